"""What is asked and how it will be answered: briefs, plans, hypotheses, metrics, search spaces.

A Plan is settled before any data exists. `a3r.campaign` executes its rules; nothing invents others later.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import product
from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from a3r.config import Budget, Config, TrialConfig


class BriefKind(StrEnum):
    TRAIN = "train"
    RESEARCH = "research"


class Brief(Config):
    """A sentence, understood: which task a Program is to be written for."""

    text: str = Field(min_length=1)
    """The person's own words. Data, never instructions to us."""
    kind: BriefKind
    recipe: str | None
    """Name of the shipped recipe that covers the task, or None when only an LLM coder can write it."""
    parameters: dict[str, JsonValue] = {}
    """Parameters of the recipe, such as `{"low": 1, "high": 31, "turns": 5}`."""
    understood: str
    """What was understood, in one line, shown to the person."""
    allowed_packages: tuple[str, ...] = ()
    """Distributions beyond the standard library and the client SDK that the Program may import."""


class Metric(Config):
    """What decides. Always measured on hidden tasks, never on training reward."""

    name: str = "success"
    direction: Literal["maximise", "minimise"] = "maximise"
    unit: str = "fraction of hidden tasks solved"
    temperature: float = Field(ge=0, le=2)
    """Temperature of the hidden-task episodes."""
    num_tasks: int = Field(ge=1)
    """Hidden tasks a policy is measured on."""


class Dimension(Config):
    """One axis of a search space: a setting path and either levels or a range."""

    path: str
    """Setting path in TrialConfig, such as `trainer.lr`."""
    levels: tuple[JsonValue, ...] = ()
    """Values to compare; empty for a range."""
    low: float | None = None
    high: float | None = None
    log: bool = False
    """Sample the range on a log scale."""
    integer: bool = False

    @model_validator(mode="after")
    def _levels_or_range(self) -> Self:
        has_range = self.low is not None and self.high is not None and self.low < self.high
        if bool(self.levels) == has_range:
            raise ValueError(f"{self.path}: give either levels or a range low < high")
        if len(set(map(repr, self.levels))) != len(self.levels):
            raise ValueError(f"{self.path}: a level is given twice")
        return self


class SearchSpace(Config):
    """Where Settings come from. With levels only, every combination is run; with a range, Optuna samples."""

    dimensions: tuple[Dimension, ...] = ()
    settings: tuple[dict[str, JsonValue], ...] = ()
    """Whole Settings to compare, instead of dimensions, where their values change together."""
    num_settings: int | None = Field(default=None, ge=1)
    """Settings to sample when any dimension is a range."""

    @model_validator(mode="after")
    def _dimensions_or_settings(self) -> Self:
        if bool(self.dimensions) == bool(self.settings):
            raise ValueError("give either dimensions or whole settings")
        if len(set(map(repr, self.settings))) != len(self.settings):
            raise ValueError("a setting is given twice")
        return self

    @property
    def is_grid(self) -> bool:
        return all(dimension.levels for dimension in self.dimensions)

    def grid(self) -> list[dict[str, JsonValue]]:
        """The whole Settings, or every combination of levels, in order. Raises ValueError when a dimension is a
        range."""
        if not self.is_grid:
            raise ValueError("a space with a range has no grid")
        if self.settings:
            return list(self.settings)
        paths = [dimension.path for dimension in self.dimensions]
        return [dict(zip(paths, values, strict=True)) for values in product(*(d.levels for d in self.dimensions))]


class ClaimKind(StrEnum):
    """The form of a hypothesis, which fixes the rule that judges it."""

    BETTER = "better"
    """The treatment beats the control by at least the minimum effect."""
    EQUIVALENT = "equivalent"
    """Treatment and control differ by less than the minimum effect."""
    RANKING = "ranking"
    """One setting is best: it beats every other one."""


class PlannedHypothesis(Config):
    """One claim with its null, fixed before data."""

    statement: str
    null: str
    kind: ClaimKind
    treatment: dict[str, JsonValue] = {}
    """Setting values of the treatment; empty for RANKING."""
    control: dict[str, JsonValue] = {}
    """Setting values it is compared with; empty for RANKING."""
    minimum_effect: float = Field(0.05, gt=0)
    """Smallest difference of the metric that matters."""
    expectation: str = ""
    """What we expect and why, written before data."""


class Estimate(Config):
    """What the plan is expected to cost, and on what basis."""

    trials: int
    wall_s: float
    basis: str


class Plan(Config):
    """A whole campaign as a contract."""

    question: str
    brief: Brief
    hypotheses: tuple[PlannedHypothesis, ...]
    metric: Metric
    space: SearchSpace
    seeds: tuple[int, ...] = Field(min_length=1)
    """Seeds of every Setting."""
    base: TrialConfig
    """Everything that is held equal."""
    decision_rules: tuple[str, ...]
    """The rules in words, as `a3r.campaign` executes them."""
    budget: Budget
    estimate: Estimate
    notes: tuple[str, ...] = ()
    """Assumptions made on the person's behalf, such as a default budget."""

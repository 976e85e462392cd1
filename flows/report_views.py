"""What a report is made of, as values that its templates walk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flows.report_sources import Number, Sources

Sentence: TypeAlias = "tuple[str | Number, ...]"
"""Plain words with cited figures among them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A score with its interval, if it has one."""

    value: Number
    low: Number | None
    high: Number | None


@dataclass(frozen=True, slots=True)
class TrialView:
    id: Number
    seed: Number
    state: Number
    reason: Number | None
    attempts: Number
    success: Measured | None
    """Held-out score; its interval is that of one evaluation (Wilson)."""
    tasks: Number | None
    faults: Number | None
    temperature: Number | None


@dataclass(frozen=True, slots=True)
class SettingView:
    name: Number
    is_untrained: bool
    colour: int
    trials: tuple[TrialView, ...]
    success: Measured | None
    """Over finished seeds by Student's t; of an untrained policy, all evaluations pooled (Wilson)."""
    num_seeds: Number


@dataclass(frozen=True, slots=True)
class CurveTable:
    """A figure of curves and the very numbers it is drawn from."""

    title: str
    svg: str
    columns: tuple[Sentence, ...]
    rows: tuple[tuple[Number | None, ...], ...]
    """One row a step: the step itself, then one figure a column."""


@dataclass(frozen=True, slots=True)
class Speech:
    """One message of a transcript."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeView:
    caption: Sentence
    speeches: tuple[Speech, ...]


@dataclass(frozen=True, slots=True)
class ExperimentView:
    statement: Number
    null: Number
    expectation: Number | None
    answer: Number | None
    """Supported, refuted or inconclusive; None before it was judged."""
    headline: Sentence
    reason: Number | None
    settings: tuple[SettingView, ...]
    figures: tuple[CurveTable, ...]
    comparison: str
    episodes: tuple[EpisodeView, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    sources: Sources
    experiments: tuple[ExperimentView, ...]
    plan: tuple[tuple[str, tuple[Number, ...]], ...]
    programs: tuple[tuple[tuple[str, Number], ...], ...]
    costs: tuple[tuple[str, Number], ...]
    limits: tuple[Sentence, ...]
    unfinished: tuple[TrialView, ...]
    level: Number

    @property
    def campaign_id(self) -> str:
        return self.sources.campaign.id

"""The shipped recipes: for each task a Program to fill, its parameters with bounds, and the Exam that judges it."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

from pydantic import JsonValue, model_validator

from a3r.config import Config, parsed
from a3r.episode import Task, Transcript
from a3r.errors import NotFound, UsageError
from a3r.swarm.program import Environment

_FOLDER = Path(__file__).resolve().parent
_PARAMETERS_LINE = re.compile(r"^PARAMETERS = .*$", re.MULTILINE)


class Parameter(Config):
    """One thing about a task that a brief may set."""

    kind: Literal["integer", "list"]
    """An integer within bounds, or a list of distinct choices."""
    default: JsonValue
    """Value where the brief says nothing."""
    meaning: str
    """What it is, in a few words."""
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    """What a list may hold."""

    @model_validator(mode="after")
    def _default_fits(self) -> Self:
        if fault := self.fault(self.default):
            raise ValueError(f"the default does not fit: {fault}")
        return self

    def fault(self, value: JsonValue) -> str | None:
        """What is wrong with `value`, or None."""
        if self.kind == "integer":
            is_within = (
                isinstance(value, int)
                and not isinstance(value, bool)
                and (self.minimum is None or value >= self.minimum)
                and (self.maximum is None or value <= self.maximum)
            )
            return None if is_within else f"it must be a whole number from {self.minimum} to {self.maximum}"
        is_choice = isinstance(value, list) and value and all(item in self.choices for item in value)
        is_distinct = isinstance(value, list) and len({str(item) for item in value}) == len(value)
        return None if is_choice and is_distinct else f"it must be a list of some of {', '.join(self.choices)}"


class RecipeFile(Config):
    """What a `recipe.json` holds."""

    description: str
    """The task in one line."""
    parameters: dict[str, Parameter]
    """By name, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A task that needs no coder."""

    name: str
    description: str
    parameters: Mapping[str, Parameter]
    folder: Path


class Exam(Protocol):
    """Hidden tasks and the metric of a recipe; made and used by the judge alone."""

    def tasks(self, split: str, seed: int) -> list[Task]: ...

    def environment(self, task: Task) -> Environment | None:
        """A fresh world for one episode of the task; None where there is nothing to act on."""
        ...

    def measure(self, task: Task, transcript: Transcript) -> float:
        """1.0 when the episode solved the task, else 0.0."""
        ...


@functools.cache
def recipes() -> dict[str, Recipe]:
    """All shipped recipes by name, in alphabetical order."""
    return {path.parent.name: _read(path) for path in sorted(_FOLDER.glob("*/recipe.json"))}


def _read(path: Path) -> Recipe:
    content = parsed(RecipeFile, json.loads(path.read_text()))
    return Recipe(path.parent.name, content.description, content.parameters, path.parent)


def recipe_named(name: str) -> Recipe:
    """The recipe of that name. Raises NotFound."""
    if name not in recipes():
        raise NotFound(f"There is no recipe {name!r}", next_step="name one of: " + ", ".join(recipes()))
    return recipes()[name]


def checked_parameters(name: str, asked: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """All parameters of a recipe: those asked for, and defaults for the others.

    Raises UsageError for an unknown name, a value out of bounds, or values that do not go together.
    """
    values = _within_bounds(recipe_named(name), asked)
    _exam(name, values)
    return values


def _within_bounds(recipe: Recipe, asked: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    for parameter, value in asked.items():
        if parameter not in recipe.parameters:
            raise UsageError(
                f"{recipe.name} has no parameter {parameter!r}",
                next_step="use one of: " + ", ".join(recipe.parameters),
            )
        if fault := recipe.parameters[parameter].fault(value):
            raise UsageError(f"{parameter} cannot be {value}", why=f"{recipe.parameters[parameter].meaning}; {fault}")
    return {parameter: asked.get(parameter, known.default) for parameter, known in recipe.parameters.items()}


def load_exam(name: str, parameters: Mapping[str, JsonValue]) -> Exam:
    """The Exam of a recipe. Raises as `checked_parameters`."""
    return _exam(name, _within_bounds(recipe_named(name), parameters))


def _exam(name: str, values: dict[str, JsonValue]) -> Exam:
    return importlib.import_module(f"vibe.recipes.{name}.exam").Exam(values)


def program_source(name: str, parameters: Mapping[str, JsonValue]) -> str:
    """The recipe's `program.py` with its parameters filled in. Raises as `checked_parameters`."""
    values = checked_parameters(name, parameters)
    source = (recipe_named(name).folder / "program.py").read_text()
    filled, count = _PARAMETERS_LINE.subn(lambda _: f"PARAMETERS = {values!r}", source)
    assert count == 1, f"{name}/program.py has {count} lines PARAMETERS = ..."
    return filled


def load_program(name: str, parameters: Mapping[str, JsonValue]) -> types.ModuleType:
    """The recipe's Program in this process: our own code, so it needs no sandbox. Raises as `checked_parameters`."""
    module = types.ModuleType(f"recipe_{name}")
    exec(compile(program_source(name, parameters), f"{name}/program.py", "exec", dont_inherit=True), module.__dict__)
    return module


def recipe_hash(name: str) -> str:
    """SHA-256 over the recipe's files, which says whether two campaigns were judged alike."""
    digest = hashlib.sha256()
    for path in sorted(recipe_named(name).folder.glob("*.*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()

"""Oracles: who knows how a task of a recipe is solved, so that gates can play it right and wrong."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

from a3r.episode import Task
from a3r.errors import PlanRejected
from a3r.plan import Brief

Replies: TypeAlias = Sequence[str]
"""What a scripted policy says turn by turn; the last one is repeated."""


class Oracle(Protocol):
    """Knows how a task is solved and how it is not."""

    def right(self, task: Task) -> Replies:
        """Replies that solve the task."""
        ...

    def wrong(self, task: Task) -> Sequence[Replies]:
        """Scripts that do not, the plainest first and then those that a careless reward would pay for."""
        ...


def oracle_of(brief: Brief) -> Oracle:
    """The oracle of the brief's recipe. Raises PlanRejected for a brief without one."""
    if brief.recipe is None:
        raise PlanRejected(
            "Nothing can judge a Program of this task yet", why="no shipped recipe covers it", next_step="name one"
        )
    return cast(Oracle, importlib.import_module(f"vibe.recipes.{brief.recipe}.oracle"))

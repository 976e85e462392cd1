"""How signalling is solved, and how it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from a3r.episode import Task


def right(task: Task) -> list[str]:
    """Any word, and then the target."""
    return [cast(list[str], task.public["words"])[0], str(task.public["target"])]


def wrong(task: Task) -> Sequence[list[str]]:
    """Another object, the target spoken outright, every object at once, and the target within a sentence."""
    word = right(task)[0]
    target = str(task.public["target"])
    objects = cast(list[str], task.public["objects"])
    other = next(thing for thing in objects if thing != target)
    return [[word, other], [target], [word, ", ".join(objects)], [word, f"It is {target}."]]

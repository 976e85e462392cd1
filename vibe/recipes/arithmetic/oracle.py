"""How arithmetic is solved, and how it is not."""

from __future__ import annotations

from collections.abc import Sequence

from a3r.episode import Task


def right(task: Task) -> list[str]:
    """The result."""
    return [str(task.private["answer"])]


def wrong(task: Task) -> Sequence[list[str]]:
    """Another number, the result within a sentence, two numbers, the result with space or a point, and a word."""
    answer = str(task.private["answer"])
    near = str(int(answer) + 1)
    return [[near], [f"It is {answer}."], [f"{answer} {near}"], [f" {answer}"], [f"{answer}.0"], ["ok"]]

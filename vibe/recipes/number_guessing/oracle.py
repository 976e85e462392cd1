"""How number guessing is solved, and how it is not."""

from __future__ import annotations

from collections.abc import Sequence

from a3r.episode import Task


def right(task: Task) -> list[str]:
    """Bisection, which finds any number in time when the range has fewer than 2 ** turns; else the number itself."""
    low, high, secret = int(str(task.public["low"])), int(str(task.public["high"])), int(str(task.private["secret"]))
    guesses = [(low + high) // 2]
    while guesses[-1] != secret:
        low, high = (guesses[-1] + 1, high) if guesses[-1] < secret else (low, guesses[-1] - 1)
        guesses.append((low + high) // 2)
    turns = int(str(task.public["turns"]))
    return [str(guess) for guess in (guesses if len(guesses) <= turns else [*guesses[: turns - 1], secret])]


def wrong(task: Task) -> Sequence[list[str]]:
    """A number that it is not, all numbers at once, the number within a sentence, and the environment's own word."""
    low, high, secret = int(str(task.public["low"])), int(str(task.public["high"])), int(str(task.private["secret"]))
    everything = " ".join(map(str, range(low, high + 1)))
    return [[str(low if secret != low else high)], [everything], [f"It is {secret}."], ["correct"]]

"""Makes the shipped small policy again: `a3r model build-small --out DIR`.

Composes what neither engine may know of the other: the recipes' demonstrations and the trainer's build.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue

from a3r.swarm import Dialogue
from trainer.small_policy_build import BuildConfig, build_small_policy
from vibe.recipes.library import load_program

_SYLLABUS: tuple[tuple[str, dict[str, JsonValue], int], ...] = (
    ("number_guessing", {"low": 1, "high": 31, "turns": 5}, 12),
    ("number_guessing", {"low": 1, "high": 20, "turns": 4}, 2),
    ("number_guessing", {"low": 1, "high": 99, "turns": 7}, 2),
    ("arithmetic", {"low": 0, "high": 9, "operators": ["+", "*"]}, 4),
    ("arithmetic", {"low": 0, "high": 9, "operators": ["+", "-", "*"]}, 1),
    ("signalling", {"objects": 8, "words": 8}, 10),
    ("signalling", {"objects": 4, "words": 4}, 1),
)
"""Recipe, its parameters, and how many sets of demonstrations of each."""


def syllabus(seed: int) -> list[Dialogue]:
    """Demonstrations of all recipes, of mixed quality."""
    return [
        dialogue
        for name, parameters, num_sets in _SYLLABUS
        for number in range(num_sets)
        for dialogue in load_program(name, parameters).demonstrations(seed * 1000 + number)
    ]


def build(folder: Path, *, seed: int, steps: int | None = None) -> dict[str, float]:
    """Build the policy into `folder` (files in it are replaced) and give the warm start's metrics.

    The same seed gives the same bits on one machine. `steps` shortens the warm start, for a quick look.
    """
    config = BuildConfig(seed=seed) if steps is None else BuildConfig(seed=seed, steps=steps)
    return build_small_policy(syllabus(seed), folder, config=config)

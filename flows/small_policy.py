"""Make the shipped small policy again: `python -m flows.small_policy --out DIR`.

Composes what neither engine may know of the other: the recipes' demonstrations and the trainer's build.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import JsonValue

from a3r.swarm import Dialogue
from trainer.small_policy_build import BuildConfig, build_small_policy
from vibe.recipes.library import load_program

_SYLLABUS: tuple[tuple[str, dict[str, JsonValue], int], ...] = (
    ("number_guessing", {"low": 1, "high": 31, "turns": 5}, 14),
    ("number_guessing", {"low": 1, "high": 20, "turns": 4}, 1),
    ("number_guessing", {"low": 1, "high": 99, "turns": 7}, 1),
    ("arithmetic", {"low": 0, "high": 9, "operators": ["+", "*"]}, 3),
    ("arithmetic", {"low": 0, "high": 9, "operators": ["+", "-", "*"]}, 1),
    ("signalling", {"objects": 8, "words": 8}, 8),
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


def main(arguments: Sequence[str]) -> int:
    """Build into `--out` and print the metrics."""
    parser = argparse.ArgumentParser(prog="python -m flows.small_policy", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; files in it are replaced")
    parser.add_argument("--steps", type=int, help="warm-start steps, for a quick look")
    options = parser.parse_args(arguments)
    config = BuildConfig() if options.steps is None else replace(BuildConfig(), steps=options.steps)
    metrics = build_small_policy(syllabus(config.seed), options.out, config=config)
    sys.stdout.write("".join(f"{name} {value:.4g}\n" for name, value in metrics.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Hidden ranges and secrets of number guessing, and the metric. Runs in the judge."""

import itertools
import random
import re
from collections.abc import Mapping
from typing import Any

from a3r.errors import UsageError
from a3r.swarm import Observation, Task, Transcript

WORDINGS = (
    "The number is between {low} and {high}. Find it in {turns} guesses.",
    "You have {turns} tries. Guess the hidden number from {low} to {high}.",
    "A number from {low} to {high}: find it in {turns} turns.",
)
NUM_TASKS = 512


class Exam:
    """The hidden side of the game."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.low, self.high, self.turns = (int(parameters[name]) for name in ("low", "high", "turns"))
        if self.high - self.low < 7:
            raise UsageError(
                f"The range {self.low} to {self.high} is too small",
                why="training, validation and hidden tasks need numbers of their own",
                next_step="let high be at least low + 7",
            )

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Ranges that training has not seen, and the whole range with secrets that training has not seen."""
        instances = list(itertools.product(self._instances(), WORDINGS))
        random.Random(f"{split}-{seed}").shuffle(instances)
        rounds = itertools.islice(itertools.cycle(instances), NUM_TASKS)
        return [self._task(f"{split}-{n}", *instance) for n, instance in enumerate(rounds)]

    def _task(self, task_id: str, instance: tuple[int, int, int], wording: str) -> Task:
        low, high, secret = instance
        public = {"low": low, "high": high, "turns": self.turns}
        return Task(id=task_id, public=public | {"instruction": wording.format(**public)}, private={"secret": secret})

    def _instances(self) -> list[tuple[int, int, int]]:
        slack = min(6, (self.high - self.low) // 8)
        lows, highs = range(self.low, self.low + slack + 1), range(self.high - slack, self.high + 1)
        ranges = [bounds for bounds in itertools.product(lows, highs) if bounds != (self.low, self.high)]
        smaller = [(low, high, n) for low, high in _hidden_part(ranges) for n in range(low, high + 1)]
        return smaller + _hidden_part([(self.low, self.high, n) for n in range(self.low, self.high + 1)])

    def environment(self, task: Task) -> "Game":
        return Game(int(str(task.private["secret"])), self.turns)

    def measure(self, task: Task, transcript: Transcript) -> float:
        """1.0 when the number was found in time by guesses that are the policy's own replies, word for word."""
        actions = [step.action for step in transcript.steps]
        if len(actions) > self.turns or actions != list(transcript.replies):
            return 0.0
        game = self.environment(task)
        answers = [game.step(action) for action in actions]
        return float(bool(answers) and answers[-1].text == "correct")


class Game:
    """One hidden number and the turns that are left."""

    def __init__(self, secret: int, turns: int) -> None:
        self.secret = secret
        self.turns_left = turns

    def step(self, action: str) -> Observation:
        self.turns_left -= 1
        if re.fullmatch("[0-9]{1,3}", action) is None:
            return Observation("not a number", done=self.turns_left <= 0)
        if int(action) == self.secret:
            return Observation("correct", done=True)
        return Observation("higher" if int(action) < self.secret else "lower", done=self.turns_left <= 0)


def _hidden_part(items: list) -> list:
    """What is left of the items after a fixed eighth for validation and a fixed half for training."""
    order = random.Random(0).sample(items, len(items))
    return order[-(-len(items) // 8) + -(-len(items) // 2) :]

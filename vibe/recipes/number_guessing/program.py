"""Guess a hidden number within a few turns; each wrong guess is answered with `higher` or `lower`."""

import itertools
import random
import re
from typing import Any

from a3r.swarm import ClaimedEpisode, Dialogue, Observation, Task, Transcript

Instance = tuple[int, int, int]
"""Smallest and largest number that the agent is told, and the one that is hidden."""

PARAMETERS = {"low": 1, "high": 31, "turns": 5}

WORDINGS: dict[str, tuple[str, ...]] = {
    "train": (
        "Guess the number from {low} to {high} in {turns} turns.",
        "A number between {low} and {high} is hidden. You have {turns} guesses.",
        "Find the number: {low} to {high}, {turns} tries.",
        "What is the hidden number? It is from {low} to {high}. Turns: {turns}.",
    ),
    "validation": (
        "Find the hidden number between {low} and {high} in {turns} turns.",
        "You have {turns} turns to guess a number from {low} to {high}.",
    ),
}
NUM_TASKS = 512
NUM_DEMONSTRATIONS = 400


def tasks(split: str, seed: int) -> list[Task]:
    """Ranges within the whole one, each with every number that may be hidden in it."""
    instances = list(itertools.product(_instances(split), WORDINGS[split]))
    random.Random(f"{split}-{seed}").shuffle(instances)
    chosen = enumerate(instances[:NUM_TASKS])
    return [_task(f"{split}-{n}", instance, wording) for n, (instance, wording) in chosen]


def _task(task_id: str, instance: Instance, wording: str) -> Task:
    low, high, secret = instance
    public = {"low": low, "high": high, "turns": PARAMETERS["turns"]}
    return Task(id=task_id, public=public | {"instruction": wording.format(**public)}, private={"secret": secret})


def _instances(split: str) -> list[Instance]:
    """Instances of the split. A smaller range belongs to one split; of the whole range, the secrets do."""
    low, high = PARAMETERS["low"], PARAMETERS["high"]
    slack = min(6, (high - low) // 8)
    bounds = list(itertools.product(range(low, low + slack + 1), range(high - slack, high + 1)))
    whole = [(low, high, secret) for secret in range(low, high + 1)]
    ranges = [(a, b) for a, b in bounds if (a, b) != (low, high)]
    smaller = [(a, b, secret) for a, b in _part(ranges, split) for secret in range(a, b + 1)]
    return smaller + _part(whole, split)


def _part(items: list, split: str) -> list:
    """A fixed eighth of the items for validation and half of them for training; the rest is for nobody here."""
    order = random.Random(0).sample(items, len(items))
    validation = -(-len(items) // 8)
    train = -(-len(items) // 2)
    return order[:validation] if split == "validation" else order[validation : validation + train]


def run_episode(task_public: dict, episode: ClaimedEpisode) -> str:
    """Guess, hear the hint, and guess again until the environment says that it is over."""
    messages = [{"role": "user", "content": task_public["instruction"]}]
    while True:
        guess = episode.chat(messages)
        observation = episode.step(guess)
        if observation.done:
            return observation.text
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": observation.text}]


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


def environment(task: Task) -> Game:
    """The game behind `episode.step`."""
    public: dict[str, Any] = {**task.public, **task.private}
    return Game(public["secret"], public["turns"])


def grade(_task: Task, transcript: Transcript) -> dict[str, float]:
    """1 when the number was found."""
    found = any(step.observation.text == "correct" for step in transcript.steps)
    return {"solved": float(found)}


def demonstrations(seed: int) -> list[Dialogue]:
    """Games of mixed skill: some guess anywhere, some within what the hints leave, some always its middle."""
    choice = random.Random(f"demonstrations-{seed}")
    instances = list(itertools.product(_instances("train"), WORDINGS["train"]))
    chosen = choice.choices(instances, k=NUM_DEMONSTRATIONS)
    return [_game(instance, wording, choice) for instance, wording in chosen]


def _game(instance: Instance, wording: str, choice: random.Random) -> Dialogue:
    task = _task("demonstration", instance, wording)
    game = environment(task)
    guess = choice.choices((_guess_anywhere, _guess_within, _guess_middle), weights=(30, 25, 45))[0]
    low, high, _ = instance
    left, right = low, high
    messages = [{"role": "user", "content": task.public["instruction"]}]
    while True:
        number = guess(choice, (low, high), (left, right))
        observation = game.step(str(number))
        messages.append({"role": "assistant", "content": str(number)})
        if observation.done:
            return messages
        messages.append({"role": "user", "content": observation.text})
        if observation.text == "higher":
            left = max(left, number + 1)
        else:
            right = min(right, number - 1)


def _guess_anywhere(choice: random.Random, whole: tuple[int, int], _left: tuple[int, int]) -> int:
    return choice.randint(*whole)


def _guess_within(choice: random.Random, _whole: tuple[int, int], left: tuple[int, int]) -> int:
    return choice.randint(*left)


def _guess_middle(_choice: random.Random, _whole: tuple[int, int], left: tuple[int, int]) -> int:
    return sum(left) // 2

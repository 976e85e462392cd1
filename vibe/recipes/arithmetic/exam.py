"""Hidden operand pairs of arithmetic, and the metric. Runs in the judge."""

import itertools
import operator
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from a3r.errors import UsageError
from a3r.swarm import Message, Task, Transcript

WORDINGS = ("Give me {sum}.", "What does {sum} make?", "Compute {sum}.")
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUM_TASKS = 512


class Exam:
    """The hidden side of arithmetic."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.low, self.high = int(parameters["low"]), int(parameters["high"])
        self.operators = list(parameters["operators"])
        if self.high - self.low < 3:
            raise UsageError(
                f"Operands from {self.low} to {self.high} are too few",
                why="training, validation and hidden tasks need pairs of their own",
                next_step="let high be at least low + 3",
            )

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Pairs of operands that training has not seen, with each operator and wording."""
        instances = list(itertools.product(self._pairs(), self.operators, WORDINGS))
        random.Random(f"{split}-{seed}").shuffle(instances)
        rounds = itertools.islice(itertools.cycle(instances), NUM_TASKS)
        return [_task(f"{split}-{n}", *instance) for n, instance in enumerate(rounds)]

    def _pairs(self) -> list[tuple[int, int]]:
        """What is left of all pairs after a fixed tenth for validation and a fixed three fifths for training."""
        numbers = range(self.low, self.high + 1)
        pairs = list(itertools.product(numbers, numbers))
        order = random.Random(0).sample(pairs, len(pairs))
        return order[-(-len(pairs) // 10) + len(pairs) * 3 // 5 :]

    def environment(self, task: Task) -> None:
        """There is nothing to act on."""

    def measure(self, task: Task, transcript: Transcript) -> float:
        """1.0 when the only reply is the result, to the letter, and the prompt did not give it away."""
        if len(transcript.turns) != 1 or transcript.replies[0] != task.private["answer"]:
            return 0.0
        return float(not _gives_away(task, transcript.turns[0].messages))


def _gives_away(task: Task, messages: Sequence[Message]) -> bool:
    """Whether the messages state the result as a number anywhere but in the question itself."""
    said = " ".join(str(message.get("content")) for message in messages)
    numbers = re.findall(r"(?<![0-9])-?[0-9]+", said.replace(str(task.public["question"]), "", 1))
    return task.private["answer"] in numbers


def _task(task_id: str, pair: tuple[int, int], sign: str, wording: str) -> Task:
    first, second = pair
    question = wording.format(sum=f"{first} {sign} {second}")
    return Task(id=task_id, public={"question": question}, private={"answer": str(APPLY[sign](first, second))})

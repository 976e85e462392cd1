"""Hidden signalling tasks and the metric. Runs in the judge."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from a3r.swarm import Message, Task, Transcript

OBJECTS = ("apple", "boat", "cat", "drum", "egg", "fish", "gate", "hat")
WORDS = ("ba", "do", "ki", "lu", "me", "no", "su", "ti")
WORDINGS = (
    ("The object is {target}. Say a word: {words}.", "Heard: {word}. Pick an object: {objects}."),
    ("Speak for {target}. Use one word of: {words}.", "The speaker says {word}. Objects: {objects}."),
)
NUM_TASKS = 512
PLACEHOLDER = "{word}"


class Exam:
    """The hidden side of signalling."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.objects = OBJECTS[: int(parameters["objects"])]
        self.words = WORDS[: int(parameters["words"])]

    def tasks(self, split: str, seed: int) -> list[Task]:
        """Every object as target, in orders and wordings that training has not seen."""
        choice = random.Random(f"{split}-{seed}")
        targets = itertools.islice(itertools.cycle(self.objects), NUM_TASKS)
        return [self._task(f"{split}-{n}", target, choice) for n, target in enumerate(targets)]

    def _task(self, task_id: str, target: str, choice: random.Random) -> Task:
        objects, words = choice.sample(self.objects, len(self.objects)), choice.sample(self.words, len(self.words))
        speaker, listener = choice.choice(WORDINGS)
        public = {
            "target": target,
            "objects": objects,
            "words": words,
            "speaker": speaker.format(target=target, words=" ".join(words)),
            "listener": listener.format(word=PLACEHOLDER, objects=" ".join(objects)),
        }
        return Task(id=task_id, public=public)

    def environment(self, task: Task) -> None:
        """There is nothing to act on."""

    def measure(self, task: Task, transcript: Transcript) -> float:
        """1.0 when the listener picked the target and could know it from the word alone.

        The listener's prompt must be the task's own, to the letter, with the word in its place: anything more, such
        as a hint, a system message or the speaker's conversation, might carry the target.
        """
        if len(transcript.turns) != 2:
            return 0.0
        word, choice = transcript.replies
        heard = [{"role": "user", "content": str(task.public["listener"]).replace(PLACEHOLDER, word)}]
        if word not in self.words or _bare(transcript.turns[1].messages) != heard:
            return 0.0
        return float(choice == task.public["target"])


def _bare(messages: Sequence[Message]) -> list[Message]:
    """The messages without fields that are empty."""
    return [{name: value for name, value in message.items() if value} for message in messages]

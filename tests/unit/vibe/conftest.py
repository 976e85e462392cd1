"""A Program run in this process, for checking the gates without a sandbox."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from a3r.episode import Task, Transcript, TranscriptTurn
from a3r.errors import ClientFault
from vibe.gates import GateTools, Rehearsal
from vibe.oracles import Replies

GOOD_PROGRAM = """
import random
import re
from types import SimpleNamespace as Task


def tasks(split, seed):
    choice = random.Random(f"{split}-{seed}")
    return [Task(id=f"{split}-{n}", public={"high": 9}, private={"target": choice.randint(0, 9)}) for n in range(6)]


async def run_episode(task_public, episode):
    return await episode.ask([{"role": "user", "content": f"A digit up to {task_public['high']}?"}])


def grade(task, transcript):
    reply = transcript.replies[-1]
    is_digit = re.fullmatch("[0-9]", reply) is not None
    return {"form": 0.1 * is_digit, "right": float(is_digit and int(reply) == task.private["target"])}
"""


class Digits:
    """The oracle of the digit game."""

    def right(self, task: Task) -> Replies:
        return [str(task.private["target"])]

    def wrong(self, task: Task) -> Sequence[Replies]:
        return [[str((int(str(task.private["target"])) + 1) % 10)], ["12345"]]


class LocalProgram:
    """A `RunningProgram` in this process."""

    def __init__(self, folder: Path) -> None:
        self.names: dict = {}
        exec((folder / "program.py").read_text(), self.names)

    def _call(self, name: str, *arguments: object) -> object:
        try:
            return self.names[name](*arguments)
        except Exception as error:
            raise ClientFault(f"{name} raised {type(error).__name__}: {error}") from error

    async def tasks(self, *, split: str, seed: int) -> list[Task]:
        return [Task(t.id, t.public, t.private) for t in self._call("tasks", split, seed)]

    async def grade(self, task: Task, transcript: Transcript) -> dict[str, float]:
        return self._call("grade", task, transcript)

    async def play(self, task: Task, replies: Replies) -> Transcript:
        turns: list[TranscriptTurn] = []

        async def ask(messages: list[dict]) -> str:
            text = replies[min(len(turns), len(replies) - 1)]
            turns.append(TranscriptTurn(tuple(messages), {"role": "assistant", "content": text}, "stop"))
            return text

        output = self._call("run_episode", dict(task.public), SimpleNamespace(ask=ask))
        if inspect.isawaitable(output):
            try:
                output = await output
            except ArithmeticError as error:
                raise ClientFault(f"run_episode raised {type(error).__name__}") from error
        return Transcript(turns=tuple(turns), output=output)


@asynccontextmanager
async def start(folder: Path) -> AsyncIterator[LocalProgram]:
    yield LocalProgram(folder)


async def play(folder: Path, task: Task, replies: Replies) -> Transcript:
    return await LocalProgram(folder).play(task, replies)


async def rehearse(folder: Path, num_tasks: int, group_size: int) -> list[Rehearsal]:
    program = LocalProgram(folder)
    tasks = (await program.tasks(split="train", seed=0))[:num_tasks]
    rehearsals = []
    for task in tasks:
        for n in range(group_size):
            transcript = await program.play(task, [str(n % 10)])
            rehearsals.append(Rehearsal(task.id, await program.grade(task, transcript), transcript))
    return rehearsals


async def examine(folder: Path, replies: Callable[[Task], Replies]) -> float:
    program = LocalProgram(folder)
    practice = [Task(f"p{n}", {"high": 9}, {"target": n}) for n in range(4)]
    said = [(await program.play(task, replies(task))).output for task in practice]
    return sum(output == str(task.private["target"]) for output, task in zip(said, practice, strict=True)) / 4


@pytest.fixture
def tools() -> GateTools:
    return GateTools(start=start, play=play, oracle=Digits(), rehearse=rehearse, examine=examine)


@pytest.fixture
def good_program() -> str:
    return GOOD_PROGRAM

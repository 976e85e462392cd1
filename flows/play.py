"""One episode of a Program, whoever grades it and whatever serves the model.

The agent runs in its sandbox; the world behind `episode.step` and the grading belong to a `Side`: the Program's
own reward process, or the Exam of the judge.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from a3r.episode import Json, Observation, Step, Task, Transcript
from a3r.errors import ClientFault
from a3r.swarm import ClaimedEpisode, Environment
from vibe.program_process import ProgramProcess

World: TypeAlias = Callable[[str], Awaitable[Observation]]


class Exam(Protocol):
    """Hidden tasks and the metric of a recipe, as the judge uses them."""

    def tasks(self, split: str, seed: int) -> list[Task]: ...

    def environment(self, task: Task) -> Environment | None: ...

    def measure(self, task: Task, transcript: Transcript) -> float: ...


class Side(Protocol):
    """Who answers `episode.step` and grades the transcript."""

    def world(self, task: Task) -> AbstractAsyncContextManager[World]: ...

    async def grade(self, task: Task, transcript: Transcript) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class ExamSide:
    """The judge's own environment and metric."""

    exam: Exam

    @asynccontextmanager
    async def world(self, task: Task) -> AsyncIterator[World]:
        environment = self.exam.environment(task)

        async def step(action: str) -> Observation:
            if environment is None:
                raise _no_environment(action)
            return environment.step(action)

        yield step

    async def grade(self, task: Task, transcript: Transcript) -> dict[str, float]:
        return {"metric": float(self.exam.measure(task, transcript))}


@dataclass(frozen=True, slots=True)
class ProgramSide:
    """The Program's environment and reward, in the second sandbox."""

    process: ProgramProcess
    has_environment: bool

    @classmethod
    async def of(cls, process: ProgramProcess) -> ProgramSide:
        return cls(process=process, has_environment="environment" in await process.describe())

    @asynccontextmanager
    async def world(self, task: Task) -> AsyncIterator[World]:
        if not self.has_environment:

            async def step(action: str) -> Observation:
                raise _no_environment(action)

            yield step
            return
        environment = await self.process.open_environment(task)
        try:
            yield environment.step
        finally:
            await environment.close()

    async def grade(self, task: Task, transcript: Transcript) -> dict[str, float]:
        return await self.process.grade(task, transcript)


@dataclass(frozen=True, slots=True)
class Performance:
    """What the agent did: its steps in the world and what `run_episode` returned."""

    steps: tuple[Step, ...]
    output: Json


async def perform(
    task: Task, claimed: ClaimedEpisode, *, agent: ProgramProcess, side: Side, timeout_s: float
) -> Performance:
    """Let the agent play one claimed episode. Raises ClientFault when the Program misbehaves or takes too long."""
    steps: list[Step] = []
    async with side.world(task) as world:

        async def on_step(action: str) -> Observation:
            observation = await world(action)
            steps.append(Step(action=action, observation=observation))
            return observation

        public: Mapping[str, Json] = dict(task.public)
        output = await agent.run_episode(public, claimed, on_step=on_step, timeout_s=timeout_s)
    return Performance(steps=tuple(steps), output=output)


def _no_environment(action: str) -> ClientFault:
    return ClientFault(f"The agent took the action {action[:60]!r}", why="this task has no environment")

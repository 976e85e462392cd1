"""A Program at work in a sandbox, spoken to by awaiting methods.

```python
async with await ProgramProcess.start(folder, sandbox=sandbox, limits=Limits(), role="reward") as program:
    for task in await program.tasks(split="train", seed=0):
        components = await program.grade(task, transcript)
```

Whatever the Program does wrong, its death included, is a ClientFault of the calls that it spoils; the next call
starts it anew.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from a3r.episode import Json, Message, Observation, Task, Transcript
from a3r.errors import ClientFault, UsageError
from a3r.swarm import ClaimedEpisode
from vibe.host_link import HostLink
from vibe.sandbox import Exposure, Limits, Sandbox

Role: TypeAlias = Literal["agent", "reward"]
OnStep: TypeAlias = Callable[[str], Awaitable[Observation]]
CALL_TIMEOUT_S = 60.0
"""Longest that one call other than an episode may take."""
_PROGRAM_FILE = "program.py"
_OPS = {
    "agent": {"run_episode"},
    "reward": {"tasks", "demonstrations", "grade", "open_environment"},
}


class ProgramProcess:
    """One Program in one sandbox. The agent's sandbox plays episodes and never sees the private part of a task;
    the reward's sandbox makes tasks, environments and grades, and reaches no gateway."""

    def __init__(self, exposure: Exposure, *, sandbox: Sandbox, limits: Limits, role: Role, log: Path | None) -> None:
        self._exposure = exposure
        self._sandbox = sandbox
        self._limits = limits
        self._role = role
        self._scratch = tempfile.TemporaryDirectory(prefix="a3r-log-") if log is None else None
        self.log = Path(self._scratch.name, "stderr") if self._scratch else Path(str(log))
        self._starting = asyncio.Lock()
        self._link: HostLink | None = None
        self._is_closed = False
        self._environment_ids = count(1)

    @classmethod
    async def start(
        cls,
        workspace: Path,
        *,
        sandbox: Sandbox,
        limits: Limits,
        gateway_socket: Path | None = None,
        role: Role = "agent",
        packages: tuple[str, ...] = (),
        log: Path | None = None,
    ) -> Self:
        """The Program `program.py` of a folder, loaded. What it prints goes to the file `log`, or is dropped at the
        end.

        Raises ClientFault when it cannot be imported, and as `Sandbox.start`.
        """
        exposure = Exposure(workspace=workspace.resolve(), gateway_socket=gateway_socket, packages=packages)
        program = cls(exposure, sandbox=sandbox, limits=limits, role=role, log=log)
        try:
            await program._alive()
        except BaseException:
            await program.close()
            raise
        return program

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the process with all that it started; open calls fail. Harmless when repeated."""
        self._is_closed = True
        if self._link is not None:
            await self._link.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    async def describe(self) -> frozenset[str]:
        """Names of the contract's functions that the Program defines."""
        return (await self._alive()).functions

    async def tasks(self, *, split: str, seed: int) -> list[Task]:
        """Its tasks of a split. Raises ClientFault."""
        found = await self._call("tasks", split=split, seed=seed)
        return [_task(value) for value in _list(found, "tasks")]

    async def demonstrations(self, *, seed: int) -> list[list[Message]]:
        """Its dialogues for a warm start; empty when it has none. Raises ClientFault."""
        if "demonstrations" not in await self.describe():
            return []
        found = await self._call("demonstrations", seed=seed)
        return [_dialogue(value) for value in _list(found, "demonstrations")]

    async def grade(self, task: Task, transcript: Transcript) -> dict[str, float]:
        """Reward components of one episode, all finite. Raises ClientFault."""
        found = await self._call("grade", task=task.as_json(), transcript=transcript.as_json())
        return _components(found)

    async def run_episode(
        self, task_public: Mapping[str, Json], claimed: ClaimedEpisode, *, on_step: OnStep, timeout_s: float
    ) -> Json:
        """Let the agent play one claimed episode; returns what its `run_episode` returned.

        `on_step` answers its steps; what that raises is raised here. Raises ClientFault when the Program fails,
        dies, or takes longer than `timeout_s`.
        """
        episode = {
            "id": claimed.id,
            "api_key": claimed.api_key,
            "base_url": claimed.base_url,
            "task_id": claimed.task_id,
            "kind": claimed.kind,
            "policy": claimed.policy,
        }
        link = await self._for_op("run_episode")
        body = {"op": "run_episode", "task": dict(task_public), "episode": episode}
        return await link.call(body, timeout_s=timeout_s, on_step=on_step)

    async def open_environment(self, task: Task) -> ProgramEnvironment:
        """The Program's environment of a task. Raises ClientFault."""
        link = await self._for_op("open_environment")
        number = next(self._environment_ids)
        body = {"op": "open_environment", "task": task.as_json(), "environment": number}
        await link.call(body, timeout_s=CALL_TIMEOUT_S)
        return ProgramEnvironment(link, number)

    async def _call(self, op: str, **fields: object) -> Any:
        link = await self._for_op(op)
        return await link.call({"op": op, **fields}, timeout_s=CALL_TIMEOUT_S)

    async def _for_op(self, op: str) -> HostLink:
        if op not in _OPS[self._role]:
            raise UsageError(f"{op} is not for the {self._role} process", why="each sandbox sees what it needs only")
        return await self._alive()

    async def _alive(self) -> HostLink:
        if self._link is not None and self._link.is_open:
            return self._link
        async with self._starting:
            if self._is_closed:
                raise UsageError("The program's process is closed")
            if self._link is None or not self._link.is_open:
                self._link = await HostLink.open(
                    self._sandbox, _PROGRAM_FILE, exposure=self._exposure, limits=self._limits, log=self.log
                )
            return self._link


@dataclass(frozen=True, slots=True)
class ProgramEnvironment:
    """The world of one episode, inside the Program's process."""

    _link: HostLink
    _number: int

    async def step(self, action: str) -> Observation:
        """The environment's answer. Raises ClientFault."""
        body = {"op": "step_environment", "environment": self._number, "action": action}
        return _observation(await self._link.call(body, timeout_s=CALL_TIMEOUT_S))

    async def close(self) -> None:
        """Let the Program forget it. Harmless when the process is gone."""
        if self._link.is_open:
            self._link.tell({"op": "close_environment", "environment": self._number})


def _task(value: Any) -> Task:
    match value:
        case {"id": str(), "public": dict(), "private": dict()}:
            return Task.from_json(value)
    raise _unfit("tasks", "a task is an id, a public dict and a private dict")


def _observation(value: Any) -> Observation:
    match value:
        case {"text": str(text), "done": bool(done)}:
            return Observation(text, done)
    raise _unfit("environment.step", "an observation is a text and whether it is done")


def _dialogue(value: Any) -> list[Message]:
    messages = _list(value, "demonstrations")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise _unfit("demonstrations", "a dialogue is a list of messages with a role")
    return messages


def _components(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not all(isinstance(v, int | float) and math.isfinite(v) for v in value.values()):
        raise _unfit("grade", "reward components are finite numbers by name")
    return {name: float(number) for name, number in value.items()}


def _list(value: Any, op: str) -> list[Any]:
    if not isinstance(value, list):
        raise _unfit(op, f"a list is needed, not {type(value).__name__}")
    return value


def _unfit(op: str, why: str) -> ClientFault:
    return ClientFault(f"What the program's {op} gave does not fit", why=why)

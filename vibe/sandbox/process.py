"""What a sandbox is to its users: limits and exposure in, a running process with pipes out."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import Field

from a3r.config import Config

MIB = 2**20
PIPE_BUFFER_BYTES = MIB


class Limits(Config):
    """What sandboxed code may use."""

    cpu_s: float = Field(default=14_400.0, gt=0)
    """CPU seconds of one process."""
    memory_bytes: int = Field(default=1024 * MIB, ge=64 * MIB)
    """Address space of one process, and memory of all together where a cgroup can be made."""
    processes: int = Field(default=512, ge=8)
    """Processes and threads at once."""
    file_bytes: int = Field(default=64 * MIB, ge=MIB)
    """Largest file, size of the scratch space, and most that is kept of stderr."""
    open_files: int = Field(default=1024, ge=16)
    """File descriptors of one process."""
    wall_s: float = Field(default=86_400.0, gt=0)
    """Wall seconds after which everything is killed."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """What sandboxed code gets to see of ours."""

    workspace: Path
    """Folder that A3R_WORKSPACE names inside."""
    workspace_is_writable: bool = False
    gateway_socket: Path | None = None
    """Unix socket that A3R_GATEWAY_SOCKET names inside."""
    packages: tuple[str, ...] = ()
    """Distributions that may be imported beside the client SDK and its own requirements."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a sandboxed process ended."""

    reason: str
    """A clause such as `it used more than 512 MiB of memory`."""
    was_set_up: bool = True
    """Whether the command itself ran; if not, the sandbox is at fault and not the code."""


class SandboxedProcess:
    """A process in its sandbox. It is killed at its wall limit and when this process dies."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        *,
        limits: Limits,
        explain: Callable[[int], Awaitable[Ended]],
        innermost: int | None = None,
    ) -> None:
        """`explain` is called once, with the exit status, when the process has ended; it also cleans up.
        `innermost` is process 1 of a process namespace, with which everything in it dies."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin = process.stdin
        self.stdout = process.stdout
        self._process = process
        self._innermost = innermost
        self._limits = limits
        self._explain = explain
        self._is_overdue = False
        self._alarm = asyncio.get_running_loop().call_later(limits.wall_s, self._expire)
        self._end = asyncio.create_task(self._finish())

    @property
    def pid(self) -> int:
        """Process id of the sandbox's outermost process, which leads its process group."""
        return self._process.pid

    def kill(self) -> None:
        """End it with everything that it started. Harmless when it has ended."""
        if self._process.returncode is None:
            # It may have ended without this loop having heard of it yet.
            with suppress(ProcessLookupError):
                if self._innermost is not None:
                    os.kill(self._innermost, signal.SIGKILL)
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> Ended:
        """Wait for its end."""
        return await asyncio.shield(self._end)

    def _expire(self) -> None:
        self._is_overdue = True
        self.kill()

    async def _finish(self) -> Ended:
        status = await self._process.wait()
        self._alarm.cancel()
        ended = await self._explain(status)
        return Ended(f"it ran longer than {self._limits.wall_s:g} s") if self._is_overdue else ended


class Sandbox(Protocol):
    """A place that runs Python code of others."""

    name: str

    async def start(
        self, arguments: Sequence[str], *, exposure: Exposure, limits: Limits, log: Path
    ) -> SandboxedProcess:
        """Start the Python interpreter with `arguments`; stderr is appended to the file `log`.

        The working directory is a private scratch folder. Must be called on the thread of a running event loop:
        the process dies with the thread that started it.
        Raises EnvironmentNotReady when a package is not installed, InfrastructureFault when it cannot start.
        """
        ...


def reason_of(status: int, limits: Limits) -> str:
    """An exit status, either as `subprocess` or as a shell gives it, in words."""
    number = -status if status < 0 else status - 128
    if number <= 0:
        return f"it exited with status {status}"
    if number == signal.SIGXCPU:
        return f"it used more than {limits.cpu_s:g} s of CPU time"
    known = {member.value: member.name for member in signal.Signals}
    return f"it was killed by {known[number]}" if number in known else f"it exited with status {status}"


def resource_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """Soft and hard rlimits by name, without RLIMIT_NPROC, whose meaning depends on the user namespace."""
    cpu_s = math.ceil(limits.cpu_s)
    return {
        # The soft limit sends SIGXCPU, which names itself in the exit status; the hard one kills.
        "RLIMIT_CPU": (cpu_s, cpu_s + 2),
        "RLIMIT_AS": (limits.memory_bytes, limits.memory_bytes),
        "RLIMIT_FSIZE": (limits.file_bytes, limits.file_bytes),
        "RLIMIT_NOFILE": (limits.open_files, limits.open_files),
        "RLIMIT_CORE": (0, 0),
    }


def at_most(wanted: tuple[int, int], hard: int) -> tuple[int, int]:
    """`wanted` within the present hard limit, where -1 means none: only root may raise it."""
    if hard < 0:
        return wanted
    return min(wanted[0], hard), min(wanted[1], hard)

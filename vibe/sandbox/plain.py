"""A plain child process with rlimits: no isolation. Only for code that a person or this project answers for."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import a3r
from vibe.sandbox.process import (
    PIPE_BUFFER_BYTES,
    Ended,
    Exposure,
    Limits,
    SandboxedProcess,
    at_most,
    reason_of,
    resource_limits,
)

_PR_SET_PDEATHSIG = 1


class PlainSandbox:
    """Runs code with rlimits, in a process group of its own and with an empty environment. It reads and writes
    whatever we may, and a child of it that leaves the process group outlives it."""

    name = "plain"

    async def start(
        self, arguments: Sequence[str], *, exposure: Exposure, limits: Limits, log: Path
    ) -> SandboxedProcess:
        """See `Sandbox.start`."""
        scratch = tempfile.mkdtemp(prefix="a3r-scratch-")
        with log.open("ab") as err:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                cwd=scratch,
                env=_environment(exposure, scratch=scratch),
                start_new_session=True,
                limit=PIPE_BUFFER_BYTES,
                preexec_fn=_confinement(limits),
            )

        async def explain(status: int) -> Ended:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
            return Ended(reason_of(status, limits))

        return SandboxedProcess(process, limits=limits, explain=explain)


def _environment(exposure: Exposure, *, scratch: str) -> dict[str, str]:
    environment = {
        "PATH": os.defpath,
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(Path(a3r.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "A3R_WORKSPACE": str(exposure.workspace.resolve()),
    }
    if exposure.gateway_socket is not None:
        environment |= {"A3R_GATEWAY_SOCKET": str(exposure.gateway_socket.resolve()), "A3R_GATEWAY_PORT": "0"}
    return environment


def _confinement(limits: Limits) -> Callable[[], None]:
    """What the child does between fork and exec; all that could take a lock is prepared here."""
    is_linux = sys.platform.startswith("linux")
    prctl = ctypes.CDLL(None).prctl if is_linux else None
    wanted = resource_limits(limits)
    if is_linux:
        processes = limits.processes + _num_threads_of(os.getuid())
        wanted["RLIMIT_NPROC"] = (processes, processes)
    else:
        # Elsewhere the kernel refuses it or counts what it maps by itself.
        del wanted["RLIMIT_AS"]
    bounds = {
        getattr(resource, name): at_most(value, resource.getrlimit(getattr(resource, name))[1])
        for name, value in wanted.items()
    }
    parent = os.getpid()

    def confine() -> None:
        for kind, bound in bounds.items():
            resource.setrlimit(kind, bound)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

    return confine


def _num_threads_of(user: int) -> int:
    """Threads of all processes of a user: RLIMIT_NPROC counts them all, wherever they were started."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                total += sum(1 for _ in (folder / "task").iterdir()) if folder.stat().st_uid == user else 0
            except (FileNotFoundError, ProcessLookupError):
                continue
    return total

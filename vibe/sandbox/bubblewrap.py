"""The default sandbox: bubblewrap with fresh namespaces, a system-call filter, rlimits and, where we may, a cgroup."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from a3r.errors import EnvironmentNotReady, InfrastructureFault
from vibe.sandbox.cgroups import ControlGroup
from vibe.sandbox.packages import importable
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
from vibe.sandbox.system_calls import system_call_filter
from vibe.sandbox.view import importable_files, interpreter, own_files, system_files

HOW_TO_INSTALL = "install bubblewrap 0.8 or newer, e.g. sudo apt-get install bubblewrap"
NOBODY = 65534
_PROBE_TIMEOUT_S = 10
# bubblewrap stays process 1 inside, and its environment can be read there.
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
# Root's bubblewrap keeps every capability unless told otherwise.
_ISOLATION = (
    *("--unshare-user", "--unshare-all", "--uid", str(NOBODY), "--gid", str(NOBODY)),
    *("--cap-drop", "ALL", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"),
)


class BubblewrapSandbox:
    """Runs code where it reaches its workspace, its scratch folder and the gateway's socket, and nothing else."""

    name = "bubblewrap"

    async def start(
        self, arguments: Sequence[str], *, exposure: Exposure, limits: Limits, log: Path
    ) -> SandboxedProcess:
        """See `Sandbox.start`."""
        view = [*system_files(), *importable_files(exposure.packages), *own_files(exposure, limits)]
        command = ["--", *_limited(limits), str(interpreter()), "-S", "-P", *arguments]
        group = ControlGroup.create(limits)
        is_dropped = group is None and os.geteuid() == 0 and _nobody_may_start(exposure)
        try:
            process, report, child = await _spawn(
                [*_ISOLATION, *view], command, group=group, log=log, is_dropped=is_dropped
            )
        except BaseException:
            if group is not None:
                await group.remove()
            raise
        explain = _Explanation(report, limits, group, log).of
        return SandboxedProcess(process, limits=limits, explain=explain, innermost=child)


async def _spawn(
    options: Sequence[str],
    command: Sequence[str],
    *,
    group: ControlGroup | None,
    log: Path,
    is_dropped: bool,
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, int]:
    """bubblewrap, let go once its process 1 is in its group; what it reports about that process; and its id."""
    report_read, report_write = _pipe()
    gate_read, gate_write = _pipe()
    with gate_write:
        with report_write, gate_read, _file_of(system_call_filter()) as calls, log.open("ab") as err:
            steering = {"--seccomp": calls, "--json-status-fd": report_write, "--block-fd": gate_read}
            process = await _bwrap(
                [
                    *options,
                    *(part for option, file in steering.items() for part in (option, str(file.fileno()))),
                    *command,
                ],
                stderr=err,
                pass_fds=[file.fileno() for file in steering.values()],
                is_dropped=is_dropped,
            )
        try:
            report = await _reader_of(report_read)
            child = await _child(report)
            if group is not None:
                group.admit(child)
            gate_write.write(b"\n")
        except BaseException as error:
            # Closing the gate would let it go, and until then it does not die with its parent.
            _kill_family(process.pid)
            await process.wait()
            if isinstance(error, OSError | ValueError):
                raise InfrastructureFault("The sandbox did not start", why=_last_words(log) or str(error)) from error
            raise
    return process, report, child


def _kill_family(pid: int) -> None:
    with suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for member in (*map(int, children), pid):
            os.kill(member, signal.SIGKILL)


async def _bwrap(
    arguments: Sequence[str], *, stderr: BinaryIO, pass_fds: Sequence[int], is_dropped: bool
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *("bwrap", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_ENVIRONMENT,
            pass_fds=pass_fds,
            start_new_session=True,
            limit=PIPE_BUFFER_BYTES,
            **({"user": NOBODY, "group": NOBODY, "extra_groups": ()} if is_dropped else {}),
        )
    except FileNotFoundError as error:
        raise EnvironmentNotReady("bubblewrap is missing", next_step=HOW_TO_INSTALL) from error


class _Explanation:
    """Why a sandbox ended, from all that knows something about it."""

    def __init__(self, report: asyncio.StreamReader, limits: Limits, group: ControlGroup | None, log: Path) -> None:
        self._report = report
        self._limits = limits
        self._group = group
        self._log = log

    async def of(self, status: int) -> Ended:
        command_ran = b"exit-code" in await self._report.read() or status < 0
        is_starved = self._group is not None and self._group.ran_out_of_memory
        if self._group is not None:
            await self._group.remove()
        if is_starved:
            return Ended(f"it used more than {self._limits.memory_bytes / 2**20:g} MiB of memory")
        if not command_ran:
            return Ended(_last_words(self._log) or f"bubblewrap ended with status {status}", was_set_up=False)
        return Ended(reason_of(status, self._limits))


def bubblewrap_obstacle() -> str | None:
    """Why bubblewrap cannot be used here; None when a trial with it went well."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if shutil.which("bwrap") is None:
        return "bwrap is not on the PATH"
    try:
        system_call_filter()
    except (ImportError, RuntimeError, OSError) as error:
        return f"the system-call filter cannot be made: {error}"
    command = ["bwrap", *_ISOLATION, *system_files(), "--", *_limited(Limits()), "true"]
    try:
        done = subprocess.run(
            command, env=_ENVIRONMENT, capture_output=True, text=True, check=False, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"a trial with it took longer than {_PROBE_TIMEOUT_S} s"
    return None if done.returncode == 0 else done.stderr.strip() or f"a trial with it ended with {done.returncode}"


def others_may_reach(path: Path, *, right: int = 0o4) -> bool:
    """Whether a user who neither owns anything nor is root has a `right` on a path (4 reads, 2 writes)."""
    path = path.resolve()
    return bool(path.stat().st_mode & right) and all(folder.stat().st_mode & 0o1 for folder in path.parents)


def _nobody_may_start(exposure: Exposure) -> bool:
    """Whether a user without rights could build this sandbox."""
    socket = exposure.gateway_socket
    packages = [source for source, _ in importable(exposure.packages)]
    return all(others_may_reach(path) for path in (interpreter(), exposure.workspace, *packages)) and (
        socket is None or others_may_reach(socket, right=0o2)
    )


def _limited(limits: Limits) -> list[str]:
    """A command that sets the rlimits of the command after it. It runs inside, where RLIMIT_NPROC counts the
    sandbox's own user namespace, and needs no rights over a process of another user."""
    wanted = resource_limits(limits)
    if counts_processes_by_namespace():
        wanted["RLIMIT_NPROC"] = (limits.processes, limits.processes)
    options: list[str] = []
    for name, value in wanted.items():
        _, hard = resource.getrlimit(getattr(resource, name))
        soft, hard = at_most(value, hard)
        options.append(f"--{name.removeprefix('RLIMIT_').lower()}={soft}:{hard}")
    return ["prlimit", *options, "--"]


def counts_processes_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts within the sandbox's user namespace; older kernels count all of the user's."""
    release = re.findall(r"\d+", os.uname().release)
    return tuple(map(int, release[:2])) >= (5, 14)


async def _child(report: asyncio.StreamReader) -> int:
    """Process 1 of the sandbox, as seen from here. Raises ValueError when bubblewrap gave up before."""
    line = await report.readline()
    if not line:
        raise ValueError("bubblewrap reported no process")
    return int(json.loads(line)["child-pid"])


def _last_words(log: Path) -> str:
    """What bubblewrap said last, if the last line is its own."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines and lines[-1].startswith("bwrap: ") else ""


def _file_of(content: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("a3r"), "w+b", 0)
    file.write(content)
    file.seek(0)
    return file


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    read, write = os.pipe()
    return os.fdopen(read, "rb", 0), os.fdopen(write, "wb", 0)


async def _reader_of(pipe: BinaryIO) -> asyncio.StreamReader:
    """A reader that closes the pipe at its end."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader

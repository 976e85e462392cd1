"""Children in their own process groups, with stdio in files, that die with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started_at: float
    """Seconds since the epoch, as the kernel reports it."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        return cls(pid=pid, started_at=psutil.Process(pid).create_time())

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_at) < 0.05
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def spawn(
    arguments: Sequence[str],
    *,
    folder: Path,
    name: str,
    environment: Mapping[str, str] | None = None,
    outlives_parent: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child in its own process group with stdout and stderr in `folder/name.{out,err}`.

    It gets SIGKILL when its parent dies, unless it is a service that `outlives_parent`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.out").open("ab") as out, (folder / f"{name}.err").open("ab") as err:
        return subprocess.Popen(
            list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environment) if environment is not None else None,
            start_new_session=True,
            preexec_fn=None if outlives_parent or not sys.platform.startswith("linux") else _die_with_parent,
        )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(identity: ProcessIdentity, *, grace_s: float = 5.0) -> None:
    """End the group that this process leads: SIGTERM, then SIGKILL after `grace_s` seconds; returns once it is over.

    The exit status is left for whoever started the process: a status taken here would read as 0 there.
    """
    if not identity.is_alive:
        return
    _signal_group(identity.pid, signal.SIGTERM)
    _wait_until_over(identity, timeout_s=grace_s)
    _signal_group(identity.pid, signal.SIGKILL)
    _wait_until_over(identity, timeout_s=grace_s)


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def _wait_until_over(identity: ProcessIdentity, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while identity.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)


def tail(path: Path, *, num_lines: int = 5) -> str:
    """Last lines of a text file, joined by ` | `; empty when there is no such file."""
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-num_lines:])

"""Which sandbox is used, and what holds on this machine."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass

from a3r.errors import EnvironmentNotReady, UsageError
from vibe.sandbox.bubblewrap import (
    HOW_TO_INSTALL,
    BubblewrapSandbox,
    bubblewrap_obstacle,
    counts_processes_by_namespace,
    others_may_reach,
)
from vibe.sandbox.cgroups import ControlGroup
from vibe.sandbox.plain import PlainSandbox
from vibe.sandbox.process import Sandbox
from vibe.sandbox.view import interpreter

_log = logging.getLogger(__name__)
_WRITABLE = "run where cgroups are writable: as root, or in a delegated systemd slice"


@dataclass(frozen=True, slots=True)
class Protection:
    """One protection: whether it holds here, how, and what would switch it on."""

    on: bool
    detail: str
    next_step: str = ""


def choose_sandbox(*, code_is_shipped: bool, asked: str | None = None) -> Sandbox:
    """The sandbox for code that is a shipped, hash-checked recipe, or not.

    Code that an LLM wrote never runs plain unless a person asked for `plain` by name.
    Raises UsageError for an unknown name, EnvironmentNotReady where bubblewrap is needed and cannot be used.
    """
    if asked == PlainSandbox.name:
        return PlainSandbox()
    if asked not in (None, BubblewrapSandbox.name):
        raise UsageError(f"There is no sandbox {asked!r}", next_step="use bubblewrap or plain")
    obstacle = bubblewrap_obstacle()
    if obstacle is None:
        return BubblewrapSandbox()
    if code_is_shipped and asked is None:
        _log.warning(
            "Shipped recipes run without isolation: bubblewrap cannot be used (%s). %s.", obstacle, HOW_TO_INSTALL
        )
        return PlainSandbox()
    raise EnvironmentNotReady(
        "Programs cannot be isolated on this machine",
        why=f"bubblewrap cannot be used: {obstacle}",
        next_step=f"{HOW_TO_INSTALL}; or ask for --sandbox plain, which gives the code all rights that you have",
    )


def sandbox_report() -> dict[str, Protection]:
    """Every protection by name, tried out on this machine."""
    obstacle = bubblewrap_obstacle()
    if obstacle is not None:
        off = Protection(on=False, detail=obstacle, next_step=HOW_TO_INSTALL)
        return dict.fromkeys(("isolation", "system calls", "number of processes", "total memory"), off)
    has_group = ControlGroup.is_available()
    return {
        "isolation": Protection(on=True, detail=f"{shutil.which('bwrap')}: files, network, processes, environment"),
        "system calls": Protection(on=True, detail="seccomp filter"),
        "number of processes": _process_bound(has_group=has_group),
        "total memory": Protection(on=True, detail="cgroup")
        if has_group
        else Protection(on=False, detail="each process is bounded, not their sum", next_step=_WRITABLE),
    }


def _process_bound(*, has_group: bool) -> Protection:
    if has_group:
        return Protection(on=True, detail="cgroup")
    if not counts_processes_by_namespace():
        return Protection(on=False, detail="this kernel cannot count them for one sandbox", next_step=_WRITABLE)
    if os.geteuid() != 0:
        return Protection(on=True, detail="RLIMIT_NPROC in a user namespace")
    if others_may_reach(interpreter()):
        return Protection(on=True, detail="RLIMIT_NPROC, as nobody, where the workspace can be reached by others")
    why = f"RLIMIT_NPROC does not bind root, and others cannot reach {interpreter()}"
    return Protection(on=False, detail=why, next_step=f"run as a normal user, or {_WRITABLE}")

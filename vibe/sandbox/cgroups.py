"""A cgroup that bounds the processes and the memory of one sandbox as a whole.

Version 1 where its `pids` and `memory` hierarchies are writable (root), version 2 where an ancestor group hands
both controllers down and is ours to write (root, or a delegated systemd user slice).
"""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vibe.sandbox.process import Limits

_CONTROLLERS = ("pids", "memory")
_numbers = count(1)
_REMOVAL_TRIES = 50


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """`folders` is one folder in each hierarchy that is used."""

    folders: tuple[Path, ...]

    @classmethod
    def create(cls, limits: Limits) -> ControlGroup | None:
        """A new, empty group; None where this process may not make one."""
        parents = _parents()
        if not parents:
            return None
        _sweep(parents)
        name = f"a3r-{os.getpid()}-{next(_numbers)}"
        group = cls(tuple(parent / name for parent in parents))
        try:
            for folder in group.folders:
                folder.mkdir()
                _write_limits(folder, limits)
        except OSError:
            # No rights, or a controller that only looks usable: the caller has other means.
            _remove_now(group.folders)
            return None
        return group

    @classmethod
    def is_available(cls) -> bool:
        """Whether this process may make groups; found out by making one."""
        group = cls.create(Limits())
        return group is not None and _remove_now(group.folders)

    def admit(self, pid: int) -> None:
        """Move a process, and all that it starts from now on, into the group. Raises OSError."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed a process of the group for its memory."""
        return any(
            _num_oom_kills(folder / name) for folder in self.folders for name in ("memory.events", "memory.oom_control")
        )

    async def remove(self) -> None:
        """Remove the group once its last process is gone. What stays busy is swept by a later `create`."""
        for _ in range(_REMOVAL_TRIES):
            if _remove_now(self.folders):
                return
            await asyncio.sleep(0.01)


def _write_limits(folder: Path, limits: Limits) -> None:
    memory = str(limits.memory_bytes)
    settings = {
        "pids.max": str(limits.processes),
        "memory.limit_in_bytes": memory,
        "memory.memsw.limit_in_bytes": memory,
        "memory.max": memory,
        "memory.swap.max": "0",
        "memory.oom.group": "1",
    }
    for name, value in settings.items():
        if (folder / name).exists():
            (folder / name).write_text(value)


def _num_oom_kills(file: Path) -> int:
    if not file.exists():
        return 0
    pairs = (line.split() for line in file.read_text().splitlines())
    return sum(int(value) for name, value in pairs if name == "oom_kill")


def _remove_now(folders: tuple[Path, ...]) -> bool:
    """Whether all of them are gone."""
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
    return True


def _sweep(parents: tuple[Path, ...]) -> None:
    """Remove groups that processes like this one left when they were killed."""
    for parent in parents:
        for folder in parent.glob("a3r-*-*"):
            owner = folder.name.split("-")[1]
            if not Path("/proc", owner).exists():
                _remove_now((folder,))


def _parents() -> tuple[Path, ...]:
    """Groups in which we may make one of our own; empty where there is none for every controller."""
    own = _own_groups()
    version_1 = [_version_1_parent(controller, own) for controller in _CONTROLLERS]
    if all(version_1):
        return tuple(dict.fromkeys(parent for parent in version_1 if parent))
    version_2 = _version_2_parent(own)
    return (version_2,) if version_2 else ()


def _own_groups() -> dict[str, str]:
    """Path of this process's group by controller; the unified hierarchy is named by the empty string."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _version_1_parent(controller: str, own: dict[str, str]) -> Path | None:
    mount = _mount_point("cgroup", controller)
    if mount is None or controller not in own:
        return None
    # Within a container the path may be the one outside, which its own mount does not have.
    nested = mount / own[controller].lstrip("/")
    parent = nested if nested.is_dir() else mount
    return parent if _is_writable(parent) else None


def _version_2_parent(own: dict[str, str]) -> Path | None:
    mount = _mount_point("cgroup2", "")
    if mount is None or "" not in own:
        return None
    group = mount / own[""].lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount) or not folder.is_dir():
            continue
        handed_down = (folder / "cgroup.subtree_control").read_text().split()
        if set(_CONTROLLERS) <= set(handed_down) and _is_writable(folder):
            return folder
    return None


def _is_writable(folder: Path) -> bool:
    """By the mode bits, which root passes even where a mount is read-only; `create` finds that out."""
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def _mount_point(kind: str, option: str) -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, options, *_ = line.split()
        if found == kind and (not option or option in options.split(",")):
            return Path(point)
    return None

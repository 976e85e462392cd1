"""Warm swarm servers: one a base model, kept between trials, ended with the process that owns the pool."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from a3r.config import TrialConfig
from a3r.errors import InfrastructureFault
from a3r.swarm.admin import SwarmAdmin
from a3r.swarm.wire import Configure
from flows.processes import ProcessIdentity, end_group, spawn, tail

_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class WarmServer:
    """A running swarm server and the keys to it."""

    identity: ProcessIdentity
    model: str
    url: str
    socket: str
    admin_key: str
    client_key: str

    @asynccontextmanager
    async def trial(self, trial_id: str, *, config: TrialConfig, folder: Path) -> AsyncIterator[None]:
        """Configure and start a trial on this server; it is stopped when the context ends."""
        admin = SwarmAdmin(self.url, self.admin_key)
        wanted = Configure(trial_id=trial_id, config=config, folder=str(folder))
        await asyncio.to_thread(admin.stop)
        await asyncio.to_thread(admin.configure, wanted)
        await asyncio.to_thread(admin.start)
        try:
            yield
        finally:
            if self.identity.is_alive:
                await asyncio.to_thread(admin.stop)
            admin.close()


@dataclass(frozen=True, slots=True)
class SwarmPool:
    """The servers of a folder, found again by what they wrote there. Any process may open the pool; a server
    dies with the process that started it."""

    folder: Path

    async def server(self, model: str) -> WarmServer:
        """The server of this base model, alive. Raises InfrastructureFault when it does not come up."""
        for record in self.folder.glob("swarm-*/server.json"):
            warm = read_server(record)
            if warm.model == model and warm.identity.is_alive:
                return warm
        number = len(list(self.folder.glob("swarm-*"))) if self.folder.exists() else 0
        return await start_server({"model": model}, folder=self.folder / f"swarm-{number}")

    def close(self) -> None:
        """End every server of the pool."""
        for record in self.folder.glob("swarm-*/server.json"):
            end_group(read_server(record).identity)
            record.unlink()


async def start_server(config: dict[str, object], *, folder: Path, outlives_parent: bool = False) -> WarmServer:
    """Start a swarm server in `folder` and wait until it answers.

    Call it on the main thread: a child that dies with its parent dies with the thread that started it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "server.json"
    record.unlink(missing_ok=True)
    description = folder / "config.json"
    description.write_text(json.dumps({"folder": str(folder), **config}))
    command = [sys.executable, "-m", "flows.swarm", str(description)]
    child = spawn(command, folder=folder, name="swarm", outlives_parent=outlives_parent)
    await _await_record(record, child=child, folder=folder)
    return read_server(record)


def read_server(record: Path) -> WarmServer:
    """The server that wrote `server.json`."""
    value = json.loads(record.read_text())
    return WarmServer(
        identity=ProcessIdentity(pid=value["pid"], started_at=value["started_at"]),
        model=value["policy"],
        url=value["url"],
        socket=value["socket"],
        admin_key=value["admin_key"],
        client_key=value["client_key"],
    )


async def _await_record(record: Path, *, child: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not record.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise InfrastructureFault(
                "The swarm server did not come up",
                why=tail(folder / "swarm.err", num_lines=1) or "it stopped without a word",
                next_step=f"read {folder / 'swarm.err'}",
            )
        await asyncio.sleep(0.05)

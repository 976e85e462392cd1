"""A swarm server for a person's own agent, in the foreground."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from a3r.config import TrialConfig
from a3r.swarm.wire import Configure
from flows.lab import Lab
from flows.swarm import ServerConfig, ServerRecord, serve_swarm


def serve_standalone(
    config: TrialConfig, *, host: str, port: int, folder: Path | None, say: Callable[[str], object]
) -> int:
    """Serve and train `config` until Ctrl-C; `say` is told where and with which key clients come in.

    Raises EnvironmentNotReady when the model or the port cannot be had.
    """
    place = folder.absolute() if folder else Lab.locate().home / "swarm" / time.strftime("%Y%m%d-%H%M%S")
    trial = Configure(trial_id=place.name, config=config, folder=str(place))
    server = ServerConfig(model=config.model, folder=str(place), host=host, port=port)

    def announce(record: ServerRecord) -> None:
        say(
            f"Serving {record.policy} at {record.url}, training {config.trainer.num_updates} updates.\n"
            f"  export A3R_SWARM_URL={record.url}\n"
            f"  export A3R_SWARM_KEY={record.client_key}\n"
            f"Checkpoints and events: {place}. Ctrl-C ends it.\n"
        )

    uvloop.run(serve_swarm(server, trial=trial, announce=announce))
    return 0

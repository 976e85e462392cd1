"""`a3r swarm`: a swarm server of one's own, for any agent on any machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from ui.cli.research import parse_settings
from ui.cli.screen import Screen

app = App(name="swarm", help="Serve and train a policy for your own agent.")


@app.command
def serve(
    *,
    model: str = "small",
    host: str = "127.0.0.1",
    port: int = 10086,
    folder: Path | None = None,
    set: Annotated[tuple[str, ...], Parameter(negative=())] = (),
) -> int:
    """Serve a policy and train it on the episodes that clients end with a reward. Ctrl-C ends it.

    Parameters
    ----------
    model
        `small` or the path of a local Hugging Face folder.
    host, port
        Where to listen.
    folder
        Where checkpoints and the ledger go; a folder in the lab by default.
    set
        Settings by path, such as `--set trainer.lr=1e-4`; may be repeated.
    """
    from a3r.config import TrialConfig
    from flows.standalone import serve_standalone

    config = TrialConfig(model=model).updated(parse_settings(set))
    return serve_standalone(config, host=host, port=port, folder=folder, say=sys.stderr.write)


@app.command
def status(
    *, url: str | None = None, key: str | None = None, json: Annotated[bool, Parameter(negative=())] = False
) -> int:
    """Show what a swarm server is doing.

    Parameters
    ----------
    url
        Its address; A3R_SWARM_URL by default.
    key
        Any key of it; A3R_SWARM_KEY by default.
    """
    from a3r.swarm import SwarmClient

    state = SwarmClient(url, key).status()
    Screen(json_lines=json).table(
        ["what", "value"], [(k, str(v)) for k, v in state.model_dump().items()], kind="status"
    )
    return 0

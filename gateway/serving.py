"""Serving an application on loopback TCP and on a Unix socket at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from a3r.errors import EnvironmentNotReady


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever composes the process."""
        yield


def bind(*, host: str, port: int, uds: Path | None = None) -> list[socket.socket]:
    """Sockets to serve on; port 0 takes any free one. An old socket file is replaced.

    Raises EnvironmentNotReady naming the port that is taken, or the path that cannot be bound.
    """
    tcp = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        tcp.bind((host, port))
    except OSError as error:
        tcp.close()
        raise EnvironmentNotReady(
            f"The swarm server cannot listen on port {port} of {host}",
            why=error.strerror or str(error),
            next_step="stop the other process or choose another port; 0 takes any free one",
        ) from error
    if uds is None:
        return [tcp]
    unix = socket.socket(socket.AF_UNIX)
    try:
        uds.unlink(missing_ok=True)
        unix.bind(str(uds))
        uds.chmod(0o666)
    except OSError as error:
        unix.close()
        tcp.close()
        raise EnvironmentNotReady(
            f"The swarm server cannot make the socket {uds}",
            why=error.strerror or str(error),
            next_step="choose a writable folder with a path shorter than 100 bytes",
        ) from error
    return [tcp, unix]


async def serve(
    app: Callable[..., Any],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    uds: Path | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve `app` until cancelled, which closes it gracefully. `on_ready` gets the TCP port once it listens.

    Raises EnvironmentNotReady as `bind` does.
    """
    sockets = bind(host=host, port=port, uds=uds)
    config = uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        proxy_headers=False,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=4096,
    )
    server = _Server(config)
    for listener in sockets:
        listener.listen(4096)
    if on_ready is not None:
        on_ready(sockets[0].getsockname()[1])
    serving = asyncio.create_task(server.serve(sockets))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise
    finally:
        for listener in sockets:
            listener.close()
        if uds is not None:
            uds.unlink(missing_ok=True)

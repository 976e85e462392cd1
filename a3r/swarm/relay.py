"""A port on 127.0.0.1 that leads to the gateway's Unix socket, for frameworks that know TCP only."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


def open_relay(socket_path: str, *, port: int) -> str:
    """Listen on `port` (0 takes a free one) and return the address. Nothing runs until somebody connects."""
    listener = socket.create_server(("127.0.0.1", port), backlog=256)
    threading.Thread(target=_serve, args=(listener, socket_path), name="a3r-relay", daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def _serve(listener: socket.socket, socket_path: str) -> None:
    first, _ = listener.accept()
    import asyncio

    asyncio.run(_relay(listener, first, socket_path))


async def _relay(listener: socket.socket, first: socket.socket, socket_path: str) -> None:
    import asyncio

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            gateway_reader, gateway_writer = await asyncio.open_unix_connection(socket_path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, gateway_writer), _pump(gateway_reader, writer))

    server = await asyncio.start_server(connected, sock=listener)
    async with server:
        await asyncio.gather(connected(*await asyncio.open_connection(sock=first)), server.serve_forever())


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy until the source ends or one of them breaks."""
    try:
        while data := await source.read(2**16):
            target.write(data)
            await target.drain()
    except OSError:
        return
    finally:
        target.close()

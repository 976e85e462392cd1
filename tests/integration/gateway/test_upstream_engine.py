"""What the HTTP engine asks for, and what it makes of a server that fails."""

from __future__ import annotations

import asyncio

import pytest

from a3r.errors import EngineFault
from gateway.engine import Sampling
from gateway.engines.upstream import UpstreamEngine
from tests.fakes import upstream


async def test_it_asks_in_token_ids_with_the_key_and_the_pinned_sampling() -> None:
    async with upstream.running(lambda _request: [5, 6, 7]) as server:
        engine = UpstreamEngine(server.url, model="m", api_key="secret")
        completion = await engine.generate([1, 2], Sampling(max_tokens=9, temperature=0.7, stop_ids=(6,), seed=3))
        await engine.close()
    assert completion.ids == (5, 6)
    assert completion.logprobs == (-1.0, -0.5)
    asked = server.asked[0]
    assert (asked["prompt"], asked["temperature"], asked["stop_token_ids"], asked["seed"]) == ([1, 2], 0.7, [6], 3)
    assert asked["return_token_ids"] is True
    assert server.keys == ["Bearer secret"]


async def test_streamed_and_plain_replies_are_the_same_completion() -> None:
    heard: list[int] = []
    async with upstream.running(lambda _request: [5, 6, 7]) as server:
        engine = UpstreamEngine(server.url, model="m")
        plain = await engine.generate([1], Sampling(max_tokens=3))
        streamed = await engine.generate([1], Sampling(max_tokens=3), on_token=heard.append)
        await engine.close()
    assert plain == streamed
    assert heard == [5, 6, 7]


async def test_frozen_weights_refuse_another_version() -> None:
    engine = UpstreamEngine("http://127.0.0.1:9/v1", model="m")
    await engine.publish(0)
    with pytest.raises(EngineFault, match="cannot become version 1"):
        await engine.publish(1)
    assert engine.version == 0
    await engine.close()


SHORT_OF_A_LOGPROB = b'{"choices":[{"token_ids":[1,2],"logprobs":{"token_logprobs":[-1.0]},"finish_reason":"stop"}]}'


@pytest.mark.parametrize(
    ("status", "body", "missing", "reason"),
    [
        (500, b"boom", 0, "answered 500"),
        (200, b"{", 9, "broke off"),
        (200, b"{}", 0, "cannot be recorded"),
        (200, SHORT_OF_A_LOGPROB, 0, "2 ids came with 1 logprobs"),
    ],
)
async def test_a_failing_server_is_an_engine_fault(status: int, body: bytes, missing: int, reason: str) -> None:
    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d -\r\ncontent-length: %d\r\n\r\n" % (status, len(body) + missing) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(fail, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    engine = UpstreamEngine(f"http://127.0.0.1:{port}/v1", model="m")
    try:
        with pytest.raises(EngineFault, match=reason):
            await engine.generate([1], Sampling(max_tokens=2))
    finally:
        await engine.close()
        server.close()


async def test_a_stream_that_breaks_off_is_no_completion() -> None:
    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = b'data: {"choices":[{"token_ids":[1],"logprobs":{"token_logprobs":[-1.0]},"finish_reason":null}]}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(event) + event)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(fail, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    engine = UpstreamEngine(f"http://127.0.0.1:{port}/v1", model="m")
    heard: list[int] = []
    with pytest.raises(EngineFault, match="ended early"):
        await engine.generate([1], Sampling(max_tokens=2), on_token=heard.append)
    assert heard == [1]
    await engine.close()
    server.close()

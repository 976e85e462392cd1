"""An OpenAI-compatible HTTP server that says what it is told: completions with token ids, and chats.

It speaks HTTP by hand, so that a benchmark measures the server in front of it. As a process it takes
`python -m tests.fakes.upstream`, prints its URL and answers until its standard input closes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

Script = Callable[[dict[str, Any]], Sequence[int]]
"""A completions request in, sampled ids out."""
REPLY_TOKENS = 32


@dataclass
class Answer:
    """What the server says to one chat call."""

    status: int = 200
    text: str = "hello world"
    prompt_tokens: int = 10
    completion_tokens: int = 5
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    body: bytes | None = None


@dataclass
class Upstream:
    """Address of a running server and what it was asked."""

    script: Script
    delay_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    """What chats are answered, in turn; the plain answer once it is empty."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""
    keeps: bool = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
                }
                request = orjson.loads(await reader.readexactly(int(headers["content-length"])))
                if self.keeps:
                    self.asked.append(request)
                    self.keys.append(headers.get("authorization", ""))
                await self._answer(head.split(b" ", 2)[1], request, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: bytes, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path.endswith(b"/chat/completions"):
            await self._chat(request, writer)
        elif request.get("stream"):
            await self._stream(request, writer)
        else:
            ids, reason = self._cut(request)
            if self.delay_s:
                await asyncio.sleep(self.delay_s * len(ids))
            await _send(writer, 200, _completion(ids, reason))

    def _cut(self, request: dict[str, Any]) -> tuple[list[int], str]:
        ids = list(self.script(request))[: request["max_tokens"]]
        for place, token in enumerate(ids):
            if token in request["stop_token_ids"]:
                return ids[: place + 1], "stop"
        return ids, "length"

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        ids, reason = self._cut(request)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for place, token in enumerate(ids):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            last = reason if place == len(ids) - 1 else None
            await _chunk(writer, b"data: " + _completion([token], last, first=place) + b"\n\n")
        await _chunk(writer, b"data: [DONE]\n\n")
        await _chunk(writer, b"")

    async def _chat(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        answer = self.answers.pop(0) if self.answers else Answer()
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        body = answer.body
        if body is None and answer.status != 200:
            body = orjson.dumps({"error": {"message": answer.text, "code": "scripted"}})
        await _send(writer, answer.status, body or _chat_body(request, answer), answer.headers)


@asynccontextmanager
async def running(script: Script, *, delay_s: float = 0.0, keeps: bool = True) -> AsyncIterator[Upstream]:
    """A server on loopback until the block ends."""
    upstream = Upstream(script, delay_s=delay_s, keeps=keeps)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", limit=16 * 2**20)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield upstream
    finally:
        server.close()


def _completion(ids: Sequence[int], reason: str | None, *, first: int = 0) -> bytes:
    logprobs = [-1 / (1 + first + place) for place in range(len(ids))]
    choice = {
        "index": 0,
        "text": "",
        "token_ids": ids,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": reason,
    }
    return orjson.dumps({"id": "cmpl-0", "object": "text_completion", "created": 0, "choices": [choice]})


def _chat_body(request: dict[str, Any], answer: Answer) -> bytes:
    tokens = [{"token": "hello", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * REPLY_TOKENS
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": answer.text},
        "finish_reason": "stop",
        "token_ids": list(range(REPLY_TOKENS)),
        "logprobs": {"content": tokens} if request.get("logprobs") else None,
    }
    total = answer.prompt_tokens + answer.completion_tokens
    usage = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": total,
    }
    return orjson.dumps(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": request.get("model"),
            "prompt_token_ids": [1, 2, 3],
            "choices": [choice],
            "usage": usage,
        }
    )


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\n{more}content-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


async def main() -> None:
    """Answer every call with the same ids until standard input closes."""
    ids = list(range(40, 40 + REPLY_TOKENS))
    async with running(lambda _request: ids, keeps=False) as upstream:
        print(upstream.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())

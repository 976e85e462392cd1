"""An engine behind HTTP: token ids and logprobs of an OpenAI-compatible `/v1/completions`, as vLLM serves it.

Prompts travel as ids and replies come back as ids (`return_token_ids`), so nothing is re-encoded on the way. The
server must give the logprobs of the distribution that it samples from: start vLLM with
`--logprobs-mode processed_logprobs`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from a3r.episode import FinishReason
from a3r.errors import EngineFault
from gateway.engine import Completion, Sampling

MAX_CONNECTIONS = 256
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class UpstreamEngine:
    """Samples at `base_url` (which ends in `/v1`). Open and use it on one event loop.

    `load` brings the server's weights to a version and is awaited by `publish`; without it the weights are frozen
    and publishing another version is an EngineFault.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        api_key: str = "",
        version: int = 0,
        load: Callable[[int], Awaitable[None]] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """`timeout_s` bounds the silence of the server, not the length of a reply."""
        self._url = f"{base_url.rstrip('/')}/completions"
        self._model = model
        self._version = version
        self._load = load
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=timeout_s)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._calls: set[asyncio.Task[Completion]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()
        self._is_closed = False

    @property
    def version(self) -> int:
        return self._version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str = "",  # noqa: ARG002  the server finds reusable prefixes by itself
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        """As the Engine protocol says. Raises EngineFault for what the server refuses, breaks off or garbles."""
        while not self._open.is_set():
            await self._open.wait()
        if self._is_closed:
            raise _closed()
        body = _body(prompt_ids, sampling, model=self._model, stream=on_token is not None)
        call = asyncio.create_task(self._complete(body, version=self._version, on_token=on_token))
        self._calls.add(call)
        self._idle.clear()
        try:
            return await call
        except asyncio.CancelledError:
            if self._is_closed:
                raise _closed() from None
            call.cancel()
            raise
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()

    async def release(self, session: str) -> None:
        """Nothing to do: an upstream drops its own caches."""

    async def pause(self) -> None:
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        self._open.set()

    async def publish(self, version: int) -> None:
        if self._load is not None:
            await self._load(version)
        elif version != self._version:
            raise EngineFault(
                f"The weights at {self._url} cannot become version {version}",
                why="this engine was opened without a way to load weights into its server",
                next_step="serve it as a frozen model, or open the engine with `load`",
            )
        self._version = version

    async def close(self) -> None:
        self._is_closed = True
        self._open.set()
        for call in self._calls:
            call.cancel()
        if self._session is not None:
            await self._session.close()

    async def _complete(self, body: bytes, *, version: int, on_token: Callable[[int], None] | None) -> Completion:
        # Opened by the first call: aiohttp's session belongs to the loop that it is made on.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS), timeout=self._timeout, auto_decompress=False
            )
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as response:
                if response.status != 200:
                    raise _refused(self._url, response.status, await response.read())
                if on_token is None:
                    return _completion([_choice(orjson.loads(await response.read()))], version=version)
                return await _streamed(response.content, version=version, on_token=on_token)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFault(
                f"The engine at {self._url} broke off",
                why=str(error) or "it was silent for too long",
                next_step="check that its server runs",
            ) from error
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineFault(
                f"The engine at {self._url} gave a reply that cannot be recorded",
                why=f"{type(error).__name__}: {error}",
                next_step="use a server that honours `return_token_ids` and `logprobs`, such as vLLM 0.11",
            ) from error


def _body(prompt_ids: Sequence[int], sampling: Sampling, *, model: str, stream: bool) -> bytes:
    fields: dict[str, Any] = {
        "model": model,
        "prompt": prompt_ids,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "logprobs": 0,
        "return_token_ids": True,
        "stop_token_ids": sampling.stop_ids,
        # The template's end ids decide, not the upstream's idea of an end of sequence.
        "ignore_eos": True,
        "stream": stream,
    }
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return orjson.dumps(fields)


async def _streamed(lines: aiohttp.StreamReader, *, version: int, on_token: Callable[[int], None]) -> Completion:
    pieces: list[Mapping[str, Any]] = []
    async for event in events(lines):
        piece = _choice(event)
        pieces.append(piece)
        for token in piece["token_ids"]:
            on_token(token)
    return _completion(pieces, version=version)


async def events(lines: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events up to `[DONE]`. Raises ValueError when the stream ends before it."""
    while line := await lines.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield orjson.loads(data)
    raise ValueError("the stream ended early")


def _choice(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    if "error" in reply:
        raise ValueError(f"the server says {reply['error']!r}")
    return reply["choices"][0]


def _completion(pieces: Sequence[Mapping[str, Any]], *, version: int) -> Completion:
    """The whole of a reply's pieces. Raises KeyError or ValueError unless every id has its logprob."""
    ids: list[int] = []
    logprobs: list[float] = []
    for piece in pieces:
        ids += piece["token_ids"]
        if piece["token_ids"]:
            logprobs += piece["logprobs"]["token_logprobs"]
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} ids came with {len(logprobs)} logprobs")
    if not all(isinstance(token, int) for token in ids) or not all(map(math.isfinite, logprobs)):
        raise ValueError("an id is no integer or a logprob is not finite")
    return Completion(
        ids=tuple(ids),
        logprobs=tuple(logprobs),
        finish_reason=_FINISH[pieces[-1]["finish_reason"]],
        version=version,
    )


def _refused(url: str, status: int, body: bytes) -> EngineFault:
    return EngineFault(
        f"The engine at {url} answered {status}",
        why=body[:500].decode(errors="replace"),
        next_step="check its model name, its context length and its key",
    )


def _closed() -> EngineFault:
    return EngineFault("The engine is closed")

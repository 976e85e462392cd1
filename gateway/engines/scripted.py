"""An engine that says what it is told: for tests, for trying out an agent, and for measuring the gateway alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from a3r.episode import FinishReason
from a3r.errors import EngineFault
from gateway.engine import Completion, Sampling

Script: TypeAlias = Callable[[Sequence[int], Sampling], Sequence[int]]
"""Prompt ids and sampling in, sampled ids out; the end token included where the reply is to end."""


class ScriptedEngine:
    """Answers from a script. Honours `max_tokens`, `stop_ids`, pause and publish as a real engine does.

    The logprob of every id is `-1/(1 + position)`, so that a mix-up shows.
    """

    def __init__(self, script: Script, *, version: int = 0, delay_s: float = 0.0) -> None:
        """`delay_s` passes before each id."""
        self._script = script
        self._version = version
        self._delay_s = delay_s
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()
        self._is_closed = False
        self.num_calls = 0
        """Calls that were computed."""
        self.released: list[str] = []
        """Sessions that were released, in order."""

    @classmethod
    def from_replies(cls, replies: Iterable[Sequence[int]], *, delay_s: float = 0.0) -> ScriptedEngine:
        """Answers with `replies` in turn; one call too many is an EngineFault."""
        rest = iter(replies)

        def script(_prompt_ids: Sequence[int], _sampling: Sampling) -> Sequence[int]:
            for reply in rest:
                return reply
            raise EngineFault("The script has no further reply")

        return cls(script, delay_s=delay_s)

    @property
    def version(self) -> int:
        return self._version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str = "",  # noqa: ARG002  part of the Engine protocol
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        while not self._open.is_set():
            await self._open.wait()
        if self._is_closed:
            raise EngineFault("The engine is closed")
        self._running += 1
        self._idle.clear()
        try:
            return await self._spell(prompt_ids, sampling, on_token)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def pause(self) -> None:
        self._open.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        self._open.set()

    async def publish(self, version: int) -> None:
        self._version = version

    async def close(self) -> None:
        self._is_closed = True
        self._open.set()

    async def _spell(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_token: Callable[[int], None] | None
    ) -> Completion:
        self.num_calls += 1
        version = self._version
        sampled: list[int] = []
        for token in self._script(prompt_ids, sampling)[: sampling.max_tokens]:
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            if self._is_closed:
                raise EngineFault("The engine is closed")
            sampled.append(token)
            if on_token is not None:
                on_token(token)
            if token in sampling.stop_ids:
                break
        stopped = bool(sampled) and sampled[-1] in sampling.stop_ids
        return Completion(
            ids=tuple(sampled),
            logprobs=tuple(-1 / (1 + place) for place in range(len(sampled))),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            version=version,
        )

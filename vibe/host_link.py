"""One running host (`a3r.swarm.host`) in its sandbox, and the calls that are open on it.

The other end is not trusted: it may answer what was not asked, twice, too long or not at all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

import orjson

from a3r.episode import Json, Observation
from a3r.errors import ClientFault, Fault, InfrastructureFault
from a3r.swarm.host import MAX_OUTPUT_BYTES
from a3r.swarm.pipe import MAX_LINE_BYTES, Lines
from vibe.sandbox import Ended, Exposure, Limits, Sandbox, SandboxedProcess

_READ_BYTES = 2**18
_START_TIMEOUT_S = 60.0
_MAX_STUCK = 16
"""Calls that go on although they were interrupted, before the whole process is given up."""
_MAX_QUOTED_BYTES = 1000
_EXIT_GRACE_S = 2.0
_INTERRUPT_GRACE_S = 2.0
_CLOSE_TIMEOUT_S = 5.0
_MAX_KEPT_LOG_BYTES = 2**16
_READY = 0


@dataclass(slots=True)
class _Pending:
    """A call without its answer."""

    answer: asyncio.Future[Any]
    op: str
    on_step: Callable[[str], Awaitable[Observation]] | None = None
    stepping: asyncio.Task[None] | None = None

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class HostLink:
    """Made by `open`. Lives until it is closed, its process dies, or it breaks the protocol."""

    def __init__(self, process: SandboxedProcess, *, log: Path) -> None:
        self._process = process
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._unwanted: set[int] = set()
        self._stuck: set[int] = set()
        self._numbers = count(_READY + 1)
        self._outbox: list[bytes] = []
        self._breach: str | None = None
        self._is_closed = False
        self.functions: frozenset[str] = frozenset()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, sandbox: Sandbox, program: str, *, exposure: Exposure, limits: Limits, log: Path) -> Self:
        """A host that has loaded the Program. Raises ClientFault when that fails, and as `Sandbox.start`."""
        log.write_bytes(_tail(log, num_bytes=_MAX_KEPT_LOG_BYTES) if log.exists() else b"")
        arguments = ["-m", "a3r.swarm.host", program]
        process = await sandbox.start(arguments, exposure=exposure, limits=limits, log=log)
        link = cls(process, log=log)
        ready = link._expect(_READY, op="import")
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                link.functions = _names(await ready.answer)
        except TimeoutError:
            await link.close()
            raise ClientFault(f"The program's import took longer than {_START_TIMEOUT_S:g} s") from None
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def is_open(self) -> bool:
        """Whether calls may still be made."""
        return not (self._is_closed or self._breach or self._reading.done())

    async def call(
        self,
        body: Mapping[str, Any],
        *,
        timeout_s: float,
        on_step: Callable[[str], Awaitable[Observation]] | None = None,
    ) -> Json:
        """The answer to a request. Raises ClientFault on an error, a death or a time-out; what `on_step` raises
        is raised as it is."""
        number = next(self._numbers)
        pending = self._expect(number, op=body["op"], on_step=on_step)
        self._send({"id": number, **body})
        try:
            async with asyncio.timeout(timeout_s):
                return await pending.answer
        except TimeoutError:
            raise ClientFault(f"The program's {pending.op} took longer than {timeout_s:g} s") from None
        finally:
            if self._pending.pop(number, None) is not None:
                self._interrupt(number, pending)

    def tell(self, body: Mapping[str, Any]) -> None:
        """Make a request and leave its answer unread."""
        number = next(self._numbers)
        self._unwanted.add(number)
        self._send({"id": number, **body})

    async def close(self) -> None:
        """Kill the process; open calls fail. Harmless when repeated."""
        self._is_closed = True
        self._process.kill()
        # A child that left a plain sandbox's process group may hold the pipe open.
        await asyncio.wait([self._reading], timeout=_CLOSE_TIMEOUT_S)
        self._reading.cancel()

    def _expect(
        self, number: int, *, op: str, on_step: Callable[[str], Awaitable[Observation]] | None = None
    ) -> _Pending:
        pending = _Pending(self._loop.create_future(), op, on_step)
        if self._is_closed or self._reading.done():
            pending.fail(ClientFault("The program's process has ended"))
        else:
            self._pending[number] = pending
        return pending

    def _interrupt(self, number: int, pending: _Pending) -> None:
        """Give up a call whose answer is not wanted any more."""
        if pending.stepping is not None:
            pending.stepping.cancel()
        self._unwanted.add(number)
        self._send({"id": number, "op": "cancel"})
        self._loop.call_later(_INTERRUPT_GRACE_S, self._count_stuck, number)

    def _count_stuck(self, number: int) -> None:
        if number in self._unwanted:
            self._stuck.add(number)
        if len(self._stuck) > _MAX_STUCK:
            self._break(f"{len(self._stuck)} of its calls went on although they were interrupted")

    def _send(self, request: Mapping[str, Any]) -> None:
        """Queue a line; all lines of one turn of the event loop go out together."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(orjson.dumps(request))

    def _flush(self) -> None:
        self._outbox.append(b"")
        if self.is_open:
            self._process.stdin.write(b"\n".join(self._outbox))
        self._outbox.clear()

    async def _read(self) -> None:
        """Take in answers until the process ends; then whatever is open fails with the reason."""
        lines = Lines()
        while chunk := await self._process.stdout.read(_READ_BYTES):
            if self._breach:
                # It is dying; only its end is of interest.
                continue
            for line in lines.feed(chunk):
                if not self._breach:
                    self._take(line)
            if lines.num_waiting_bytes > MAX_LINE_BYTES:
                self._break(f"it wrote a line longer than {MAX_LINE_BYTES} bytes")
        ended = await self._end()
        fault = await asyncio.to_thread(self._fault, ended)
        for pending in self._pending.values():
            pending.fail(fault)
        self._pending.clear()

    async def _end(self) -> Ended:
        """A process whose pipe is closed is about to end by itself, with a status that tells why."""
        try:
            async with asyncio.timeout(_EXIT_GRACE_S):
                return await self._process.wait()
        except TimeoutError:
            self._break("it closed its pipe")
            return await self._process.wait()

    def _take(self, line: bytes) -> None:
        try:
            answer = orjson.loads(line)
        except orjson.JSONDecodeError:
            self._break("it wrote a line that is no JSON")
            return
        match answer:
            case {"id": int(number), "step": str(action)}:
                self._step(number, action, size=len(line))
            case {"id": int(number), "value": value}:
                self._settle(number, value, size=len(line))
            case {"id": int(number), "error": {"type": str(kind), "message": str(message), "where": str(where)}}:
                self._settle(number, _Failure(kind, message, where), size=len(line))
            case _:
                self._break("it wrote a line that is no answer")

    def _settle(self, number: int, value: Any, *, size: int) -> None:
        if number in self._unwanted:
            self._unwanted.discard(number)
            self._stuck.discard(number)
            return
        pending = self._pending.pop(number, None)
        if pending is None:
            self._break("it answered what was not asked")
            return
        if pending.stepping is not None:
            pending.stepping.cancel()
        if pending.answer.done():
            return
        if isinstance(value, _Failure):
            pending.fail(value.of(pending.op))
        elif pending.on_step is not None and size > MAX_OUTPUT_BYTES:
            pending.fail(ClientFault(f"The program's {pending.op} gave more than {MAX_OUTPUT_BYTES} bytes"))
        else:
            pending.answer.set_result(value)

    def _step(self, number: int, action: str, *, size: int) -> None:
        pending = self._pending.get(number)
        if pending is None:
            if number not in self._unwanted:
                self._break("it took a step in an episode that is not open")
            return
        if pending.on_step is None or pending.stepping is not None or size > MAX_OUTPUT_BYTES:
            self._break("it took a step out of turn")
            return
        pending.stepping = self._loop.create_task(self._answer_step(number, pending, action))

    async def _answer_step(self, number: int, pending: _Pending, action: str) -> None:
        assert pending.on_step is not None
        try:
            observation = await pending.on_step(action)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the episode
            pending.fail(error)
            return
        pending.stepping = None
        self._send({"id": number, "op": "observe", "observation": observation.as_json()})

    def _break(self, breach: str) -> None:
        self._breach = self._breach or breach
        self._process.kill()

    def _fault(self, ended: Ended) -> Fault:
        if not ended.was_set_up and not self._is_closed:
            return InfrastructureFault("The sandbox could not be set up", why=ended.reason)
        reason = "it was closed" if self._is_closed else self._breach or ended.reason
        said = _tail(self._log, num_bytes=_MAX_QUOTED_BYTES).decode(errors="replace").strip()
        return ClientFault(f"The program's process ended: {reason}", why=f"its last words: {said}" if said else "")


@dataclass(frozen=True, slots=True)
class _Failure:
    """What the host said about an error."""

    kind: str
    message: str
    where: str

    def of(self, op: str) -> ClientFault:
        return ClientFault(f"The program's {op} failed with {self.kind}: {self.message}", why=self.where)


def _names(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ClientFault("The program's process did not say what it offers")
    return frozenset(value)


def _tail(log: Path, *, num_bytes: int) -> bytes:
    """The last that a Program printed."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read(num_bytes)

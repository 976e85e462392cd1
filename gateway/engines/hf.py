"""The in-process engine: continuous batching over a slot cache, on one thread.

The thread alternates between taking in waiting calls, one `extend` for their prompts and one `extend` for a token of
every call that runs. A slot keeps the keys and values of its session's last call, so that the next turn computes
only what is new. Everything kept is dropped when the weights change.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from a3r.episode import FinishReason
from a3r.errors import EngineFault, Refused
from gateway.engine import Completion, Sampling
from gateway.engines.cache import Row, longest
from gateway.engines.decoder import decoder_for
from gateway.engines.sampling import draw
from gateway.engines.slots import Slot, forget, take_slot

_PREFILL_TOKENS = 2048
"""Padded prompt tokens computed at once: bounds memory, and how long running calls wait."""


@dataclass(eq=False, slots=True)
class _Call:
    """One `generate`, from its arrival to its completion. Belongs to the engine's thread once it is queued."""

    prompt: tuple[int, ...]
    sampling: Sampling
    session: str
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Completion]
    on_token: Callable[[int], None] | None
    noise: random.Random
    version: int = 0
    slot: Slot | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    fault: EngineFault | None = None
    is_abandoned: bool = False
    """Nobody waits for it any more."""

    @property
    def seat(self) -> Slot:
        """The slot of a call that runs."""
        if self.slot is None:
            raise AssertionError("the call has not been taken in")
        return self.slot

    @property
    def pending(self) -> Sequence[int]:
        """Tokens to compute next: the rest of the prompt, or the one sampled last."""
        return self.ids[-1:] if self.ids else self.prompt[len(self.seat.ids) :]


class HFEngine:
    """An Engine over a transformers module that the learner shares.

    The module's weights may change, in place, between `pause` and `resume` only.
    """

    def __init__(self, model: PreTrainedModel, *, num_slots: int = 64, max_length: int = 1024, seed: int = 0) -> None:
        """`num_slots`: calls computed at once; `max_length`: most tokens of prompt and reply together, where the
        model takes as many; `seed`: of calls that bring none.

        Raises UsageError for a model that cannot be served here.
        """
        self._max_length = min(max_length, longest(model))
        self._decoder = decoder_for(model, num_slots=num_slots, max_length=self._max_length)
        self._seed = seed
        self._slots = [Slot(index) for index in range(num_slots)]
        self._waiting: deque[_Call] = deque()
        self._running: list[_Call] = []
        self._pausing: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._is_paused = False
        self._ended_by: str | None = None
        self._version = 0
        self._num_calls = 0
        self._num_steps = 0
        self._changed = threading.Condition()
        """Guards all of the above."""
        self._thread = threading.Thread(target=self._serve, name="hf-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str = "",
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        """Sample a completion; see `gateway.engine.Engine`. Cancelling it frees its slot.

        Raises Refused (400, `context_length_exceeded`) for a prompt that leaves no room, and EngineFault when the
        engine has failed or is closed.
        """
        if not 0 < len(prompt_ids) < self._max_length:
            raise Refused(
                f"The prompt has {len(prompt_ids)} tokens",
                why=f"1 to {self._max_length - 1} fit",
                next_step="shorten the conversation",
                status=400,
                code="context_length_exceeded",
            )
        loop = asyncio.get_running_loop()
        with self._changed:
            self._require_running()
            call = _Call(
                prompt=tuple(prompt_ids),
                sampling=sampling,
                session=session,
                loop=loop,
                done=loop.create_future(),
                on_token=on_token,
                noise=self._noise(sampling.seed),
            )
            self._waiting.append(call)
            self._changed.notify()
        try:
            return await call.done
        finally:
            call.is_abandoned = True

    async def release(self, session: str) -> None:
        with self._changed:
            for slot in self._slots:
                if slot.session == session:
                    forget(slot)

    async def pause(self) -> None:
        """Raises EngineFault when the engine has failed or is closed."""
        loop = asyncio.get_running_loop()
        idle: asyncio.Future[None] = loop.create_future()
        with self._changed:
            self._require_running()
            self._is_paused = True
            self._pausing.append((loop, idle))
            self._changed.notify()
        await idle

    async def resume(self) -> None:
        with self._changed:
            self._is_paused = False
            self._changed.notify()

    async def publish(self, version: int) -> None:
        """Calls that run nevertheless fail with EngineFault: nobody can say which weights their tokens came from."""
        with self._changed:
            self._version = version
            for slot in self._slots:
                forget(slot)
            for call in self._running:
                call.fault = EngineFault("The policy's weights changed while the call ran", next_step="call again")

    async def close(self) -> None:
        with self._changed:
            self._ended_by = self._ended_by or "it was closed"
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _require_running(self) -> None:
        if self._ended_by is not None:
            raise _ended(self._ended_by)

    def _noise(self, seed: int | None) -> random.Random:
        """A call's own stream of uniforms, so that its ids depend on no other call."""
        self._num_calls += 1
        key = (self._seed % 2**62 << 64) + self._num_calls if seed is None else (1 << 127) + seed % 2**64
        return random.Random(key)

    # What follows runs on the engine's thread.

    def _serve(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_in():
                    self._step()
        except Exception as error:  # noqa: BLE001  the thread's boundary: every call learns of it as an EngineFault
            with self._changed:
                self._ended_by = f"{type(error).__name__}: {error}"
        with self._changed:
            self._fail_all(_ended(self._ended_by or "its thread ended"))

    def _take_in(self) -> bool:
        """Wait for work and give waiting calls their slots; False once closed."""
        with self._changed:
            while self._ended_by is None:
                self._drop_dead()
                if not self._is_paused:
                    self._admit()
                if self._running:
                    return True
                if self._is_paused:
                    self._tell_paused()
                self._changed.wait()
            return False

    def _drop_dead(self) -> None:
        for call in [call for call in self._running if call.is_abandoned or call.fault]:
            self._free(call)
            if call.fault:
                _tell(call.loop, _fail, call.done, call.fault)

    def _admit(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            if not call.is_abandoned:
                call.slot = take_slot(self._slots, call.prompt, session=call.session)
                if call.slot is None:
                    return
                call.version = self._version
                self._running.append(call)
            self._waiting.popleft()

    def _free(self, call: _Call) -> None:
        self._running.remove(call)
        call.seat.is_busy = False
        if not call.seat.session:
            forget(call.seat)

    def _step(self) -> None:
        """The prompts of new calls, then a token for every call that ran before."""
        self._num_steps += 1
        calls = [call for call in self._running if call.ids]
        for batch in _batches([call for call in self._running if not call.ids]):
            self._extend(batch)
        if calls:
            self._extend(calls)
        self._hand_out()

    def _extend(self, calls: Sequence[_Call]) -> None:
        rows = [Row(call.seat.index, len(call.seat.ids), call.pending) for call in calls]
        logits = self._decoder.extend(rows)
        temperatures = [call.sampling.temperature for call in calls]
        ids, logprobs = draw(logits, temperatures, [call.noise.random() for call in calls])
        for call, row, token, logprob in zip(calls, rows, ids, logprobs, strict=True):
            call.seat.ids.extend(row.ids)
            call.seat.used_at = self._num_steps
            call.ids.append(token)
            call.logprobs.append(logprob)
        if not all(map(math.isfinite, logprobs)):
            self._give_up_running()

    def _give_up_running(self) -> None:
        """The weights are not fit to sample from. The engine goes on: better ones may be published."""
        fault = EngineFault("The policy gives no probabilities", why="its logits are not finite")
        with self._changed:
            for call in self._running:
                call.fault = fault
            for slot in self._slots:
                forget(slot)
            self._decoder.clear()

    def _hand_out(self) -> None:
        """Tell event loops about sampled tokens and finished calls, one wake-up a loop."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Call, int, Completion | None]]] = {}
        with self._changed:
            for call in [call for call in self._running if call.fault is None]:
                completion = self._completion(call)
                if completion is not None:
                    self._free(call)
                if completion is not None or call.on_token is not None:
                    news.setdefault(call.loop, []).append((call, call.ids[-1], completion))
        for loop, items in news.items():
            _tell(loop, _deliver, items)

    def _completion(self, call: _Call) -> Completion | None:
        if call.ids[-1] in call.sampling.stop_ids:
            reason = FinishReason.STOP
        elif len(call.ids) >= call.sampling.max_tokens or len(call.prompt) + len(call.ids) >= self._max_length:
            reason = FinishReason.LENGTH
        else:
            return None
        return Completion(tuple(call.ids), tuple(call.logprobs), reason, call.version)

    def _tell_paused(self) -> None:
        for loop, idle in self._pausing:
            _tell(loop, _settle, idle)
        self._pausing.clear()

    def _fail_all(self, fault: EngineFault) -> None:
        for call in (*self._running, *self._waiting):
            _tell(call.loop, _fail, call.done, fault)
        for loop, idle in self._pausing:
            _tell(loop, _fail, idle, fault)
        self._running.clear()
        self._waiting.clear()
        self._pausing.clear()


def _ended(why: str) -> EngineFault:
    return EngineFault("The inference engine does not run", why=why, next_step="restart the server")


def _batches(calls: Sequence[_Call]) -> Iterable[list[_Call]]:
    """Calls of similar prompt length together, at most `_PREFILL_TOKENS` padded tokens each."""
    batch: list[_Call] = []
    for call in sorted(calls, key=lambda call: len(call.pending)):
        if batch and (len(batch) + 1) * len(call.pending) > _PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(call)
    if batch:
        yield batch


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    # A loop that is closed has nobody left who waits.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


def _deliver(items: list[tuple[_Call, int, Completion | None]]) -> None:
    for call, token, completion in items:
        if call.done.done():
            continue
        try:
            if call.on_token is not None:
                call.on_token(token)
        except Exception as error:  # noqa: BLE001  the caller's own code failed: its call ends, the others go on
            call.done.set_exception(error)
            continue
        if completion is not None:
            call.done.set_result(completion)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[object], fault: EngineFault) -> None:
    if not future.done():
        future.set_exception(fault)

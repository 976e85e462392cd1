"""The in-process engine: continuous batching over a slot cache, on one thread.

The thread alternates between taking in waiting calls, one `extend` for their prompts and one `extend` for a token of
every call that runs. A slot keeps the keys and values of its session's last call, so that the next turn computes
only what is new. Everything kept is dropped when the weights change.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from a3r.episode import FinishReason
from a3r.errors import EngineFault, Refused
from gateway.engine import Completion, Sampling
from gateway.engines.slots import SlotDecoder

_PREFILL_TOKENS = 2048
"""Padded prompt tokens computed at once: bounds memory, and how long running calls wait."""


@dataclass
class _Slot:
    index: int
    session: str = ""
    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the cache."""
    is_busy: bool = False
    used_at: int = 0


@dataclass
class _Call:
    prompt: tuple[int, ...]
    sampling: Sampling
    session: str
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Completion]
    on_token: Callable[[int], None] | None
    noise: np.random.Generator
    slot: _Slot | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_abandoned: bool = False


class HFEngine:
    """An Engine over a transformers module that the learner shares. The module's weights may change in place between
    `pause` and `resume` only."""

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int = 64, max_length: int = 1024, seed: int = 0
    ) -> None:
        self._decoder = SlotDecoder(model, num_slots=num_slots, max_length=max_length)
        self._device = model.get_input_embeddings().weight.device
        self._max_length = max_length
        self._seed = seed
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._waiting: deque[_Call] = deque()
        self._running: list[_Call] = []
        self._pausing: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._is_paused = False
        self._is_closed = False
        self._failure: str | None = None
        self._version = 0
        self._num_calls = 0
        self._tick = 0
        self._changed = threading.Condition()
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
        """Sample a completion; see `gateway.engine.Engine`.

        Raises Refused (400, `context_length_exceeded`) for a prompt that leaves no room, EngineFault when the
        engine has failed or is closed.
        """
        if not prompt_ids or len(prompt_ids) >= self._max_length:
            raise Refused(
                f"The prompt has {len(prompt_ids)} tokens; 1 to {self._max_length - 1} fit",
                next_step="shorten the conversation",
                status=400,
                code="context_length_exceeded",
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Completion] = loop.create_future()
        with self._changed:
            self._require_open()
            self._num_calls += 1
            call = _Call(
                prompt=tuple(prompt_ids),
                sampling=sampling,
                session=session,
                loop=loop,
                done=done,
                on_token=on_token,
                noise=self._noise(sampling, number=self._num_calls),
            )
            self._waiting.append(call)
            self._changed.notify()
        try:
            return await done
        except asyncio.CancelledError:
            call.is_abandoned = True
            raise

    async def release(self, session: str) -> None:
        with self._changed:
            for slot in self._slots:
                if slot.session == session and not slot.is_busy:
                    slot.session, slot.ids = "", []

    async def pause(self) -> None:
        loop = asyncio.get_running_loop()
        idle: asyncio.Future[None] = loop.create_future()
        with self._changed:
            self._is_paused = True
            self._pausing.append((loop, idle))
            self._changed.notify()
        await idle

    async def resume(self) -> None:
        with self._changed:
            self._is_paused = False
            self._changed.notify()

    async def publish(self, version: int) -> None:
        with self._changed:
            self._version = version
            for slot in self._slots:
                slot.session, slot.ids = "", []

    async def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _require_open(self) -> None:
        if self._failure is not None or self._is_closed:
            raise EngineFault(
                "The inference engine does not run", why=self._failure or "it was closed", next_step="restart the server"
            )

    def _noise(self, sampling: Sampling, *, number: int) -> np.random.Generator:
        key = (self._seed << 64) + number if sampling.seed is None else (1 << 127) + sampling.seed % 2**64
        return np.random.Generator(np.random.Philox(key=key))

    # The engine's thread.

    def _serve(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_in():
                    self._step()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: every call learns of it as an EngineFault
            self._fail(f"{type(error).__name__}: {error}")

    def _take_in(self) -> bool:
        """Wait for work and give waiting calls their slots; False once closed."""
        with self._changed:
            while not self._is_closed:
                self._running = [call for call in self._running if not self._freed(call)]
                if not self._is_paused:
                    self._admit()
                if self._running:
                    return True
                if self._is_paused:
                    self._tell_paused()
                self._changed.wait()
            self._drop_all("it was closed")
            return False

    def _freed(self, call: _Call) -> bool:
        if call.is_abandoned and call.slot is not None:
            call.slot.is_busy = False
        return call.is_abandoned

    def _admit(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            if call.is_abandoned:
                self._waiting.popleft()
                continue
            slot = self._slot_for(call)
            if slot is None:
                return
            self._waiting.popleft()
            slot.ids = slot.ids[: _shared(slot.ids, call.prompt)] if slot.session == call.session else []
            slot.session, slot.is_busy = call.session, True
            call.slot = slot
            self._running.append(call)

    def _slot_for(self, call: _Call) -> _Slot | None:
        """The free slot that holds most of the prompt, else the one that was idle longest."""
        free = [slot for slot in self._slots if not slot.is_busy]
        if not free:
            return None
        own = [slot for slot in free if call.session and slot.session == call.session]
        if own:
            return max(own, key=lambda slot: _shared(slot.ids, call.prompt))
        return min(free, key=lambda slot: slot.used_at)

    def _step(self) -> None:
        """One token for every running call; prompts first."""
        self._tick += 1
        prompts = [call for call in self._running if not call.ids]
        for calls in _batches(prompts):
            self._extend(calls)
        decoding = [call for call in self._running if call not in prompts] if prompts else self._running
        if decoding:
            self._extend(decoding)
        self._hand_out()

    def _extend(self, calls: Sequence[_Call]) -> None:
        pending = [_pending(call) for call in calls]
        lengths = [len(ids) for ids in pending]
        width = max(lengths)
        padded = [[*ids, *([0] * (width - len(ids)))] for ids in pending]
        slots = [call.slot for call in calls if call.slot is not None]
        device = self._device
        logits = self._decoder.extend(
            torch.tensor([slot.index for slot in slots], device=device),
            torch.tensor([len(slot.ids) for slot in slots], device=device),
            torch.tensor(lengths, device=device),
            torch.tensor(padded, device=device),
        )
        for slot, ids in zip(slots, pending, strict=True):
            slot.ids.extend(ids)
            slot.used_at = self._tick
        self._sample(calls, logits)

    def _sample(self, calls: Sequence[_Call], logits: torch.Tensor) -> None:
        temperatures = [call.sampling.temperature for call in calls]
        scale = torch.tensor([t if t > 0 else 1.0 for t in temperatures], device=logits.device)
        logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)  # [B, V]
        uniform = torch.tensor([call.noise.random() for call in calls], dtype=torch.float64, device=logits.device)
        cumulative = logprobs.double().exp().cumsum(-1)
        drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
        drawn = drawn.clamp_(max=logits.shape[-1] - 1)
        if 0 in temperatures:
            greedy = torch.tensor([t == 0 for t in temperatures], device=logits.device)
            drawn = torch.where(greedy, logprobs.argmax(-1), drawn)
        chosen = logprobs.gather(-1, drawn[:, None])[:, 0]
        for call, token, logprob in zip(calls, drawn.tolist(), chosen.tolist(), strict=True):
            call.ids.append(token)
            call.logprobs.append(logprob)

    def _hand_out(self) -> None:
        """Tell event loops about sampled tokens and finished calls, one wake-up a loop."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Call, int, Completion | None]]] = {}
        still: list[_Call] = []
        for call in self._running:
            completion = self._completion(call)
            if completion is not None or call.on_token is not None:
                news.setdefault(call.loop, []).append((call, call.ids[-1], completion))
            if completion is None:
                still.append(call)
            elif call.slot is not None:
                call.slot.is_busy = False
        self._running = still
        for loop, items in news.items():
            loop.call_soon_threadsafe(_deliver, items)

    def _completion(self, call: _Call) -> Completion | None:
        if call.ids[-1] in call.sampling.stop_ids:
            reason = FinishReason.STOP
        elif len(call.ids) >= call.sampling.max_tokens or len(call.prompt) + len(call.ids) >= self._max_length:
            reason = FinishReason.LENGTH
        else:
            return None
        return Completion(tuple(call.ids), tuple(call.logprobs), reason, self._version)

    def _tell_paused(self) -> None:
        for loop, idle in self._pausing:
            loop.call_soon_threadsafe(_set, idle)
        self._pausing.clear()

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failure = why
            self._drop_all(why)

    def _drop_all(self, why: str) -> None:
        fault = EngineFault("The inference engine stopped", why=why, next_step="restart the server")
        for call in (*self._running, *self._waiting):
            call.loop.call_soon_threadsafe(_fail_one, call.done, fault)
        self._running, self._waiting = [], deque()
        self._tell_paused()


def _pending(call: _Call) -> Sequence[int]:
    """Tokens whose keys and values are still to be computed: of the prompt, or the one sampled last."""
    if call.slot is None:
        raise AssertionError("a running call has a slot")
    return call.ids[-1:] if call.ids else call.prompt[len(call.slot.ids) :]


def _shared(kept: Sequence[int], prompt: Sequence[int]) -> int:
    """Length of the common prefix that may be reused; the prompt's last token is always computed."""
    most = min(len(kept), len(prompt) - 1)
    if tuple(kept[:most]) == tuple(prompt[:most]):
        return most
    return next(index for index in range(most) if kept[index] != prompt[index])


def _batches(calls: Sequence[_Call]) -> Iterable[list[_Call]]:
    """Calls of similar prompt length together, at most `_PREFILL_TOKENS` padded tokens each."""
    batch: list[_Call] = []
    for call in sorted(calls, key=lambda call: len(_pending(call))):
        if batch and (len(batch) + 1) * len(_pending(call)) > _PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(call)
    if batch:
        yield batch


def _deliver(items: list[tuple[_Call, int, Completion | None]]) -> None:
    for call, token, completion in items:
        if call.done.done():
            continue
        if call.on_token is not None:
            call.on_token(token)
        if completion is not None:
            call.done.set_result(completion)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail_one(future: asyncio.Future[Completion], fault: EngineFault) -> None:
    if not future.done():
        future.set_exception(fault)

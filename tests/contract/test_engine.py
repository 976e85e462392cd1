"""What every inference engine keeps, whatever it computes with. A new engine joins with one more opener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from a3r.episode import FinishReason
from a3r.errors import EngineFault
from gateway.engine import Completion, Engine, Sampling
from gateway.engines.hf import HFEngine
from gateway.engines.scripted import ScriptedEngine
from gateway.engines.upstream import UpstreamEngine
from tests.fakes import upstream
from tests.fakes.tiny_models import tiny_model

LONG = Sampling(max_tokens=400)


@asynccontextmanager
async def _open_hf() -> AsyncIterator[Engine]:
    yield HFEngine(tiny_model(), num_slots=4, max_length=512)


@asynccontextmanager
async def _open_scripted() -> AsyncIterator[Engine]:
    def script(prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        start = sum(prompt_ids) + (sampling.seed or 0)
        return [(start + place) % 90 for place in range(500)]

    yield ScriptedEngine(script, delay_s=0.0005)


@asynccontextmanager
async def _open_upstream() -> AsyncIterator[Engine]:
    def script(request: dict[str, Any]) -> Sequence[int]:
        start = sum(request["prompt"]) + request.get("seed", 0)
        return [(start + place) % 90 for place in range(500)]

    async def load(_version: int) -> None:
        """The scripted server has no weights."""

    async with upstream.running(script, delay_s=0.0005) as server:
        yield UpstreamEngine(server.url, model="small", load=load)


Opener = Callable[[], AbstractAsyncContextManager[Engine]]
OPENERS: dict[str, Opener] = {"hf": _open_hf, "scripted": _open_scripted, "upstream": _open_upstream}


@pytest.fixture(params=OPENERS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with OPENERS[request.param]() as opened:
        yield opened
        await opened.close()


async def begun(engine: Engine, sampling: Sampling = LONG, *, session: str = "") -> asyncio.Task[Completion]:
    """A call that has sampled its first token."""
    sampled = asyncio.Event()
    call = asyncio.create_task(
        engine.generate([1, 2, 3], sampling, session=session, on_token=lambda _token: sampled.set())
    )
    waiting = asyncio.create_task(sampled.wait())
    await asyncio.wait([call, waiting], timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert sampled.is_set()
    return call


async def test_a_completion_has_one_logprob_an_id_and_says_why_it_ended(engine: Engine) -> None:
    completion = await engine.generate([1, 2, 3], Sampling(max_tokens=5))
    assert len(completion.ids) == len(completion.logprobs) == 5
    assert all(logprob <= 0 for logprob in completion.logprobs)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.version == engine.version


async def test_a_stop_id_is_kept_as_the_last_id(engine: Engine) -> None:
    free = await engine.generate([1, 2, 3], Sampling(max_tokens=8, seed=3))
    stop = free.ids[4]
    stopped = await engine.generate([1, 2, 3], Sampling(max_tokens=8, seed=3, stop_ids=(stop,)))
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP


async def test_on_token_hears_every_id_in_order_on_the_event_loop(engine: Engine) -> None:
    heard: list[int] = []
    loops: set[asyncio.AbstractEventLoop] = set()

    def on_token(token: int) -> None:
        heard.append(token)
        loops.add(asyncio.get_running_loop())

    completion = await engine.generate([4, 5], Sampling(max_tokens=7), on_token=on_token)
    assert tuple(heard) == completion.ids
    assert loops == {asyncio.get_running_loop()}


async def test_the_same_seed_gives_the_same_ids_among_other_calls(engine: Engine) -> None:
    sampling = Sampling(max_tokens=12, seed=11)
    alone = await engine.generate([7, 8, 9], sampling)
    others = (engine.generate([place], Sampling(max_tokens=12)) for place in range(1, 9))
    among, *_ = await asyncio.gather(engine.generate([7, 8, 9], sampling), *others)
    assert among.ids == alone.ids


async def test_calls_of_one_session_may_overlap(engine: Engine) -> None:
    calls = (engine.generate([1, 2, place], Sampling(max_tokens=6), session="a") for place in range(6))
    assert [len(completion.ids) for completion in await asyncio.gather(*calls)] == [6] * 6


async def test_pause_waits_for_running_calls_and_holds_later_ones_back(engine: Engine) -> None:
    running = await begun(engine, Sampling(max_tokens=40))
    await asyncio.wait_for(engine.pause(), 20)
    assert running.done()
    later = asyncio.create_task(engine.generate([1], Sampling(max_tokens=1)))
    await asyncio.wait([later], timeout=0.1)
    assert not later.done()
    await engine.resume()
    await asyncio.wait_for(later, 20)


async def test_calls_after_publish_carry_the_new_version(engine: Engine) -> None:
    before = engine.version
    first = await engine.generate([1], Sampling(max_tokens=1))
    await engine.pause()
    held_back = asyncio.create_task(engine.generate([1], Sampling(max_tokens=1)))
    await asyncio.sleep(0)
    await engine.publish(before + 5)
    await engine.resume()
    assert first.version == before
    assert (await held_back).version == engine.version == before + 5


async def test_pausing_an_idle_or_paused_engine_returns(engine: Engine) -> None:
    await asyncio.wait_for(engine.pause(), 5)
    await asyncio.wait_for(engine.pause(), 5)
    await engine.resume()
    completion = await asyncio.wait_for(engine.generate([1], Sampling(max_tokens=1)), 20)
    assert len(completion.ids) == 1


async def test_a_cancelled_call_does_not_hold_up_a_pause(engine: Engine) -> None:
    call = await begun(engine)
    call.cancel()
    await asyncio.wait_for(engine.pause(), 5)
    await engine.resume()
    assert call.cancelled()


async def test_releasing_sessions_is_harmless(engine: Engine) -> None:
    await engine.release("never seen")
    call = await begun(engine, Sampling(max_tokens=20), session="a")
    await engine.release("a")
    completion = await asyncio.wait_for(call, 20)
    assert len(completion.ids) > 1


async def test_closing_fails_calls_in_flight_and_later_ones(engine: Engine) -> None:
    call = await begun(engine)
    await asyncio.wait_for(engine.close(), 20)
    with pytest.raises(EngineFault):
        await asyncio.wait_for(call, 5)
    with pytest.raises(EngineFault):
        await engine.generate([1], Sampling(max_tokens=1))


async def test_closing_fails_calls_that_wait_for_resume(engine: Engine) -> None:
    await engine.pause()
    waiting = asyncio.create_task(engine.generate([1], Sampling(max_tokens=1)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineFault):
        await asyncio.wait_for(waiting, 5)

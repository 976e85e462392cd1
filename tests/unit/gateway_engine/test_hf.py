from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from a3r.episode import FinishReason
from a3r.errors import EngineFault, Refused
from gateway.engine import Completion, Sampling
from gateway.engines.cache import Row
from gateway.engines.decoder import Decoder
from gateway.engines.hf import HFEngine
from tests.fakes.tiny_models import VOCAB_SIZE, gap_to_own_logprobs, tiny_model

OpenEngine = Callable[..., HFEngine]


class CountingDecoder:
    """Passes on to a decoder and keeps what it was asked to compute."""

    def __init__(self, inner: Decoder) -> None:
        self.inner = inner
        self.steps: list[list[Row]] = []

    def extend(self, rows: Sequence[Row]) -> torch.Tensor:
        self.steps.append([Row(row.slot, row.start, tuple(row.ids)) for row in rows])
        return self.inner.extend(rows)

    def clear(self) -> None:
        self.inner.clear()


class BreakingDecoder(CountingDecoder):
    def extend(self, rows: Sequence[Row]) -> torch.Tensor:
        raise RuntimeError("out of memory")


class HeldDecoder(CountingDecoder):
    """Computes nothing until it is let go."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner)
        self.reached = threading.Event()
        self.go = threading.Event()

    def extend(self, rows: Sequence[Row]) -> torch.Tensor:
        self.reached.set()
        assert self.go.wait(20)
        return super().extend(rows)


def counted(engine: HFEngine) -> CountingDecoder:
    engine._decoder = counting = CountingDecoder(engine._decoder)
    return counting


def held(engine: HFEngine) -> HeldDecoder:
    engine._decoder = holding = HeldDecoder(engine._decoder)
    return holding


def random_prompt(length: int, *, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB_SIZE) for _ in range(length)]


def change_weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))


async def conversation(engine: HFEngine, *, session: str, turns: int = 4) -> list[tuple[list[int], Completion]]:
    """Turns whose prompts grow by the reply and some further tokens."""
    prompt = random_prompt(9, seed=len(session))
    played = []
    for turn in range(turns):
        completion = await engine.generate(prompt, Sampling(max_tokens=6 + turn), session=session)
        played.append((prompt, completion))
        prompt = [*prompt, *completion.ids, *random_prompt(3 + turn, seed=turn)]
    return played


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_recorded_logprobs_are_those_of_a_full_forward(
    name: str, temperature: float, open_engine: OpenEngine
) -> None:
    model = tiny_model(name)
    engine = open_engine(model, num_slots=8, max_length=128)
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 5, 17, 33, 64, 90, 3, 40, 11, 77, 6)]
    sampling = Sampling(max_tokens=24, temperature=temperature)
    completions = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert gap_to_own_logprobs(model, prompt, completion, temperature=temperature) <= 1e-5


async def test_a_turn_computes_only_what_is_new_and_its_logprobs_are_exact(
    model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    engine = open_engine(model, num_slots=4, max_length=128)
    counting = counted(engine)
    turns = await conversation(engine, session="a")
    starts = [step[0].start for step in counting.steps if len(step[0].ids) > 1]
    kept = [0, *(len(prompt) + len(completion.ids) - 1 for prompt, completion in turns[:-1])]
    assert starts == kept
    for prompt, completion in turns:
        assert gap_to_own_logprobs(model, prompt, completion) <= 1e-5


async def test_many_conversations_over_few_slots_keep_exact_logprobs(
    model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    engine = open_engine(model, num_slots=3, max_length=128)
    played = await asyncio.gather(*(conversation(engine, session="s" * place) for place in range(1, 9)))
    for prompt, completion in (turn for turns in played for turn in turns):
        assert gap_to_own_logprobs(model, prompt, completion) <= 1e-5


async def test_nothing_kept_outlives_the_weights_it_was_computed_with(open_engine: OpenEngine) -> None:
    model = tiny_model()
    engine = open_engine(model, num_slots=4, max_length=128)
    ((prompt, first),) = await conversation(engine, session="a", turns=1)
    await engine.pause()
    change_weights(model)
    await engine.publish(1)
    await engine.resume()
    longer = [*prompt, *first.ids, 4, 5]
    second = await engine.generate(longer, Sampling(max_tokens=12), session="a")
    assert (first.version, second.version) == (0, 1)
    assert gap_to_own_logprobs(model, longer, second) <= 1e-5


async def test_greedy_takes_the_likeliest_token_and_records_logprobs_of_temperature_one(
    model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    engine = open_engine(model)
    prompt = random_prompt(7)
    one, two = [await engine.generate(prompt, Sampling(max_tokens=12, temperature=0.0)) for _ in range(2)]
    assert one == two
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *one.ids]])).logits[0, len(prompt) - 1 : -1]
    assert list(one.ids) == logits.argmax(-1).tolist()
    assert gap_to_own_logprobs(model, prompt, one) <= 1e-5


async def test_a_seeded_call_gives_the_same_ids_whatever_else_is_in_flight(
    model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    engine = open_engine(model, num_slots=16, max_length=128)
    prompt, sampling = random_prompt(12), Sampling(max_tokens=20, seed=7)
    alone = await engine.generate(prompt, sampling)
    crowd = [engine.generate(random_prompt(length, seed=length), Sampling(max_tokens=20)) for length in range(5, 45, 2)]
    *_, among = await asyncio.gather(*crowd, engine.generate(prompt, sampling))
    assert among.ids == alone.ids
    assert (await engine.generate(prompt, replace(sampling, seed=8))).ids != alone.ids


async def test_calls_without_a_seed_follow_the_engines_seed_and_differ_from_one_another(
    model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    async def three(seed: int) -> list[tuple[int, ...]]:
        engine = open_engine(model, seed=seed)
        return [(await engine.generate([1, 2, 3], Sampling(max_tokens=16))).ids for _ in range(3)]

    first, again, other = await three(0), await three(0), await three(1)
    assert first == again
    assert len({*first, *other}) == 6


async def test_calls_that_arrive_together_share_their_steps(model: PreTrainedModel, open_engine: OpenEngine) -> None:
    engine = open_engine(model, num_slots=32, max_length=64)
    counting = counted(engine)
    await engine.pause()
    calls = [asyncio.create_task(engine.generate(random_prompt(8), Sampling(max_tokens=10))) for _ in range(32)]
    await asyncio.sleep(0)
    await engine.resume()
    await asyncio.gather(*calls)
    assert [len(step) for step in counting.steps] == [32] * 10


async def test_a_call_that_arrives_later_joins_the_running_ones(
    model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    engine = open_engine(model)
    counting = counted(engine)
    late: list[asyncio.Task[Completion]] = []

    def on_token(_token: int) -> None:
        if not late:
            late.append(asyncio.create_task(engine.generate([9, 8], Sampling(max_tokens=3))))

    await engine.generate([1, 2, 3], Sampling(max_tokens=200), on_token=on_token)
    await late[0]
    assert any(len(step) == 2 for step in counting.steps)


async def test_more_calls_than_slots_wait_their_turn(model: PreTrainedModel, open_engine: OpenEngine) -> None:
    engine = open_engine(model, num_slots=2, max_length=64)
    counting = counted(engine)
    await asyncio.gather(*(engine.generate(random_prompt(5, seed=n), Sampling(max_tokens=4)) for n in range(7)))
    assert max(len(step) for step in counting.steps) == 2


@pytest.mark.parametrize("length", [0, 64, 65, 1000])
async def test_a_prompt_that_leaves_no_room_is_refused(
    length: int, model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    engine = open_engine(model, max_length=64)
    with pytest.raises(Refused) as refusal:
        await engine.generate([1] * length, Sampling(max_tokens=4))
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")


async def test_a_reply_ends_where_the_context_does(model: PreTrainedModel, open_engine: OpenEngine) -> None:
    engine = open_engine(model, max_length=64)
    for length in (63, 50):
        completion = await engine.generate(random_prompt(length), Sampling(max_tokens=40))
        assert len(completion.ids) == 64 - length
        assert completion.finish_reason is FinishReason.LENGTH
        assert gap_to_own_logprobs(model, random_prompt(length), completion) <= 1e-5


async def test_contexts_are_no_longer_than_the_model_has_positions_for(
    model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    engine = open_engine(model, max_length=4096)
    with pytest.raises(Refused, match="1 to 511 fit"):
        await engine.generate([1] * 512, Sampling(max_tokens=4))


async def test_a_cancelled_call_frees_its_slot(model: PreTrainedModel, open_engine: OpenEngine) -> None:
    engine = open_engine(model, num_slots=1, max_length=512)
    began = asyncio.Event()
    long = asyncio.create_task(
        engine.generate([1, 2], Sampling(max_tokens=500), session="a", on_token=lambda _token: began.set())
    )
    await began.wait()
    long.cancel()
    completion = await asyncio.wait_for(engine.generate([3, 4], Sampling(max_tokens=2)), 10)
    assert len(completion.ids) == 2
    assert long.cancelled() or (await asyncio.wait([long]) and long.cancelled())


async def test_a_failing_step_fails_every_call_and_later_ones_with_its_reason(
    model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    engine = open_engine(model)
    await engine.pause()
    engine._decoder = BreakingDecoder(engine._decoder)
    calls = [asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=2))) for _ in range(3)]
    await asyncio.sleep(0)
    await engine.resume()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, EngineFault) and "out of memory" in str(error) for error in outcomes)
    with pytest.raises(EngineFault, match="out of memory"):
        await engine.generate([1, 2], Sampling(max_tokens=2))
    with pytest.raises(EngineFault, match="out of memory"):
        await engine.pause()


async def test_weights_that_give_no_probabilities_fail_the_call_and_spoil_nothing(open_engine: OpenEngine) -> None:
    model = tiny_model()
    engine = open_engine(model)
    kept = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    await engine.pause()
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight").fill_(torch.nan)
        model.get_parameter("model.layers.0.self_attn.v_proj.weight").fill_(torch.inf)
    await engine.publish(1)
    await engine.resume()
    with pytest.raises(EngineFault, match="not finite"):
        await engine.generate(random_prompt(30), Sampling(max_tokens=5), session="a")
    await engine.pause()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(kept[name])
    await engine.publish(2)
    await engine.resume()
    completion = await engine.generate([5, 6], Sampling(max_tokens=5), session="a")
    assert gap_to_own_logprobs(model, [5, 6], completion) <= 1e-5


async def test_a_call_that_runs_while_weights_are_published_fails(
    model: PreTrainedModel, open_engine: OpenEngine
) -> None:
    engine = open_engine(model)
    holding = held(engine)
    call = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=50)))
    await asyncio.to_thread(holding.reached.wait)
    await engine.publish(1)
    holding.go.set()
    with pytest.raises(EngineFault, match="weights changed"):
        await call
    assert (await engine.generate([1, 2], Sampling(max_tokens=2))).version == 1


async def test_an_error_in_on_token_is_its_callers_own(model: PreTrainedModel, open_engine: OpenEngine) -> None:
    def broken(_token: int) -> None:
        raise KeyError("mine")

    engine = open_engine(model)
    failing = engine.generate([1, 2], Sampling(max_tokens=30), on_token=broken)
    other = engine.generate([3, 4], Sampling(max_tokens=30))
    error, completion = await asyncio.gather(failing, other, return_exceptions=True)
    assert isinstance(error, KeyError)
    assert isinstance(completion, Completion)


async def test_a_released_session_starts_over(model: PreTrainedModel, open_engine: OpenEngine) -> None:
    engine = open_engine(model)
    counting = counted(engine)
    await engine.generate([1, 2, 3], Sampling(max_tokens=2), session="a")
    await engine.release("a")
    await engine.generate([1, 2, 3, 4], Sampling(max_tokens=1), session="a")
    assert counting.steps[-1][0].start == 0


async def test_no_global_torch_state_is_changed(model: PreTrainedModel, open_engine: OpenEngine) -> None:
    before = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.random.get_rng_state())
    engine = open_engine(model)
    await engine.generate([1, 2, 3], Sampling(max_tokens=4))
    after = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.random.get_rng_state())
    assert before[:3] == after[:3]
    assert torch.equal(before[3], after[3])
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())

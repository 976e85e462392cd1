from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, MambaConfig, MistralConfig, PreTrainedModel

from a3r.errors import UsageError
from gateway.engines.cache import Row, SlotCache, longest
from gateway.engines.decoder import Decoder, LeanDecoder, ModuleDecoder, decoder_for, is_lean
from tests.fakes.tiny_models import CONFIGS, VOCAB_SIZE, own_logits, tiny_model

LEAN = [name for name in CONFIGS if name.startswith(("qwen", "llama")) and "dynamic" not in name]


def replay(
    decoder: Decoder, sequences: dict[int, list[int]], *, pieces: Callable[[int], int]
) -> dict[int, torch.Tensor]:
    """Feed each slot its sequence in pieces of given lengths, all slots at once; the logits after its last token."""
    kept = dict.fromkeys(sequences, 0)
    last: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        while open_slots := [slot for slot, ids in sequences.items() if kept[slot] < len(ids)]:
            rows = [Row(slot, kept[slot], sequences[slot][kept[slot] :][: pieces(slot)]) for slot in open_slots]
            for row, logits in zip(rows, decoder.extend(rows), strict=True):
                kept[row.slot] += len(row.ids)
                last[row.slot] = logits
    return last


def random_sequences(slots: list[int], *, longest: int = 60) -> dict[int, list[int]]:
    chance = random.Random(0)
    return {slot: [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(2, longest))] for slot in slots}


def assert_own_logits(model: PreTrainedModel, sequences: dict[int, list[int]], logits: dict[int, torch.Tensor]) -> None:
    for slot, ids in sequences.items():
        own = own_logits(model, ids)[-1]
        assert (logits[slot] - own).abs().max() <= 1e-5 * max(1.0, own.abs().max().item())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_modules_own_forward(name: str) -> None:
    model = tiny_model(name)
    sequences = random_sequences([3, 0, 9, 5])
    chance = random.Random(1)
    decoder = decoder_for(model, num_slots=10, max_length=64)
    logits = replay(decoder, sequences, pieces=lambda _slot: chance.randrange(1, 9))
    assert isinstance(decoder, LeanDecoder if name in LEAN else ModuleDecoder)
    assert_own_logits(model, sequences, logits)


@pytest.mark.parametrize("name", LEAN)
def test_both_decoders_agree(name: str) -> None:
    model = tiny_model(name)
    assert is_lean(model)
    sequences = random_sequences([0, 1, 2])
    caches = [SlotCache(model, num_slots=3, max_length=64) for _ in range(2)]
    lean = replay(LeanDecoder(model, caches[0]), sequences, pieces=lambda _slot: 7)
    module = replay(ModuleDecoder(model, caches[1]), sequences, pieces=lambda _slot: 7)
    for slot in sequences:
        assert torch.allclose(lean[slot], module[slot], rtol=1e-5, atol=1e-5)


def test_idle_slots_within_a_computed_range_keep_their_tokens(model: PreTrainedModel) -> None:
    decoder = decoder_for(model, num_slots=8, max_length=64)
    sequences = random_sequences(list(range(8)))
    replay(decoder, sequences, pieces=lambda _slot: 64)
    with torch.inference_mode():
        decoder.extend([Row(slot, len(ids), [1]) for slot, ids in sequences.items() if slot not in (2, 5)])
        again = {
            slot: decoder.extend([Row(slot, len(sequences[slot]) - 1, sequences[slot][-1:])])[0] for slot in (2, 5)
        }
    assert_own_logits(model, {slot: sequences[slot] for slot in (2, 5)}, again)


def test_the_cache_grows_to_the_longest_call_and_keeps_what_it_holds(model: PreTrainedModel) -> None:
    decoder = decoder_for(model, num_slots=2, max_length=400)
    chance = random.Random(2)
    sequences = {slot: [chance.randrange(VOCAB_SIZE) for _ in range(length)] for slot, length in ((0, 399), (1, 30))}
    logits = replay(decoder, sequences, pieces=lambda slot: 50 if slot == 0 else 3)
    assert_own_logits(model, sequences, logits)


def test_weights_that_change_in_place_are_the_ones_computed_with() -> None:
    model = tiny_model()
    decoder = decoder_for(model, num_slots=1, max_length=64)
    sequences = random_sequences([0])
    replay(decoder, sequences, pieces=lambda _slot: 64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    assert_own_logits(model, sequences, replay(decoder, sequences, pieces=lambda _slot: 64))


def test_numbers_that_are_not_finite_are_wiped() -> None:
    model = tiny_model()
    decoder = decoder_for(model, num_slots=1, max_length=64)
    weight = model.get_parameter("model.layers.0.self_attn.v_proj.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    assert replay(decoder, {0: [4] * 20}, pieces=lambda _slot: 64)[0].isnan().all()
    with torch.no_grad():
        weight.copy_(kept)
    decoder.clear()
    assert_own_logits(model, {0: [5, 6]}, replay(decoder, {0: [5, 6]}, pieces=lambda _slot: 1))


def test_a_model_that_scales_its_logits_is_refused() -> None:
    config = GraniteConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=4, logits_scaling=8.0)  # fmt: skip
    with pytest.raises(UsageError, match=r"granite.*logits came out differently"):
        decoder_for(AutoModelForCausalLM.from_config(config), num_slots=1, max_length=64)


def test_a_model_without_keys_and_values_is_refused() -> None:
    config = MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1)
    with pytest.raises(UsageError, match=r"mamba.*does not take a cache"):
        decoder_for(AutoModelForCausalLM.from_config(config), num_slots=1, max_length=64)


def test_a_call_is_no_longer_than_the_attention_window(model: PreTrainedModel) -> None:
    config = MistralConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=4, sliding_window=32)  # fmt: skip
    assert longest(AutoModelForCausalLM.from_config(config)) == 32
    assert longest(model) == 512

"""Tiny random models of several architectures, and their own logprobs of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from gateway.engine import Completion

VOCAB_SIZE = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LONG_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2, tied": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE),
    "llama": LlamaConfig(**_SHAPE),
    "llama, scaled rope": LlamaConfig(**_SHAPE, rope_parameters=_LONG_ROPE),
    "llama, dynamic rope": LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "gemma": GemmaConfig(**_SHAPE),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
}


def tiny_model(name: str = "qwen2") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()


@torch.no_grad()
def own_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of the module's own forward over a whole sequence, without a cache."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def gap_to_own_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], completion: Completion, *, temperature: float = 1.0
) -> float:
    """Largest difference between recorded logprobs and those of the module's own forward at `temperature`."""
    logits = own_logits(model, [*prompt, *completion.ids])[len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    own = logprobs.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
    return (own - torch.tensor(completion.logprobs)).abs().max().item()

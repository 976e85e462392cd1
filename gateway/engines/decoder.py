"""Forward passes over a cache of slots: a few new tokens a row in, the logits after the last of each row out.

Two of them, of which `decoder_for` takes the fitting one. `LeanDecoder` calls the parts of a Llama-family module
itself, since most of a small model's time per step is Python and not arithmetic. `ModuleDecoder` runs the module's
own forward and so serves any architecture that takes a 4-D mask and a cache.
Shapes: B rows, T new tokens, D head size, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from a3r.errors import UsageError
from gateway.engines.cache import Row, SlotCache, Window, embedding_of

_LEAN_FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles do not depend on the length of the sequence."""


class Decoder(Protocol):
    """Extends slots by new tokens, with the weights as they are at that moment."""

    def extend(self, rows: Sequence[Row]) -> Tensor:
        """Logits [rows, V] after the last new token of each row; the rows' slots differ."""
        ...

    def clear(self) -> None:
        """Wipe every slot, after a step that gave numbers that are not finite."""
        ...


class LeanDecoder:
    """The forward of Llama, Qwen2 and Qwen3, with their differences: biases and query/key norms."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache) -> None:
        self._cache = cache
        self._body: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        weight = self._body.embed_tokens.weight
        positions = torch.arange(cache.max_length, device=weight.device)[None]
        with torch.no_grad():
            cos, sin = self._body.rotary_emb(weight[:1, None], positions)
        self._cos, self._sin = cos[0], sin[0]  # [max_length, D]

    def extend(self, rows: Sequence[Row]) -> Tensor:
        window = self._cache.window(rows)
        cos, sin = self._cos[window.positions][:, None], self._sin[window.positions][:, None]  # [B, 1, T, D]
        hidden = self._body.embed_tokens(window.ids.flatten())  # [B * T, H]: matmuls of two dimensions are faster
        for index, layer in enumerate(self._body.layers):
            normed = _normed(layer.input_layernorm, hidden)
            hidden = hidden + self._attend(index, layer.self_attn, normed, window, cos, sin)
            hidden = hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden))
        return self._head(_normed(self._body.norm, hidden.index_select(0, window.last)))

    def clear(self) -> None:
        self._cache.clear()

    def _attend(self, index: int, part: Any, hidden: Tensor, window: Window, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*window.ids.shape, -1, part.head_dim)  # [B, T, heads, D]
        query = part.q_proj(hidden).view(shape)
        key = part.k_proj(hidden).view(shape)
        value = part.v_proj(hidden).view(shape).transpose(1, 2)
        if hasattr(part, "q_norm"):
            query, key = _normed(part.q_norm, query), _normed(part.k_norm, key)
        heads = query.shape[2], key.shape[2]
        query, key = _rotated(torch.cat((query, key), dim=2).transpose(1, 2), cos, sin).split(heads, dim=1)
        keys, values = self._cache.exchange(index, key, value, window)
        attended = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=window.mask, scale=part.scaling, enable_gqa=heads[0] != heads[1]
        )
        return part.o_proj(attended.transpose(1, 2).reshape(len(hidden), -1))


class ModuleDecoder:
    """The module's own forward, for architectures that `LeanDecoder` does not know."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache) -> None:
        self._cache = cache
        self._body: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        named = inspect.signature(self._body.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"

    def extend(self, rows: Sequence[Row]) -> Tensor:
        window = self._cache.window(rows)
        output = self._body(
            input_ids=window.ids,
            attention_mask=window.mask,
            position_ids=window.positions,
            use_cache=True,
            **{self._cache_name: _WindowCache(self._cache, window)},
        )
        return self._head(output.last_hidden_state.flatten(0, 1).index_select(0, window.last))

    def clear(self) -> None:
        self._cache.clear()


class _WindowCache(Cache):
    """A SlotCache in the eyes of a transformers module, for one step."""

    def __init__(self, cache: SlotCache, window: Window) -> None:
        super().__init__(layers=[])
        self._slots = cache
        self._window = window

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self._slots.exchange(layer_idx, key_states, value_states, self._window)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  part of the interface
        return 0


def decoder_for(model: PreTrainedModel, *, num_slots: int, max_length: int) -> Decoder:
    """The fastest decoder that knows the model.

    Raises UsageError when that does not give the logits of the model's own forward.
    """
    kind = LeanDecoder if is_lean(model) else ModuleDecoder
    try:
        gap = _gap(model, kind(model, SlotCache(model, num_slots=2, max_length=16)))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise _unservable(model, f"it does not take a cache of keys and values: {error}") from error
    if not gap <= (1e-4 if embedding_of(model).dtype == torch.float32 else 5e-2):
        raise _unservable(model, f"its logits came out differently, by {gap:.2g} of the largest")
    return kind(model, SlotCache(model, num_slots=num_slots, max_length=max_length))


def is_lean(model: PreTrainedModel) -> bool:
    """Whether `LeanDecoder` knows the model."""
    body: Any = model.base_model
    return model.config.model_type in _LEAN_FAMILIES and body.rotary_emb.rope_type in _FIXED_ROPE


@torch.no_grad()
def _gap(model: PreTrainedModel, decoder: Decoder) -> float:
    """Largest difference between decoder and model on a prompt and on a padded continuation, relative to the logits."""
    vocab_size = model.config.get_text_config().vocab_size
    probe = [token % vocab_size for token in (5, 3, 8, 1, 9, 2)]
    expected = model(input_ids=torch.tensor([probe], device=embedding_of(model).device), use_cache=False).logits[0]
    decoder.extend([Row(1, 0, probe[:3])])
    ours = decoder.extend([Row(0, 0, probe), Row(1, 3, probe[3:5])])
    gap = (ours - expected[[5, 4]]).abs().max() / expected.abs().max()
    return gap.item()


def _unservable(model: PreTrainedModel, why: str) -> UsageError:
    return UsageError(
        f"The in-process engine cannot serve this {model.config.model_type} model",
        why=why,
        next_step="serve it with vLLM, or choose a model such as Qwen2, Qwen3 or Llama",
    )


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    """Root mean square norm (arXiv 1910.07467, eq. 4), fused where torch has it fused."""
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34), in the half-split layout of Llama."""
    low, high = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-high, low), dim=-1) * sin

"""Forward passes over a cache of slots: a few new tokens a row in, the logits after the last of each row out.

Two of them, of which `decoder_for` takes the fitting one. `LeanDecoder` calls the parts of a Llama-family module
itself, since most of a small model's time per step is Python and not arithmetic. `ModuleDecoder` runs the module's
own forward and so serves any architecture that takes a 4-D mask and a cache.
Shapes: B rows, T new tokens, S cached span, K key/value heads, D head size, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from a3r.errors import UsageError

_LEAN_FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles do not depend on the length of the sequence."""
_SPAN_STEP = 16
"""Spans are rounded up to this, so that few different shapes occur."""
_FIRST_LENGTH = 128


class Row(NamedTuple):
    """New tokens of one slot."""

    slot: int
    start: int
    """Tokens of the slot whose keys and values are kept."""
    ids: Sequence[int]


class Decoder(Protocol):
    """Extends slots by new tokens, with the weights as they are at that moment."""

    def extend(self, rows: Sequence[Row]) -> Tensor:
        """Logits [rows, V] after the last new token of each row; the rows' slots differ."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """Where the new tokens of a step go and what they see.

    A step computes B rows: the wanted ones, or, where they lie close together, the whole range of slots that they
    lie in. A range is a view of the cache; picking rows means copying all that they see, which costs more than
    computing some idle slots along.
    """

    ids: Tensor
    """[B, T], right-padded."""
    slots: Tensor
    """[B]"""
    positions: Tensor
    """[B, T]"""
    columns: Tensor
    """[B, T], where new keys and values are stored; those of padding and idle slots in the spare last column."""
    mask: Tensor
    """[B, 1, T, S], added to attention scores."""
    span: int
    """S: longest row, rounded up."""
    run: slice | None
    """The range of slots, if it is one."""
    wanted: Tensor
    """Places of the wanted rows among the B."""
    last: Tensor
    """Place in T of each wanted row's last new token."""


class SlotCache:
    """Keys and values [num_slots, 2, K, length + 1, D] of every layer; `length` grows up to `max_length`."""

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_length: int) -> None:
        config = model.config.get_text_config()
        weight = embedding_of(model)
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.max_length = max_length
        self._length = min(_FIRST_LENGTH, max_length)
        self._device, self._dtype = weight.device, weight.dtype
        shape = (num_slots, 2, num_heads, self._length + 1, head_dim)
        self._kept = [weight.new_zeros(shape, requires_grad=False) for _ in range(config.num_hidden_layers)]
        self._columns = torch.arange(max_length + 1, device=self._device)

    def window(self, rows: Sequence[Row]) -> Window:
        """Room for the rows' new tokens."""
        width = max(len(row.ids) for row in rows)
        span = max(row.start + len(row.ids) for row in rows)
        span = min(-(-span // _SPAN_STEP) * _SPAN_STEP, self.max_length)
        self._reserve(span)
        places, run = _places(rows, width=width)
        grid = [[0] * (width + 3)] * (run.stop - run.start if run else len(rows))
        for place, row in zip(places, rows, strict=True):
            grid[place] = [row.slot, row.start, len(row.ids), *row.ids, *[0] * (width - len(row.ids))]
        numbers = torch.tensor(grid, device=self._device)
        slots, starts, lengths = numbers[:, 0], numbers[:, 1:2], numbers[:, 2:3]
        wanted = torch.tensor(places, device=self._device)
        new = self._columns[:width]
        positions = starts + new
        mask = torch.zeros((len(grid), 1, width, span), dtype=self._dtype, device=self._device)
        mask.masked_fill_(self._columns[:span] > positions[:, None, :, None], torch.finfo(self._dtype).min)
        return Window(
            ids=numbers[:, 3:],
            slots=slots,
            positions=positions.clamp(max=self.max_length - 1),
            columns=torch.where(new < lengths, positions, self._length),
            mask=mask,
            span=span,
            run=run,
            wanted=wanted,
            last=lengths[wanted, 0] - 1,
        )

    def exchange(self, layer: int, keys: Tensor, values: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, K, T, D]; give all that the rows see, [B, K, S, D]."""
        kept = self._kept[layer]
        rows, columns = window.slots[:, None], window.columns
        if window.run is not None:
            kept = kept[window.run]
            rows = self._columns[: len(kept), None]
        kept[rows, :, :, columns] = torch.stack((keys, values), dim=1).permute(0, 3, 1, 2, 4)
        seen = kept[:, :, :, : window.span]
        if window.run is None:
            seen = seen.index_select(0, window.slots)
        return seen[:, 0], seen[:, 1]

    def _reserve(self, span: int) -> None:
        if span <= self._length:
            return
        more = min(max(span, 2 * self._length), self.max_length) - self._length
        self._length += more
        self._kept = [F.pad(kept, (0, 0, 0, more)) for kept in self._kept]


def _places(rows: Sequence[Row], *, width: int) -> tuple[list[int], slice | None]:
    """Where each row is computed, and the range of slots if a range is computed."""
    first, end = min(row.slot for row in rows), max(row.slot for row in rows) + 1
    # Idle slots cost as much as others: one more for every three when decoding, none with a prompt.
    if (end - first) * 3 <= len(rows) * (4 if width == 1 else 3):
        return [row.slot - first for row in rows], slice(first, end)
    return list(range(len(rows))), None


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
        hidden = self._body.embed_tokens(window.ids)  # [B, T, H]
        for index, layer in enumerate(self._body.layers):
            normed = _normed(layer.input_layernorm, hidden)
            hidden = hidden + self._attend(index, layer.self_attn, normed, window, cos, sin)
            hidden = hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden))
        return self._head(_normed(self._body.norm, _last(hidden, window)))

    def _attend(self, index: int, part: Any, hidden: Tensor, window: Window, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*hidden.shape[:2], -1, part.head_dim)
        query = part.q_proj(hidden).view(shape)
        key = part.k_proj(hidden).view(shape)
        if hasattr(part, "q_norm"):
            query, key = _normed(part.q_norm, query), _normed(part.k_norm, key)
        both = _rotated(torch.cat((query, key), dim=2).transpose(1, 2), cos, sin)
        query, key = both.split((query.shape[2], key.shape[2]), dim=1)
        value = part.v_proj(hidden).view(shape).transpose(1, 2)
        keys, values = self._cache.exchange(index, key, value, window)
        attended = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=window.mask, scale=part.scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
        return part.o_proj(attended.transpose(1, 2).flatten(2))


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
        return self._head(_last(output.last_hidden_state, window))


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

    Raises UsageError when no decoder gives the logits of the model's own forward, or when its attention window is
    shorter than `max_length`.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_length:
        raise _unservable(model, f"it looks back over {window} tokens only, and calls may have {max_length}")
    kind = LeanDecoder if is_lean(model) else ModuleDecoder
    _check(model, kind(model, SlotCache(model, num_slots=2, max_length=16)))
    return kind(model, SlotCache(model, num_slots=num_slots, max_length=max_length))


def embedding_of(model: PreTrainedModel) -> Tensor:
    """The input embedding [V, H]; device and dtype of the model."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight


def is_lean(model: PreTrainedModel) -> bool:
    """Whether `LeanDecoder` knows the model."""
    body: Any = model.base_model
    return model.config.model_type in _LEAN_FAMILIES and body.rotary_emb.rope_type in _FIXED_ROPE


@torch.no_grad()
def _check(model: PreTrainedModel, decoder: Decoder) -> None:
    """Compare a prompt, a continuation and a padded row with the model's own forward."""
    vocab_size = model.config.get_text_config().vocab_size
    probe = [token % vocab_size for token in (5, 3, 8, 1, 9, 2)]
    device = embedding_of(model).device
    expected = model(input_ids=torch.tensor([probe], device=device), use_cache=False).logits[0]
    decoder.extend([Row(1, 0, probe[:3])])
    ours = decoder.extend([Row(0, 0, probe), Row(1, 3, probe[3:5])])
    gap = (ours - expected[[5, 4]]).abs().max().item()
    allowed = (1e-4 if expected.dtype == torch.float32 else 5e-2) * max(1.0, expected.abs().max().item())
    if not gap <= allowed:
        raise _unservable(model, f"its logits came out differently, by {gap:.2g}")


def _unservable(model: PreTrainedModel, why: str) -> UsageError:
    return UsageError(
        f"The in-process engine cannot serve this {model.config.model_type} model",
        why=why,
        next_step="serve it with vLLM, or choose a model such as Qwen2, Qwen3 or Llama",
    )


def _last(hidden: Tensor, window: Window) -> Tensor:
    """Hidden states of each wanted row's last new token: [wanted, H]."""
    return hidden[window.wanted, window.last]


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    """Root mean square norm (arXiv 1910.07467, eq. 4), fused where torch has it fused."""
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34), in the half-split layout of Llama."""
    low, high = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-high, low), dim=-1) * sin

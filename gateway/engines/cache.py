"""Keys and values of the tokens computed so far, by slot: where new ones go, and what they see.

Shapes: B rows, T new tokens, S cached span, K key/value heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

_SPAN_STEP = 16
"""Spans are rounded up to this, so that few different shapes occur."""
_FIRST_LENGTH = 128


class Row(NamedTuple):
    """New tokens of one slot."""

    slot: int
    start: int
    """Tokens of the slot whose keys and values are kept."""
    ids: Sequence[int]


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
    last: Tensor
    """Each wanted row's last new token, as a place among the B * T."""


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
        width = max([len(row.ids) for row in rows])
        span = max([row.start + len(row.ids) for row in rows])
        span = min(-(-span // _SPAN_STEP) * _SPAN_STEP, self.max_length)
        self._reserve(span)
        places, run = _places([row.slot for row in rows], width=width)
        grid = [[0] * (width + 3)] * (run.stop - run.start if run else len(rows))
        for place, (slot, start, ids) in zip(places, rows, strict=True):
            grid[place] = [slot, start, len(ids), *ids, *[0] * (width - len(ids))]
        numbers = torch.tensor(grid, device=self._device)
        starts, lengths = numbers[:, 1:2], numbers[:, 2:3]
        new = self._columns[:width]
        positions = starts + new
        mask = torch.zeros((len(grid), 1, width, span), dtype=self._dtype, device=self._device)
        mask.masked_fill_(self._columns[:span] > positions[:, None, :, None], torch.finfo(self._dtype).min)
        last = [place * width + len(row.ids) - 1 for place, row in zip(places, rows, strict=True)]
        return Window(
            ids=numbers[:, 3:],
            slots=numbers[:, 0],
            positions=positions.clamp(max=self.max_length - 1),
            columns=torch.where(new < lengths, positions, self._length),
            mask=mask,
            span=span,
            run=run,
            last=torch.tensor(last, device=self._device),
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

    def clear(self) -> None:
        """Zero everything: what is not finite would spoil the rows that come after it, masked or not."""
        for kept in self._kept:
            kept.zero_()

    def _reserve(self, span: int) -> None:
        if span <= self._length:
            return
        more = min(max(span, 2 * self._length), self.max_length) - self._length
        self._length += more
        self._kept = [F.pad(kept, (0, 0, 0, more)) for kept in self._kept]


def _places(slots: Sequence[int], *, width: int) -> tuple[list[int], slice | None]:
    """Where each row is computed, and the range of slots if a range is computed."""
    first, end = min(slots), max(slots) + 1
    # Idle slots cost as much as others: one more for every three when decoding, none with a prompt.
    if (end - first) * 3 <= len(slots) * (4 if width == 1 else 3):
        return [slot - first for slot in slots], slice(first, end)
    return list(range(len(slots))), None


def longest(model: PreTrainedModel) -> int:
    """Most tokens that the model has positions for and that its attention looks back over."""
    config = model.config.get_text_config()
    bounds = (getattr(config, "max_position_embeddings", None), getattr(config, "sliding_window", None))
    return min(bound for bound in (*bounds, sys.maxsize) if bound)


def embedding_of(model: PreTrainedModel) -> Tensor:
    """The input embedding [V, H]; device and dtype of the model."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight

"""Batches: samples as padded tensors, cut into micro-batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from a3r.errors import UsageError
from a3r.sample import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B rows that are computed at once, holding N trained tokens.

    Rows start at position 0 and are padded on the right, so a model's default positions are the true ones.
    """

    inputs: Tensor
    """Ids without each row's last, which nothing follows: long [B, T]."""
    predecessors: Tensor
    """Index of the token before each trained one in the flattened inputs: long [N]."""
    targets: Tensor
    """Ids of the trained tokens: long [N]."""
    behaviour_logprobs: Tensor
    """float32 [N]."""
    advantages: Tensor
    """float32 [N]."""
    versions: Tensor
    """Oldest policy version of the row each trained token is in: long [N]."""
    num_tokens: int
    """Tokens of the rows, without padding."""


def default_tokens(device: torch.device) -> int:
    """Padded ids to compute at once: few enough for a CPU's caches, more where a GPU wants to be filled."""
    return 2048 if device.type == "cpu" else 16384


def micro_batches(
    samples: Sequence[Sample], *, max_tokens: int, device: torch.device | str = "cpu"
) -> tuple[MicroBatch, ...]:
    """The samples, sorted by length and cut so that no micro-batch holds more than `max_tokens` ids with padding.

    A single longer row makes a micro-batch of its own. Raises UsageError for a row whose first token is trained.
    """
    return tuple(_packed(rows, device=device) for rows in _buckets(samples, max_tokens=max_tokens))


def _buckets(samples: Sequence[Sample], *, max_tokens: int) -> Iterator[list[Sample]]:
    bucket: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.ids)):
        if bucket and (len(bucket) + 1) * (len(sample.ids) - 1) > max_tokens:
            yield bucket
            bucket = []
        bucket.append(sample)
    if bucket:
        yield bucket


def _packed(rows: Sequence[Sample], *, device: torch.device | str) -> MicroBatch:
    lengths = np.array([len(row.ids) for row in rows])
    real = np.arange(lengths.max()) < lengths[:, None]  # [B, T + 1]

    def column(values: Iterator[tuple[float, ...]], dtype: type) -> np.ndarray:
        padded = np.zeros(real.shape, dtype)
        padded[real] = np.concatenate([np.array(value, dtype) for value in values])
        return padded

    ids = column((row.ids for row in rows), np.int64)
    row_index, position = np.nonzero(column((row.mask for row in rows), np.int64))
    if not position.all():
        raise UsageError("A sample trains its first token", why="nothing precedes it, so it has no probability")
    versions = np.array([row.version for row in rows])

    def trained(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[row_index, position]).to(device)

    return MicroBatch(
        inputs=torch.from_numpy(np.ascontiguousarray(ids[:, :-1])).to(device),
        predecessors=torch.from_numpy(row_index * (real.shape[1] - 1) + position - 1).to(device),
        targets=trained(ids),
        behaviour_logprobs=trained(column((row.logprobs for row in rows), np.float32)),
        advantages=trained(column((row.advantages for row in rows), np.float32)),
        versions=torch.from_numpy(versions[row_index]).to(device),
        num_tokens=int(lengths.sum()),
    )

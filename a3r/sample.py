"""Samples: the rows an update computes on, as plain token columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row of T tokens. Columns have equal length; position t describes `ids[t]` itself.

    A token with `mask` 1 was sampled by the policy and is trained in this row and in no other.
    `logprobs` holds its behaviour logprob (0 elsewhere), `advantages` its advantage (0 elsewhere).
    """

    episode_id: str
    task_id: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    version: int
    """Oldest policy version among the trained tokens."""

    @property
    def num_trained(self) -> int:
        return sum(self.mask)

"""What an update measures about itself, as finite numbers named `train/...`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Self

from torch import Tensor

from a3r.episode import Group
from trainer.timeline import own_turns


@dataclass(frozen=True, slots=True)
class GradientPass:
    """Token means of one forward and backward pass, before the step that followed it."""

    num_trained: int
    num_tokens: int
    """Tokens of all rows, context included, without padding."""
    num_rows: int
    loss: float
    entropy: float
    """Nats a token."""
    clip_fraction: float
    """Share of trained tokens whose policy gradient the clip took away."""
    behaviour_kl: float
    """k3 estimate of KL(behaviour || policy)."""
    reference_kl: float | None
    """k3 estimate of KL(policy || starting policy)."""
    num_fresh: int
    """Trained tokens of rows sampled by the learner's own version."""
    mismatch_mean: float
    """Mean |engine logprob - learner logprob| over fresh tokens."""
    mismatch_max: float

    @classmethod
    def from_sums(cls, sums: Tensor, *, num_trained: int, num_rows: int, num_tokens: int, has_reference: bool) -> Self:
        """From one row a micro-batch [M, 8]: loss, entropy, clipped, behaviour KL, reference KL, fresh tokens,
        and the sum and maximum of the gap over fresh tokens."""
        loss, entropy, clipped, behaviour_kl, reference_kl, num_fresh, gap, _ = sums.sum(dim=0).tolist()
        return cls(
            num_trained=num_trained,
            num_tokens=num_tokens,
            num_rows=num_rows,
            loss=loss / num_trained,
            entropy=entropy / num_trained,
            clip_fraction=clipped / num_trained,
            behaviour_kl=behaviour_kl / num_trained,
            reference_kl=reference_kl / num_trained if has_reference else None,
            num_fresh=int(num_fresh),
            mismatch_mean=gap / max(num_fresh, 1),
            mismatch_max=sums[:, 7].max().item(),
        )


@dataclass(frozen=True, slots=True)
class OptimiserStep:
    """What one optimiser step did."""

    grad_norm: float
    """Before clipping."""
    is_skipped: bool
    """Loss or gradient was not finite, and the weights stayed as they were."""


def episode_metrics(groups: Sequence[Group], *, version: int) -> dict[str, float]:
    """Means over all episodes of the groups, filtered ones too. `version` is the policy's before the update."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [episode.reward for episode in episodes]
    turns = [own_turns(episode) for episode in episodes]
    ages = [version - min(turn.version for turn in own) for own in turns if own]
    return {
        "train/reward": fmean(rewards),
        "train/reward_std": pstdev(rewards),
        "train/reply_tokens": fmean(sum(len(turn.sampled_ids) for turn in own) for own in turns),
        "train/turns": fmean(map(len, turns)),
        "train/staleness_mean": fmean(ages) if ages else 0.0,
        "train/episodes": float(len(episodes)),
        "train/filtered_groups": float(sum(group.has_equal_rewards for group in groups)),
    }


def pass_metrics(passes: Sequence[GradientPass], steps: Sequence[OptimiserStep], *, seconds: float) -> dict[str, float]:
    """Token means over the passes whose step was taken; mismatch from the first pass, whose weights had not moved."""
    metrics = {
        "train/rows": float(sum(one.num_rows for one in passes)),
        "train/skipped_steps": float(sum(step.is_skipped for step in steps)),
        "train/seconds": seconds,
        "train/tokens_per_s": sum(one.num_tokens for one in passes) / seconds,
    }
    if passes and passes[0].num_fresh and math.isfinite(passes[0].mismatch_mean):
        metrics["train/mismatch_mean"] = passes[0].mismatch_mean
        metrics["train/mismatch_max"] = passes[0].mismatch_max
    taken = [one for one, step in zip(passes, steps, strict=True) if not step.is_skipped]
    if taken:
        metrics["train/grad_norm"] = fmean(step.grad_norm for step in steps if not step.is_skipped)
        metrics["train/loss"] = _token_mean(taken, lambda one: one.loss)
        metrics["train/entropy"] = _token_mean(taken, lambda one: one.entropy)
        metrics["train/clip_fraction"] = _token_mean(taken, lambda one: one.clip_fraction)
        metrics["train/behaviour_kl"] = _token_mean(taken, lambda one: one.behaviour_kl)
        if taken[0].reference_kl is not None:
            metrics["train/kl"] = _token_mean(taken, lambda one: one.reference_kl or 0.0)
    return metrics


def _token_mean(passes: Sequence[GradientPass], value: Callable[[GradientPass], float]) -> float:
    total = math.fsum(value(one) * one.num_trained for one in passes)
    return total / sum(one.num_trained for one in passes)

"""Policy losses, one number for each trained token.

A loss gives per-token values and never averages: the learner divides their sum by the number of trained tokens of the
optimiser step. So every term and the denominator count the same tokens, the gradient does not depend on how rows or
micro-batches are cut, and an episode weighs the same however many rows it makes (token mean over the step, as in DAPO,
arXiv 2503.14476, eq. 8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from a3r.config import TrainerConfig
from a3r.errors import UsageError
from trainer.import_path import function_at


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """What a loss sees of the N trained tokens of a micro-batch. All columns are [N]."""

    logprobs: Tensor
    """Under the policy being trained, at the sampling temperature; carries the gradient."""
    behaviour_logprobs: Tensor
    """As recorded when the tokens were sampled."""
    advantages: Tensor
    entropy: Tensor
    """Entropy of the policy's distribution at each token, in nats."""
    reference_logprobs: Tensor | None
    """Under the starting policy; None unless `kl_coef` is positive."""


Loss: TypeAlias = Callable[[TrainedTokens, TrainerConfig], Tensor]
"""Per-token loss [N]."""


def clipped_policy_gradient(tokens: TrainedTokens, config: TrainerConfig) -> Tensor:
    """Token-level clipped surrogate, plus `kl_coef` * KL, minus `entropy_coef` * entropy: [N].

    Surrogate: PPO (arXiv 1707.06347, eq. 7) against the recorded behaviour logprobs, with separate lower and upper
    clips (DAPO, arXiv 2503.14476, eq. 10).
    """
    ratio = importance_ratio(tokens)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    if tokens.reference_logprobs is not None:
        loss = loss + config.kl_coef * k3(tokens.logprobs, tokens.reference_logprobs)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * tokens.entropy
    return loss


def importance_ratio(tokens: TrainedTokens) -> Tensor:
    """Policy over behaviour probability of each token: [N]."""
    return torch.exp(tokens.logprobs - tokens.behaviour_logprobs)


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens of p: r - 1 - log r with r = q / p, never negative: [N].

    http://joschu.net/blog/kl-approx.html, estimator k3; `logprobs` are under p and `other` under q.
    """
    log_ratio = other - logprobs
    return torch.expm1(log_ratio) - log_ratio


def is_clipped(tokens: TrainedTokens, config: TrainerConfig) -> Tensor:
    """Whether the clip takes away the token's policy gradient: bool [N]."""
    ratio = importance_ratio(tokens)
    above = (ratio > 1 + config.clip_high) & (tokens.advantages > 0)
    below = (ratio < 1 - config.clip_low) & (tokens.advantages < 0)
    return above | below


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy in nats of each row of `logits` [N, V]: [N]."""
    logprobs = torch.log_softmax(logits, dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def loss_from(config: TrainerConfig) -> Loss:
    """The loss that the config asks for: its own import path, or the clipped policy gradient."""
    return function_at(config.loss) if config.loss else clipped_policy_gradient


def checked_loss(loss: Loss, tokens: TrainedTokens, config: TrainerConfig) -> Tensor:
    """Per-token loss. Raises UsageError unless there is one value for each trained token."""
    values = loss(tokens, config)
    if values.shape != tokens.logprobs.shape:
        raise UsageError(
            f"The loss {config.loss} does not fit",
            why=f"it gave shape {tuple(values.shape)} for {tuple(tokens.logprobs.shape)} trained tokens",
            next_step="return one unaveraged value a token",
        )
    return values

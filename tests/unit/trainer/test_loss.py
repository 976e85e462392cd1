from __future__ import annotations

import math

import pytest
import torch

from a3r.config import TrainerConfig
from a3r.errors import UsageError
from trainer.loss import TrainedTokens, checked_loss, clipped_policy_gradient, entropy_of, is_clipped, k3, loss_from


def tokens(ratios: list[float], advantages: list[float], *, reference: list[float] | None = None) -> TrainedTokens:
    behaviour = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    logprobs = (behaviour + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return TrainedTokens(
        logprobs=logprobs,
        behaviour_logprobs=behaviour,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        entropy=torch.full((len(ratios),), 1.5, dtype=torch.float64),
        reference_logprobs=torch.tensor(reference, dtype=torch.float64) if reference else None,
    )


def test_the_surrogate_is_clipped_where_the_ratio_went_too_far_in_the_good_direction() -> None:
    config = TrainerConfig(clip_low=0.2, clip_high=0.3)
    seen = tokens([1.0, 1.5, 0.5, 1.5, 0.5], [1.0, 1.0, 1.0, -1.0, -1.0])
    loss = clipped_policy_gradient(seen, config)
    assert loss.tolist() == pytest.approx([-1.0, -1.3, -0.5, 1.5, 0.8])
    (gradient,) = torch.autograd.grad(loss.sum(), seen.logprobs)
    assert gradient.tolist() == pytest.approx([-1.0, 0.0, -0.5, 1.5, 0.0])
    assert is_clipped(seen, config).tolist() == [False, True, False, False, True]


def test_kl_and_entropy_are_added_to_each_trained_token() -> None:
    seen = tokens([1.0, 1.0], [0.0, 0.0], reference=[-2.0, -1.0])
    loss = clipped_policy_gradient(seen, TrainerConfig(kl_coef=0.5, entropy_coef=0.1))
    assert loss.tolist() == pytest.approx([-0.15, 0.5 * (math.e - 1 - 1) - 0.15])


def test_k3_is_unbiased_for_the_divergence_and_never_negative() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    estimates = k3(p.log(), q.log())
    assert (estimates >= 0).all()
    assert (p * estimates).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


def test_entropy_of_uniform_logits_is_the_log_of_their_number() -> None:
    assert entropy_of(torch.zeros(2, 8)).tolist() == pytest.approx([math.log(8)] * 2)


def test_a_loss_that_averages_is_refused() -> None:
    config = TrainerConfig(loss="torch:sum")
    assert loss_from(config) is torch.sum
    with pytest.raises(UsageError, match="unaveraged"):
        checked_loss(lambda seen, config: seen.logprobs.mean(), tokens([1.0, 1.0], [1.0, 1.0]), config)

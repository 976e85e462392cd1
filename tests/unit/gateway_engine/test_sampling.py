from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from gateway.engines.sampling import draw


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_come_with_the_frequencies_of_the_distribution_after_temperature(temperature: float) -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0])
    num_draws = 20_000
    uniforms = np.random.default_rng(0).random(num_draws).tolist()
    ids, logprobs = draw(logits.expand(num_draws, -1), [temperature] * num_draws, uniforms)
    expected = torch.softmax(logits.double() / temperature, dim=-1).numpy()
    assert chisquare(np.bincount(ids, minlength=5), expected * num_draws).pvalue > 1e-3
    assert np.allclose(np.exp(logprobs), expected[ids], atol=1e-6)


def test_temperature_zero_takes_the_likeliest_token_with_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    ids, logprobs = draw(logits, [0.0, 1.0], [0.999999, 0.0])
    assert ids == [1, 0]
    assert logprobs == pytest.approx(torch.log_softmax(logits, -1)[[0, 1], [1, 0]].tolist())


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-1e4, 0.0, -1e4, 0.0, -1e4]])
    drawn = {draw(logits, [1.0], [uniform])[0][0] for uniform in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53)}
    assert drawn == {1, 3}


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    _, logprobs = draw(torch.tensor([[0.0, torch.nan], [0.0, 1.0]]), [1.0, 1.0], [0.5, 0.5])
    assert not np.isfinite(logprobs[0])
    assert np.isfinite(logprobs[1])

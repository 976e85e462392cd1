"""Drawing tokens from logits, and the logprobs of the very distribution drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """One token for each row of `logits` [B, V] and its natural logprob, both after the row's temperature.

    Inverse transform: the first token at which the cumulative probability exceeds `uniforms[b]`, which lies in
    [0, 1). Temperature 0 takes the likeliest token and gives its logprob at temperature 1. A logprob that is not
    finite says that the row's logits were not.
    """
    device = logits.device
    scale = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)  # [B, V]
    cumulative = logprobs.exp().double().cumsum(dim=-1)
    thresholds = torch.tensor(uniforms, dtype=torch.float64, device=device) * cumulative[:, -1]
    ids = torch.searchsorted(cumulative, thresholds[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    if 0 in temperatures:
        is_greedy = torch.tensor([temperature == 0 for temperature in temperatures], device=device)
        ids = torch.where(is_greedy, logprobs.argmax(dim=-1), ids)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    return ids.tolist(), chosen.tolist()

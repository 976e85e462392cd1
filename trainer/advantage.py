"""Advantages: how much better an episode did than its group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from a3r.config import TrainerConfig
from a3r.episode import Group
from a3r.errors import UsageError
from trainer.import_path import function_at

Advantage: TypeAlias = Callable[[Group, TrainerConfig], Sequence[float]]
"""One finite number for each episode of the group, in order."""

_EPSILON = 1e-6


def group_relative(group: Group, config: TrainerConfig) -> tuple[float, ...]:
    """Group-relative advantages, one an episode however many rows it makes.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / std(r), with the population standard
    deviation. Without `advantage_scale_std` the centred reward alone, as in Dr. GRPO (arXiv 2503.20783, section 3.2).
    """
    rewards = [episode.reward for episode in group.episodes]
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not config.advantage_scale_std:
        return tuple(centred)
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return tuple(value / (deviation + _EPSILON) for value in centred)


def advantage_from(config: TrainerConfig) -> Advantage:
    """The advantage that the config asks for: its own import path, or the group-relative one."""
    return function_at(config.advantage) if config.advantage else group_relative


def checked_advantages(advantage: Advantage, group: Group, config: TrainerConfig) -> list[float]:
    """Advantages of the group. Raises UsageError unless there is one finite number for each episode."""
    values = [float(value) for value in advantage(group, config)]
    if len(values) != len(group.episodes) or not all(map(math.isfinite, values)):
        raise UsageError(
            f"The advantage {config.advantage or 'group_relative'} does not fit task {group.task_id}",
            why=f"{len(group.episodes)} episodes need as many finite numbers, got {values[:8]}",
        )
    return values

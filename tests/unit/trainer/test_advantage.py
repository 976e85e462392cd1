from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3r.config import TrainerConfig
from a3r.episode import Episode, EpisodeKind, Group
from a3r.errors import UsageError
from trainer.advantage import advantage_from, checked_advantages, group_relative


def group(rewards: list[float]) -> Group:
    return Group("t", tuple(Episode(str(i), "t", EpisodeKind.TRAIN, "p", r, ()) for i, r in enumerate(rewards)))


def test_advantages_are_rewards_in_units_of_the_groups_deviation() -> None:
    assert group_relative(group([1.0, 0.0, 0.0, 1.0]), TrainerConfig()) == pytest.approx([1, -1, -1, 1], abs=1e-5)


def test_without_std_normalisation_advantages_are_centred_rewards() -> None:
    config = TrainerConfig(advantage_scale_std=False)
    assert group_relative(group([1.0, 0.0, 0.0, 0.0]), config) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_rewards_that_differ_by_rounding_only_give_no_advantage() -> None:
    values = group_relative(group([0.1 + 0.2, 0.3, 0.3]), TrainerConfig())
    assert max(map(abs, values)) < 1e-9


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_advantages_have_mean_zero_and_at_most_unit_deviation(rewards: list[float]) -> None:
    values = group_relative(group(rewards), TrainerConfig())
    assert math.isclose(fmean(values), 0.0, abs_tol=1e-6)
    assert pstdev(values) <= 1 + 1e-9


def rank_advantage(group: Group, config: TrainerConfig) -> list[float]:
    return [float(index) for index in range(len(group.episodes))]


def test_an_import_path_replaces_the_advantage() -> None:
    config = TrainerConfig(advantage="statistics:mean")
    assert advantage_from(config) is __import__("statistics").mean


@pytest.mark.parametrize("path", ["statistics", "statistics:nothing", "no_such_module:f", "math:pi"])
def test_an_import_path_that_names_no_function_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="import"):
        advantage_from(TrainerConfig(advantage=path))


def test_an_advantage_must_give_one_finite_number_for_each_episode() -> None:
    assert checked_advantages(rank_advantage, group([1.0, 0.0]), TrainerConfig()) == [0.0, 1.0]
    with pytest.raises(UsageError, match="2 episodes"):
        checked_advantages(lambda group, config: [1.0], group([1.0, 0.0]), TrainerConfig())
    with pytest.raises(UsageError, match="finite"):
        checked_advantages(lambda group, config: [1.0, math.nan], group([1.0, 0.0]), TrainerConfig())

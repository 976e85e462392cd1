from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from a3r.errors import InfrastructureFault, UsageError
from a3r.plan import Dimension, SearchSpace
from a3r.search import ProposedSetting, Search

GRID = SearchSpace(
    dimensions=(
        Dimension(path="trainer.lr", levels=(1e-4, 3e-4)),
        Dimension(path="trainer.advantage_scale_std", levels=(True, False)),
    )
)
PAIRS = SearchSpace(
    settings=(
        {"trainer.group_size": 4, "trainer.batch_tasks": 32},
        {"trainer.group_size": 8, "trainer.batch_tasks": 16},
    )
)
RANGE = SearchSpace(
    dimensions=(
        Dimension(path="trainer.lr", low=1e-5, high=1e-2, log=True),
        Dimension(path="trainer.group_size", low=2, high=16, integer=True),
        Dimension(path="trainer.kl_coef", levels=(0.0, 0.01)),
    ),
    num_settings=8,
)


def opened(folder: Path, space: SearchSpace, *, seed: int = 0) -> Search:
    return Search.open(folder / "search.journal", "e-k3f9-0", space, seed=seed)


def response(values: dict) -> float:
    return -abs(math.log10(values["trainer.lr"]) + 3)


def walk(search: Search) -> list[ProposedSetting]:
    found = []
    while (proposed := search.ask()) is not None:
        search.tell(proposed.number, response(proposed.values) if "trainer.lr" in proposed.values else 0.5)
        found.append(proposed)
    return found


@pytest.mark.parametrize("space", [GRID, PAIRS])
def test_a_grid_is_walked_once_in_order_with_its_very_values(tmp_path: Path, space: SearchSpace) -> None:
    proposed = walk(opened(tmp_path, space))
    assert [setting.values for setting in proposed] == space.grid()
    assert [setting.number for setting in proposed] == list(range(len(space.grid())))
    assert opened(tmp_path, space).ask() is None


def test_values_are_plain_json_of_their_own_types(tmp_path: Path) -> None:
    space = SearchSpace(dimensions=(Dimension(path="x", levels=(1, 1.5, "1", None, True, [1, 2])),))
    values = [setting.values["x"] for setting in walk(opened(tmp_path, space))]
    assert values == [1, 1.5, "1", None, True, [1, 2]]
    assert [type(value) for value in values] == [int, float, str, type(None), bool, list]


def test_a_range_is_sampled_num_settings_times_within_its_bounds(tmp_path: Path) -> None:
    proposed = walk(opened(tmp_path, RANGE))
    assert len(proposed) == 8
    for setting in proposed:
        assert json.loads(json.dumps(setting.values)) == setting.values
        assert 1e-5 <= setting.values["trainer.lr"] <= 1e-2
        assert type(setting.values["trainer.group_size"]) is int
        assert setting.values["trainer.kl_coef"] in (0.0, 0.01)
    assert len({setting.values["trainer.lr"] for setting in proposed}) == 8


def test_a_killed_search_proposes_what_an_unbroken_one_does(tmp_path: Path) -> None:
    unbroken = walk(opened(tmp_path / "a", RANGE, seed=5))
    broken = []
    for _ in range(8):
        search = opened(tmp_path / "b", RANGE, seed=5)
        proposed = search.ask()
        assert proposed is not None
        search.tell(proposed.number, response(proposed.values))
        broken.append(proposed)
    assert broken == unbroken
    assert walk(opened(tmp_path / "c", RANGE, seed=6)) != unbroken


@pytest.mark.parametrize("space", [GRID, PAIRS, RANGE])
def test_what_was_proposed_and_never_told_is_proposed_again(tmp_path: Path, space: SearchSpace) -> None:
    first = opened(tmp_path, space)
    told, lost, lost_too = first.ask(), first.ask(), None
    assert told is not None
    first.tell(told.number, 0.5)
    search = opened(tmp_path, space)
    assert search.ask() == lost
    lost_too = search.ask()
    assert lost_too is None or lost_too.number == 2
    assert [setting.mean for setting in search.told()] == [0.5]


def test_a_proposal_that_was_torn_in_writing_is_made_anew(tmp_path: Path) -> None:
    search = opened(tmp_path, GRID)
    first = search.ask()
    assert first is not None
    search.tell(first.number, 0.1)
    # The process dies after the study handed out the point and before its values were written.
    search._study.ask()
    again = opened(tmp_path, GRID)
    rest = walk(again)
    assert sorted(map(str, [first.values, *(s.values for s in rest)])) == sorted(map(str, GRID.grid()))
    assert len(again.told()) == 4


def test_a_torn_proposal_of_a_range_costs_none_of_its_settings(tmp_path: Path) -> None:
    opened(tmp_path, RANGE)._study.ask()
    assert len(walk(opened(tmp_path, RANGE))) == 8


def test_a_setting_that_failed_is_kept_with_its_reason_and_not_proposed_again(tmp_path: Path) -> None:
    search = opened(tmp_path, GRID)
    failed = search.ask()
    assert failed is not None
    search.fail(failed.number, "every trial ran out of memory")
    search.fail(failed.number, "said twice")
    resumed = opened(tmp_path, GRID)
    assert len(walk(resumed)) == 3
    told = resumed.told()[0]
    assert (told.values, told.mean, told.reason) == (failed.values, None, "every trial ran out of memory")


def test_the_first_told_value_stays(tmp_path: Path) -> None:
    search = opened(tmp_path, GRID)
    proposed = search.ask()
    assert proposed is not None
    search.tell(proposed.number, 0.25)
    search.tell(proposed.number, 0.75)
    assert search.told()[0].mean == 0.25


def test_sampling_learns_from_what_was_told(tmp_path: Path) -> None:
    space = RANGE.model_copy(update={"num_settings": 24})
    values = [setting.values for setting in walk(opened(tmp_path, space, seed=1))]
    early = sum(map(response, values[:5])) / 5
    late = sum(map(response, values[-8:])) / 8
    assert late > early


@pytest.mark.parametrize("number", [-1, 7])
def test_a_number_that_was_never_proposed_is_refused(tmp_path: Path, number: int) -> None:
    with pytest.raises(UsageError, match="never proposed"):
        opened(tmp_path, GRID).tell(number, 0.5)


def test_a_study_keeps_to_its_space(tmp_path: Path) -> None:
    opened(tmp_path, GRID)
    with pytest.raises(UsageError, match="another search space"):
        opened(tmp_path, PAIRS)


def test_a_range_needs_its_number_of_settings(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="num_settings"):
        opened(tmp_path, RANGE.model_copy(update={"num_settings": None}))


def test_a_folder_that_cannot_be_made_is_an_infrastructure_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InfrastructureFault):
        Search.open(tmp_path / "file" / "search.journal", "s", GRID, seed=0)

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from a3r.stats import difference, equivalence, holm, mean_over_seeds, success_interval

success = st.integers(0, 256).map(lambda solved: solved / 256)
scores = st.lists(success, min_size=2, max_size=8)


def test_wilson_interval_of_a_known_rate() -> None:
    # Newcombe 1998, table I: 81 of 263.
    interval = success_interval(81, trials=263)
    assert (interval.low, interval.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize(("successes", "low", "high"), [(0, 0.0, 0.2775), (10, 0.7225, 1.0)])
def test_wilson_interval_at_the_ends_stays_inside_and_is_not_a_point(successes: int, low: float, high: float) -> None:
    interval = success_interval(successes, trials=10)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


@settings(deadline=None)
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_its_rate(case: tuple[int, int]) -> None:
    successes, trials = case
    interval = success_interval(successes, trials=trials)
    assert 0 <= interval.low <= successes / trials <= interval.high <= 1


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 4), (5, 4)])
def test_no_success_rate_is_refused(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="no success rate"):
        success_interval(successes, trials=trials)


def test_mean_over_seeds_is_students() -> None:
    # t(0.975, 2) = 4.302653, s = 0.1, so half = 4.302653 * 0.1 / sqrt(3).
    mean = mean_over_seeds([0.1, 0.2, 0.3])
    assert mean.interval is not None
    assert mean.value == pytest.approx(0.2)
    assert mean.interval.high - mean.value == pytest.approx(0.248414, abs=1e-6)


def test_one_seed_has_no_interval() -> None:
    assert mean_over_seeds([0.4]).interval is None
    found = difference([0.4], [0.1, 0.2])
    assert (found.interval, found.p_value, found.n_treatment) == (None, None, 1)
    assert found.effect == pytest.approx(0.25)
    assert equivalence([0.4], [0.1], margin=0.5).p_value is None


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean_over_seeds([])
    with pytest.raises(ValueError, match="both sides"):
        difference([0.1], [])


@settings(deadline=None)
@given(scores, scores)
def test_difference_agrees_with_scipys_welch(treatment: list[float], control: list[float]) -> None:
    found = difference(treatment, control)
    assert found.interval is not None
    if found.interval.high - found.interval.low < 1e-9:
        return
    expected = ttest_ind(treatment, control, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert (found.interval.low, found.interval.high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)


@settings(deadline=None)
@given(scores, scores)
def test_difference_changes_sign_when_sides_are_swapped(treatment: list[float], control: list[float]) -> None:
    there, back = difference(treatment, control), difference(control, treatment)
    assert there.interval is not None
    assert back.interval is not None
    assert there.effect == pytest.approx(-back.effect)
    assert there.interval.low == pytest.approx(-back.interval.high)
    assert there.p_value == pytest.approx(back.p_value)


def test_effect_size_of_a_known_case() -> None:
    # Means 0.6 and 0.2, both s = 0.1: d = 4; correction 1 - 3 / (4 * 6 - 9) = 0.8.
    assert difference([0.5, 0.6, 0.7], [0.1, 0.2, 0.3]).effect_size == pytest.approx(3.2)


def test_seeds_that_all_agree_are_given_the_spread_of_the_measurement() -> None:
    bare = difference([0.25, 0.25], [0.125, 0.125])
    assert bare.interval is not None
    assert bare.interval.low == bare.interval.high
    honest = difference([0.25, 0.25], [0.125, 0.125], num_tasks=8)
    assert honest.interval is not None
    assert honest.interval.low < 0 < honest.interval.high
    clear = difference([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], num_tasks=256)
    assert clear.interval is not None
    assert clear.interval.low > 0.98


@settings(deadline=None)
@given(scores, scores, st.floats(0.01, 0.5))
def test_equivalence_at_a_fortieth_is_the_interval_within_the_margin(
    treatment: list[float], control: list[float], margin: float
) -> None:
    tested = equivalence(treatment, control, margin=margin)
    interval = tested.difference.interval
    assert interval is not None
    assert tested.p_value is not None
    if abs(tested.p_value - 0.025) < 1e-9 or min(abs(interval.low + margin), abs(interval.high - margin)) < 1e-9:
        return
    assert (tested.p_value <= 0.025) == (-margin < interval.low and interval.high < margin)


def test_holm_of_a_known_family() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )
    assert holm({}) == {}


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=2), st.floats(0, 1), min_size=1, max_size=6))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values: dict[str, float]) -> None:
    adjusted = holm(p_values)
    assert all(adjusted[name] >= p for name, p in p_values.items())
    assert all(value <= 1 for value in adjusted.values())
    by_raw = sorted(p_values, key=lambda name: p_values[name])
    assert [adjusted[name] for name in by_raw] == sorted(adjusted.values())


def test_the_interval_of_a_mean_covers_it_in_95_of_100_samples() -> None:
    noise = random.Random(7)
    covered = sum(_covers([noise.gauss(0.5, 0.1) for _ in range(3)]) for _ in range(2000))
    assert 0.935 <= covered / 2000 <= 0.965


def _covers(sample: list[float]) -> bool:
    interval = mean_over_seeds(sample).interval
    assert interval is not None
    assert fmean(sample) in interval
    return 0.5 in interval

"""What may be concluded from a handful of seeds: intervals, differences, corrections.

Every interval is two-sided at 95 % unless `level` says otherwise. A sample is one number per seed. With fewer
than two numbers there is no spread to judge by, hence no interval: `Interval` is then None and nobody guesses.
scipy.special (seconds lighter than scipy.stats) is imported by the functions that need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

LEVEL = 0.95
_NO_SPREAD = 1e-24
"""A variance of the mean up to this is rounding, not spread: scores are means over tasks."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval of plausible values."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds; `interval` is None with fewer than two."""

    value: float
    n: int
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of the treatment minus mean of the control."""

    effect: float
    interval: Interval | None
    """None when either side has fewer than two seeds."""
    p_value: float | None
    """Two-sided, against no difference."""
    effect_size: float | None
    """Hedges' g: the difference in pooled standard deviations, corrected for few seeds; None without spread."""
    n_treatment: int
    n_control: int


def success_interval(successes: float, *, trials: int, level: float = LEVEL) -> Interval:
    """Wilson's score interval of a success rate, `successes` of `trials` (Wilson 1927).

    Partial credit makes `successes` fractional; the interval is then conservative. Raises ValueError when
    `trials` is not positive or `successes` lies outside it.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} is no success rate")
    z = _normal_quantile(0.5 + level / 2)
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Interval(max(0.0, low), min(1.0, high))


def mean_over_seeds(values: Sequence[float], *, level: float = LEVEL) -> Mean:
    """Mean with its Student t interval. Raises ValueError for no values."""
    if not values:
        raise ValueError("a mean needs at least one value")
    value, n = fmean(values), len(values)
    if n < 2:
        return Mean(value, n, None)
    half = _t_quantile(0.5 + level / 2, df=n - 1) * math.sqrt(_variance(values) / n)
    return Mean(value, n, Interval(value - half, value + half))


def difference(
    treatment: Sequence[float],
    control: Sequence[float],
    *,
    num_tasks: int | None = None,
    level: float = LEVEL,
) -> Difference:
    """Difference of two settings' per-seed scores by Welch's t (Welch 1947).

    Where no seed of either side differs from its siblings, the spread is unknown and not zero. With `num_tasks`
    it is then taken to be that of a success rate over so many tasks. Raises ValueError for an empty side.
    """
    if not treatment or not control:
        raise ValueError("a difference needs both sides")
    effect = fmean(treatment) - fmean(control)
    counts = len(treatment), len(control)
    if min(counts) < 2:
        return Difference(effect, None, None, None, *counts)
    spread, df = _welch(treatment, control, num_tasks=num_tasks)
    if spread == 0:
        return Difference(effect, Interval(effect, effect), float(effect == 0), None, *counts)
    half = _t_quantile(0.5 + level / 2, df=df) * spread
    p_value = 2 * _t_tail(abs(effect) / spread, df=df)
    size = _hedges_g(treatment, control)
    return Difference(effect, Interval(effect - half, effect + half), p_value, size, *counts)


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _welch(treatment: Sequence[float], control: Sequence[float], *, num_tasks: int | None) -> tuple[float, float]:
    """Standard error of the difference and its Welch-Satterthwaite degrees of freedom."""
    a, b = (_variance(side) / len(side) for side in (treatment, control))
    if a + b <= _NO_SPREAD and num_tasks is not None:
        a, b = (_binomial_variance(side, num_tasks=num_tasks) / len(side) for side in (treatment, control))
    if a + b <= _NO_SPREAD:
        return 0.0, math.inf
    df = (a + b) ** 2 / (a * a / (len(treatment) - 1) + b * b / (len(control) - 1))
    return math.sqrt(a + b), df


def _binomial_variance(values: Sequence[float], *, num_tasks: int) -> float:
    """Variance of one seed's success rate, from the rate over all seeds with one success and one failure added."""
    total = num_tasks * len(values)
    rate = (min(max(fmean(values), 0.0), 1.0) * total + 1) / (total + 2)
    return rate * (1 - rate) / num_tasks


def _hedges_g(treatment: Sequence[float], control: Sequence[float]) -> float | None:
    n, m = len(treatment), len(control)
    pooled = ((n - 1) * _variance(treatment) + (m - 1) * _variance(control)) / (n + m - 2)
    if pooled <= _NO_SPREAD:
        return None
    correction = 1 - 3 / (4 * (n + m) - 9)
    return (fmean(treatment) - fmean(control)) / math.sqrt(pooled) * correction


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two one-sided tests against differences of the margin or more."""

    difference: Difference
    p_value: float | None
    """The larger of the two; None with fewer than two seeds on a side."""


def equivalence(
    treatment: Sequence[float], control: Sequence[float], *, margin: float, num_tasks: int | None = None
) -> Equivalence:
    """TOST with Welch's t (Schuirmann 1987). `p_value <= 0.025` holds exactly when the difference's 95 % interval
    lies within the margin on both sides."""
    found = difference(treatment, control, num_tasks=num_tasks)
    if found.interval is None:
        return Equivalence(found, None)
    spread, df = _welch(treatment, control, num_tasks=num_tasks)
    if spread == 0:
        return Equivalence(found, float(abs(found.effect) >= margin))
    return Equivalence(found, _t_tail((margin - abs(found.effect)) / spread, df=df))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down adjustment (Holm 1979): reject where the adjusted value is at most the wanted level."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def _normal_quantile(p: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(p))


def _t_quantile(p: float, *, df: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, p))


def _t_tail(value: float, *, df: float) -> float:
    from scipy.special import stdtr

    return float(stdtr(df, -value))

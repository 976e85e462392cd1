"""How much of a question fits a budget: settings, seeds and updates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pydantic import Field

from a3r.config import Budget, Config, TrialConfig
from a3r.errors import PlanRejected
from vibe import wording

BUDGET_SHARE = 0.75
"""Part of the wall budget that trials are planned into; the rest is slack for a slower machine."""
MIN_SEEDS, USUAL_SEEDS, MAX_SEEDS = 2, 3, 5
MIN_UPDATES = 10
"""Fewest updates that a training trial is planned with."""
ENOUGH_UPDATES = 16
"""Updates from which on a third seed is worth more than further updates."""
MIN_SEARCHED, MAX_SEARCHED = 4, 24
_SEARCH_UPDATES = 30
"""Updates that a searched setting gets before more settings are tried."""
_UPDATE_EPISODES = 128
"""Episodes that `Rates.update_s` is about."""


class Rates(Config):
    """What work costs in wall time. The defaults are for the small policy on two CPU cores; measured ones replace
    them."""

    turn_s: float = Field(default=0.0065, gt=0)
    """One turn of one episode through the gateway, when as many run at once as the judge allows."""
    update_s: float = Field(default=0.65, ge=0)
    """One policy update on 128 episodes, with publishing the weights; it grows with the episodes."""
    trial_overhead_s: float = Field(default=5.0, ge=0)
    """Start and end of a trial."""
    fixed_s: float = Field(default=35.0, ge=0)
    """A campaign's own work: the Program and its gates before the trials, the report after them."""
    basis: str = "rates of the small policy on a slow machine of two cores; this lab has none of its own yet"
    """Where the figures come from, as the plan will say."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a question is run."""

    num_settings: int
    num_seeds: int
    num_updates: int

    @property
    def num_trials(self) -> int:
        return self.num_settings * self.num_seeds


@dataclass(frozen=True, slots=True)
class Costs:
    """What the trials of one question cost."""

    rates: Rates
    base: TrialConfig
    turns: int
    """Turns of an episode, at most."""
    episodes: int
    """Episodes of an update, of the dearest setting."""

    def wall_s(self, size: Size) -> float:
        """Wall time of a whole campaign of `size`, in seconds."""
        return self.rates.fixed_s + size.num_trials * self.trial_s(size.num_updates)

    def trial_s(self, num_updates: int) -> float:
        """Wall time of one trial with its measurements, in seconds."""
        judge = self.base.judge
        update_s = self.episodes * (self.turns * self.rates.turn_s + self.rates.update_s / _UPDATE_EPISODES)
        interim = num_updates // judge.eval_every if judge.eval_every else 0
        evaluation_s = judge.eval_tasks * self.turns * self.rates.turn_s
        return self.rates.trial_overhead_s + num_updates * update_s + (1 + interim) * evaluation_s


def least_size(num_settings: int | None, *, costs: Costs) -> Size:
    """The least that answers a question with `num_settings` settings (None: a search)."""
    updates = min(MIN_UPDATES, costs.base.trainer.num_updates)
    return Size(num_settings or MIN_SEARCHED, MIN_SEEDS, updates)


def least_wall_s(num_settings: int | None, *, costs: Costs) -> float:
    """Least wall budget that holds the question, in whole minutes."""
    return math.ceil(costs.wall_s(least_size(num_settings, costs=costs)) / BUDGET_SHARE / 60) * 60.0


def fitted(num_settings: int | None, *, costs: Costs, budget: Budget) -> Size:
    """The most informative size that fits `budget`. Raises PlanRejected, with the least that would do."""
    least = least_size(num_settings, costs=costs)
    if not _fits(least, costs=costs, budget=budget):
        least_trials = least.num_trials if budget.trials is not None else None
        wall_s = least_wall_s(num_settings, costs=costs)
        raise too_small("The budget cannot hold this question", least_s=wall_s, least_trials=least_trials)
    if num_settings is None:
        return _fitted_search(least, costs=costs, budget=budget)
    return _fitted_comparison(least, costs=costs, budget=budget)


def too_small(what: str, *, least_s: float, least_trials: int | None = None) -> PlanRejected:
    """The refusal of a budget, naming the least that would do."""
    trials = f",trials={least_trials}" if least_trials is not None else ""
    return PlanRejected(
        what,
        why=f"a verdict needs every setting trained and measured with at least {MIN_SEEDS} seeds",
        next_step=f"give at least --budget wall={wording.duration_shown(least_s)}{trials}, the least that would do",
    )


def _fitted_comparison(least: Size, *, costs: Costs, budget: Budget) -> Size:
    """A third seed is worth more than further updates, as long as the updates are not too few to learn from;
    further seeds come when all updates fit."""
    wanted = costs.base.trainer.num_updates
    usual = Size(least.num_settings, USUAL_SEEDS, min(wanted, ENOUGH_UPDATES))
    start = usual if _fits(usual, costs=costs, budget=budget) else least
    size = replace(start, num_updates=most_updates(start, costs=costs, budget=budget))
    while size.num_updates == wanted and size.num_seeds < MAX_SEEDS:
        more = replace(size, num_seeds=size.num_seeds + 1)
        if not _fits(more, costs=costs, budget=budget):
            break
        size = more
    return size


def _fitted_search(least: Size, *, costs: Costs, budget: Budget) -> Size:
    """As many settings as fit at the usual updates, each with the fewest seeds; then more updates."""
    size = least
    usual = min(_SEARCH_UPDATES, costs.base.trainer.num_updates)
    while size.num_settings < MAX_SEARCHED:
        more = Size(size.num_settings + 1, MIN_SEEDS, usual)
        if not _fits(more, costs=costs, budget=budget):
            break
        size = more
    return replace(size, num_updates=most_updates(size, costs=costs, budget=budget))


def _fits(size: Size, *, costs: Costs, budget: Budget) -> bool:
    too_many = budget.trials is not None and size.num_trials > budget.trials
    return not too_many and costs.wall_s(size) <= BUDGET_SHARE * budget.wall_s


def most_updates(size: Size, *, costs: Costs, budget: Budget) -> int:
    """Most updates up to the base's own that fit; those of `size` do."""
    wanted = range(costs.base.trainer.num_updates, size.num_updates, -1)
    fitting = (updates for updates in wanted if _fits(replace(size, num_updates=updates), costs=costs, budget=budget))
    return next(fitting, size.num_updates)

"""What work costs on this machine, from the trials that it has already run."""

from __future__ import annotations

from statistics import median

from a3r.campaign import CampaignState, TrialState
from a3r.store.records import TrialRecord
from a3r.store.store import Store
from flows.lab import Lab
from vibe.sizing import Rates

_LOOK_BACK = 5
"""Campaigns that are looked at, the latest first."""


def measured_rates(lab: Lab, *, model: str) -> Rates | None:
    """Rates of this lab's finished training trials of a model; None when there are none yet."""
    store = Store(lab.store_url)
    try:
        finished = tuple(state for state in CampaignState if state.is_over)
        trials = [
            trial
            for campaign in store.campaigns(finished)[:_LOOK_BACK]
            for trial in store.campaign_trials(campaign.id, (TrialState.FINISHED,))
            if trial.config.model == model and trial.config.trainer.num_updates >= 5
        ]
        measured = [rate for trial in trials if (rate := _of_trial(store, trial)) is not None]
    finally:
        store.close()
    if not measured:
        return None
    return Rates(
        turn_s=median(turn_s for turn_s, _ in measured),
        update_s=median(update_s for _, update_s in measured),
        basis=f"measured on {len(measured)} trials of this lab",
    )


def _of_trial(store: Store, trial: TrialRecord) -> tuple[float, float] | None:
    """Seconds a turn and seconds an update of 128 episodes, of one trial."""
    last = trial.config.trainer.num_updates
    values = {point.name: point.value for point in store.metrics(trial.id) if point.step == last}
    updates = [point.value for point in store.series(trial.id, "train/seconds")]
    if "cost/turns" not in values or "cost/wall_s" not in values or not updates:
        return None
    episodes = trial.config.trainer.batch_tasks * trial.config.trainer.group_size
    rolling_s = max(values["cost/wall_s"] - sum(updates), 1e-3)
    return rolling_s / values["cost/turns"], median(updates) * 128 / episodes

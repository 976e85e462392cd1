"""The record's mirror in MLflow: campaign = experiment; experiment, setting and trial = nested runs.

MLflow is a display. When it fails, the campaign notes that once and goes on; the store has everything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from a3r.campaign import EventKind, TrialState
from a3r.errors import InfrastructureFault
from a3r.store.records import CampaignRecord, TrialRecord
from a3r.store.store import Store
from a3r.tracking import RunStatus, Tracking

_STATUS = {
    TrialState.FINISHED: RunStatus.FINISHED,
    TrialState.FAILED: RunStatus.FAILED,
    TrialState.CANCELLED: RunStatus.KILLED,
}


@dataclass
class Curves:
    """One trial's run in MLflow; does nothing once MLflow has failed or where there is none."""

    store: Store
    campaign_id: str
    tracking: Tracking | None
    run_id: str = ""

    def log(self, rows: Sequence[tuple[str, int, float]]) -> None:
        if self.tracking is None or not rows:
            return
        try:
            self.tracking.log_metrics(self.run_id, rows)
        except InfrastructureFault as fault:
            self._give_up(fault)

    def finish(self, state: TrialState) -> None:
        if self.tracking is None:
            return
        try:
            self.tracking.finish(self.run_id, _STATUS[state])
        except InfrastructureFault as fault:
            self._give_up(fault)

    def _give_up(self, fault: InfrastructureFault) -> None:
        self.tracking = None
        self.store.add_event(
            self.campaign_id, EventKind.FAULT, f"MLflow is left out: {fault}", data={"boundary": fault.boundary}
        )


def trial_curves(store: Store, trial: TrialRecord, *, campaign: CampaignRecord) -> Curves:
    """The run of a trial under its setting, its experiment and its campaign; made where they are missing."""
    curves = Curves(store=store, campaign_id=campaign.id, tracking=None)
    try:
        tracking = _tracking()
        if tracking is not None:
            curves.run_id = _open_trial_run(tracking, store, trial, campaign=campaign)
            curves.tracking = tracking
    except InfrastructureFault as fault:
        curves._give_up(fault)  # noqa: SLF001 - of this very module
    return curves


def campaign_links(campaign: CampaignRecord, *, flow_run_id: str) -> dict[str, str]:
    """Pages about a campaign in Prefect and MLflow."""
    links = {}
    prefect_url = os.environ.get("PREFECT_API_URL", "").removesuffix("/api")
    if prefect_url:
        links["prefect"] = f"{prefect_url}/runs/flow-run/{flow_run_id}"
    tracking = _tracking()
    if tracking is not None:
        try:
            page = tracking.experiment_url(tracking.open_experiment(campaign.id, question=campaign.question))
        except InfrastructureFault:
            page = None  # the first trial notes that MLflow is left out
        if page is not None:
            links["mlflow"] = page
    return links


def _tracking() -> Tracking | None:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return Tracking(uri) if uri else None


def _open_trial_run(tracking: Tracking, store: Store, trial: TrialRecord, *, campaign: CampaignRecord) -> str:
    setting = store.setting(trial.setting_id)
    experiment = tracking.open_experiment(campaign.id, question=campaign.question)
    top = tracking.open_run(experiment, setting.experiment_id, name=f"experiment {setting.experiment_id}")
    tags = {"a3r.campaign": campaign.id, "a3r.kind": setting.kind.value, "a3r.setting": setting.key}
    nested = tracking.open_run(experiment, setting.id, name=setting.key, parent=top, tags=tags)
    run = tracking.open_run(
        experiment,
        trial.id,
        name=f"{setting.key} seed {trial.seed}",
        parent=nested,
        tags=tags | {"a3r.seed": str(trial.seed)},
    )
    tracking.log_params(run, _flat(trial))
    return run


def _flat(trial: TrialRecord) -> dict[str, object]:
    config = trial.config
    return {
        "model": config.model,
        "seed": config.seed,
        **{f"trainer.{name}": value for name, value in config.trainer.model_dump().items()},
        **{f"judge.{name}": value for name, value in config.judge.model_dump().items()},
    }

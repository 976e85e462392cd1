"""Brings store, processes and Prefect to one truth after something was killed.

The store is the truth. A campaign that says it runs but whose process is gone is taken up again; its trial that
ran is planned anew; Prefect's run of it, which would say Running for ever, is marked Crashed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from a3r.campaign import CampaignState, TrialState
from a3r.store.records import CampaignRecord
from a3r.store.store import Store
from flows.deployment import hand_over
from flows.desk import identity_of
from flows.lab import Lab
from flows.swarm_pool import SwarmPool

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, StateType

STARTING_S = 60.0
"""How long a Prefect run may take until the campaign's process shows up in the record."""


def reconcile(lab: Lab) -> list[str]:
    """Take up every interrupted campaign; returns their ids."""
    store = Store(lab.store_url)
    try:
        taken_up = []
        for campaign in store.campaigns((CampaignState.APPROVED, CampaignState.RUNNING)):
            if not runs(campaign) and not _is_fresh(campaign) and not is_starting(campaign.id):
                reconcile_campaign(store, campaign)
                hand_over(campaign.id)
                taken_up.append(campaign.id)
        return taken_up
    finally:
        store.close()


def runs(campaign: CampaignRecord) -> bool:
    """Whether the process that owns the campaign is alive."""
    return campaign.owner is not None and identity_of(campaign.owner).is_alive


def _is_fresh(campaign: CampaignRecord) -> bool:
    """Whether it was approved so lately that whoever ordered it is about to hand it to Prefect."""
    approved_at = campaign.approved_at or campaign.created_at
    return campaign.state is CampaignState.APPROVED and time.time() - approved_at < STARTING_S


def is_starting(campaign_id: str) -> bool:
    """Whether Prefect holds a run of the campaign whose process may still be about to start."""
    from prefect.client.schemas.objects import StateType

    now = datetime.now(UTC)
    for run in _flow_runs(campaign_id, (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING)):
        since = run.start_time or run.expected_start_time or run.created
        if since is not None and (now - since).total_seconds() < STARTING_S:
            return True
    return False


def reconcile_campaign(store: Store, campaign: CampaignRecord) -> None:
    """Make the record of a campaign whose process is gone fit to be taken up."""
    lab = Lab.locate()
    SwarmPool(lab.campaign_folder(campaign.id) / "swarm").close()
    for trial in store.campaign_trials(campaign.id, (TrialState.RUNNING,)):
        store.replan_trial(trial.id, reason="the process that ran it was gone")
    store.own_campaign(campaign.id, None)
    _mark_crashed(campaign.id)


def _mark_crashed(campaign_id: str) -> None:
    """Prefect never finds out by itself that a killed flow run is gone."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    with get_client(sync_client=True) as client:
        for run in _flow_runs(campaign_id, (StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED)):
            client.set_flow_run_state(run.id, Crashed(message="its process was gone"), force=True)


def _flow_runs(campaign_id: str, states: Sequence[StateType]) -> list[FlowRun]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, FlowRunFilterState
    from prefect.client.schemas.filters import FlowRunFilterStateType as StateTypes

    wanted = FlowRunFilter(
        name=FlowRunFilterName(any_=[f"campaign {campaign_id}"]),
        state=FlowRunFilterState(type=StateTypes(any_=list(states))),
    )
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_run_filter=wanted)

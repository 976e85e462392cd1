"""From a sentence to a campaign that runs: plan it, record it, hand it to the runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from a3r.campaign import CampaignState
from a3r.config import Budget, TrialConfig
from a3r.errors import UsageError
from a3r.plan import BriefKind, Plan
from a3r.store.store import Store
from flows.deployment import hand_over
from flows.lab import Lab
from flows.llm_settings import keep_llm_settings
from flows.rates import measured_rates
from flows.record import named_campaign
from flows.services import bring_up
from vibe.brief import understand
from vibe.planner import plan as plan_of
from vibe.sandbox import choose_sandbox


@dataclass(frozen=True, slots=True)
class Order:
    """What a person asked for."""

    text: str
    kind: BriefKind
    base: TrialConfig
    budget: Budget | None
    coder: str
    sandbox: str | None


def draft(order: Order) -> Plan:
    """The plan of an order; nothing is spent and nothing recorded.

    Raises UsageError or PlanRejected for what makes no sense, EnvironmentNotReady when the model, the coder's key
    or the sandbox is missing: all of that is found out before a person approves.
    """
    if not order.text:
        raise UsageError(
            "The sentence is empty", next_step='say what to do, as in a3r research "Which learning rate …?"'
        )
    brief = understand(order.text, kind=order.kind)
    _check_environment(order)
    lab = Lab.locate()
    return plan_of(
        order.text, brief=brief, budget=order.budget, base=order.base, rates=measured_rates(lab, model=order.base.model)
    )


def _check_environment(order: Order) -> None:
    from flows.model_folder import check_model
    from flows.programming import coder_named

    coder_named(order.coder, environment=os.environ)
    check_model(order.base.model)
    choose_sandbox(code_is_shipped=order.coder == "recipes", asked=order.sandbox)


def submit(order: Order, plan: Plan, *, notify: Callable[[str], None]) -> str:
    """Record an approved plan as a campaign and start it. Returns its id."""
    lab = Lab.locate()
    store = Store(lab.store_url)
    campaign = store.create_campaign(plan, options={"coder": order.coder, "sandbox": order.sandbox})
    if order.coder != "recipes":
        keep_llm_settings(lab.campaign_folder(campaign.id), os.environ)
    try:
        notify(f"campaign {campaign.id}: starting services")
        os.environ.update(bring_up(lab).environment())
        # Approved only now: the runner takes up approved campaigns that nobody hands to it.
        store.set_campaign_state(campaign.id, CampaignState.APPROVED, reason="approved by the person who ordered it")
        hand_over(campaign.id)
    finally:
        store.close()
    return campaign.id


def resume_campaign(prefix: str, *, notify: Callable[[str], None]) -> str:
    """Go on with an interrupted campaign; harmless for one that runs. Returns its id.

    Raises UsageError for one that is over.
    """
    from flows.reconcile import is_starting, reconcile_campaign, runs

    lab = Lab.locate()
    store = Store(lab.store_url)
    try:
        campaign = named_campaign(store, prefix)
        if not campaign.state.is_resumable:
            raise UsageError(
                f"Campaign {campaign.id} is {campaign.state} and cannot go on",
                next_step=f"read it with a3r report {campaign.id}, or start a new one",
            )
        if not runs(campaign):
            notify(f"campaign {campaign.id}: taking it up again")
            os.environ.update(bring_up(lab).environment())
            if not is_starting(campaign.id):
                reconcile_campaign(store, campaign)
                hand_over(campaign.id)
        return campaign.id
    finally:
        store.close()

"""One campaign's working place: its record, its files, its clock, its warm servers. Opened from ids by anyone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from a3r.campaign import CampaignState, EventKind
from a3r.errors import A3RError, BudgetExhausted
from a3r.store.records import CampaignRecord, Owner, TrialRecord
from a3r.store.store import Store
from flows.judge import Assignment
from flows.lab import Lab
from flows.processes import ProcessIdentity
from flows.swarm_pool import SwarmPool, WarmServer

REPORT_RESERVE_S = 15.0
"""Wall time kept back for judging and the report."""


class Cancelled(A3RError):
    """A person asked for the campaign to end."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What every step of a campaign needs."""

    lab: Lab
    store: Store
    campaign_id: str

    @classmethod
    @contextmanager
    def open(cls, campaign_id: str) -> Iterator[Desk]:
        """The desk of a campaign of this lab."""
        lab = Lab.locate()
        store = Store(lab.store_url)
        try:
            yield cls(lab=lab, store=store, campaign_id=campaign_id)
        finally:
            store.close()

    @property
    def campaign(self) -> CampaignRecord:
        """The campaign's row as it is now."""
        return self.store.campaign(self.campaign_id)

    @property
    def folder(self) -> Path:
        return self.lab.campaign_folder(self.campaign_id)

    @property
    def pool(self) -> SwarmPool:
        return SwarmPool(self.folder / "swarm")

    def trial_folder(self, trial: TrialRecord) -> Path:
        """Folder of this attempt at a trial."""
        return self.folder / "trials" / f"{trial.id}-{trial.attempts}"

    def remaining_s(self) -> float:
        """Wall time left for trials, in seconds."""
        deadline = self.campaign.deadline
        if deadline is None:
            raise AssertionError("a campaign that runs was approved")
        return deadline - time.time() - REPORT_RESERVE_S

    def check_stop(self) -> None:
        """Raise Cancelled when a person asked for the end, BudgetExhausted when the wall time is spent."""
        if self.store.events_after(self.campaign_id, kinds=(EventKind.CANCEL,)):
            raise Cancelled("The campaign was cancelled", next_step=f"a3r report {self.campaign_id}")
        if self.remaining_s() <= 0:
            raise BudgetExhausted("The wall time of the budget is spent", next_step=f"a3r report {self.campaign_id}")

    def note(self, text: str, *, kind: EventKind = EventKind.NOTE) -> None:
        """One line for whoever watches."""
        self.store.add_event(self.campaign_id, kind, text)

    def end(self, state: CampaignState, *, reason: str = "") -> None:
        self.store.set_campaign_state(self.campaign_id, state, reason=reason)
        self.store.own_campaign(self.campaign_id, None)

    def assignment(self, trial: TrialRecord, *, server: WarmServer) -> Assignment:
        """What the judge of a trial is told."""
        campaign = self.campaign
        program = self.store.programs(self.campaign_id)[-1]
        return judge_assignment(
            campaign,
            trial_id=f"{trial.id}-{trial.attempts}",
            program_folder=program.path,
            folder=self.trial_folder(trial),
            server=server,
        ).updated({"config": trial.config.model_dump(mode="json")})


def judge_assignment(
    campaign: CampaignRecord, *, trial_id: str, program_folder: str, folder: Path, server: WarmServer
) -> Assignment:
    """A judge's instructions for a campaign's base settings."""
    brief = campaign.plan.brief
    if brief.recipe is None or campaign.hidden_seed is None or campaign.hidden_sha256 is None:
        raise AssertionError("hidden tasks are fixed before anything is judged")
    coder, sandbox = campaign.options["coder"], campaign.options["sandbox"]
    return Assignment(
        trial_id=trial_id,
        config=campaign.plan.base,
        program_folder=program_folder,
        recipe=brief.recipe,
        parameters=brief.parameters,
        hidden_seed=campaign.hidden_seed,
        hidden_sha256=campaign.hidden_sha256,
        swarm_url=server.url,
        swarm_socket=server.socket,
        client_key=server.client_key,
        folder=str(folder),
        code_is_shipped=coder == "recipes",
        sandbox=None if sandbox is None else str(sandbox),
        packages=brief.allowed_packages,
    )


def owner_of(identity: ProcessIdentity) -> Owner:
    """A process as the record names it."""
    return Owner(pid=identity.pid, started_at=identity.started_at)


def identity_of(owner: Owner) -> ProcessIdentity:
    """A recorded owner as a process."""
    return ProcessIdentity(pid=owner.pid, started_at=owner.started_at)

"""Reading the record for faces: where a campaign stands, its trials, its transcripts; and asking it to end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from a3r.campaign import EventKind, SettingKind, exit_code
from a3r.episode import EpisodeKind
from a3r.errors import NotFound
from a3r.store.records import (
    CampaignRecord,
    EpisodeSummary,
    Event,
    HypothesisRecord,
    ProgramRecord,
    SettingRecord,
    TrialRecord,
)
from a3r.store.store import Store
from flows.lab import Lab
from flows.llm_settings import forget_llm_settings
from flows.report import ReportPaths, write_report


@contextmanager
def open_store() -> Iterator[Store]:
    """The store of this lab."""
    store = Store(Lab.locate().store_url)
    try:
        yield store
    finally:
        store.close()


def named_campaign(store: Store, name: str) -> CampaignRecord:
    """The campaign with this id or beginning of an id; `last` is the latest. Raises NotFound or UsageError."""
    if name != "last":
        return store.campaign(name)
    campaigns = store.campaigns()
    if not campaigns:
        raise NotFound("There is no campaign yet", next_step='start one: a3r research "Which learning rate is best?"')
    return campaigns[0]


@dataclass(frozen=True, slots=True)
class TrialStanding:
    """One trial as it is now."""

    trial: TrialRecord
    setting: SettingRecord
    updates: int
    """Updates done."""
    reward: float | None
    """Mean training reward of the latest update."""
    success: float | None
    """Held-out success, once measured."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A campaign as it is now."""

    campaign: CampaignRecord
    hypotheses: tuple[HypothesisRecord, ...]
    programs: tuple[ProgramRecord, ...]
    trials: tuple[TrialStanding, ...]

    @property
    def num_planned_trials(self) -> int:
        """Trials of the whole plan, with the untrained policy's."""
        return self.campaign.plan.estimate.trials + 1

    @property
    def exit_code(self) -> int:
        """What a command that waited for its end exits with."""
        verdicts = [row.verdict for row in self.hypotheses if row.verdict is not None]
        return exit_code(self.campaign.state, kind=self.campaign.kind, verdicts=verdicts)

    @property
    def elapsed_s(self) -> float:
        started = self.campaign.approved_at or self.campaign.created_at
        return (self.campaign.ended_at or time.time()) - started


def standing(store: Store, campaign_id: str) -> Standing:
    """Everything about a campaign that changes while it runs."""
    settings = {
        setting.id: setting
        for experiment in store.experiments(campaign_id)
        for setting in store.settings(experiment.id)
    }
    return Standing(
        campaign=store.campaign(campaign_id),
        hypotheses=tuple(store.hypotheses(campaign_id)),
        programs=tuple(store.programs(campaign_id)),
        trials=tuple(
            _trial_standing(store, trial, settings[trial.setting_id]) for trial in store.campaign_trials(campaign_id)
        ),
    )


def _trial_standing(store: Store, trial: TrialRecord, setting: SettingRecord) -> TrialStanding:
    rewards = store.series(trial.id, "train/reward")
    successes = store.series(trial.id, "eval/success")
    return TrialStanding(
        trial=trial,
        setting=setting,
        updates=rewards[-1].step if rewards else 0,
        reward=rewards[-1].value if rewards else None,
        success=successes[-1].value if successes else None,
    )


def new_events(store: Store, campaign_id: str, *, after: int) -> list[Event]:
    """Events since the one numbered `after`."""
    return store.events_after(campaign_id, after)


def request_cancel(store: Store, name: str) -> CampaignRecord:
    """Ask a campaign to end; it does so within seconds. One that is over only forgets its LLM key."""
    campaign = named_campaign(store, name)
    if campaign.state.is_over:
        forget_llm_settings(Lab.locate().campaign_folder(campaign.id))
    else:
        store.add_event(campaign.id, EventKind.CANCEL, "cancelled from the command line")
    return campaign


def render_report(store: Store, name: str) -> ReportPaths:
    """The report of a campaign as it stands now."""
    campaign = named_campaign(store, name)
    folder = Lab.locate().campaign_folder(campaign.id) / "report"
    return write_report(store, campaign.id, folder, links=dict(campaign.links))


@dataclass(frozen=True, slots=True)
class Shown:
    """A hidden-task episode with its transcript and where it comes from."""

    trial_id: str
    setting: str
    episode: EpisodeSummary

    def as_json(self) -> dict[str, Any]:
        transcript = self.episode.transcript
        return {
            "trial": self.trial_id,
            "setting": self.setting,
            "episode": self.episode.episode_id,
            "task": self.episode.task_id,
            "metric": self.episode.metric,
            "ending": self.episode.ending.value,
            "transcript": None if transcript is None else transcript.as_json(),
        }


def transcripts(store: Store, name: str, *, best: bool, limit: int) -> list[Shown]:
    """The best or worst kept hidden-task episodes of a campaign (or one trial, by its id)."""
    trials = _named_trials(store, name)
    kept = [
        Shown(trial_id=trial.id, setting=store.setting(trial.setting_id).key, episode=episode)
        for trial in trials
        for episode in store.episodes(trial.id, EpisodeKind.EVAL)
        if episode.transcript is not None and episode.metric is not None
    ]
    return sorted(kept, key=lambda shown: (shown.episode.metric or 0.0, -shown.episode.turns), reverse=best)[:limit]


def _named_trials(store: Store, name: str) -> list[TrialRecord]:
    if name.startswith("t-"):
        return [store.trial(name)]
    return store.campaign_trials(named_campaign(store, name).id)


def is_baseline(setting: SettingRecord) -> bool:
    """Whether the setting is the untrained policy."""
    return setting.kind is SettingKind.BASELINE

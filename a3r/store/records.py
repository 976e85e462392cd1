"""What the store hands out: frozen records, plain values, no live rows. `of` reads one off its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from a3r.campaign import CampaignState, EventKind, SettingKind, TrialState, Verdict
from a3r.config import TrialConfig, parsed
from a3r.episode import Ending, EpisodeKind, Transcript
from a3r.plan import BriefKind, Plan, PlannedHypothesis
from a3r.store import tables


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that runs a row; pid and start time together name one process for ever."""

    pid: int
    started_at: float
    """Seconds since the epoch, as the kernel reports it."""

    @classmethod
    def of(cls, row: tables.CampaignRow | tables.TrialRow) -> Owner | None:
        if row.owner_pid is None or row.owner_started_at is None:
            return None
        return cls(row.owner_pid, row.owner_started_at)


@dataclass(frozen=True, slots=True)
class CampaignRecord:
    id: str
    state: CampaignState
    kind: BriefKind
    question: str
    plan: Plan
    options: Mapping[str, JsonValue]
    """How it was ordered: coder, sandbox and the like."""
    links: Mapping[str, str]
    """Pages about it, by name: `prefect`, `mlflow`."""
    hidden_seed: int | None
    hidden_sha256: str | None
    """Hash of the hidden tasks, taken before any program was written."""
    reason: str
    """Why it is in its state, where that needs a reason."""
    created_at: float
    approved_at: float | None
    ended_at: float | None
    owner: Owner | None

    @property
    def deadline(self) -> float | None:
        """When its wall-time budget ends, in seconds since the epoch; None before approval."""
        return None if self.approved_at is None else self.approved_at + self.plan.budget.wall_s

    @classmethod
    def of(cls, row: tables.CampaignRow) -> CampaignRecord:
        return cls(
            id=row.id,
            state=CampaignState(row.state),
            kind=BriefKind(row.kind),
            question=row.question,
            plan=parsed(Plan, row.plan),
            options=row.options,
            links=row.links,
            hidden_seed=row.hidden_seed,
            hidden_sha256=row.hidden_sha256,
            reason=row.reason,
            created_at=row.created_at,
            approved_at=row.approved_at,
            ended_at=row.ended_at,
            owner=Owner.of(row),
        )


@dataclass(frozen=True, slots=True)
class HypothesisRecord:
    campaign_id: str
    index: int
    planned: PlannedHypothesis
    verdict: Verdict | None
    judged_at: float | None

    @classmethod
    def of(cls, row: tables.HypothesisRow) -> HypothesisRecord:
        return cls(
            campaign_id=row.campaign_id,
            index=row.index,
            planned=parsed(PlannedHypothesis, row.planned),
            verdict=None if row.verdict is None else Verdict.from_json(row.verdict),
            judged_at=row.judged_at,
        )


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    id: str
    campaign_id: str
    sha256: str
    commit: str
    path: str
    coder: str
    attempts: int
    """Versions the coder wrote until the gates let one pass."""
    gates: Mapping[str, str]
    """What each gate found, by its name."""
    created_at: float

    @classmethod
    def of(cls, row: tables.ProgramRow) -> ProgramRecord:
        return cls(**row.model_dump())


@dataclass(frozen=True, slots=True)
class ExperimentRecord:
    id: str
    campaign_id: str
    hypothesis_index: int
    program_id: str
    created_at: float

    @classmethod
    def of(cls, row: tables.ExperimentRow) -> ExperimentRecord:
        return cls(**row.model_dump())


@dataclass(frozen=True, slots=True)
class SettingRecord:
    id: str
    experiment_id: str
    index: int
    """Order of opening within the experiment, from 0."""
    key: str
    kind: SettingKind
    values: Mapping[str, JsonValue]
    number: int | None
    """Its number in the search, if the search proposed it."""

    @classmethod
    def of(cls, row: tables.SettingRow) -> SettingRecord:
        return cls(row.id, row.experiment_id, row.index, row.key, SettingKind(row.kind), row.values, row.number)


@dataclass(frozen=True, slots=True)
class TrialRecord:
    id: str
    setting_id: str
    seed: int
    state: TrialState
    config: TrialConfig
    attempts: int
    """Times it was started."""
    reason: str
    """Why it failed or was cancelled."""
    started_at: float | None
    ended_at: float | None
    owner: Owner | None

    @classmethod
    def of(cls, row: tables.TrialRow) -> TrialRecord:
        return cls(
            id=row.id,
            setting_id=row.setting_id,
            seed=row.seed,
            state=TrialState(row.state),
            config=parsed(TrialConfig, row.config),
            attempts=row.attempts,
            reason=row.reason,
            started_at=row.started_at,
            ended_at=row.ended_at,
            owner=Owner.of(row),
        )


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One number: what a report's references resolve to."""

    name: str
    step: int
    """Policy updates behind it; 0 is the untrained policy."""
    value: float


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """One judged episode. Only a few, the best and the worst, keep their transcript."""

    episode_id: str
    task_id: str
    kind: EpisodeKind
    step: int
    ending: Ending
    reward: float | None
    """Reward of a training episode; None on a fault or a hidden task."""
    metric: float | None
    """Metric of a hidden task; None on a fault or a training task."""
    turns: int
    transcript: Transcript | None = None

    @classmethod
    def of(cls, row: tables.EpisodeRow) -> EpisodeSummary:
        return cls(
            episode_id=row.episode_id,
            task_id=row.task_id,
            kind=EpisodeKind(row.kind),
            step=row.step,
            ending=Ending(row.ending),
            reward=row.reward,
            metric=row.metric,
            turns=row.turns,
            transcript=None if row.transcript is None else Transcript.from_json(row.transcript),
        )


@dataclass(frozen=True, slots=True)
class Event:
    """One row of the append-only event table."""

    id: int
    """Grows with time within a campaign."""
    campaign_id: str
    trial_id: str | None
    kind: EventKind
    text: str
    at: float
    data: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: tables.EventRow) -> Event:
        assert row.id is not None, "a row that was read has its id"
        return cls(row.id, row.campaign_id, row.trial_id, EventKind(row.kind), row.text, row.at, row.data)

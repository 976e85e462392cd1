"""The write side of the record. Only `flows` (and steering faces) write it.

Every write is idempotent by its domain key: a campaign's id, a hypothesis' index, a program's hash, a setting's
values, a trial's seed, a metric's name and step, an episode's id. So a step that is repeated after a crash finds
what it did. Events alone are appended each time.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import JsonValue
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, SQLModel, col, select

from a3r.campaign import (
    CampaignState,
    EventKind,
    SettingKind,
    TrialState,
    Verdict,
    check_campaign_move,
    check_trial_move,
    setting_key,
)
from a3r.config import TrialConfig
from a3r.errors import InfrastructureFault, NotFound, UsageError
from a3r.plan import Plan
from a3r.store import records, tables
from a3r.store.database import Database
from a3r.store.reader import Reader

_SLUG_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"
_SLUG_LENGTH = 4
_ROWS_PER_STATEMENT = 500


class Store(Reader):
    """The record at a database URL, open for reading and writing.

    `sqlite:////folder/a3r.db`, `sqlite://` (memory, one thread) or `postgresql://user@host/database`.
    """

    def __init__(self, url: str) -> None:
        super().__init__(Database(url))

    def close(self) -> None:
        self._database.close()

    def create_campaign(
        self,
        plan: Plan,
        *,
        id: str | None = None,
        options: Mapping[str, JsonValue] | None = None,
    ) -> records.CampaignRecord:
        """Record a plan as a campaign in state PLANNED. With an `id` that exists, return that campaign; raises
        UsageError when its plan is another one."""
        with self._writing() as session:
            row = session.get(tables.CampaignRow, id) if id is not None else None
            if row is None:
                row = _new_campaign(plan, campaign_id=id or _free_slug(session), options=options or {})
                session.add(row)
                session.flush()
                session.add_all(_hypotheses(row.id, plan))
            record = records.CampaignRecord.of(row)
        if record.plan != plan:
            raise UsageError(f"Campaign {record.id} exists with another plan", next_step="leave the id out")
        return record

    def set_campaign_state(self, campaign_id: str, state: CampaignState, *, reason: str = "") -> records.CampaignRecord:
        """Move a campaign and append a STATE event; the state it has already is left alone.

        Raises NotFound, IllegalTransition.
        """
        with self._writing() as session:
            row = _locked(session, tables.CampaignRow, campaign_id, noun="campaign")
            old = CampaignState(row.state)
            check_campaign_move(old, state)
            if old is not state:
                _enter(row, state, reason=reason)
                _append(session, campaign_id, EventKind.STATE, reason, data={"state": state.value})
            return records.CampaignRecord.of(row)

    def own_campaign(self, campaign_id: str, owner: records.Owner | None) -> records.CampaignRecord:
        """Say which process runs a campaign, or that none does. Raises NotFound."""
        with self._writing() as session:
            row = _locked(session, tables.CampaignRow, campaign_id, noun="campaign")
            _set_owner(row, owner)
            return records.CampaignRecord.of(row)

    def add_links(self, campaign_id: str, links: Mapping[str, str]) -> records.CampaignRecord:
        """Add pages about a campaign by name; a name that exists is replaced. Raises NotFound."""
        with self._writing() as session:
            row = _locked(session, tables.CampaignRow, campaign_id, noun="campaign")
            row.links = row.links | dict(links)
            return records.CampaignRecord.of(row)

    def set_hidden_tasks(self, campaign_id: str, *, seed: int, sha256: str) -> records.CampaignRecord:
        """Fix the hidden tasks by seed and hash. Raises NotFound, and UsageError when others are fixed already."""
        with self._writing() as session:
            row = _locked(session, tables.CampaignRow, campaign_id, noun="campaign")
            if row.hidden_sha256 is not None and (row.hidden_seed, row.hidden_sha256) != (seed, sha256):
                raise UsageError(
                    f"The hidden tasks of campaign {campaign_id} are fixed already",
                    why="others would make its trials incomparable",
                    next_step="start a new campaign",
                )
            row.hidden_seed, row.hidden_sha256 = seed, sha256
            return records.CampaignRecord.of(row)

    def set_verdict(self, campaign_id: str, index: int, verdict: Verdict) -> records.HypothesisRecord:
        """Record the verdict on a hypothesis; a later one (after a resume) replaces it. Raises NotFound."""
        with self._writing() as session:
            _locked(session, tables.CampaignRow, campaign_id, noun="campaign")
            row = session.get(tables.HypothesisRow, (campaign_id, index))
            if row is None:
                raise NotFound(f"Campaign {campaign_id} has no hypothesis {index}")
            if row.verdict != verdict.as_json():
                row.verdict, row.judged_at = verdict.as_json(), time.time()
                data = {"hypothesis": index, "verdict": verdict.kind.value}
                _append(session, campaign_id, EventKind.VERDICT, verdict.reason, data=data)
            return records.HypothesisRecord.of(row)

    def add_program(
        self,
        campaign_id: str,
        *,
        sha256: str,
        commit: str,
        path: str,
        coder: str,
        attempts: int = 1,
        gates: Mapping[str, str] | None = None,
    ) -> records.ProgramRecord:
        """Record a program that passed its gates; the same hash again is the same program."""
        with self._writing() as session:
            _locked(session, tables.CampaignRow, campaign_id, noun="campaign")
            query = select(tables.ProgramRow).where(tables.ProgramRow.campaign_id == campaign_id)
            rows = session.exec(query).all()
            row = next((row for row in rows if row.sha256 == sha256), None)
            if row is None:
                row = tables.ProgramRow(
                    id=f"p-{campaign_id[2:]}-{len(rows)}",
                    campaign_id=campaign_id,
                    sha256=sha256,
                    commit=commit,
                    path=path,
                    coder=coder,
                    attempts=attempts,
                    gates=dict(gates or {}),
                    created_at=time.time(),
                )
                session.add(row)
            return records.ProgramRecord.of(row)

    def open_experiment(
        self, campaign_id: str, *, program_id: str, hypothesis_index: int = 0
    ) -> records.ExperimentRecord:
        """The experiment on one hypothesis, made when it is missing."""
        with self._writing() as session:
            _locked(session, tables.CampaignRow, campaign_id, noun="campaign")
            experiment_id = f"e-{campaign_id[2:]}-{hypothesis_index}"
            row = session.get(tables.ExperimentRow, experiment_id)
            if row is None:
                row = tables.ExperimentRow(
                    id=experiment_id,
                    campaign_id=campaign_id,
                    hypothesis_index=hypothesis_index,
                    program_id=program_id,
                    created_at=time.time(),
                )
                session.add(row)
            return records.ExperimentRecord.of(row)

    def open_setting(
        self,
        experiment_id: str,
        values: Mapping[str, JsonValue],
        *,
        kind: SettingKind = SettingKind.PLANNED,
        number: int | None = None,
    ) -> records.SettingRecord:
        """The setting with these values, made when it is missing; `number` is the search's. Raises NotFound."""
        key = setting_key(values)
        with self._writing() as session:
            _locked(session, tables.ExperimentRow, experiment_id, noun="experiment")
            query = select(tables.SettingRow).where(tables.SettingRow.experiment_id == experiment_id)
            rows = session.exec(query).all()
            row = next((row for row in rows if row.key == key), None)
            if row is None:
                row = tables.SettingRow(
                    id=f"s-{experiment_id[2:]}-{len(rows)}",
                    experiment_id=experiment_id,
                    index=len(rows),
                    key=key,
                    kind=kind.value,
                    values=dict(values),
                    number=number,
                )
                session.add(row)
            elif row.number is None:
                row.number = number  # such as the baseline's, which a search may propose too
            return records.SettingRecord.of(row)

    def open_trial(self, setting_id: str, *, seed: int, config: TrialConfig) -> records.TrialRecord:
        """The trial of a setting with a seed, made in state PLANNED when it is missing. Raises NotFound."""
        with self._writing() as session:
            _locked(session, tables.SettingRow, setting_id, noun="setting")
            trial_id = f"t-{setting_id[2:]}-{seed}"
            row = session.get(tables.TrialRow, trial_id)
            if row is None:
                row = tables.TrialRow(
                    id=trial_id,
                    setting_id=setting_id,
                    seed=seed,
                    state=TrialState.PLANNED.value,
                    config=config.model_dump(mode="json"),
                    attempts=0,
                )
                session.add(row)
            return records.TrialRecord.of(row)

    def start_trial(self, trial_id: str, *, owner: records.Owner) -> records.TrialRecord:
        """Move a trial to RUNNING under an owner, as its next attempt. Raises NotFound, IllegalTransition."""
        with self._writing() as session:
            row = _locked(session, tables.TrialRow, trial_id, noun="trial")
            old = TrialState(row.state)
            check_trial_move(old, TrialState.RUNNING)
            _set_owner(row, owner)
            if old is not TrialState.RUNNING:
                row.state, row.reason = TrialState.RUNNING.value, ""
                row.attempts += 1
                row.started_at, row.ended_at = time.time(), None
                _append_trial_state(session, row)
            return records.TrialRecord.of(row)

    def close_trial(self, trial_id: str, state: TrialState, *, reason: str = "") -> records.TrialRecord:
        """End a trial as FINISHED, FAILED or CANCELLED, with the reason. Raises NotFound, IllegalTransition."""
        if not state.is_over:
            raise UsageError(f"A trial does not end as {state}")
        return self._move_trial(trial_id, state, reason=reason)

    def replan_trial(self, trial_id: str, *, reason: str) -> records.TrialRecord:
        """Put a failed trial, or one whose owner died, back to PLANNED. What the attempt measured is kept until the
        next one writes the same metric and step. Raises NotFound, IllegalTransition."""
        return self._move_trial(trial_id, TrialState.PLANNED, reason=reason)

    def _move_trial(self, trial_id: str, state: TrialState, *, reason: str) -> records.TrialRecord:
        with self._writing() as session:
            row = _locked(session, tables.TrialRow, trial_id, noun="trial")
            old = TrialState(row.state)
            check_trial_move(old, state)
            if old is not state:
                row.state, row.reason = state.value, reason
                row.ended_at = time.time() if state.is_over else None
                _set_owner(row, None)
                _append_trial_state(session, row)
            return records.TrialRecord.of(row)

    def add_metrics(self, trial_id: str, rows: Iterable[tuple[str, int, float]]) -> None:
        """Write (name, step, value) rows of a trial; the same name and step again replaces the value.

        Raises UsageError when a value is not finite, NotFound when there is no such trial.
        """
        values = {(name, step): float(value) for name, step, value in rows}
        for (name, step), value in values.items():
            if not math.isfinite(value):
                raise UsageError(f"Metric {name!r} of trial {trial_id} at step {step} is {value}, not a number")
        self._upsert(
            tables.MetricRow,
            [
                {"trial_id": trial_id, "name": name, "step": step, "value": value}
                for (name, step), value in values.items()
            ],
            key=("trial_id", "name", "step"),
        )

    def add_episodes(self, trial_id: str, episodes: Iterable[records.EpisodeSummary]) -> None:
        """Write episode summaries of a trial; the same episode again replaces it. Raises NotFound."""
        rows = {episode.episode_id: _episode_values(trial_id, episode) for episode in episodes}
        self._upsert(tables.EpisodeRow, list(rows.values()), key=("trial_id", "episode_id"))

    def add_event(
        self,
        campaign_id: str,
        kind: EventKind,
        text: str = "",
        *,
        trial_id: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> records.Event:
        """Append an event. Raises NotFound."""
        with self._writing() as session:
            # The lock makes ids of one campaign become visible in their order, so that a follower misses none.
            _locked(session, tables.CampaignRow, campaign_id, noun="campaign")
            return records.Event.of(_append(session, campaign_id, kind, text, trial_id=trial_id, data=data or {}))

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        try:
            with self._database.writing() as session:
                yield session
        except IntegrityError as error:
            raise InfrastructureFault(
                "The store refused a row", why=str(error.orig), next_step="try again; if it persists, report it"
            ) from error

    def _upsert(self, table: type[SQLModel], rows: Sequence[Mapping[str, Any]], *, key: tuple[str, ...]) -> None:
        if not rows:
            return
        insert = postgresql.insert if self._database.dialect == "postgresql" else sqlite.insert
        statement = insert(table)
        replaced = {name: statement.excluded[name] for name in rows[0] if name not in key}
        statement = statement.on_conflict_do_update(index_elements=key, set_=replaced)
        with self._writing() as session:
            if session.get(tables.TrialRow, rows[0]["trial_id"]) is None:
                raise NotFound(f"There is no trial {rows[0]['trial_id']!r}")
            for start in range(0, len(rows), _ROWS_PER_STATEMENT):
                session.connection().execute(statement, list(rows[start : start + _ROWS_PER_STATEMENT]))


def _free_slug(session: Session) -> str:
    """A short id that no campaign has, without look-alike characters; longer ones once short ones run out."""
    for attempt in range(1000):
        length = _SLUG_LENGTH + attempt // 20
        slug = "c-" + "".join(secrets.choice(_SLUG_ALPHABET) for _ in range(length))
        if session.get(tables.CampaignRow, slug) is None:
            return slug
    raise InfrastructureFault("No free campaign id was found")


def _new_campaign(plan: Plan, *, campaign_id: str, options: Mapping[str, JsonValue]) -> tables.CampaignRow:
    if not campaign_id.startswith("c-") or len(campaign_id) < 4:
        raise UsageError(f"{campaign_id!r} is no campaign id", next_step="write it like c-k3f9")
    return tables.CampaignRow(
        id=campaign_id,
        state=CampaignState.PLANNED.value,
        kind=plan.brief.kind.value,
        question=plan.question,
        plan=plan.model_dump(mode="json"),
        options=dict(options),
        links={},
        created_at=time.time(),
    )


def _hypotheses(campaign_id: str, plan: Plan) -> list[tables.HypothesisRow]:
    return [
        tables.HypothesisRow(campaign_id=campaign_id, index=index, planned=planned.model_dump(mode="json"))
        for index, planned in enumerate(plan.hypotheses)
    ]


def _locked(session: Session, table: type[Any], key: str, *, noun: str) -> Any:
    """The row, held against other writers until the transaction ends (on SQLite the whole database is)."""
    row = session.get(table, key, with_for_update=True)
    if row is None:
        raise NotFound(f"There is no {noun} {key!r}", next_step="`a3r ls` lists what there is")
    return row


def _enter(row: tables.CampaignRow, state: CampaignState, *, reason: str) -> None:
    row.state, row.reason = state.value, reason
    row.ended_at = time.time() if state.is_over else None
    if state is CampaignState.APPROVED:
        row.approved_at = time.time()
    if state.is_over:
        _set_owner(row, None)


def _set_owner(row: tables.CampaignRow | tables.TrialRow, owner: records.Owner | None) -> None:
    row.owner_pid = owner.pid if owner else None
    row.owner_started_at = owner.started_at if owner else None


def _append(
    session: Session,
    campaign_id: str,
    kind: EventKind,
    text: str,
    *,
    trial_id: str | None = None,
    data: Mapping[str, Any],
) -> tables.EventRow:
    row = tables.EventRow(
        campaign_id=campaign_id, trial_id=trial_id, kind=kind.value, text=text, data=dict(data), at=time.time()
    )
    session.add(row)
    session.flush()
    return row


def _append_trial_state(session: Session, trial: tables.TrialRow) -> None:
    query = (
        select(tables.ExperimentRow.campaign_id)
        .join(tables.SettingRow, col(tables.SettingRow.experiment_id) == tables.ExperimentRow.id)
        .where(tables.SettingRow.id == trial.setting_id)
    )
    campaign_id = session.exec(query).one()
    _locked(session, tables.CampaignRow, campaign_id, noun="campaign")
    data = {"state": trial.state, "attempt": trial.attempts}
    _append(session, campaign_id, EventKind.STATE, trial.reason, trial_id=trial.id, data=data)


def _episode_values(trial_id: str, episode: records.EpisodeSummary) -> dict[str, Any]:
    return {
        "trial_id": trial_id,
        "episode_id": episode.episode_id,
        "task_id": episode.task_id,
        "kind": episode.kind.value,
        "step": episode.step,
        "ending": episode.ending.value,
        "reward": episode.reward,
        "metric": episode.metric,
        "turns": episode.turns,
        "transcript": None if episode.transcript is None else episode.transcript.as_json(),
    }

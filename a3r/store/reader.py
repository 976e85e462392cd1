"""The read side of the record: for reports, command line, web page and analyst."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from sqlmodel import Session, SQLModel, col, func, select

from a3r.campaign import CampaignState, EventKind, TrialState
from a3r.episode import EpisodeKind
from a3r.errors import NotFound, UsageError
from a3r.store import records, tables
from a3r.store.database import Database

R = TypeVar("R", bound=SQLModel)


class Reader:
    """Reads of one database. Ids may be given as any unique prefix where a method says so.

    Every method raises InfrastructureFault when the database fails.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def campaign(self, prefix: str) -> records.CampaignRecord:
        """The campaign whose id is or uniquely starts with `prefix`; `c-` may be left out.

        Raises NotFound, or UsageError when several ids start like that.
        """
        with self._database.reading() as session:
            return records.CampaignRecord.of(
                _by_prefix(session, tables.CampaignRow, prefix, letter="c", noun="campaign")
            )

    def campaigns(self, states: Collection[CampaignState] = tuple(CampaignState)) -> list[records.CampaignRecord]:
        """Campaigns in these states, newest first."""
        query = (
            select(tables.CampaignRow)
            .where(col(tables.CampaignRow.state).in_([state.value for state in states]))
            .order_by(col(tables.CampaignRow.created_at).desc(), col(tables.CampaignRow.id))
        )
        with self._database.reading() as session:
            return [records.CampaignRecord.of(row) for row in session.exec(query)]

    def hypotheses(self, campaign_id: str) -> list[records.HypothesisRecord]:
        return [records.HypothesisRecord.of(row) for row in self._rows(tables.HypothesisRow, campaign_id=campaign_id)]

    def programs(self, campaign_id: str) -> list[records.ProgramRecord]:
        """Programs of a campaign, oldest first."""
        rows = self._rows(tables.ProgramRow, campaign_id=campaign_id)
        return sorted((records.ProgramRecord.of(row) for row in rows), key=lambda program: program.created_at)

    def program(self, program_id: str) -> records.ProgramRecord:
        """Raises NotFound."""
        with self._database.reading() as session:
            return records.ProgramRecord.of(_get(session, tables.ProgramRow, program_id, noun="program"))

    def experiments(self, campaign_id: str) -> list[records.ExperimentRecord]:
        rows = self._rows(tables.ExperimentRow, campaign_id=campaign_id)
        return sorted(
            (records.ExperimentRecord.of(row) for row in rows), key=lambda experiment: experiment.hypothesis_index
        )

    def settings(self, experiment_id: str) -> list[records.SettingRecord]:
        """Settings of an experiment in the order they were opened."""
        rows = self._rows(tables.SettingRow, experiment_id=experiment_id)
        return sorted((records.SettingRecord.of(row) for row in rows), key=lambda setting: setting.index)

    def setting(self, setting_id: str) -> records.SettingRecord:
        """Raises NotFound."""
        with self._database.reading() as session:
            return records.SettingRecord.of(_get(session, tables.SettingRow, setting_id, noun="setting"))

    def trials(self, setting_id: str) -> list[records.TrialRecord]:
        """Trials of a setting by seed."""
        rows = self._rows(tables.TrialRow, setting_id=setting_id)
        return sorted((records.TrialRecord.of(row) for row in rows), key=lambda trial: trial.seed)

    def campaign_trials(
        self, campaign_id: str, states: Collection[TrialState] = tuple(TrialState)
    ) -> list[records.TrialRecord]:
        """Trials of a whole campaign in these states, by experiment, setting and seed."""
        query = (
            select(tables.TrialRow)
            .join(tables.SettingRow, col(tables.SettingRow.id) == tables.TrialRow.setting_id)
            .join(tables.ExperimentRow, col(tables.ExperimentRow.id) == tables.SettingRow.experiment_id)
            .where(
                tables.ExperimentRow.campaign_id == campaign_id,
                col(tables.TrialRow.state).in_([state.value for state in states]),
            )
            .order_by(
                col(tables.ExperimentRow.hypothesis_index), col(tables.SettingRow.index), col(tables.TrialRow.seed)
            )
        )
        with self._database.reading() as session:
            return [records.TrialRecord.of(row) for row in session.exec(query)]

    def running_trials(self) -> list[records.TrialRecord]:
        """Every trial that says it runs, with its owner: what a reconciler has to check."""
        return [records.TrialRecord.of(row) for row in self._rows(tables.TrialRow, state=TrialState.RUNNING.value)]

    def trial(self, prefix: str) -> records.TrialRecord:
        """The trial whose id is or uniquely starts with `prefix`; `t-` may be left out.

        Raises NotFound, or UsageError when several ids start like that.
        """
        with self._database.reading() as session:
            return records.TrialRecord.of(_by_prefix(session, tables.TrialRow, prefix, letter="t", noun="trial"))

    def series(self, trial_id: str, name: str) -> list[records.MetricPoint]:
        """All points of one metric of a trial, by step."""
        return _points(self._rows(tables.MetricRow, trial_id=trial_id, name=name))

    def metrics(self, trial_id: str) -> list[records.MetricPoint]:
        """All metrics of a trial, by name and step."""
        return _points(self._rows(tables.MetricRow, trial_id=trial_id))

    def metric(self, trial_id: str, name: str, step: int) -> float:
        """Raises NotFound."""
        with self._database.reading() as session:
            row = session.get(tables.MetricRow, (trial_id, name, step))
            if row is None:
                raise NotFound(f"Trial {trial_id} has no metric {name!r} at step {step}")
            return row.value

    def scores(self, experiment_id: str, name: str = "eval/success") -> dict[str, tuple[float, ...]]:
        """Setting key to the last value of a metric in each finished trial, by seed: what `judge_hypothesis` takes.

        A setting without finished trials is left out.
        """
        last = (
            select(tables.MetricRow.trial_id, func.max(tables.MetricRow.step).label("step"))
            .where(tables.MetricRow.name == name)
            .group_by(tables.MetricRow.trial_id)
            .subquery()
        )
        query = (
            select(tables.SettingRow.key, tables.MetricRow.value)
            .join(tables.TrialRow, col(tables.TrialRow.setting_id) == tables.SettingRow.id)
            .join(tables.MetricRow, col(tables.MetricRow.trial_id) == tables.TrialRow.id)
            .join(last, (last.c.trial_id == tables.MetricRow.trial_id) & (last.c.step == tables.MetricRow.step))
            .where(
                tables.SettingRow.experiment_id == experiment_id,
                tables.TrialRow.state == TrialState.FINISHED.value,
                tables.MetricRow.name == name,
            )
            .order_by(col(tables.SettingRow.index), col(tables.TrialRow.seed))
        )
        found: defaultdict[str, list[float]] = defaultdict(list)
        with self._database.reading() as session:
            for key, value in session.exec(query):
                found[key].append(value)
        return {key: tuple(values) for key, values in found.items()}

    def episodes(self, trial_id: str, kind: EpisodeKind | None = None) -> list[records.EpisodeSummary]:
        """Episode summaries of a trial, by step and id; of one kind, where one is named."""
        found = [records.EpisodeSummary.of(row) for row in self._rows(tables.EpisodeRow, trial_id=trial_id)]
        wanted = [episode for episode in found if kind in (None, episode.kind)]
        return sorted(wanted, key=lambda episode: (episode.step, episode.episode_id))

    def events_after(
        self, campaign_id: str, after_id: int = 0, kinds: Collection[EventKind] = tuple(EventKind)
    ) -> list[records.Event]:
        """Events of a campaign that were added after the one with id `after_id`, oldest first."""
        query = (
            select(tables.EventRow)
            .where(
                tables.EventRow.campaign_id == campaign_id,
                col(tables.EventRow.id) > after_id,
                col(tables.EventRow.kind).in_([kind.value for kind in kinds]),
            )
            .order_by(col(tables.EventRow.id))
        )
        with self._database.reading() as session:
            return [records.Event.of(row) for row in session.exec(query)]

    def _rows(self, table: type[R], **equal: Any) -> Sequence[R]:
        query = select(table).where(*(getattr(table, name) == value for name, value in equal.items()))
        with self._database.reading() as session:
            return session.exec(query).all()


def _points(rows: Sequence[tables.MetricRow]) -> list[records.MetricPoint]:
    points = [records.MetricPoint(row.name, row.step, row.value) for row in rows]
    return sorted(points, key=lambda point: (point.name, point.step))


def _get(session: Session, table: type[R], key: str, *, noun: str) -> R:
    row = session.get(table, key)
    if row is None:
        raise NotFound(f"There is no {noun} {key!r}", next_step="`a3r ls` lists what there is")
    return row


Named = TypeVar("Named", tables.CampaignRow, tables.TrialRow)


def _by_prefix(session: Session, table: type[Named], prefix: str, *, letter: str, noun: str) -> Named:
    full = prefix if prefix.startswith(f"{letter}-") else f"{letter}-{prefix}"
    exact = session.get(table, full)
    if exact is not None:
        return exact
    query = select(table).where(col(table.id).startswith(full, autoescape=True)).order_by(col(table.id)).limit(6)
    rows = session.exec(query).all()
    if not rows or full == f"{letter}-":
        raise NotFound(f"There is no {noun} {prefix!r}", next_step="`a3r ls` lists what there is")
    if len(rows) > 1:
        raise UsageError(
            f"Several {noun}s start with {prefix!r}",
            why=", ".join(row.id for row in rows[:5]) + (", ..." if len(rows) > 5 else ""),
            next_step="give more of the id",
        )
    return rows[0]

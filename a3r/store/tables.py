"""The tables of the record. Only `a3r.store` sees these classes; everyone else gets frozen records.

Every table has a domain key, so that writing the same fact twice makes one row. Times are seconds since the epoch.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Integer, Text
from sqlmodel import JSON, Column, Field, MetaData, SQLModel, UniqueConstraint

SCHEMA_VERSION = 1


class _Table(SQLModel):
    """Base with metadata of its own: the gateway's ledger keeps other tables in other databases."""

    metadata = MetaData()


class SchemaRow(_Table, table=True):
    __tablename__ = "schema_version"  # pyright: ignore[reportAssignmentType]

    version: int = Field(primary_key=True)


class CampaignRow(_Table, table=True):
    __tablename__ = "campaign"  # pyright: ignore[reportAssignmentType]

    id: str = Field(primary_key=True)
    state: str = Field(index=True)
    kind: str
    question: str = Field(sa_type=Text)
    plan: dict[str, Any] = Field(sa_type=JSON)
    options: dict[str, Any] = Field(sa_type=JSON)
    links: dict[str, str] = Field(sa_type=JSON)
    hidden_seed: int | None = Field(default=None, sa_type=BigInteger)
    hidden_sha256: str | None = None
    reason: str = Field(default="", sa_type=Text)
    created_at: float
    approved_at: float | None = None
    ended_at: float | None = None
    owner_pid: int | None = None
    owner_started_at: float | None = None


class HypothesisRow(_Table, table=True):
    __tablename__ = "hypothesis"  # pyright: ignore[reportAssignmentType]

    campaign_id: str = Field(primary_key=True, foreign_key="campaign.id")
    index: int = Field(primary_key=True)
    planned: dict[str, Any] = Field(sa_type=JSON)
    verdict: dict[str, Any] | None = Field(default=None, sa_type=JSON)
    judged_at: float | None = None


class ProgramRow(_Table, table=True):
    __tablename__ = "program"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("campaign_id", "sha256"),)

    id: str = Field(primary_key=True)
    campaign_id: str = Field(foreign_key="campaign.id", index=True)
    sha256: str
    commit: str
    path: str
    coder: str
    attempts: int
    gates: dict[str, str] = Field(sa_type=JSON)
    created_at: float


class ExperimentRow(_Table, table=True):
    __tablename__ = "experiment"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("campaign_id", "hypothesis_index"),)

    id: str = Field(primary_key=True)
    campaign_id: str = Field(foreign_key="campaign.id", index=True)
    hypothesis_index: int
    program_id: str = Field(foreign_key="program.id")
    created_at: float


class SettingRow(_Table, table=True):
    __tablename__ = "setting"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("experiment_id", "key"),)

    id: str = Field(primary_key=True)
    experiment_id: str = Field(foreign_key="experiment.id", index=True)
    index: int
    key: str
    kind: str
    values: dict[str, Any] = Field(sa_type=JSON)
    number: int | None = None


class TrialRow(_Table, table=True):
    __tablename__ = "trial"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("setting_id", "seed"),)

    id: str = Field(primary_key=True)
    setting_id: str = Field(foreign_key="setting.id", index=True)
    seed: int = Field(sa_type=BigInteger)
    state: str = Field(index=True)
    config: dict[str, Any] = Field(sa_type=JSON)
    attempts: int
    reason: str = Field(default="", sa_type=Text)
    started_at: float | None = None
    ended_at: float | None = None
    owner_pid: int | None = None
    owner_started_at: float | None = None


class MetricRow(_Table, table=True):
    __tablename__ = "metric"  # pyright: ignore[reportAssignmentType]

    trial_id: str = Field(primary_key=True, foreign_key="trial.id")
    name: str = Field(primary_key=True)
    step: int = Field(primary_key=True)
    value: float


class EpisodeRow(_Table, table=True):
    __tablename__ = "episode"  # pyright: ignore[reportAssignmentType]

    trial_id: str = Field(primary_key=True, foreign_key="trial.id")
    episode_id: str = Field(primary_key=True)
    task_id: str
    kind: str
    step: int
    ending: str
    reward: float | None = None
    metric: float | None = None
    turns: int
    transcript: dict[str, Any] | None = Field(default=None, sa_type=JSON)


class EventRow(_Table, table=True):
    __tablename__ = "event"  # pyright: ignore[reportAssignmentType]

    id: int | None = Field(default=None, sa_column=Column(Integer, primary_key=True, autoincrement=True))
    campaign_id: str = Field(foreign_key="campaign.id", index=True)
    trial_id: str | None = Field(default=None, foreign_key="trial.id")
    kind: str
    text: str = Field(default="", sa_type=Text)
    data: dict[str, Any] = Field(sa_type=JSON)
    at: float

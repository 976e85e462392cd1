"""The record: every campaign, setting, trial, metric and event, in SQLite or PostgreSQL. See README.md."""

from a3r.store.reader import Reader
from a3r.store.records import (
    CampaignRecord,
    EpisodeSummary,
    Event,
    ExperimentRecord,
    HypothesisRecord,
    MetricPoint,
    Owner,
    ProgramRecord,
    SettingRecord,
    TrialRecord,
)
from a3r.store.store import Store

__all__ = [
    "CampaignRecord",
    "EpisodeSummary",
    "Event",
    "ExperimentRecord",
    "HypothesisRecord",
    "MetricPoint",
    "Owner",
    "ProgramRecord",
    "Reader",
    "SettingRecord",
    "Store",
    "TrialRecord",
]

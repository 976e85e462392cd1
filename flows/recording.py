"""From a trial's event files into the store and MLflow, in batches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from a3r.campaign import EventKind as Happened
from a3r.campaign import TrialState
from a3r.episode import Ending, EpisodeKind, Transcript
from a3r.store.records import CampaignRecord, EpisodeSummary, TrialRecord
from a3r.store.store import Store
from flows.curves import Curves, trial_curves
from flows.events import EventKind, EventTail, TrialEvent


@dataclass
class Recorder:
    """Follows `swarm.jsonl` and `judge.jsonl` of one attempt at a trial."""

    store: Store
    trial: TrialRecord
    campaign: CampaignRecord
    tails: tuple[EventTail, ...]
    curves: Curves
    failure: str = ""
    """What ended the trial, in the words of the process that failed."""
    _faults_noted: int = field(default=0)

    @classmethod
    def open(cls, store: Store, trial: TrialRecord, *, campaign: CampaignRecord, folder: Path) -> Recorder:
        return cls(
            store=store,
            trial=trial,
            campaign=campaign,
            tails=(EventTail(folder / "swarm.jsonl"), EventTail(folder / "judge.jsonl")),
            curves=trial_curves(store, trial, campaign=campaign),
        )

    async def catch_up(self) -> None:
        """Write everything that was appended since the last call."""
        events = [event for tail in self.tails for event in tail.read()]
        if events:
            await asyncio.to_thread(self._write, events)

    def close(self, state: TrialState) -> None:
        self.curves.finish(state)

    def _write(self, events: list[TrialEvent]) -> None:
        rows = [
            (name, event.fields["step"], value)
            for event in events
            if event.kind is EventKind.METRICS
            for name, value in event.fields["values"].items()
        ]
        self.store.add_metrics(self.trial.id, rows)
        self.store.add_episodes(
            self.trial.id, [_summary(event.fields) for event in events if event.kind is EventKind.EPISODE]
        )
        for event in events:
            if event.kind in (EventKind.FAULT, EventKind.NOTE):
                self._note(event)
        self.curves.log(rows)

    def _note(self, event: TrialEvent) -> None:
        text = event.fields["text"]
        if event.fields.get("ends_trial"):
            self.failure = text
        self._faults_noted += 1
        # A program that fails in every episode would drown the event table; the file keeps them all.
        if self._faults_noted <= 10 or event.fields.get("ends_trial"):
            kind = Happened.FAULT if event.kind is EventKind.FAULT else Happened.NOTE
            data = {"boundary": event.fields["boundary"]} if event.kind is EventKind.FAULT else {}
            self.store.add_event(self.campaign.id, kind, text, trial_id=self.trial.id, data=data)


def _summary(fields: Any) -> EpisodeSummary:
    kind, ending = EpisodeKind(fields["episode_kind"]), Ending(fields["ending"])
    value = None if ending.is_fault else fields["reward"]
    transcript = fields["transcript"]
    return EpisodeSummary(
        episode_id=fields["episode"],
        task_id=fields["task"],
        kind=kind,
        step=fields["step"],
        ending=ending,
        reward=value if kind is EpisodeKind.TRAIN else None,
        metric=value if kind is EpisodeKind.EVAL else None,
        turns=fields["turns"],
        transcript=None if transcript is None else Transcript.from_json(transcript),
    )

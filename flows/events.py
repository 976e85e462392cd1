"""How a trial's processes tell the campaign what happened: lines of JSON in a file.

A swarm server writes `swarm.jsonl`, a judge `judge.jsonl`; the campaign's process follows both. So neither
of them imports Prefect, MLflow or the store, and what was written survives any of the three.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class EventKind(StrEnum):
    """What a line says."""

    METRICS = "metrics"
    """`step` and `values`: metric name to finite number."""
    EPISODE = "episode"
    """A summary of one judged episode."""
    NOTE = "note"
    """Something a person may want to know, in `text`."""
    FAULT = "fault"
    """What went wrong at which `boundary`, in `text`."""


@dataclass(frozen=True, slots=True)
class TrialEvent:
    """One line: its kind and its fields."""

    kind: EventKind
    fields: Mapping[str, Any]


class EventLog:
    """Appends events to a file; a line is handed to the operating system before `write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: EventKind, /, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind.value, **fields}, allow_nan=False) + "\n")
        self._file.flush()

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self.write(EventKind.METRICS, step=step, values=dict(values))

    def close(self) -> None:
        self._file.close()


class EventTail:
    """Reads the events that were appended since the last read. A torn last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[TrialEvent]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            block = file.read()
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_event(line) for line in whole.splitlines()]


def _event(line: bytes) -> TrialEvent:
    fields = json.loads(line)
    return TrialEvent(kind=EventKind(fields.pop("kind")), fields=fields)

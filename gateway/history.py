"""Reading a ledger: episodes, turns and transcripts, from any process, while the server writes.

Also where the books are set right after a crash: the checkpoint's list of consumed episodes rules.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from a3r.episode import Ending, Episode, EpisodeKind, Fate, FinishReason, Message, Transcript, TranscriptTurn, Turn
from a3r.errors import NotFound
from gateway.messages import joined
from gateway.states import OPEN


class Order(StrEnum):
    """How a listing is sorted."""

    BEST = "best"
    WORST = "worst"
    LATEST = "latest"

    @property
    def clause(self) -> str:
        best_first = {"best": "reward DESC, claimed_at", "worst": "reward, claimed_at", "latest": "claimed_at DESC"}
        return best_first[self.value]


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """One line of a listing."""

    id: str
    trial_id: str
    task_id: str
    kind: EpisodeKind
    state: str
    """`open`, or how it ended."""
    reward: float | None
    components: dict[str, float]
    fate: Fate | None
    reason: str
    version: int
    """Policy version when it was claimed."""
    num_turns: int
    claimed_at: float
    ended_at: float | None


def read_episodes(
    path: Path,
    *,
    trial_id: str | None = None,
    kind: EpisodeKind | None = None,
    order: Order = Order.LATEST,
    limit: int = 50,
) -> list[EpisodeSummary]:
    """Episodes of a ledger. BEST and WORST list rewarded ones only. Raises NotFound for a missing file."""
    where, values = ["1"], []
    for column, value in (("trial_id", trial_id), ("kind", kind)):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(str(value))
    if order is not Order.LATEST:
        where.append("reward IS NOT NULL")
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT *, (SELECT count(*) FROM turn WHERE episode_id = episode.id) AS num_turns FROM episode"
            f" WHERE {' AND '.join(where)} ORDER BY {order.clause}, rowid LIMIT ?",
            [*values, limit],
        )
        return [_summary(row) for row in rows]


def read_episode(path: Path, episode_id: str) -> Episode:
    """An episode with its turns. Raises NotFound when there is none or it has no reward."""
    with _reading(path) as connection:
        return _episode(connection, _row(connection, episode_id))


def read_turns(path: Path, episode_id: str) -> tuple[Turn, ...]:
    """Turns of an episode, open or ended. Raises NotFound when there is no such episode."""
    with _reading(path) as connection:
        row = _row(connection, episode_id)
        return tuple(stored.turn for stored in _stored_turns(connection, row))


def read_transcript(path: Path, episode_id: str) -> Transcript:
    """What was said in an episode. Raises NotFound when there is no such episode."""
    with _reading(path) as connection:
        stored = _stored_turns(connection, _row(connection, episode_id))
        return Transcript(turns=tuple(turn.said for turn in stored))


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One turn with its messages."""

    turn: Turn
    said: TranscriptTurn
    tools: tuple[dict[str, Any], ...] | None
    prefill: bool


@dataclass(frozen=True, slots=True)
class OpenRow:
    """An episode that was running when the server went down."""

    row: dict[str, Any]
    turns: tuple[StoredTurn, ...]


def read_open(path: Path, *, trial_id: str) -> list[OpenRow]:
    """Episodes of a trial that have not ended."""
    with _reading(path) as connection:
        rows = connection.execute("SELECT * FROM episode WHERE trial_id = ? AND state = ?", [trial_id, OPEN])
        return [OpenRow(dict(row), tuple(_stored_turns(connection, row))) for row in rows.fetchall()]


def read_ending(path: Path, episode_id: str) -> tuple[str, float | None, dict[str, float]]:
    """State, reward and reward components of an episode. Raises NotFound when there is none."""
    with _reading(path) as connection:
        row = _row(connection, episode_id)
        return row["state"], row["reward"], json.loads(row["components"])


def read_trial(path: Path, *, trial_id: str) -> str | None:
    """The trial's configuration as JSON, or None when the ledger does not know it."""
    with _reading(path) as connection:
        row = connection.execute("SELECT config FROM trial WHERE id = ?", [trial_id]).fetchone()
        return None if row is None else row["config"]


def read_group_indices(path: Path, *, trial_id: str) -> dict[str, int]:
    """Highest group index used for each task of a trial."""
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT task_id, max(group_index) FROM episode WHERE trial_id = ? AND kind = 'train' GROUP BY 1", [trial_id]
        )
        return dict(tuple(row) for row in rows)


def read_ended_claims(path: Path, *, trial_id: str) -> dict[str, str]:
    """Episode id by claim id, of the trial's ended episodes."""
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT claim_id, id FROM episode WHERE trial_id = ? AND state <> ?", [trial_id, OPEN]
        )
        return dict(tuple(row) for row in rows)


@dataclass(frozen=True, slots=True)
class Waiting:
    """An accepted training episode without a fate, and its group."""

    episode: Episode
    group_index: int
    place: int
    version: int
    """Policy version when it was claimed."""


def read_waiting(path: Path, *, trial_id: str) -> list[Waiting]:
    """Accepted training episodes of a trial that have no fate yet, in the order of their claims."""
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT * FROM episode WHERE trial_id = ? AND kind = 'train' AND state = ? AND fate IS NULL ORDER BY rowid",
            [trial_id, Ending.REWARDED],
        )
        return [
            Waiting(_episode(connection, row), row["group_index"], row["place"], row["version"])
            for row in rows.fetchall()
        ]


def read_counts(path: Path, *, trial_id: str) -> dict[str, int]:
    """Accepted training episodes of a trial by fate; those without one under `waiting`."""
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT coalesce(fate, 'waiting'), count(*) FROM episode"
            " WHERE trial_id = ? AND kind = 'train' AND state = ? GROUP BY 1",
            [trial_id, Ending.REWARDED],
        )
        return dict(tuple(row) for row in rows)


def reconcile_fates(path: Path, *, trial_id: str, version: int, consumed: Collection[str]) -> dict[str, Fate | None]:
    """Changes that make the ledger agree with a checkpoint of policy `version` that consumed `consumed`.

    Marks made by later updates are taken back, so that those episodes replay; a consumed episode whose mark
    was lost gets it. Hand the result to `Ledger.mark_fates`.
    """
    changes: dict[str, Fate | None] = {}
    with _reading(path) as connection:
        rows = connection.execute(
            "SELECT id, fate, fate_version FROM episode WHERE trial_id = ? AND kind = 'train' AND state = ?",
            [trial_id, Ending.REWARDED],
        )
        for episode_id, fate, fate_version in rows:
            if episode_id in consumed:
                if fate != Fate.CONSUMED:
                    changes[episode_id] = Fate.CONSUMED
            elif fate == Fate.CONSUMED or (fate is not None and fate_version > version):
                changes[episode_id] = None
    return changes


def _summary(row: sqlite3.Row) -> EpisodeSummary:
    return EpisodeSummary(
        id=row["id"],
        trial_id=row["trial_id"],
        task_id=row["task_id"],
        kind=EpisodeKind(row["kind"]),
        state=row["state"],
        reward=row["reward"],
        components=json.loads(row["components"]),
        fate=None if row["fate"] is None else Fate(row["fate"]),
        reason=row["reason"],
        version=row["version"],
        num_turns=row["num_turns"],
        claimed_at=row["claimed_at"],
        ended_at=row["ended_at"],
    )


def _episode(connection: sqlite3.Connection, row: sqlite3.Row) -> Episode:
    if row["reward"] is None:
        raise NotFound(f"The episode {row['id']} has no reward", why=f"its state is {row['state']}")
    return Episode(
        id=row["id"],
        task_id=row["task_id"],
        kind=EpisodeKind(row["kind"]),
        policy=row["policy"],
        reward=row["reward"],
        turns=tuple(stored.turn for stored in _stored_turns(connection, row)),
        components=json.loads(row["components"]),
        ending=Ending(row["state"]),
        client_id=row["client_id"],
    )


def _stored_turns(connection: sqlite3.Connection, episode: sqlite3.Row) -> list[StoredTurn]:
    rows = connection.execute('SELECT * FROM turn WHERE episode_id = ? ORDER BY "index"', [episode["id"]])
    stored: list[StoredTurn] = []
    for row in rows:
        parent = None if row["parent"] is None else stored[row["parent"]]
        stored.append(_stored_turn(row, policy=episode["policy"], parent=parent))
    return stored


def _stored_turn(row: sqlite3.Row, *, policy: str, parent: StoredTurn | None) -> StoredTurn:
    matched_ids: tuple[int, ...] = ()
    matched: tuple[Message, ...] = ()
    if parent is not None:
        matched_ids = parent.turn.prompt_ids + parent.turn.sampled_ids
        matched = _conversation(parent)
    turn = Turn(
        episode_id=row["episode_id"],
        index=row["index"],
        prompt_ids=matched_ids + tuple(array("i", row["context_ids"])),
        sampled_ids=tuple(array("i", row["sampled_ids"])),
        logprobs=tuple(array("d", row["logprobs"])),
        finish_reason=FinishReason(row["finish_reason"]),
        policy=policy,
        version=row["version"],
        temperature=row["temperature"],
        fork_reason=row["fork_reason"],
        drift=bool(row["drift"]),
    )
    said = TranscriptTurn(
        messages=(*matched, *orjson.loads(row["messages"])),
        reply=orjson.loads(row["reply"]),
        finish_reason=row["finish_reason"],
    )
    tools = None if row["tools"] is None else tuple(orjson.loads(row["tools"]))
    return StoredTurn(turn, said, tools, prefill=bool(row["prefill"]))


def _conversation(stored: StoredTurn) -> tuple[Message, ...]:
    """Messages of a turn and its reply, as a later history holds them."""
    said = stored.said
    if stored.prefill:
        return (*said.messages[:-1], joined(said.messages[-1], said.reply))
    return (*said.messages, said.reply)


def _row(connection: sqlite3.Connection, episode_id: str) -> sqlite3.Row:
    row = connection.execute("SELECT * FROM episode WHERE id = ?", [episode_id]).fetchone()
    if row is None:
        raise NotFound(f"There is no episode {episode_id!r}")
    return row


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.exists():
        raise NotFound(f"There is no ledger at {path}", next_step="name the folder of a swarm server that has run")
    connection = sqlite3.connect(path, timeout=10)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA query_only=ON")
        yield connection
    finally:
        connection.close()

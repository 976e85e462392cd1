"""The swarm server's own books: trials, episodes and turns in one SQLite file.

One thread writes, and commits whatever has queued up meanwhile as one transaction (`synchronous=FULL`: what is
committed survives a power cut). Whoever hands in a row awaits that commit, so no answer leaves before its turn
is on disk. Any other process may read while it runs.

A turn stores what it adds to the turn that it continues (its parent): the rest of its ids and of its messages.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

from sqlalchemy import Connection, Executable, MetaData, UniqueConstraint, bindparam, event, insert, update
from sqlalchemy import Engine as Database
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import Field, SQLModel, create_engine

from a3r.episode import Fate
from a3r.errors import EnvironmentNotReady, InfrastructureFault
from gateway.states import OPEN


class Books(SQLModel):
    """Base of the ledger's tables, which have a schema of their own."""

    metadata = MetaData()


class TrialRow(Books, table=True):
    __tablename__ = "trial"  # pyright: ignore[reportAssignmentType]
    id: str = Field(primary_key=True)
    config: str
    """Configuration as canonical JSON."""
    policy: str
    created_at: float


class EpisodeTable(Books, table=True):
    __tablename__ = "episode"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (UniqueConstraint("trial_id", "claim_id"),)
    id: str = Field(primary_key=True)
    trial_id: str = Field(index=True, foreign_key="trial.id")
    task_id: str
    kind: str
    policy: str
    client_id: str
    claim_id: str
    lease_s: float
    lease_epoch: int = 0
    """How often the same claim was answered; older keys are fenced off."""
    group_index: int = 0
    """Which group of its task a training episode belongs to."""
    place: int = 0
    """Which claim of its group it was; seeds its sampling."""
    temperature: float | None
    """Temperature of every call; None lets the caller choose."""
    version: int
    """Policy version when it was claimed."""
    state: str = OPEN
    reason: str = ""
    reward: float | None = None
    components: str = "{}"
    fate: str | None = None
    fate_version: int | None = None
    """Policy version that the update which decided the fate led to."""
    claimed_at: float
    ended_at: float | None = None


@dataclass(slots=True)
class EpisodeRow:
    """One row of that table while its episode runs: plain, since every call of the episode reads it."""

    id: str
    trial_id: str
    task_id: str
    kind: str
    policy: str
    client_id: str
    claim_id: str
    lease_s: float
    temperature: float | None
    version: int
    claimed_at: float
    lease_epoch: int = 0
    group_index: int = 0
    place: int = 0
    state: str = OPEN
    reason: str = ""
    reward: float | None = None
    components: str = "{}"
    fate: str | None = None
    fate_version: int | None = None
    ended_at: float | None = None


class TurnRow(Books, table=True):
    __tablename__ = "turn"  # pyright: ignore[reportAssignmentType]
    episode_id: str = Field(primary_key=True, foreign_key="episode.id")
    index: int = Field(primary_key=True)
    parent: int | None = None
    """Index of the turn whose prompt and sampled ids this prompt begins with."""
    context_ids: bytes
    """Prompt ids behind the parent's, as 32-bit integers."""
    sampled_ids: bytes
    logprobs: bytes
    """64-bit floats, as the engine gave them."""
    finish_reason: str
    version: int
    temperature: float
    fork_reason: str | None = None
    drift: bool = False
    num_matched: int = 0
    """Messages that the parent accounts for."""
    messages: bytes
    """The messages behind those, as JSON."""
    reply: bytes
    tools: bytes | None = None
    prefill: bool = False
    """The last message was an unfinished reply that this one goes on from."""


class TurnValues(TypedDict):
    """A TurnRow to be written, as plain values: making the object would cost more than writing it."""

    episode_id: str
    index: int
    parent: int | None
    context_ids: bytes
    sampled_ids: bytes
    logprobs: bytes
    finish_reason: str
    version: int
    temperature: float
    fork_reason: str | None
    drift: bool
    num_matched: int
    messages: bytes
    reply: bytes
    tools: bytes | None
    prefill: bool


_EPISODES = Books.metadata.tables["episode"]
_INSERT_TRIAL, _INSERT_EPISODE, _INSERT_TURN = (insert(kind) for kind in (TrialRow, EpisodeTable, TurnRow))
_END = (
    update(_EPISODES)
    .where(_EPISODES.c.id == bindparam("episode"))
    .values({name: bindparam(name) for name in ("state", "reason", "reward", "components", "fate", "ended_at")})
)
_FATE = (
    update(_EPISODES)
    .where(_EPISODES.c.id == bindparam("episode"))
    .values(fate=bindparam("fate"), fate_version=bindparam("fate_version"))
)
_EPOCH = update(_EPISODES).where(_EPISODES.c.id == bindparam("episode")).values(lease_epoch=bindparam("lease_epoch"))


@dataclass(frozen=True, slots=True)
class _Write:
    statement: Executable
    rows: Sequence[Mapping[str, Any]]
    done: asyncio.Future[None]


class Ledger:
    """Writer of one ledger file. Open one per file and close it; use it as a context manager.

    The write methods queue at once, in call order, and return an awaitable that ends when the row is durable;
    it raises InfrastructureFault when the disk refused it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._database = _open(path)
        self._thread = threading.Thread(target=self._write_all, name="ledger", daemon=True)
        self._thread.start()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Commit what is queued and end the writer. Harmless when repeated."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._database.dispose()

    def add(self, row: TrialRow | EpisodeRow) -> asyncio.Future[None]:
        """Insert a trial or an episode."""
        if isinstance(row, TrialRow):
            return self._write(_INSERT_TRIAL, [row.model_dump()])
        return self._write(_INSERT_EPISODE, [{name: getattr(row, name) for name in EpisodeRow.__slots__}])

    def add_turns(self, turns: Sequence[TurnValues]) -> asyncio.Future[None]:
        """Insert the turns of one call, all or none."""
        return self._write(_INSERT_TURN, turns)

    def end_episode(
        self,
        episode_id: str,
        *,
        state: str,
        ended_at: float,
        reason: str = "",
        reward: float | None = None,
        components: Mapping[str, float] | None = None,
        fate: Fate | None = None,
    ) -> asyncio.Future[None]:
        row = {
            "episode": episode_id,
            "state": state,
            "reason": reason,
            "reward": reward,
            "components": json.dumps(dict(components or {}), sort_keys=True),
            "fate": fate,
            "ended_at": ended_at,
        }
        return self._write(_END, [row])

    def renew_claim(self, episode_id: str, *, lease_epoch: int) -> asyncio.Future[None]:
        """Note that a claim was answered once more."""
        return self._write(_EPOCH, [{"episode": episode_id, "lease_epoch": lease_epoch}])

    def mark_fates(self, fates: Mapping[str, Fate | None], *, version: int) -> asyncio.Future[None]:
        """Note what became of accepted training episodes, in one transaction. None takes a mark back."""
        rows = [
            {"episode": episode, "fate": fate, "fate_version": None if fate is None else version}
            for episode, fate in fates.items()
        ]
        return self._write(_FATE, rows)

    def _write(self, statement: Executable, rows: Sequence[Mapping[str, Any]]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not rows:
            done.set_result(None)
        elif not self._thread.is_alive():
            done.set_exception(_fault(self.path, "the ledger is closed"))
        else:
            self._queue.put(_Write(statement, rows, done))
        return done

    def _write_all(self) -> None:
        closing = False
        with self._database.connect() as connection:
            while not closing:
                group = [self._queue.get()]
                while not self._queue.empty():
                    group.append(self._queue.get())
                closing = None in group
                self._commit(connection, [write for write in group if write is not None])

    def _commit(self, connection: Connection, group: Sequence[_Write]) -> None:
        fault: InfrastructureFault | None = None
        try:
            with connection.begin():
                for statement, rows in _merged(group):
                    connection.execute(statement, rows)
        except SQLAlchemyError as error:
            fault = _fault(self.path, str(error))
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for write in group:
            by_loop.setdefault(write.done.get_loop(), []).append(write.done)
        for loop, futures in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, futures, fault)


def _merged(group: Sequence[_Write]) -> Iterable[tuple[Executable, list[Mapping[str, Any]]]]:
    """Neighbours of one statement as one call."""
    statement: Executable | None = None
    rows: list[Mapping[str, Any]] = []
    for write in group:
        if write.statement is not statement:
            if statement is not None:
                yield statement, rows
            statement, rows = write.statement, []
        rows.extend(write.rows)
    if statement is not None:
        yield statement, rows


def _settle(futures: Iterable[asyncio.Future[None]], fault: InfrastructureFault | None) -> None:
    for future in futures:
        if future.done():
            continue
        if fault is None:
            future.set_result(None)
        else:
            future.set_exception(fault)


def _open(path: Path) -> Database:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        database = create_engine(f"sqlite:///{path}")
        event.listen(database, "connect", _durable)
        Books.metadata.create_all(database)
    except (OSError, SQLAlchemyError) as error:
        raise EnvironmentNotReady(
            f"The ledger {path} cannot be opened", why=str(error), next_step="choose a writable local folder"
        ) from error
    return database


def _durable(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA busy_timeout=10000")


def _fault(path: Path, why: str) -> InfrastructureFault:
    return InfrastructureFault(
        f"The ledger {path} did not take a record", why=why, next_step="check the disk and restart the server"
    )

"""One database, opened: its connections, its schema version, and its errors in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool
from sqlmodel import Session, create_engine, select

from a3r.errors import EnvironmentNotReady, InfrastructureFault, UsageError
from a3r.store.tables import SCHEMA_VERSION, SchemaRow

_BUSY_TIMEOUT_S = 30


class Database:
    """SQLite (a file in WAL mode, or memory) or PostgreSQL, by SQLAlchemy URL.

    Missing tables are made. Raises UsageError for a URL that cannot be read, EnvironmentNotReady when a newer A3R
    wrote the database, InfrastructureFault when it cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._url = _parsed(url)
        self.dialect = self._url.get_backend_name()
        self._engine = _engine(self._url)
        self._prepare()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session for reads; nothing it changes is kept."""
        with self.translated(), Session(self._engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session that commits at its end and rolls back on any error. On SQLite writers queue up here, before
        they read, so that what they read still holds when they write."""
        with self.translated(), Session(self._engine, expire_on_commit=False) as session:
            if self.dialect == "sqlite":
                session.connection().exec_driver_sql("BEGIN IMMEDIATE")
            yield session
            session.commit()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turns the database's errors into InfrastructureFault; a broken uniqueness passes, since a caller that
        raced another one reads again."""
        try:
            yield
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise InfrastructureFault(
                f"The store at {self._url.render_as_string(hide_password=True)} failed",
                why=str(error.__cause__ or error),
                next_step="check that the database is reachable and its disk is not full",
            ) from error

    def close(self) -> None:
        self._engine.dispose()

    def _prepare(self) -> None:
        """Make missing tables and check the version, one process at a time."""
        with self.writing() as session:
            if self.dialect == "postgresql":
                session.connection().exec_driver_sql("SELECT pg_advisory_xact_lock(4132)")
            SchemaRow.metadata.create_all(session.connection())
            row = session.exec(select(SchemaRow)).first()
            if row is None:
                session.add(SchemaRow(version=SCHEMA_VERSION))
            elif row.version != SCHEMA_VERSION:
                raise EnvironmentNotReady(
                    f"The store at {self._url.render_as_string(hide_password=True)} has schema version {row.version}",
                    why=f"this A3R reads and writes version {SCHEMA_VERSION}",
                    next_step="use the A3R that wrote it, or set A3R_HOME to a new folder",
                )


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise _unreadable(url) from error
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise _unreadable(url)
    if parsed.drivername == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    return parsed


def _unreadable(url: str) -> UsageError:
    return UsageError(
        f"The store URL {url.rpartition('@')[2]!r} cannot be used",
        next_step="write sqlite:////absolute/path/a3r.db or postgresql://user@host/database",
    )


def _engine(url: URL) -> Engine:
    try:
        if url.get_backend_name() == "postgresql":
            return create_engine(url, pool_pre_ping=True)
        if not url.database or url.database == ":memory:":
            # One connection is the whole database; a second one would see another.
            return create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    except NoSuchModuleError as error:
        raise _unreadable(str(url)) from error
    Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _tune_sqlite)
    return engine


def _tune_sqlite(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")

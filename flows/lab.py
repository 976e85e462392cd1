"""Where everything of one laboratory lies on disk, and how its store is reached."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from a3r.errors import EnvironmentNotReady


@dataclass(frozen=True, slots=True)
class Lab:
    """A folder that holds one store, its services' data and every campaign's files."""

    home: Path
    store_url: str

    @classmethod
    def locate(cls, environment: Mapping[str, str] = os.environ) -> Lab:
        """The lab named by A3R_HOME, or `.a3r` in the current folder; made when it is missing.

        A3R_STORE_URL replaces its SQLite store by another database.
        Raises EnvironmentNotReady when the folder cannot be written.
        """
        home = Path(environment.get("A3R_HOME") or ".a3r").absolute()
        try:
            for folder in (home, home / "campaigns", home / "services"):
                folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(home, os.W_OK)
        except OSError as error:
            raise _not_writable(home, str(error)) from error
        if not writable:
            raise _not_writable(home, "no permission to write there")
        return cls(home=home, store_url=environment.get("A3R_STORE_URL") or f"sqlite:///{home / 'a3r.db'}")

    @property
    def services_folder(self) -> Path:
        return self.home / "services"

    def campaign_folder(self, campaign_id: str) -> Path:
        return self.home / "campaigns" / campaign_id

    def search_path(self, campaign_id: str) -> Path:
        return self.campaign_folder(campaign_id) / "search.journal"


def _not_writable(home: Path, why: str) -> EnvironmentNotReady:
    return EnvironmentNotReady(
        f"The lab folder {home} cannot be written",
        why=why,
        next_step="set A3R_HOME to a folder that you can write, or run from one",
    )

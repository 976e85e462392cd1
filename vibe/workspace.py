"""A folder that a Program lives in, with every draft kept in git.

The history lies beside the files and not among them: a sandbox that sees the files can reach neither the
history nor a git configuration or hook that would run outside it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from a3r.errors import CoderFault, EnvironmentNotReady, InfrastructureFault, UsageError

_GIT_TIMEOUT_S = 30
_MAX_FILE_BYTES = 1_000_000
_IDENTITY = ("A3R coder", "coder@a3r.invalid")


@dataclass(frozen=True, slots=True)
class Workspace:
    """`files` is what a sandbox may see; `history` is the git directory of its drafts."""

    files: Path
    history: Path

    @classmethod
    def create(cls, folder: Path) -> Workspace:
        """The workspace in `folder`, made if it is not there yet; its history goes on if it is.

        Raises EnvironmentNotReady without git, InfrastructureFault when git fails.
        """
        if shutil.which("git") is None:
            raise EnvironmentNotReady(
                "git is missing", why="every draft of a Program is kept as a commit", next_step="install git"
            )
        workspace = cls(files=folder / "program", history=folder / "history.git")
        workspace.files.mkdir(parents=True, exist_ok=True)
        if not workspace.history.exists():
            workspace._git("init", "--quiet", "--initial-branch=main")
        return workspace

    def write(self, files: Mapping[str, str]) -> None:
        """Make `files` (path within the workspace -> text) the whole content of the next commit.

        Raises CoderFault, before anything is written, on a path that leaves the workspace or a huge file.
        """
        faults = file_faults(files) + [f"{path} leaves the workspace" for path in files if self._leaves(path)]
        if faults:
            raise CoderFault("The draft's files cannot be written", why="; ".join(faults))
        for path in self._tracked():
            (self.files / path).unlink(missing_ok=True)
        for path, text in files.items():
            target = self.files / path
            target.parent.mkdir(parents=True, exist_ok=True)
            # A link that a Program left in this place would lead the write elsewhere.
            target.unlink(missing_ok=True)
            target.write_text(text, encoding="utf-8")
        self._stage(files)

    def commit(self, message: str) -> str:
        """Commit what `write` wrote last; returns the sha. A draft that changes nothing is a commit too."""
        self._git("commit", "--quiet", "--allow-empty", "--allow-empty-message", "--file=-", stdin=message)
        return self._git("rev-parse", "HEAD").strip()

    def annotate(self, commit: str, text: str) -> None:
        """Attach `text` (the gates' reports) to a commit as a git note, without changing its sha."""
        self._git("notes", "add", "--force", "--file=-", commit, stdin=text)

    def note(self, commit: str) -> str:
        """What `annotate` attached to `commit`."""
        return self._git("notes", "show", commit)

    def log(self) -> list[tuple[str, str]]:
        """Every draft as (sha, first line of its reason), newest first."""
        lines = self._git("log", "--format=%H%x09%s").splitlines()
        return [(sha, subject) for sha, _, subject in (line.partition("\t") for line in lines)]

    def show(self, commit: str, path: str) -> str:
        """Text of `path` as it was in `commit`."""
        return self._git("show", f"{commit}:{path}")

    def _stage(self, files: Mapping[str, str]) -> None:
        """Exactly `files`: what a running Program left behind is no part of a draft."""
        self._git("rm", "--cached", "-r", "--quiet", "--ignore-unmatch", "--", ".")
        if files:
            self._git("add", "--force", "--", *(f":(literal){path}" for path in files))

    def _leaves(self, path: str) -> bool:
        """Whether a link among the folders on the way leads out."""
        return not (self.files / path).parent.resolve().is_relative_to(self.files.resolve())

    def _tracked(self) -> list[str]:
        return [path for path in self._git("ls-files", "-z").split("\0") if path]

    def _git(self, *arguments: str, stdin: str = "") -> str:
        name, email = _IDENTITY
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.history),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_DIR": str(self.history),
            "GIT_WORK_TREE": str(self.files),
            "GIT_AUTHOR_NAME": name,
            "GIT_AUTHOR_EMAIL": email,
            "GIT_COMMITTER_NAME": name,
            "GIT_COMMITTER_EMAIL": email,
            "GIT_TERMINAL_PROMPT": "0",
        }
        command = ["git", "-c", f"core.hooksPath={os.devnull}", "-c", "commit.gpgSign=false", "-c", "gc.auto=0"]
        try:
            done = subprocess.run(
                [*command, *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                cwd=self.files,
                env=environment,
                timeout=_GIT_TIMEOUT_S,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            raise InfrastructureFault(f"git {arguments[0]} failed", why=error.stderr.strip()) from error
        except subprocess.TimeoutExpired as error:
            raise InfrastructureFault(f"git {arguments[0]} took longer than {_GIT_TIMEOUT_S} s") from error
        return done.stdout


def file_faults(files: Mapping[str, str]) -> list[str]:
    """What is wrong with the paths and sizes of a draft, as sentences; empty where nothing is."""
    faults: list[str] = []
    for path, text in files.items():
        pure = PurePosixPath(path)
        if not pure.parts or pure.is_absolute() or {"..", ".git"} & set(pure.parts) or "\\" in path or "\0" in path:
            faults.append(f"{path!r} is not a path within the workspace")
        if len(text.encode()) > _MAX_FILE_BYTES:
            faults.append(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
    return faults


def content_sha256(files: Mapping[str, str]) -> str:
    """Fingerprint of a Program: over its paths and texts in order of path. Raises UsageError without files."""
    if not files:
        raise UsageError("A Program without files has no fingerprint")
    digest = hashlib.sha256()
    for path in sorted(files):
        for part in (path, files[path]):
            digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    return digest.hexdigest()

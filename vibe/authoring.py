"""From a brief to a checked Program: draft, commit, gates, and one repair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from a3r.errors import A3RError, PlanRejected
from a3r.plan import Brief
from vibe.coder import Coder, CodingRequest, Draft, no_program
from vibe.gates import GateReport, GateTools, all_passed, run_gates
from vibe.source_gates import PROGRAM_FILE
from vibe.workspace import Workspace, content_sha256, file_faults


@dataclass(frozen=True, slots=True)
class Attempt:
    """One draft, its commit and what the gates said about it."""

    commit: str
    draft: Draft
    reports: tuple[GateReport, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A Program that passed every gate."""

    folder: Path
    """Where `program.py` lies: what a sandbox may see."""
    commit: str
    sha256: str
    """Fingerprint of its files, see `content_sha256`."""
    reports: tuple[GateReport, ...]
    tokens: int
    """Tokens that all drafts cost together."""


def _unwatched(_attempt: Attempt) -> None:
    """Default watcher: the caller reads the attempts from the workspace's log."""


async def write_program(
    brief: Brief,
    *,
    coder: Coder,
    workspace: Workspace,
    tools: GateTools,
    num_repairs: int = 1,
    on_attempt: Callable[[Attempt], None] = _unwatched,
) -> Program:
    """Have `coder` write the Program of `brief` and check it; a refused draft goes back with the gates' reports.

    Every draft becomes a commit with its reports as a git note, also the refused ones. Raises PlanRejected when
    the last draft fails a gate, CoderFault when it holds no Program. Both carry `reports` and `tokens`.
    """
    request = CodingRequest(brief=brief)
    tokens = 0
    while True:
        draft = await coder.write(request)
        attempt = await _attempt(draft, number=request.attempt, brief=brief, workspace=workspace, tools=tools)
        tokens += draft.tokens
        on_attempt(attempt)
        if all_passed(attempt.reports):
            sha256 = content_sha256(draft.files)
            return Program(workspace.files, attempt.commit, sha256, attempt.reports, tokens)
        if request.attempt == num_repairs:
            raise _refusal(attempt, tokens=tokens, num_drafts=num_repairs + 1)
        request = CodingRequest(brief, previous=draft, reports=attempt.reports, attempt=request.attempt + 1)


async def _attempt(draft: Draft, *, number: int, brief: Brief, workspace: Workspace, tools: GateTools) -> Attempt:
    commit = await asyncio.to_thread(_commit, workspace, draft, number)
    reports = await run_gates(draft.files, folder=workspace.files, tools=tools, allowed_packages=brief.allowed_packages)
    note = json.dumps([asdict(report) for report in reports], indent=1)
    await asyncio.to_thread(workspace.annotate, commit, note)
    return Attempt(commit=commit, draft=draft, reports=reports)


def _commit(workspace: Workspace, draft: Draft, number: int) -> str:
    # A draft whose paths are refused is kept as a commit without files: its reports say why.
    workspace.write({} if file_faults(draft.files) else draft.files)
    title = f"Repair {number}" if number else "Draft"
    return workspace.commit(f"{title}\n\n{draft.note}".rstrip() + "\n")


def _refusal(attempt: Attempt, *, tokens: int, num_drafts: int) -> A3RError:
    if PROGRAM_FILE not in attempt.draft.files:
        error: A3RError = no_program(attempt.draft)
    else:
        failure = attempt.reports[-1]
        error = PlanRejected(
            f"The Program does not pass the gate {failure.name!r} after {num_drafts} draft(s)",
            why=failure.detail,
            next_step="rephrase the task or use another coder; the drafts are kept in the workspace's history",
        )
    error.__dict__.update(reports=attempt.reports, tokens=tokens)
    return error


def read_reports(note: str) -> Sequence[GateReport]:
    """Reports from a draft's git note."""
    return [GateReport(**report) for report in json.loads(note)]

"""What this machine has of what A3R needs, and how to get the rest."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version

from a3r.errors import A3RError
from flows.lab import Lab
from flows.services import running
from trainer.policy import resolve_model
from vibe.sandbox import sandbox_report


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    next_step: str = ""
    needed: bool = True
    """Whether campaigns on this machine need it."""


def examine() -> list[Finding]:
    """Look at Python, packages, programs, the lab folder, the shipped policy, services and the LLM settings."""
    return [
        _python(),
        *(_package(name) for name in ("torch", "transformers", "prefect", "mlflow", "optuna", "sqlmodel", "fastapi")),
        _program("git", next_step="apt-get install git"),
        _program("bwrap", next_step="apt-get install bubblewrap; without it only shipped recipes run"),
        *_protections(),
        _lab(),
        _small_policy(),
        _services(),
        _llm(),
    ]


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding("python", ok, platform.python_version(), "" if ok else "install Python 3.11 or newer")


def _package(name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, ok=False, detail="not installed", next_step="pip install 'a3r[lab]'")
    return Finding(name, ok=True, detail=version(name))


def _program(name: str, *, next_step: str) -> Finding:
    path = shutil.which(name)
    return Finding(name, ok=path is not None, detail=path or "not found", next_step="" if path else next_step)


def _protections() -> list[Finding]:
    return [
        Finding(f"sandbox: {name}", ok=state.on, detail=state.detail, next_step=state.next_step, needed=False)
        for name, state in sandbox_report().items()
    ]


def _lab() -> Finding:
    try:
        lab = Lab.locate()
    except A3RError as error:
        return Finding("lab folder", ok=False, detail=error.what, next_step=error.next_step)
    return Finding("lab folder", ok=True, detail=str(lab.home))


def _small_policy() -> Finding:
    try:
        return Finding("small policy", ok=True, detail=str(resolve_model("small")))
    except A3RError as error:
        return Finding("small policy", ok=False, detail=error.what, next_step="a3r model build-small")


def _services() -> Finding:
    names = ", ".join(service.name for service in running(Lab.locate()))
    return Finding(
        "services", ok=True, detail=names or "none running; started when a campaign needs them", needed=False
    )


def _llm() -> Finding:
    wanted = ("OPENAI_API_KEY", "A3R_CODER_MODEL")
    missing = [name for name in wanted if not os.environ.get(name)]
    if missing:
        return Finding(
            "LLM coder",
            ok=False,
            detail=f"not set: {', '.join(missing)}",
            next_step="set them (and OPENAI_BASE_URL for your own endpoint) to use --coder openai",
            needed=False,
        )
    return Finding("LLM coder", ok=True, detail=os.environ["A3R_CODER_MODEL"], needed=False)

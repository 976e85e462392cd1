"""`a3r research` and `a3r train`: a sentence in, a campaign started and watched."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from a3r.errors import ApprovalNeeded, UsageError
from ui.cli.screen import Screen


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """What both commands understand."""

    budget: str | None = None
    """Limits, such as `wall=8m` or `wall=2h,trials=12`."""
    model: str = "small"
    """`small`, the shipped policy, or the path of a local Hugging Face folder."""
    coder: str = "recipes"
    """Who writes the program: `recipes` (offline) or `openai` (any OpenAI-compatible endpoint)."""
    sandbox: str | None = None
    """`plain` runs programs under resource limits only; by default they run under bubblewrap."""
    set: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Settings by path, such as `--set trainer.lr=1e-4`; may be repeated."""
    yes: Annotated[bool, Parameter(negative=())] = False
    """Start without asking."""
    dry_run: Annotated[bool, Parameter(negative=())] = False
    """Print the plan as JSON and spend nothing."""
    detach: Annotated[bool, Parameter(negative=())] = False
    """Start and return; `a3r attach` watches."""
    json: Annotated[bool, Parameter(negative=())] = False
    """One JSON object a line on standard output."""


def research(question: str, /, *, options: Options | None = None) -> int:
    """Answer a research question with real training runs.

    QUESTION is a sentence, the path of a text file, or `-` for standard input.
    """
    return _submit(question, kind="research", options=options or Options())


def train(task: str, /, *, options: Options | None = None) -> int:
    """Train one policy for a task that is described in words.

    TASK is a sentence, the path of a text file, or `-` for standard input.
    """
    return _submit(task, kind="train", options=options or Options())


def _submit(text: str, *, kind: Literal["research", "train"], options: Options) -> int:
    from a3r.config import Budget, TrialConfig
    from a3r.plan import BriefKind

    base = TrialConfig(model=_model(options.model)).updated(parse_settings(options.set))
    budget = Budget.parse(options.budget) if options.budget is not None else None
    from flows.submission import Order, draft, submit

    order = Order(
        text=_read(text), kind=BriefKind(kind), base=base, budget=budget, coder=options.coder, sandbox=options.sandbox
    )
    plan = draft(order)
    screen = Screen(json_lines=options.json)
    if options.dry_run:
        sys.stdout.write(plan.model_dump_json(indent=None if options.json else 2) + "\n")
        return 0
    screen.plan(plan)
    _approve(options)
    campaign_id = submit(order, plan, notify=screen.note)
    if options.detach:
        screen.detached(campaign_id)
        return 0
    from ui.cli.campaigns import watch

    return watch(campaign_id, screen=screen)


def _approve(options: Options) -> None:
    if options.yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ApprovalNeeded(
            "A plan needs a person's yes before anything is spent",
            why="this is not a terminal",
            next_step="add --yes to start, or --dry-run to see the plan only",
        )
    sys.stdout.write("Start? [y/N] ")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ApprovalNeeded(
            "Not started", why="the plan was declined", next_step="change the sentence or --set values"
        )


def _read(text: str) -> str:
    if text == "-":
        return sys.stdin.read().strip()
    path = Path(text)
    if len(text) < 200 and path.suffix in (".md", ".txt") and path.exists():
        return path.read_text().strip()
    return text.strip()


def _model(text: str) -> str:
    return text if text == "small" else str(Path(text).expanduser().absolute())


def parse_settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`("trainer.lr=1e-4",)` as `{"trainer.lr": 0.0001}`; a value that is no JSON is text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        path, separator, value = pair.partition("=")
        if not separator:
            raise UsageError(f"The setting {pair!r} has no value", next_step="write --set trainer.lr=1e-4")
        try:
            values[path] = json.loads(value)
        except json.JSONDecodeError:
            values[path] = value
    return values

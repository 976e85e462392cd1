"""What a person (or, with --json, a program) sees: plan cards, progress, tables.

Progress and notes go to standard error, answers to standard output. No spinner off a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from a3r.plan import Plan
    from flows.doctor import Finding


class Screen:
    """Writes lines for people, or one JSON object a line."""

    def __init__(self, *, json_lines: bool = False, stream: TextIO | None = None) -> None:
        self.json_lines = json_lines
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)

    @property
    def is_live(self) -> bool:
        """Whether progress may redraw itself."""
        return self.console.is_terminal and not self.json_lines

    def emit(self, kind: str, /, **fields: Any) -> None:
        """One JSON line on standard output; nothing when people are reading."""
        if self.json_lines:
            sys.stdout.write(json.dumps({"kind": kind, **fields}, default=str) + "\n")
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """One line about what is going on."""
        self.emit("note", text=text)
        if not self.json_lines:
            self.console.print(text, markup=False)

    def plan(self, plan: Plan) -> None:
        """The plan card: what will be asked, tried and spent."""
        self.emit("plan", plan=plan.model_dump(mode="json"))
        if self.json_lines:
            return
        table = Table(
            show_header=False, box=None, padding=(0, 1), title="Plan", title_justify="left", title_style="bold"
        )
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in plan_rows(plan):
            table.add_row(name, value)
        self.console.print(table, markup=False)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str) -> None:
        """A table on standard output, or one JSON line a row."""
        if self.json_lines:
            for row in rows:
                self.emit(kind, **dict(zip(columns, row, strict=True)))
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*row)
        Console(highlight=False).print(table, markup=False)

    def services(self, states: Mapping[str, str]) -> None:
        self.table(["service", "state"], list(states.items()), kind="service")

    def findings(self, findings: Sequence[Finding]) -> None:
        rows = [(_mark(finding), finding.name, finding.detail, finding.next_step) for finding in findings]
        self.table(["", "what", "found", "next"], rows, kind="finding")

    def detached(self, campaign_id: str) -> None:
        self.emit("detached", campaign=campaign_id)
        if not self.json_lines:
            self.console.print(
                f"Campaign {campaign_id} goes on. Watch: a3r attach {campaign_id}   End: a3r cancel {campaign_id}",
                markup=False,
            )


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """The plan card's lines: name and text."""
    rows = [("question", plan.question), ("task", plan.brief.understood)]
    for hypothesis in plan.hypotheses:
        rows += [
            ("hypothesis", hypothesis.statement),
            ("null", hypothesis.null),
            ("expectation", hypothesis.expectation),
        ]
    metric = plan.metric
    rows.append(
        (
            "metric",
            f"{metric.name}: {metric.unit}, {metric.num_tasks} hidden tasks at temperature {metric.temperature:g}",
        )
    )
    rows += [("decides", rule) for rule in plan.decision_rules]
    trainer = plan.base.trainer
    rows += [
        ("settings", _settings_text(plan)),
        ("seeds", ", ".join(map(str, plan.seeds))),
        (
            "held equal",
            f"{trainer.num_updates} updates of {trainer.batch_tasks} tasks x {trainer.group_size} episodes, "
            f"model {plan.base.model}",
        ),
        ("budget", _budget_text(plan)),
        ("estimate", f"{plan.estimate.trials} trials, {duration(plan.estimate.wall_s)} ({plan.estimate.basis})"),
    ]
    rows += [("note", note) for note in plan.notes]
    return [row for row in rows if row[1]]


def _settings_text(plan: Plan) -> str:
    if plan.space.is_grid:
        return "; ".join(setting_text(values) for values in plan.space.grid())
    axes = ", ".join(f"{d.path} in [{d.low:g}, {d.high:g}]" for d in plan.space.dimensions if not d.levels)
    return f"{plan.space.num_settings} sampled by Optuna: {axes}"


def _budget_text(plan: Plan) -> str:
    trials = f", at most {plan.budget.trials} trials" if plan.budget.trials is not None else ""
    return f"{duration(plan.budget.wall_s)} wall time{trials}"


def setting_text(values: Mapping[str, object]) -> str:
    """`{"trainer.lr": 0.0003}` as `lr 0.0003`."""
    return ", ".join(f"{path.rpartition('.')[2]} {_short(value)}" for path, value in values.items()) or "as it is"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """Seconds as `45 s`, `7 min 30 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, rest = divmod(whole, 3600)
    return f"{hours} h" + (f" {rest // 60} min" if rest >= 60 else "")


def _mark(finding: Finding) -> str:
    if finding.ok:
        return "ok"
    return "MISSING" if finding.needed else "-"

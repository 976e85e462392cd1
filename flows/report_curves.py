"""Figures of a report with the very numbers they are drawn from."""

from __future__ import annotations

from collections.abc import Sequence

from a3r.store import SettingRecord, TrialRecord
from flows.report_figures import Bar, Line, comparison, curves
from flows.report_measures import score_name
from flows.report_sources import Number, Sources, Style, computed, metric
from flows.report_views import CurveTable, Sentence, SettingView

_MAX_POINTS = 40


def curve_tables(
    sources: Sources, settings: Sequence[SettingView], records: Sequence[SettingRecord]
) -> tuple[CurveTable, ...]:
    """Learning curves of an experiment: training reward, and held-out scores where trials were measured midway."""
    trials = {record.key: sources.reader.trials(record.id) for record in records}
    drawn: list[CurveTable] = []
    for name, title, least in (
        ("train/reward", "Training reward", 1),
        (score_name(sources), "Held-out score during training", 2),
    ):
        shown = [
            (view, trial)
            for view in settings
            for trial in trials[str(view.name.value)]
            if len(sources.steps(trial.id, name)) >= least
        ]
        if shown:
            drawn.append(_curve_table(sources, shown, name, title))
    return tuple(drawn)


def _curve_table(
    sources: Sources, shown: Sequence[tuple[SettingView, TrialRecord]], name: str, title: str
) -> CurveTable:
    steps = _thinned(sorted({step for _, trial in shown for step in sources.steps(trial.id, name)}))
    columns: list[Sentence] = []
    cells: list[dict[int, Number]] = []
    lines: list[Line] = []
    for view in dict.fromkeys(view for view, _ in shown):
        trials = [trial for owner, trial in shown if owner == view]
        for trial in trials:
            seed = next(t.seed for t in view.trials if t.id.value == trial.id)
            columns.append((view.name, ", seed ", seed))
            cells.append(_curve(sources, [trial], name, steps, label=view.name.text))
            lines.append(_line(cells[-1], view.colour, is_mean=False))
        columns.append((view.name, ", mean"))
        cells.append(_curve(sources, trials, name, steps, label=view.name.text))
        lines.append(_line(cells[-1], view.colour, is_mean=True))
    step_refs = {step: _step_number(step, shown, sources, name) for step in steps}
    rows = tuple((step_refs[step], *(cell.get(step) for cell in cells)) for step in steps)
    return CurveTable(title, curves(lines, y_label=title.lower()), tuple(columns), rows)


def _step_number(step: int, shown: Sequence[tuple[SettingView, TrialRecord]], sources: Sources, name: str) -> Number:
    trial = next(trial for _, trial in shown if step in sources.steps(trial.id, name))
    return sources.cite(f"step:{trial.id}/{name}@{step}", label="policy updates", style=Style.COUNT)


def _curve(
    sources: Sources, trials: Sequence[TrialRecord], name: str, steps: Sequence[int], *, label: str
) -> dict[int, Number]:
    """Step to the metric of one trial, or to its mean over several."""
    points: dict[int, Number] = {}
    for step in steps:
        refs = [metric(t.id, name, step) for t in trials if (name, step) in sources.metrics(t.id)]
        if refs:
            ref = refs[0] if len(trials) == 1 else computed("mean", refs)
            points[step] = sources.cite(ref, label=f"{label}: {name} at update {step}")
    return points


def _line(points: dict[int, Number], colour: int, *, is_mean: bool) -> Line:
    return Line([(step, float(number.value)) for step, number in points.items()], colour, is_mean)


def _thinned(steps: list[int]) -> list[int]:
    """At most about forty steps, evenly, always with the last one."""
    stride = -(-len(steps) // _MAX_POINTS)
    return sorted({*steps[::stride], steps[-1]}) if steps else []


def comparison_figure(settings: Sequence[SettingView], name: str) -> str:
    """The settings side by side as SVG; empty before anything was measured."""
    bars = [
        Bar(
            name="untrained" if view.is_untrained else view.name.text,
            value=float(view.success.value.value),
            low=float(view.success.low.value) if view.success.low else None,
            high=float(view.success.high.value) if view.success.high else None,
            seeds=[float(t.success.value.value) for t in view.trials if t.success and t.state.value == "finished"],
            colour=view.colour,
        )
        for view in settings
        if view.success
    ]
    return comparison(bars, x_label=f"held-out {name}") if bars else ""

"""Scores, their intervals and their differences, as references into the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from a3r.campaign import TrialState
from a3r.store import SettingRecord, TrialRecord
from flows.report_sources import Number, Sources, Style, computed, metric
from flows.report_views import Measured


class ScoreStyles(NamedTuple):
    """How the plan's metric, differences of it, and sizes of differences are written."""

    score: Style
    change: Style
    span: Style


def score_styles(sources: Sources) -> ScoreStyles:
    """Per cent and points for fractions, plain numbers otherwise."""
    if sources.campaign.plan.metric.unit.startswith("fraction"):
        return ScoreStyles(Style.RATE, Style.POINTS, Style.SPAN)
    return ScoreStyles(Style.NUMBER, Style.NUMBER, Style.NUMBER)


def score_name(sources: Sources) -> str:
    """Name of the plan's metric among a trial's metrics."""
    return f"eval/{sources.campaign.plan.metric.name}"


def confidence_level(sources: Sources) -> Number:
    """The level of every interval in the report."""
    return sources.cite(computed("level", []), label="confidence level", style=Style.LEVEL)


def score_refs(sources: Sources, trial: TrialRecord) -> list[str]:
    """The reference of a trial's last score; none before it was measured."""
    steps = sources.steps(trial.id, score_name(sources))
    return [metric(trial.id, score_name(sources), steps[-1])] if steps else []


def _refs_of(sources: Sources, records: Sequence[SettingRecord], key: str) -> list[str]:
    record = next(record for record in records if record.key == key)
    finished = [t for t in sources.reader.trials(record.id) if t.state is TrialState.FINISHED]
    return [ref for trial in finished for ref in score_refs(sources, trial)]


def effect_groups(sources: Sources, index: int, records: Sequence[SettingRecord]) -> list[list[str]]:
    """Arguments of the functions of a difference: treatment, control, hidden tasks."""
    judged = sources.judged(index)
    sides = [_refs_of(sources, records, key) for key in (judged.treatment, judged.control)]
    if sources.campaign.plan.metric.direction == "minimise":
        sides.reverse()
    return [*sides, ["plan:metric.num_tasks"]]


def last_refs(sources: Sources, trials: Sequence[TrialRecord], name: str) -> list[str]:
    """References of the last value of a metric in each trial that has it."""
    known = [(trial.id, sources.steps(trial.id, name)) for trial in trials]
    return [metric(trial_id, name, steps[-1]) for trial_id, steps in known if steps]


def mean_of_seeds(sources: Sources, scores: list[str], name: str) -> Measured | None:
    """Mean of per-seed scores with Student's interval, if there are two or more."""
    if not scores:
        return None
    style = score_styles(sources).score
    has_spread = len(scores) >= 2
    label = f"{name}: mean over seeds"
    return Measured(
        value=sources.cite(computed("mean", scores), label=label, style=style),
        low=sources.cite(computed("mean_low", scores), label=f"{label}, low end", style=style) if has_spread else None,
        high=sources.cite(computed("mean_high", scores), label=f"{label}, high end", style=style)
        if has_spread
        else None,
    )


def pooled_success(sources: Sources, trials: Sequence[TrialRecord], name: str) -> Measured | None:
    """Mean over evaluations of one policy, with Wilson's interval where the metric is a success rate."""
    style = score_styles(sources).score
    scores = [ref for trial in trials for ref in score_refs(sources, trial)]
    if not scores:
        return None
    whole = scores[0] if len(scores) == 1 else computed("mean", scores)
    value = sources.cite(whole, label=f"{name}: success", style=style)
    counts = [ref.replace(f"/{score_name(sources)}@", "/eval/episodes@") for ref in scores]
    if style is not Style.RATE or not all(_is_known(sources, ref) for ref in counts):
        return Measured(value, None, None)
    return Measured(
        value=value,
        low=sources.cite(computed("success_low", scores, counts), label=f"{name}: success, low end", style=style),
        high=sources.cite(computed("success_high", scores, counts), label=f"{name}: success, high end", style=style),
    )


def _is_known(sources: Sources, ref: str) -> bool:
    trial_id, _, name_at_step = ref.removeprefix("metric:").partition("/")
    name, _, step = name_at_step.rpartition("@")
    return (name, int(step)) in sources.metrics(trial_id)

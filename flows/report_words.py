"""A campaign's answer and its limits, in plain words with every figure cited."""

from __future__ import annotations

from collections.abc import Sequence

from a3r.campaign import BASELINE_KEY, VerdictKind
from a3r.plan import BriefKind, ClaimKind, PlannedHypothesis
from a3r.store import HypothesisRecord, SettingRecord
from flows.report_measures import confidence_level, effect_groups, last_refs, score_styles
from flows.report_sources import Number, Sources, Style, computed
from flows.report_views import ExperimentView, Sentence


def headline(sources: Sources, row: HypothesisRecord, records: Sequence[SettingRecord]) -> Sentence:
    """The verdict in plain words, every figure cited."""
    judged = sources.judged(row.index)
    names = tuple(_name(sources, row.index, side) for side in ("treatment", "control"))
    if judged.effect is None:
        return ("Undecided: too little of the plan was finished to compare anything.",)
    measured = _effect(sources, row, records)
    minimum = sources.cite(
        f"plan:hypotheses.{row.index}.minimum_effect", label="minimum effect", style=score_styles(sources).span
    )
    opening = _opening(row.planned, judged.kind, names=names, minimum=minimum)
    return (*opening, *measured)


def _name(sources: Sources, index: int, side: str) -> str | Number:
    key = sources.value(f"verdict:{index}/{side}")
    if key == BASELINE_KEY:
        return "the untrained policy"
    if sources.campaign.kind is BriefKind.TRAIN:
        return "the trained policy"
    return sources.cite(f"verdict:{index}/{side}", label=f"{side} of the verdict", style=Style.KEY)


def _opening(
    planned: PlannedHypothesis, kind: VerdictKind, *, names: tuple[str | Number, ...], minimum: Number
) -> Sentence:
    treatment, control = names
    decided: dict[tuple[ClaimKind, VerdictKind], Sentence] = {
        (ClaimKind.BETTER, VerdictKind.SUPPORTED): ("Yes: ", treatment, " beats ", control, ". "),
        (ClaimKind.BETTER, VerdictKind.REFUTED): (
            *("No: ", treatment, " does not beat ", control),
            *(" by the minimum effect of ", minimum, ". "),
        ),
        (ClaimKind.EQUIVALENT, VerdictKind.SUPPORTED): (
            *("Yes: ", treatment, " and ", control, " differ by less than the margin of ", minimum, ". "),
        ),
        (ClaimKind.EQUIVALENT, VerdictKind.REFUTED): (
            *("No: ", treatment, " and ", control, " differ by more than the margin of ", minimum, ". "),
        ),
        (ClaimKind.RANKING, VerdictKind.SUPPORTED): (
            *("Yes: ", treatment, " is the best setting tried; the next best is ", control, ". "),
        ),
    }
    if planned.kind is ClaimKind.RANKING:
        undecided: Sentence = (
            *("Undecided: ", treatment, " has the highest mean, but not every other setting is told apart from it; "),
            *("the next best is ", control, ". "),
        )
    else:
        undecided = ("Undecided between ", treatment, " and ", control, ". ")
    return decided.get((planned.kind, kind), undecided)


def _effect(sources: Sources, row: HypothesisRecord, records: Sequence[SettingRecord]) -> Sentence:
    groups = effect_groups(sources, row.index, records)
    style = score_styles(sources).change
    effect = sources.cite(computed("effect", *groups), label="difference of the verdict", style=style)
    if sources.judged(row.index).interval_low is None:
        return ("Measured difference: ", effect, ", without an interval.")
    low = sources.cite(computed("effect_low", *groups), label="difference, low end", style=style)
    high = sources.cite(computed("effect_high", *groups), label="difference, high end", style=style)
    return ("Measured difference: ", effect, "; ", confidence_level(sources), " interval ", low, " to ", high, ".")


def limits_of(sources: Sources, experiments: Sequence[ExperimentView]) -> tuple[Sentence, ...]:
    """What this campaign cannot say, in sentences."""
    plan, campaign_id = sources.campaign.plan, sources.campaign.id
    seeds = sources.cite(
        computed("count", [f"plan:seeds.{i}" for i in range(len(plan.seeds))]), label="planned seeds", style=Style.COUNT
    )
    tasks = sources.cite("plan:metric.num_tasks", label="hidden tasks", style=Style.COUNT)
    temperature = sources.cite("plan:metric.temperature", label="temperature")
    done = sources.cite(f"record:{campaign_id}/trials_finished", label="finished trials", style=Style.COUNT)
    opened = sources.cite(f"record:{campaign_id}/trials", label="opened trials", style=Style.COUNT)
    limits: list[Sentence] = [
        ("Each setting has ", seeds, " planned seeds; ", done, " of ", opened, " opened trials finished."),
        (
            *("Scores come from ", tasks, " hidden tasks at temperature ", temperature),
            ", drawn by the same generator as the training tasks: other kinds of task were not tested.",
        ),
        ("One model and one program were used; everything that the plan holds equal was not varied.",),
        ("Concurrent trials are alike only statistically: run again, every figure moves within its noise.",),
    ]
    limits += [_noise(sources, row) for row in sources.reader.hypotheses(campaign_id) if _has_interval(sources, row)]
    if any(h.kind is ClaimKind.RANKING for h in plan.hypotheses):
        limits.append(("The best of several settings was picked by its score, so its own score is somewhat too high.",))
    faults = last_refs(sources, sources.reader.campaign_trials(campaign_id), "eval/faults")
    if faults:
        total = sources.cite(computed("sum", faults), label="faults on hidden tasks", style=Style.COUNT)
        limits.append(("Hidden-task episodes that ended in a fault of the program and count as unsolved: ", total, "."))
    if not any(setting.success for view in experiments for setting in view.settings if setting.is_untrained):
        limits.append(("The untrained policy was not measured.",))
    return tuple(limits)


def _has_interval(sources: Sources, row: HypothesisRecord) -> bool:
    return row.verdict is not None and sources.judged(row.index).interval_low is not None


def _noise(sources: Sources, row: HypothesisRecord) -> Sentence:
    experiments = sources.reader.experiments(sources.campaign.id)
    experiment = next(e for e in experiments if e.hypothesis_index == row.index)
    groups = effect_groups(sources, row.index, sources.reader.settings(experiment.id))
    half = sources.cite(computed("effect_half", *groups), label="half the interval", style=score_styles(sources).span)
    return ("With this noise and this many seeds the difference is known to within ", half, " either way.")

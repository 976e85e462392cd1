"""States of a campaign and its trials, the events that steer it, and the plain code that judges a hypothesis.

A language model may write words about a Verdict; only the rules here make one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

from pydantic import JsonValue

from a3r.errors import IllegalTransition, UsageError
from a3r.plan import BriefKind, ClaimKind, Metric, PlannedHypothesis
from a3r.stats import Difference, difference, equivalence, holm


class CampaignState(StrEnum):
    """Where a campaign is."""

    PLANNED = "planned"
    """A plan exists; nobody agreed to it yet."""
    APPROVED = "approved"
    """A person agreed; nothing was spent."""
    RUNNING = "running"
    PAUSED = "paused"
    """A person asked it to hold between steps."""
    FINISHED = "finished"
    """Everything planned was done and judged."""
    FAILED = "failed"
    """A fault ended it; `resume` takes it up again."""
    CANCELLED = "cancelled"
    EXHAUSTED = "exhausted"
    """The budget ended it; what was done is judged and kept."""

    @property
    def is_over(self) -> bool:
        return self in (
            CampaignState.FINISHED,
            CampaignState.FAILED,
            CampaignState.CANCELLED,
            CampaignState.EXHAUSTED,
        )

    @property
    def is_resumable(self) -> bool:
        """Whether a process may take it up (again)."""
        return self in (CampaignState.APPROVED, CampaignState.RUNNING, CampaignState.PAUSED, CampaignState.FAILED)


class TrialState(StrEnum):
    """Where a trial is."""

    PLANNED = "planned"
    RUNNING = "running"
    FINISHED = "finished"
    """Trained and measured; the only state whose score counts."""
    FAILED = "failed"
    """A fault ended it. It may be planned again; it never counts as zero."""
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in (TrialState.FINISHED, TrialState.FAILED, TrialState.CANCELLED)


class SettingKind(StrEnum):
    """Why a Setting exists."""

    PLANNED = "planned"
    """A point of the plan's search space."""
    BASELINE = "baseline"
    """The untrained policy, measured for comparison."""


class EventKind(StrEnum):
    """What a row of the event table says."""

    STATE = "state"
    """The campaign or a trial changed its state; `data["state"]` is the new one."""
    PROGRESS = "progress"
    """How far a trial or the campaign is, in `data`."""
    NOTE = "note"
    """Something a person may want to know."""
    FAULT = "fault"
    """Something misbehaved; `data["boundary"]` says where."""
    VERDICT = "verdict"
    """A hypothesis was judged."""
    STEER = "steer"
    """A person's remark for the analyst, in words."""
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"

    @property
    def is_steering(self) -> bool:
        """Whether a person wrote it and the campaign has to act on it."""
        return self in (EventKind.STEER, EventKind.PAUSE, EventKind.RESUME, EventKind.CANCEL)


_CAMPAIGN_MOVES: Mapping[CampaignState, frozenset[CampaignState]] = {
    CampaignState.PLANNED: frozenset({CampaignState.APPROVED, CampaignState.CANCELLED}),
    CampaignState.APPROVED: frozenset({CampaignState.RUNNING, CampaignState.FAILED, CampaignState.CANCELLED}),
    CampaignState.RUNNING: frozenset(
        {
            CampaignState.PAUSED,
            CampaignState.FINISHED,
            CampaignState.FAILED,
            CampaignState.CANCELLED,
            CampaignState.EXHAUSTED,
        }
    ),
    CampaignState.PAUSED: frozenset(
        {CampaignState.RUNNING, CampaignState.FAILED, CampaignState.CANCELLED, CampaignState.EXHAUSTED}
    ),
    CampaignState.FAILED: frozenset({CampaignState.RUNNING, CampaignState.CANCELLED}),
    CampaignState.FINISHED: frozenset(),
    CampaignState.CANCELLED: frozenset(),
    CampaignState.EXHAUSTED: frozenset(),
}

_TRIAL_MOVES: Mapping[TrialState, frozenset[TrialState]] = {
    TrialState.PLANNED: frozenset({TrialState.RUNNING, TrialState.FAILED, TrialState.CANCELLED}),
    # Back to planned: whoever ran it died, and nothing about the trial itself is known to be wrong.
    TrialState.RUNNING: frozenset({TrialState.PLANNED, TrialState.FINISHED, TrialState.FAILED, TrialState.CANCELLED}),
    TrialState.FAILED: frozenset({TrialState.PLANNED, TrialState.CANCELLED}),
    TrialState.FINISHED: frozenset(),
    TrialState.CANCELLED: frozenset(),
}


def check_campaign_move(old: CampaignState, new: CampaignState) -> None:
    """Raise IllegalTransition unless a campaign in `old` may become `new`. Staying is always legal."""
    if new != old and new not in _CAMPAIGN_MOVES[old]:
        raise _illegal("campaign", old, new, allowed=_CAMPAIGN_MOVES[old])


def check_trial_move(old: TrialState, new: TrialState) -> None:
    """Raise IllegalTransition unless a trial in `old` may become `new`. Staying is always legal."""
    if new != old and new not in _TRIAL_MOVES[old]:
        raise _illegal("trial", old, new, allowed=_TRIAL_MOVES[old])


def _illegal(what: str, old: StrEnum, new: StrEnum, *, allowed: frozenset[Any]) -> IllegalTransition:
    ways = ", ".join(sorted(state.value for state in allowed)) or "nothing: it is over"
    return IllegalTransition(f"A {old} {what} cannot become {new}", why=f"from {old} it may become {ways}")


def setting_key(values: Mapping[str, JsonValue]) -> str:
    """One name per Setting, whatever the order of its values: `trainer.lr=0.0003,trainer.num_updates=20`.

    Equal numbers get equal names (`1.0` is `1`), since a value may come back from JSON as either.
    """
    return ",".join(f"{path}={_canonical(values[path])}" for path in sorted(values)) or "as planned"


def _canonical(value: JsonValue) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


BASELINE_VALUES: Mapping[str, JsonValue] = {"trainer.num_updates": 0}
"""Setting of the untrained policy."""
BASELINE_KEY = setting_key(BASELINE_VALUES)


class VerdictKind(StrEnum):
    SUPPORTED = "supported"
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"

    @property
    def is_decided(self) -> bool:
        return self is not VerdictKind.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the data says about one hypothesis, by the plan's rule. `effect` and interval are in the metric's unit,
    signed so that positive favours the treatment (or the best setting)."""

    kind: VerdictKind
    effect: float | None
    """Treatment minus control, or best minus runner-up; None when a side has no finished trial."""
    interval_low: float | None
    interval_high: float | None
    n_treatment: int
    n_control: int
    reason: str
    treatment: str
    """Key of the Setting that `effect` speaks for: the treatment, or the best of a ranking."""
    control: str
    """Key of the Setting it is compared with: the control, or the runner-up."""
    tied: tuple[str, ...] = ()
    """Of an undecided ranking: keys of the settings that the best one is not distinguished from."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"kind": self.kind.value, "tied": list(self.tied)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Verdict:
        fields = dict(value)
        return cls(**fields | {"kind": VerdictKind(fields["kind"]), "tied": tuple(fields["tied"])})


def decision_rule(kind: ClaimKind, *, minimum_effect: float) -> str:
    """In words, the rule that `judge_hypothesis` executes for a kind of claim."""
    margin = f"{minimum_effect:g}"
    return {
        ClaimKind.BETTER: "Supported when the whole 95 % interval of treatment minus control (Welch's t over seeds) "
        f"lies above 0 and the difference itself is at least {margin}; refuted when the whole interval lies below "
        f"{margin}; else inconclusive.",
        ClaimKind.EQUIVALENT: "Supported when the whole 95 % interval of the difference (Welch's t over seeds) lies "
        f"within ±{margin}, that is by two one-sided tests; refuted when it lies wholly outside; else inconclusive.",
        ClaimKind.RANKING: "Supported when the best setting beats every other one at 5 %, two-sided, by Welch's t over "
        "seeds with Holm's correction over the comparisons; else inconclusive, naming the settings it ties with. "
        "The untrained policy is not ranked.",
    }[kind]


def judge_hypothesis(
    hypothesis: PlannedHypothesis, scores: Mapping[str, Sequence[float]], *, metric: Metric
) -> Verdict:
    """The Verdict on a hypothesis by its plan's rule (see `decision_rule`).

    `scores` maps setting keys to the metric of each finished seed; a missing or empty entry means that no trial of
    that setting finished. Fewer than two seeds on a side are inconclusive, since nothing tells noise from effect.
    """
    signed = _signed(scores, metric)
    if hypothesis.kind is ClaimKind.RANKING:
        return _judge_ranking(signed, num_tasks=metric.num_tasks)
    treatment, control = setting_key(hypothesis.treatment), setting_key(hypothesis.control)
    return _judge_pair(hypothesis, treatment, control, scores=signed, num_tasks=metric.num_tasks)


def _signed(scores: Mapping[str, Sequence[float]], metric: Metric) -> dict[str, list[float]]:
    sign = 1.0 if metric.direction == "maximise" else -1.0
    return {key: [sign * value for value in values] for key, values in scores.items() if values}


def _judge_pair(
    hypothesis: PlannedHypothesis,
    treatment: str,
    control: str,
    *,
    scores: Mapping[str, Sequence[float]],
    num_tasks: int,
) -> Verdict:
    missing = [key for key in (treatment, control) if key not in scores]
    if missing:
        return _undecided(treatment, control, scores, reason=f"No trial of {' or of '.join(missing)} finished.")
    found = difference(scores[treatment], scores[control], num_tasks=num_tasks)
    if found.interval is None:
        return _verdict(VerdictKind.INCONCLUSIVE, found, treatment, control, reason=_too_few(found))
    if hypothesis.kind is ClaimKind.EQUIVALENT:
        kind, reason = _equivalent(scores[treatment], scores[control], hypothesis.minimum_effect, num_tasks=num_tasks)
    else:
        kind, reason = _better(found, hypothesis.minimum_effect)
    return _verdict(kind, found, treatment, control, reason=reason)


def _better(found: Difference, margin: float) -> tuple[VerdictKind, str]:
    assert found.interval is not None
    if found.interval.high < margin:
        return VerdictKind.REFUTED, f"The whole interval lies below the minimum effect of {margin:g}."
    if found.interval.low > 0 and found.effect >= margin:
        return (
            VerdictKind.SUPPORTED,
            f"The whole interval lies above 0 and the difference reaches the minimum effect of {margin:g}.",
        )
    if found.interval.low > 0:
        return (
            VerdictKind.INCONCLUSIVE,
            f"The treatment is better, but whether by the minimum effect of {margin:g} is open.",
        )
    return (
        VerdictKind.INCONCLUSIVE,
        f"The interval holds both no difference and the minimum effect of {margin:g}: too few seeds for this noise.",
    )


def _equivalent(
    treatment: Sequence[float], control: Sequence[float], margin: float, *, num_tasks: int
) -> tuple[VerdictKind, str]:
    tested = equivalence(treatment, control, margin=margin, num_tasks=num_tasks)
    interval = tested.difference.interval
    assert interval is not None
    assert tested.p_value is not None
    if tested.p_value <= 0.025:
        return VerdictKind.SUPPORTED, f"The whole interval lies within ±{margin:g}."
    if interval.low > margin or interval.high < -margin:
        return VerdictKind.REFUTED, f"The whole interval lies outside ±{margin:g}."
    return (
        VerdictKind.INCONCLUSIVE,
        f"The interval reaches across the margin of {margin:g}: too few seeds for this noise.",
    )


def _judge_ranking(scores: Mapping[str, Sequence[float]], *, num_tasks: int) -> Verdict:
    ranked = sorted((key for key in scores if key != BASELINE_KEY), key=lambda key: (-fmean(scores[key]), key))
    if len(ranked) < 2:
        reason = "Fewer than two settings have a finished trial."
        return _undecided(ranked[0] if ranked else "", "", scores, reason=reason)
    best, *others = ranked
    found = {key: difference(scores[best], scores[key], num_tasks=num_tasks) for key in others}
    runner_up = found[others[0]]
    p_values = {key: pair.p_value for key, pair in found.items() if pair.p_value is not None}
    unmeasured = tuple(key for key in others if key not in p_values)
    if unmeasured:
        return _verdict(
            VerdictKind.INCONCLUSIVE, runner_up, best, others[0], reason=_too_few(found[unmeasured[0]]), tied=unmeasured
        )
    adjusted = holm(p_values)
    tied = tuple(key for key in others if adjusted[key] > 0.05)
    if tied:
        reason = f"{best} has the highest mean but is not distinguished from {'; '.join(tied)} (Holm, 5 %)."
        return _verdict(VerdictKind.INCONCLUSIVE, runner_up, best, others[0], reason=reason, tied=tied)
    reason = f"{best} beats each of the {len(others)} other settings (Holm, 5 %)."
    return _verdict(VerdictKind.SUPPORTED, runner_up, best, others[0], reason=reason)


def _too_few(found: Difference) -> str:
    return (
        f"With {found.n_treatment} and {found.n_control} finished seeds there is no telling noise from effect; "
        "at least 2 on each side are needed."
    )


def _undecided(treatment: str, control: str, scores: Mapping[str, Sequence[float]], *, reason: str) -> Verdict:
    n, m = (len(scores[key]) if key in scores else 0 for key in (treatment, control))
    return Verdict(VerdictKind.INCONCLUSIVE, None, None, None, n, m, reason, treatment, control)


def _verdict(
    kind: VerdictKind, found: Difference, treatment: str, control: str, *, reason: str, tied: tuple[str, ...] = ()
) -> Verdict:
    return Verdict(
        kind=kind,
        effect=found.effect,
        interval_low=found.interval.low if found.interval else None,
        interval_high=found.interval.high if found.interval else None,
        n_treatment=found.n_treatment,
        n_control=found.n_control,
        reason=reason,
        treatment=treatment,
        control=control,
        tied=tied,
    )


def exit_code(state: CampaignState, *, kind: BriefKind, verdicts: Sequence[Verdict]) -> int:
    """What a command that waited for a campaign exits with: 0 decided or trained, 1 failed or cancelled, 6 budget
    exhausted, 7 inconclusive. Raises UsageError for a campaign that is not over."""
    if not state.is_over:
        raise UsageError(f"The campaign is {state} and not over", next_step="wait for it with `a3r attach`")
    if state is CampaignState.EXHAUSTED:
        return 6
    if state is not CampaignState.FINISHED:
        return 1
    decided = bool(verdicts) and all(verdict.kind.is_decided for verdict in verdicts)
    return 0 if kind is BriefKind.TRAIN or decided else 7

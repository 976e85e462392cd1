"""Where every figure of a report comes from: references into the record, and the one way to resolve them.

| reference | is |
|---|---|
| `metric:<trial>/<name>@<step>` | one recorded metric |
| `step:<trial>/<name>@<step>` | the step itself, where that metric was recorded |
| `episode:<trial>/<episode>/<field>` | a field of a judged episode |
| `plan:<dotted path>` | a value of the approved plan |
| `record:<id>/<field>` | a field of a campaign, program, setting or trial |
| `verdict:<hypothesis>/<field>` | a field of the verdict, judged anew from the recorded metrics |
| `computed:<function>(<ref>,<ref>;<ref>)` | a function of `FUNCTIONS` over groups of references |

A figure is made by resolving its reference, so what is printed cannot differ from what is cited; `verify_report`
resolves it again later.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import TypeAlias

from pydantic import JsonValue

from a3r.campaign import TrialState, Verdict, judge_hypothesis
from a3r.errors import NotFound, UsageError
from a3r.stats import LEVEL, Interval, difference, mean_over_seeds, success_interval
from a3r.store import CampaignRecord, EpisodeSummary, ProgramRecord, Reader, SettingRecord, TrialRecord

Value: TypeAlias = "float | str"
Groups: TypeAlias = "Sequence[Sequence[float]]"


class Style(StrEnum):
    """How a value is written."""

    RATE = "rate"
    """A fraction, as per cent."""
    POINTS = "points"
    """A difference of fractions, as signed percentage points."""
    SPAN = "span"
    """A size of differences of fractions, as percentage points."""
    COUNT = "count"
    NUMBER = "number"
    SECONDS = "seconds"
    TIME = "time"
    """Seconds since the epoch, as a date in UTC."""
    LEVEL = "level"
    """A fraction known exactly, as per cent."""
    KEY = "key"
    """A setting's key, without the groups its paths start with."""
    TEXT = "text"

    def write(self, value: Value) -> str:
        if isinstance(value, str):
            return re.sub(r"(^|,)(trainer|judge)\.", r"\1", value) if self is Style.KEY else value
        match self:
            case Style.RATE:
                return f"{100 * value:.1f} %"
            case Style.POINTS:
                return f"{100 * value:+.1f}".replace("-", "−") + " points"
            case Style.SPAN:
                return f"{100 * value:.1f} points"
            case Style.COUNT:
                return f"{value:,.0f}"
            case Style.SECONDS:
                return _duration(value)
            case Style.TIME:
                return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(value))
            case Style.LEVEL:
                return f"{100 * value:g} %"
            case Style.NUMBER | Style.KEY | Style.TEXT:
                return f"{value:.3g}".replace("-", "−")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


@dataclass(frozen=True, slots=True)
class Number:
    """A figure (or a word of the record) with the reference that it was resolved from."""

    value: Value
    ref: str
    style: Style
    label: str
    """What it is, for the list of sources."""

    @property
    def text(self) -> str:
        return self.style.write(self.value)


class Sources:
    """Resolves references of one campaign."""

    def __init__(self, reader: Reader, campaign_id: str) -> None:
        self.reader = reader
        self.campaign = reader.campaign(campaign_id)
        self._metrics: dict[str, Mapping[tuple[str, int], float]] = {}
        self._episodes: dict[str, list[EpisodeSummary]] = {}
        self._verdicts: dict[int, Verdict] = {}

    def cite(self, ref: str, *, label: str, style: Style = Style.NUMBER) -> Number:
        """The figure behind a reference. Raises NotFound or UsageError when there is none."""
        return Number(self.value(ref), ref, style, label)

    def value(self, ref: str) -> Value:
        """Resolve a reference. Raises NotFound when the record lacks it, UsageError when it cannot be read."""
        kind, _, rest = ref.partition(":")
        resolve = {
            "metric": self._metric,
            "step": self._step,
            "episode": self._episode,
            "plan": self._plan,
            "record": self._record,
            "verdict": self._verdict,
            "computed": self._computed,
        }
        if kind not in resolve:
            raise UsageError(f"The reference {ref!r} cannot be read")
        return resolve[kind](rest)

    def metrics(self, trial_id: str) -> Mapping[tuple[str, int], float]:
        """(name, step) to value of one trial."""
        if trial_id not in self._metrics:
            points = self.reader.metrics(trial_id)
            self._metrics[trial_id] = {(point.name, point.step): point.value for point in points}
        return self._metrics[trial_id]

    def episodes(self, trial_id: str) -> list[EpisodeSummary]:
        """Judged episodes of one trial."""
        if trial_id not in self._episodes:
            self._episodes[trial_id] = self.reader.episodes(trial_id)
        return self._episodes[trial_id]

    def steps(self, trial_id: str, name: str) -> list[int]:
        """Steps at which a trial recorded a metric."""
        return sorted(step for known, step in self.metrics(trial_id) if known == name)

    def _metric(self, rest: str) -> float:
        trial_id, _, name_at_step = rest.partition("/")
        name, _, step = name_at_step.rpartition("@")
        found = self.metrics(trial_id).get((name, _whole(step, rest)))
        if found is None:
            raise NotFound(f"The record has no metric {rest}")
        return found

    def _step(self, rest: str) -> float:
        self._metric(rest)
        return float(rest.rpartition("@")[2])

    def _episode(self, rest: str) -> Value:
        trial_id, episode_id, field = _parts(rest, 3)
        for episode in self.episodes(trial_id):
            if episode.episode_id == episode_id:
                fields: dict[str, Value | None] = {
                    "metric": episode.metric,
                    "reward": episode.reward,
                    "turns": float(episode.turns),
                    "ending": episode.ending.value,
                    "task": episode.task_id,
                }
                return _present(fields, field, rest)
        raise NotFound(f"The record has no episode {rest}")

    def _plan(self, rest: str) -> Value:
        node: JsonValue = self.campaign.plan.model_dump(mode="json")
        for part in rest.split("."):
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                raise NotFound(f"The plan has no {rest}")
        if isinstance(node, bool) or not isinstance(node, (str, int, float)):
            raise UsageError(f"The plan's {rest} is neither a number nor a text")
        return node

    def _record(self, rest: str) -> Value:
        record_id, field = _parts(rest, 2)
        readers: Mapping[str, Callable[[], Mapping[str, Value | None]]] = {
            "c": lambda: _campaign_fields(self.reader, self.reader.campaign(record_id)),
            "p": lambda: _program_fields(self.reader.program(record_id)),
            "s": lambda: _setting_fields(self.reader.setting(record_id)),
            "t": lambda: _trial_fields(self.reader.trial(record_id)),
        }
        if record_id[:1] not in readers:
            raise UsageError(f"The reference record:{rest} cannot be read")
        return _present(readers[record_id[:1]](), field, rest)

    def _verdict(self, rest: str) -> Value:
        index, field = _parts(rest, 2)
        verdict = self.judged(_whole(index, rest))
        fields: dict[str, Value | None] = {
            "kind": verdict.kind.value,
            "reason": verdict.reason,
            "treatment": verdict.treatment,
            "control": verdict.control,
            "tied": "; ".join(verdict.tied),
        }
        return _present(fields, field, rest)

    def judged(self, index: int) -> Verdict:
        """The verdict on a hypothesis as the recorded metrics give it now."""
        if index not in self._verdicts:
            plan = self.campaign.plan
            experiments = [e for e in self.reader.experiments(self.campaign.id) if e.hypothesis_index == index]
            if not experiments or index >= len(plan.hypotheses):
                raise NotFound(f"There is no experiment on hypothesis {index}")
            scores = self.reader.scores(experiments[0].id, f"eval/{plan.metric.name}")
            self._verdicts[index] = judge_hypothesis(plan.hypotheses[index], scores, metric=plan.metric)
        return self._verdicts[index]

    def _computed(self, rest: str) -> float:
        name, _, arguments = rest.partition("(")
        if name not in FUNCTIONS or not arguments.endswith(")"):
            raise UsageError(f"The reference computed:{rest} cannot be read")
        inside = arguments[:-1]
        groups = [
            [self._argument(argument) for argument in _split(group, ",")] if group else []
            for group in _split(inside, ";")
        ]
        return FUNCTIONS[name](groups)

    def _argument(self, ref: str) -> float:
        value = self.value(ref)
        if isinstance(value, str):
            raise UsageError(f"{ref} is a text, not a number")
        return value


def computed(name: str, *groups: Sequence[str]) -> str:
    """The reference of a function over groups of references."""
    return f"computed:{name}({';'.join(','.join(group) for group in groups)})"


def metric(trial_id: str, name: str, step: int) -> str:
    """The reference of a recorded metric."""
    return f"metric:{trial_id}/{name}@{step}"


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside of parentheses."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _parts(text: str, count: int) -> list[str]:
    parts = text.split("/")
    if len(parts) != count:
        raise UsageError(f"The reference {text!r} cannot be read")
    return parts


def _whole(text: str, ref: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"The reference {ref!r} cannot be read")
    return int(text)


def _present(fields: Mapping[str, Value | None], field: str, ref: str) -> Value:
    value = fields.get(field)
    if value is None:
        raise NotFound(f"The record has nothing at {ref}")
    return value


def _campaign_fields(reader: Reader, campaign: CampaignRecord) -> dict[str, Value | None]:
    trials = reader.campaign_trials(campaign.id)
    counts = {f"trials_{state}": float(sum(t.state is state for t in trials)) for state in TrialState}
    seconds = None
    if campaign.approved_at is not None and campaign.ended_at is not None:
        seconds = campaign.ended_at - campaign.approved_at
    return {
        "id": campaign.id,
        "state": campaign.state.value,
        "reason": campaign.reason,
        "hidden_sha256": campaign.hidden_sha256,
        "created_at": campaign.created_at,
        "seconds": seconds,
        "trials": float(len(trials)),
        **counts,
    }


def _program_fields(program: ProgramRecord) -> dict[str, Value | None]:
    return {
        "sha256": program.sha256,
        "commit": program.commit,
        "path": program.path,
        "coder": program.coder,
        "attempts": float(program.attempts),
        **{f"gate {name}": found for name, found in program.gates.items()},
    }


def _setting_fields(setting: SettingRecord) -> dict[str, Value | None]:
    return {"key": setting.key, "kind": setting.kind.value}


def _trial_fields(trial: TrialRecord) -> dict[str, Value | None]:
    return {
        "id": trial.id,
        "seed": float(trial.seed),
        "state": trial.state.value,
        "reason": trial.reason,
        "attempts": float(trial.attempts),
    }


def _interval(groups: Groups) -> Interval:
    interval = mean_over_seeds(groups[0]).interval
    if interval is None:
        raise NotFound("One seed has no interval")
    return interval


def _success(groups: Groups) -> Interval:
    """Wilson's interval of pooled evaluations: groups of rates and of episode counts."""
    rates, counts = groups
    episodes = round(sum(counts))
    solved = sum(rate * count for rate, count in zip(rates, counts, strict=True))
    return success_interval(min(solved, episodes), trials=episodes)


def _effect_interval(groups: Groups) -> Interval:
    interval = difference(groups[0], groups[1], num_tasks=round(groups[2][0])).interval
    if interval is None:
        raise NotFound("One seed has no interval")
    return interval


FUNCTIONS: Mapping[str, Callable[[Groups], float]] = {
    "level": lambda _: LEVEL,
    "count": lambda groups: float(len(groups[0])),
    "sum": lambda groups: sum(groups[0]),
    "mean": lambda groups: fmean(groups[0]),
    "max": lambda groups: max(groups[0]),
    "mean_low": lambda groups: _interval(groups).low,
    "mean_high": lambda groups: _interval(groups).high,
    "success_low": lambda groups: _success(groups).low,
    "success_high": lambda groups: _success(groups).high,
    "effect": lambda groups: difference(groups[0], groups[1]).effect,
    "effect_low": lambda groups: _effect_interval(groups).low,
    "effect_high": lambda groups: _effect_interval(groups).high,
    "effect_half": lambda groups: (_effect_interval(groups).high - _effect_interval(groups).low) / 2,
}

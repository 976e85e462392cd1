"""A research sentence, read into what is varied and what is claimed. Nothing here knows of budgets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import JsonValue

from a3r.config import TrainerConfig, TrialConfig, setting_paths
from a3r.errors import PlanRejected
from a3r.plan import ClaimKind, Dimension
from vibe import wording


@dataclass(frozen=True, slots=True)
class Factor:
    """A setting that sentences speak of."""

    path: str
    name: str
    cue: str
    """Regular expression over plain text."""
    levels: tuple[JsonValue, ...]
    """Compared where the sentence gives no values; for a switch: off, on."""
    is_switch: bool = False
    """Whether "does it help" means on against off."""
    is_integer: bool = False


FACTORS = (
    Factor("trainer.lr", "learning rate", r"\blearning[- ]rates?\b|\blrs?\b|\bstep sizes?\b", (1e-5, 1e-4, 3e-4, 1e-3)),
    Factor("trainer.group_size", "group size", r"\bgroup[- ]sizes?\b|\bgroups? of\b", (4, 8, 16), is_integer=True),
    Factor("trainer.kl_coef", "KL penalty", r"\bkl\b", (0.0, 0.05), is_switch=True),
    Factor("trainer.entropy_coef", "entropy bonus", r"\bentropy\b", (0.0, 0.01), is_switch=True),
    Factor("trainer.weight_decay", "weight decay", r"\bweight[- ]decay\b", (0.0, 0.01), is_switch=True),
    Factor(
        "trainer.advantage_scale_std",
        "dividing advantages by their standard deviation",
        r"\bstandard deviations?\b|\bstd\b|\badvantage (?:normali[sz]ation|scaling)\b",
        (False, True),
        is_switch=True,
    ),
    Factor("trainer.advantage_scale_std", "Dr. GRPO", r"\bdr\.? ?grpo\b", (True, False), is_switch=True),
    Factor(
        "trainer.clip_high",
        "upper clip",
        r"\bclip(?:ping)?[- ]?(?:high(?:er)?|upper)\b|\bupper clip\b",
        (0.2, 0.28, 0.4),
    ),
    Factor("trainer.max_grad_norm", "gradient clip", r"\bgrad(?:ient)?[- ](?:norm|clip)\w*", (0.3, 1.0, 3.0)),
    Factor("trainer.temperature", "sampling temperature", r"\btemperatures?\b", (0.7, 1.0, 1.3)),
    Factor("trainer.num_minibatches", "minibatches", r"\bmini-?batch(?:es)?\b", (1, 2, 4), is_integer=True),
    Factor(
        "trainer.batch_tasks",
        "batch size in tasks",
        r"\bbatch[- ]sizes?\b|\btasks per (?:batch|update)\b",
        (8, 16, 32),
        is_integer=True,
    ),
)

# What a sentence asks for, however it goes on, and what it asks for only where it names no factor.
_BEYOND_ANYWAY = (
    (r"\blo-?ra\b|\badapters?\b|\bfull(?:[- ]weights?| fine)", "LoRA against full weights"),
    (
        r"\b(?:bigger|larger|smaller) models?\b|\bmodel sizes?\b|\b(?:two|three|\d+) model sizes\b",
        "models of other sizes",
    ),
    (r"\bppo\b|\bcritic\b|\brloo\b|\bgspo\b|\breinforce\b|\bdapo\b|\bcispo\b", "other algorithms"),
)
_BEYOND = (
    (r"\b(?:turns?|steps?|tries|attempts?)\b", "the number of turns of a task"),
    (r"\bprompts?\b|\bwording\b|\brewards?\b", "the prompt or the reward"),
)
_OPTIMUM = r"\bbest (?:settings?|config\w*|hyper\S*)|\boptim\w+|\btune\b|\btuning\b|\bhyper-?parameters?\b"
_ENDLESS = r"\bforever\b|\bfor ever\b|\bendless\w*|\bnever stop|\bwithout (?:an )?end\b|\bindefinitely\b"
_NO_DIFFERENCE = (
    r"\b(?:change|changes|matter|matters|difference|affect|affects|effect|influence|influences|equivalent|same)\b"
)
_DOUBT = re.compile(
    r"\bi (?:think|guess|believe|suspect) (?:it does )?not\b|\bi don'?t (?:think|believe)\b|\bi doubt\b"
)
_DIRECTED = r"\b(?:than|beats?|outperforms?|over)\b"
_CHOICE = r"\b(?:which|what|best|find)\b"
_RANGE = rf"\b(?:between|from) {wording.NUMBER} (?:and|to) {wording.NUMBER}(?!\w)"
_NUM_SPREAD = 4
_WORSE = r"\b(?:worse|slower|less well)\b"
_SEARCHED = (
    Dimension(path="trainer.lr", low=3e-5, high=1.5e-3, log=True),
    Dimension(path="trainer.temperature", low=0.7, high=1.3),
    Dimension(path="trainer.num_minibatches", low=1, high=4, integer=True),
)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: the claim, and the values it is about."""

    kind: ClaimKind
    factor: Factor | None
    """None for a search over several settings."""
    levels: tuple[JsonValue, ...] = ()
    """Values compared. For BETTER and EQUIVALENT the treatment comes first and the control second."""
    expectation: str = ""
    notes: tuple[str, ...] = ()

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """Axes of the search, for a question without a factor."""
        return _SEARCHED


def read_question(text: str, *, base: TrialConfig) -> Question:
    """The question in `text`. `base` gives the value that a single named one is compared with.

    Raises PlanRejected, with the settings that can be varied, when the sentence asks for something else.
    """
    plain = wording.without_durations(wording.plain(text))
    _refuse_beyond(_BEYOND_ANYWAY, plain)
    named = [factor for factor in FACTORS if re.search(factor.cue, plain)]
    if len(named) > 1:
        raise PlanRejected(
            "One question varies one setting",
            why="the sentence names " + " and ".join(factor.name for factor in named),
            next_step='ask about one of them, or ask to "find the best settings"',
        )
    if named:
        return _about(named[0], plain, base=base)
    _refuse_beyond(_BEYOND, plain)
    if re.search(_OPTIMUM, plain):
        return Question(kind=ClaimKind.RANKING, factor=None)
    if re.search(_ENDLESS, plain):
        return Question(
            kind=ClaimKind.RANKING,
            factor=None,
            notes=("No question was asked: a search for the best settings is planned.",),
        )
    raise _not_varied("No setting to vary was found in the sentence")


def _refuse_beyond(cues: tuple[tuple[str, str], ...], plain: str) -> None:
    for cue, what in cues:
        if re.search(cue, plain):
            raise _not_varied(f"This version does not compare {what}")


def is_endless(text: str) -> bool:
    """Whether the sentence asks for work without an end."""
    return re.search(_ENDLESS, wording.plain(text)) is not None


def _not_varied(what: str) -> PlanRejected:
    paths = ", ".join(setting_paths(TrainerConfig, prefix="trainer."))
    return PlanRejected(
        what,
        why="a question is answered by varying a setting and measuring the hidden tasks",
        next_step="ask about one of " + ", ".join(f.name for f in FACTORS) + f" (settings: {paths}), "
        'such as "Does a learning rate of 3e-4 train number guessing better than 1e-5?"',
    )


def _about(factor: Factor, plain: str, *, base: TrialConfig) -> Question:
    levels = _levels(factor, plain)
    doubt = "No difference is expected, as the question says." if _DOUBT.search(plain) else ""
    if len(levels) >= 3:
        return Question(kind=ClaimKind.RANKING, factor=factor, levels=levels)
    if re.search(_NO_DIFFERENCE, plain) or doubt:
        return Question(
            kind=ClaimKind.EQUIVALENT, factor=factor, levels=_pair(factor, levels, base=base), expectation=doubt
        )
    if len(levels) == 2 and re.search(_DIRECTED, plain):
        return Question(kind=ClaimKind.BETTER, factor=factor, levels=_directed(levels, plain))
    if len(levels) == 2:
        return Question(kind=ClaimKind.RANKING, factor=factor, levels=levels)
    if len(levels) == 1 or factor.is_switch:
        return Question(kind=ClaimKind.BETTER, factor=factor, levels=_directed(_pair(factor, levels, base=base), plain))
    note = f"No values were named: {', '.join(map(_shown, factor.levels))} are compared."
    return Question(kind=ClaimKind.RANKING, factor=factor, levels=factor.levels, notes=(note,))


def _directed(levels: tuple[JsonValue, ...], plain: str) -> tuple[JsonValue, ...]:
    """Treatment first: "is A worse than B" claims that B is better."""
    return levels[::-1] if re.search(_WORSE, plain) else levels


def _pair(factor: Factor, levels: tuple[JsonValue, ...], *, base: TrialConfig) -> tuple[JsonValue, ...]:
    """Treatment and control: what is named, against what would be used otherwise."""
    if len(levels) == 2:
        return levels
    usual = _value_at(base, factor.path)
    if levels:
        control = usual if levels[0] != usual else next(v for v in factor.levels if v != usual)
        return levels[0], control
    if factor.is_switch:
        off, on = factor.levels
        return on, off
    return next(v for v in reversed(factor.levels) if v != usual), usual


def _value_at(base: TrialConfig, path: str) -> JsonValue:
    value: JsonValue = base.model_dump(mode="json")
    for part in path.split("."):
        assert isinstance(value, dict)
        value = value[part]
    return value


def _levels(factor: Factor, plain: str) -> tuple[JsonValue, ...]:
    """The values that the sentence names for `factor`, without what it says of the task."""
    if isinstance(factor.levels[0], bool):
        return ()
    found = tuple(dict.fromkeys(wording.numbers(_about_factor(factor, plain))))
    if len(found) == 2 and re.search(_RANGE, plain) and re.search(_CHOICE, plain):
        found = _spread(*found)
    if factor.is_integer:
        return tuple(dict.fromkeys(round(value) for value in found))
    return found


def _about_factor(factor: Factor, plain: str) -> str:
    """`plain` without the numbers that belong to the task or only count ("3 learning rates")."""
    text = re.sub(r"\b\d+[- ](?:digit|turns?|tries|guesses|questions|seeds?|objects?|words?|updates?)\b", " ", plain)
    text = re.sub(r"\bnumbers?\b[^.,;?]{0,20}?\d+(?:-| to | and )\d+", " ", text)
    counted = re.compile(rf"\b\d+ (?:different |other )?({factor.cue})")
    return counted.sub(lambda match: " " if match[1].endswith("s") else match[0], text)


def _spread(low: float, high: float) -> tuple[float, ...]:
    """Values from `low` to `high`, evenly spaced on a log scale, to two digits."""
    if not 0 < low < high:
        return low, (low + high) / 2, high
    ratio = (high / low) ** (1 / (_NUM_SPREAD - 1))
    return tuple(float(f"{low * ratio**step:.1e}") for step in range(_NUM_SPREAD))


def _shown(value: JsonValue) -> str:
    return str(value) if isinstance(value, bool) or not isinstance(value, int | float) else wording.shown(value)


def setting_shown(values: dict[str, JsonValue]) -> str:
    """`{"trainer.lr": 3e-4}` as "trainer.lr 3e-4"."""
    return ", ".join(f"{path} {_shown(value)}" for path, value in values.items()) or "the base settings"

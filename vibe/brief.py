"""A sentence, understood without a language model: which recipe it asks for, with which parameters.

The sentence is data. Nothing in it is executed or obeyed; it is only searched for a task and its numbers.
"""

from __future__ import annotations

import re

from pydantic import JsonValue

from a3r.errors import A3RError, PlanRejected, UsageError
from a3r.plan import Brief, BriefKind
from vibe import wording
from vibe.recipes.library import Recipe, checked_parameters, recipes

DEFAULT_RECIPE = "number_guessing"

# A sentence names a recipe when the weights of the cues in it add up to 2.
_CUES: dict[str, tuple[tuple[str, int], ...]] = {
    "number_guessing": (
        (r"\bnumber[- _]?guess\w*|\bguess\w*\b.{0,40}\bnumbers?\b|\b20 questions\b|\bhigher[- ]or[- ]lower\b", 2),
        (r"\bnumbers?\b.{0,40}\bguess\w*|\b(?:find|search)\w*\b.{0,20}\b(?:hidden|secret) number\b|\bbisect\w*", 2),
        (r"\bguess(?:es|ing|er)?\b", 1),
        (r"\bnumbers?\b|\b\d+ (?:to|-) ?\d+\b", 1),
    ),
    "arithmetic": (
        (r"\barithmetic\b|\badditions?\b|\bsubtractions?\b|\bmultiplications?\b|\btimes[- ]tables?\b|\bmental math", 2),
        (r"\b(?:adds?|adding|subtracts?|subtracting|multipl(?:y|ies|ying))\b(?! (?:a|an|the) )", 1),
        (r"\bsums?\b|\b(?:plus|minus)\b|\bcalculat\w+|\bdigits?\b|\bnumbers?\b", 1),
    ),
    "signalling": (
        (r"\bsignal+ing\b|\breferential game|\bspeakers?\b.{0,60}\blisteners?\b|\bsenders?\b.{0,60}\breceivers?\b", 2),
        (r"\b(?:2|both) (?:agents|roles|players)\b", 1),
        (r"\b(?:say|says|send|sends|speak|speaks|utter)\b.{0,20}\bwords?\b|\bpicks?\b.{0,20}\bobjects?\b", 1),
    ),
}

_HIDDEN_TEST = re.compile(
    r"\b(?:train|fit|tun|learn|optimi[sz]|overfit)\w*\b(?:(?!measur|evaluat|report|scor)[^.;])*"
    r"\b(?:on|with|using|from|to)\s+(?:the\s+)?(?:hidden|test|held[- ]?out|eval(?:uation)?|exam)\b"
)
_SEED = re.compile(
    r"\b(?:best|better|optimal|lucky|luckiest|which|what)\s+(?:(?:is|are|of|the|best|random|training)\s+){0,4}seeds?\b"
    r"|\b(?:tune|search|optimi[sz]e)\w* (?:the )?(?:random )?seeds?\b"
)
_SEPARATE = re.compile(
    r"\b(?:separate|own|different|unshared|independent|individual)\s+(?:\w+\s+)?(?:weights?|parameters?|polic(?:y|ies)|models?|adapters?)\b"
)
_OWN_FILES = re.compile(r"\b[\w*./-]+\.(?:py|jsonl?|csv|parquet|txt)\b")
_DOCUMENTS = re.compile(r"\b(?:pdfs?|documents?|wiki|knowledge base|web ?pages?|e-?mails?)\b")


def understand(text: str, *, kind: BriefKind) -> Brief:
    """The brief of `text`. A research sentence that names no task is about number guessing.

    Raises UsageError for an empty text; PlanRejected, with what can be done instead, for a task that no recipe
    covers, that this version does not train, or that would spoil what judges it.
    """
    if not text.strip():
        raise UsageError(
            "The sentence is empty",
            why="a task or a question is needed",
            next_step='write one, such as "Teach the small policy to guess a number between 1 and 31 in five turns"',
        )
    plain = wording.plain(text)
    _refuse_unsound(text, plain)
    named = _named_recipes(plain)
    if len(named) > 1:
        raise PlanRejected(
            "One policy on several tasks at once is not trained in this version",
            why="the sentence names " + " and ".join(named),
            next_step="train them one after the other, one sentence each",
        )
    if not named and kind == BriefKind.TRAIN:
        raise _uncovered(plain)
    recipe = recipes()[named[0] if named else DEFAULT_RECIPE]
    asked = _PARAMETERS[recipe.name](wording.without_durations(plain), kind) if named else {}
    parameters = _checked(recipe, asked)
    return Brief(
        text=text, kind=kind, recipe=recipe.name, parameters=parameters, understood=_understood(recipe, parameters)
    )


def names_a_task(text: str) -> bool:
    """Whether the sentence itself names a recipe's task."""
    return bool(_named_recipes(wording.plain(text)))


def offline_tasks() -> str:
    """The shipped recipes in one line."""
    return "; ".join(f"{recipe.name} ({recipe.description.rstrip('.')})" for recipe in recipes().values())


def _named_recipes(plain: str) -> list[str]:
    return [
        name
        for name, cues in _CUES.items()
        if sum(weight for pattern, weight in cues if re.search(pattern, plain)) >= 2
    ]


def _refuse_unsound(text: str, plain: str) -> None:
    if language := wording.foreign_language(text):
        raise PlanRejected(
            f"The sentence seems to be in {language}, and only English is understood offline",
            next_step="please write it in English; tasks: " + offline_tasks(),
        )
    if _HIDDEN_TEST.search(plain):
        raise PlanRejected(
            "Policies are never trained on the hidden tasks",
            why="a figure measured on what was trained on says nothing about what was learned",
            next_step="ask for training alone: the hidden tasks are made, kept and measured by the judge",
        )
    if _SEED.search(plain):
        raise PlanRejected(
            "A seed is not a setting, so none is best",
            why="seeds differ by chance, and picking the luckiest one reports the noise as a gain",
            next_step="compare settings instead, such as two learning rates: every setting runs with several seeds "
            "and the report gives their spread",
        )
    if _SEPARATE.search(plain):
        raise PlanRejected(
            "Separate weights for several policies are not trained in this version",
            why="every role of an episode plays with the same policy",
            next_step="ask for shared weights: one policy that plays all roles",
        )


def _uncovered(plain: str) -> A3RError:
    offline = (
        f"offline tasks are {offline_tasks()}. With OPENAI_API_KEY and A3R_CODER_MODEL set, an LLM coder can write "
        "the Program of such a task itself"
    )
    if _OWN_FILES.search(plain):
        return PlanRejected(
            "Training with files of your own (agent, data or reward) is not part of this version",
            why="the sentence names " + ", ".join(_OWN_FILES.findall(plain)),
            next_step="drive the swarm server from your own client with a3r.swarm (claim, run, end), or pick a recipe: "
            + offline,
        )
    if _DOCUMENTS.search(plain):
        return PlanRejected(
            "The task cannot be trained from this sentence alone",
            why="missing are the documents, questions with checkable answers, and something that judges a reply",
            next_step=offline,
        )
    if not wording.is_sentence(plain):
        return PlanRejected("The sentence is not understood", why="no task was found in it", next_step=offline)
    return PlanRejected(
        "No shipped recipe covers this task",
        why="hidden tasks and a metric that judge it cannot be made yet",
        next_step=offline,
    )


def _checked(recipe: Recipe, asked: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        return checked_parameters(recipe.name, asked)
    except UsageError as error:
        raise PlanRejected(
            f"{recipe.name} cannot be set up like that: {error.what}", why=error.why, next_step=error.next_step
        ) from error


def _understood(recipe: Recipe, parameters: dict[str, JsonValue]) -> str:
    return f"{recipe.name.replace('_', ' ')}: " + ", ".join(
        f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in parameters.items()
    )


def _guessing_parameters(plain: str, kind: BriefKind) -> dict[str, JsonValue]:
    asked: dict[str, JsonValue] = {}
    game = re.sub(r"\b20 questions\b", "the game", plain) if re.search(r"\b20 questions\b", plain) else plain
    turns = re.search(r"\b(\d+) (?:\w+ )?(?:turns?|tries|try|guesses|attempts?|questions|chances|steps|rounds)\b", game)
    if turns:
        asked["turns"] = int(turns[1])
    elif game != plain:
        asked["turns"] = 20
    return asked | _number_range(game, needs_context=kind == BriefKind.RESEARCH)


def _number_range(plain: str, *, needs_context: bool) -> dict[str, JsonValue]:
    """A range such as "between 1 and 31"; in a research sentence only where it is said of numbers, since its
    other ranges are settings."""
    context = r"\b(?:numbers?|range|integers?)\b[^.;]{0,25}?" if needs_context else ""
    integer = r"(?<![\w.])(-?\d+)(?![\w]|\.\d)"
    upper = r"(?<!\d)(-?\d+)(?![\w]|\.\d)"
    if both := re.search(rf"{context}{integer}(?: ?(?:-|to|and|\.\.\.?|through|until) ?){upper}", plain):
        low, high = sorted((int(both[1]), int(both[2])))
        return {"low": low, "high": high}
    if top := re.search(rf"{context}\b(?:up to|at most|no more than|until|to) {upper}", plain):
        return {"high": int(top[1])}
    if under := re.search(rf"{context}\b(?:under|below|less than|smaller than) {upper}", plain):
        return {"high": int(under[1]) - 1}
    return {}


_OPERATORS = (
    ("+", r"\badd\w*|\bsums?\b|\bplus\b|\+"),
    ("-", r"\bsubtract\w*|\bminus\b|\bdifferences?\b"),
    ("*", r"\bmultipl\w*|\btimes\b|\bproducts?\b|\*"),
)


def _arithmetic_parameters(plain: str, _kind: BriefKind) -> dict[str, JsonValue]:
    if re.search(r"\bdivi[ds]\w*", plain):
        raise PlanRejected(
            "The arithmetic recipe has no division", next_step="ask for addition, subtraction or multiplication"
        )
    asked: dict[str, JsonValue] = {}
    operators: list[JsonValue] = [sign for sign, pattern in _OPERATORS if re.search(pattern, plain)]
    if operators:
        asked["operators"] = operators
    if digits := re.search(r"\b(\d)[- ]digit", plain):
        count = int(digits[1])
        return asked | {"low": 0 if count == 1 else 10 ** (count - 1), "high": 10**count - 1}
    return asked | _number_range(plain, needs_context=True)


def _signalling_parameters(plain: str, _kind: BriefKind) -> dict[str, JsonValue]:
    counts = {name: re.search(rf"\b(\d+) (?:\w+ )?{name}\b", plain) for name in ("objects", "words")}
    return {name: int(match[1]) for name, match in counts.items() if match}


_PARAMETERS = {
    "number_guessing": _guessing_parameters,
    "arithmetic": _arithmetic_parameters,
    "signalling": _signalling_parameters,
}

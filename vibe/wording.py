"""Numbers, durations and languages in a person's sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = (
    {name: n for n, name in enumerate(_UNITS.split())}
    | {name: 10 * n for n, name in enumerate(_TENS.split(), 2)}
    | {"dozen": 12}
)
_NUMBER_WORD = "|".join(_VALUES)
# "which one is best" counts nothing.
_PRONOUN_ONE = "".join(f"(?<!\\b{word} )" for word in ("which", "that", "this", "the", "each", "every", "any", "no"))
_NUMBER_WORDS = re.compile(
    rf"{_PRONOUN_ONE}\b(?:{_NUMBER_WORD}|hundred)(?:(?:[ -]|(?<=hundred) and )(?:{_NUMBER_WORD}|hundred))*\b"
)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
# A single letter counts only where it touches its number: "8m" is a time, "4 m" is not.
_DURATION = re.compile(
    r"(?<![\w.-])(\d+(?:\.\d+)?)(?:([smh])|[ -]?(sec(?:ond)?s?|min(?:ute)?s?|h(?:(?:ou)?rs?)?|days?|weeks?))\b"
    r"(?: and (?:a|1) (half|quarter))?"
)
_SPOKEN_DURATIONS = (
    (r"\bhalf (?:an |1 )?hour\b", 1800.0),
    (r"\b(?:a )?quarter of an hour\b|\b(?:a )?quarter hour\b", 900.0),
    (r"\bhalf (?:a |1 )?minute\b", 30.0),
    (r"\bhalf (?:a |1 )?day\b", 43200.0),
    (r"\bover ?night\b|\b(?:a|1) night\b", 28800.0),
)

# Words that tell a language: common ones, and those that these tasks are asked for with.
_ENGLISH = (
    "the a an and or of to in is it with for on at by from that this which what how do does not no you can any than "
    "between up without its my i want make teach train let be are as use if gets one two same"
)
_FOREIGN = {
    "Spanish": "el la los las un una para del en con que por cinco turnos entre entrena adivinar como",
    "German": "der die das ein eine und für mit nicht ist von zu den dem trainiere zwischen zahl wie welche",
    "French": "le les des une pour avec dans est du nombre entre et entraîne quel quelle deviner modèle",
    "Italian": "il gli una per con di che non numero tra indovinare allena quale modello",
    "Portuguese": "os uma para com que não número entre treine adivinhar qual modelo em",
    "Dutch": "het een en voor met niet van tussen getal welke leer de",
}


def plain(text: str) -> str:
    """`text` in lower case with simple dashes and quotes and with number words as digits ("twenty-five" -> "25")."""
    text = " ".join(text.lower().split())
    text = re.sub("[\u2010-\u2015\u2212]", "-", text)
    text = re.sub("[\u2018\u2019]", "'", text)
    # A dash in "1 - 31" joins two numbers; spaces round it would hide that.
    text = re.sub(r"(?<=\d) ?- ?(?=\d)", "-", text)
    return _NUMBER_WORDS.sub(_as_digits, text)


def _as_digits(match: re.Match[str]) -> str:
    """Number words that belong together become one number, others follow one another ("one two" -> "1 2")."""
    numbers: list[int] = []
    for word in re.split(r"[ -]", match[0]):
        if word == "and":
            continue
        if word == "hundred":
            numbers[-1:] = [100 * (numbers[-1] if numbers else 1)]
        elif numbers and _continues(numbers[-1], _VALUES[word]):
            numbers[-1] += _VALUES[word]
        else:
            numbers.append(_VALUES[word])
    return " ".join(map(str, numbers))


def _continues(so_far: int, value: int) -> bool:
    return (so_far % 100 == 0 and so_far > 0 and value < 100) or (so_far % 10 == 0 and so_far > 19 and 0 < value < 10)


def numbers(text: str) -> list[float]:
    """Every number in plain `text`, in order; "16/32" and "4,16" are two each."""
    return [float(match[0]) for match in re.finditer(rf"(?<![\w.]){NUMBER}(?![\w]|\.\d)", text)]


def duration_s(text: str) -> float | None:
    """The first length of time in plain `text`, in seconds, or None."""
    for pattern, seconds in _SPOKEN_DURATIONS:
        if re.search(pattern, text):
            return seconds
    match = _DURATION.search(re.sub(r"\ban? (?=(?:second|minute|hour|day|week)\b)", "1 ", text))
    if match is None:
        return None
    unit = _SECONDS[(match[2] or match[3])[0]]
    return float(match[1]) * unit + {"half": unit / 2, "quarter": unit / 4, None: 0.0}[match[4]]


def without_durations(text: str) -> str:
    """Plain `text` with lengths of time taken out, so that their numbers are not read as settings."""
    for pattern, _ in _SPOKEN_DURATIONS:
        text = re.sub(pattern, " ", text)
    return _DURATION.sub(" ", text)


def foreign_language(text: str) -> str | None:
    """Name of the language `text` seems to be in, None for English or for no language at all."""
    letters = [c for c in text if c.isalpha()]
    if letters and sum(not ("a" <= c.lower() <= "\u024f") for c in letters) > len(letters) / 2:
        return "a language other than English"
    words = re.findall(r"[^\W\d_]+", text.lower())
    english = _count(words, _ENGLISH.split())
    counts = {language: _count(words, known.split()) for language, known in _FOREIGN.items()}
    best = max(counts, key=lambda language: counts[language])
    return best if counts[best] >= 2 and counts[best] > english else None


def _count(words: Sequence[str], known: Sequence[str]) -> int:
    return sum(word in known for word in words)


def is_sentence(text: str) -> bool:
    """Whether at least one word of plain `text` is an ordinary English one."""
    return _count(re.findall(r"[a-z]+", text), _ENGLISH.split()) > 0


def shown(value: float) -> str:
    """A number as a person writes it: 0.0003 is 3e-4, 16.0 is 16."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) >= 1e-2:
        return f"{value:g}"
    mantissa, exponent = f"{value:.6e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def duration_shown(seconds: float) -> str:
    """Seconds as a budget is written: 90 -> 90s, 480 -> 8m, 7200 -> 2h."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"

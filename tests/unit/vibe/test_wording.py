"""Numbers, durations and languages as people write them."""

from __future__ import annotations

import pytest

from vibe import wording


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Twenty-five turns", "25 turns"),
        ("one hundred and five", "105"),
        ("two hundred thirty one", "231"),
        ("one two three", "1 2 3"),
        ("between one and thirty-one", "between 1 and 31"),
        ("1 – 31", "1-31"),
        ("which one is best", "which one is best"),
        ("a dozen tries", "a 12 tries"),
        ("someone often weighs", "someone often weighs"),
    ],
)
def test_number_words_become_digits(text: str, plain: str):
    assert wording.plain(text) == plain


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("in half an hour", 1800),
        ("Budget 20 minutes.", 1200),
        ("an hour and a half", 5400),
        ("for a day", 86400),
        ("a quarter of an hour", 900),
        ("90s", 90),
        ("1.5 h", 5400),
        ("twenty minutes", 1200),
        ("use 0 minutes", 0),
        ("overnight", 28800),
        ("a twenty-minute budget", 1200),
        ("two weeks", 1209600),
        ("8m or so", 480),
        ("a 3 d grid, 4 m wide", None),
        ("in five turns", None),
        ("4x4 grid", None),
        ("group sizes 4, 8 and 16", None),
    ],
)
def test_durations_are_read(text: str, seconds: float | None):
    assert wording.duration_s(wording.plain(text)) == seconds


def test_numbers_are_read_in_order():
    assert wording.numbers("3e-4 better than 1e-5, or 0.5. and 16/32") == [3e-4, 1e-5, 0.5, 16, 32]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Entrena la política pequeña para adivinar un número", "Spanish"),
        ("Trainiere das Modell mit der Zahl", "German"),
        ("Entraîne le modèle pour deviner un nombre", "French"),
        ("научи модель угадывать число", "a language other than English"),
        ("教模型猜数字", "a language other than English"),
        ("Teach the model to guess a number in Paris", None),
        ("asdf qwer zxcv", None),
        ("train arithmetic", None),
        ("Does a learning rate of 3e-4 train the model better than 1e-5?", None),
    ],
)
def test_other_languages_are_told_apart(text: str, language: str | None):
    assert wording.foreign_language(text) == language


def test_figures_are_shown_as_people_write_them():
    assert [wording.shown(v) for v in (3e-4, 1e-5, 1e-3, 0.05, 16.0, 0.0, 1.5)] == [
        "3e-4",
        "1e-5",
        "1e-3",
        "0.05",
        "16",
        "0",
        "1.5",
    ]
    assert [wording.duration_shown(s) for s in (90, 480, 7200, 5400)] == ["90s", "8m", "2h", "90m"]

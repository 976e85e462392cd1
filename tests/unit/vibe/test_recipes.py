"""Shipped recipes: splits that never meet, agents that play, metrics that cannot be talked into a point."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from a3r.episode import Message, Step, Task, Transcript, TranscriptTurn
from a3r.errors import NotFound, UsageError
from vibe.recipes.library import (
    Exam,
    checked_parameters,
    load_exam,
    load_program,
    program_source,
    recipe_hash,
    recipes,
)

RECIPES = ("arithmetic", "number_guessing", "signalling")
EDGES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in RECIPES),
    ("number_guessing", {"low": 0, "high": 7, "turns": 1}),
    ("number_guessing", {"low": 0, "high": 999, "turns": 20}),
    ("number_guessing", {"low": 1, "high": 99, "turns": 7}),
    ("arithmetic", {"low": 3, "high": 6, "operators": ["-"]}),
    ("arithmetic", {"low": 10, "high": 99, "operators": ["+", "-", "*"]}),
    ("signalling", {"objects": 2, "words": 2}),
    ("signalling", {"objects": 3, "words": 5}),
]


GUESSING, GUESSING_EXAM = load_program("number_guessing", {}), load_exam("number_guessing", {})


class Scripted:
    """An episode whose policy says `replies` in order, in a world of the given environment."""

    def __init__(self, replies: list[str], world: Any = None) -> None:
        self.replies = replies
        self.world = world
        self.turns: list[TranscriptTurn] = []
        self.steps: list[Step] = []

    def chat(self, messages: list[Message]) -> str:
        reply = self.replies[min(len(self.turns), len(self.replies) - 1)]
        self.turns.append(TranscriptTurn(tuple(messages), {"role": "assistant", "content": reply}, "stop"))
        return reply

    def step(self, action: str) -> Any:
        self.steps.append(Step(action, self.world.step(action)))
        return self.steps[-1].observation


def played(program: ModuleType, task: Task, replies: list[str], *, world: Any = None) -> Transcript:
    episode = Scripted(replies, world)
    output = program.run_episode(dict(task.public), episode)
    return Transcript(tuple(episode.turns), tuple(episode.steps), output)


def guessed(task: Task, replies: list[str], *, exam: Exam | None = None) -> Transcript:
    world = (exam or GUESSING_EXAM).environment(task)
    return played(GUESSING, task, replies, world=world)


def contents(tasks: list[Task]) -> set[str]:
    return {repr((dict(task.public), dict(task.private))) for task in tasks}


def wordings(tasks: list[Task]) -> set[str]:
    """What the agent is told, without numbers, objects and words."""
    changing = r"[0-9]+( [+*-] [0-9]+)?|apple|boat|cat|drum|egg|fish|gate|hat|\b(ba|do|ki|lu|me|no|su|ti)\b"
    texts = [str(value) for task in tasks for value in task.public.values() if isinstance(value, str)]
    return {re.sub(changing, "#", text) for text in texts} - {"#"}


def test_three_recipes_ship():
    assert tuple(recipes()) == RECIPES
    for recipe in recipes().values():
        assert recipe.description
        assert "\n" not in recipe.description
        assert {"recipe.json", "program.py", "exam.py", "oracle.py"} <= {path.name for path in recipe.folder.iterdir()}


@pytest.mark.parametrize(("name", "parameters"), EDGES)
def test_train_validation_and_hidden_tasks_never_meet(name: str, parameters: dict[str, Any]):
    program, exam = load_program(name, parameters), load_exam(name, parameters)
    splits = [program.tasks("train", 0), program.tasks("validation", 0), exam.tasks("hidden", 0)]
    for tasks in splits:
        assert len(tasks) >= 2
        assert len({task.id for task in tasks}) == len(tasks)
    train, validation, hidden = map(contents, splits)
    assert not train & validation
    assert not (train | validation) & hidden
    train, validation, hidden = map(wordings, splits)
    assert not train & validation
    assert not (train | validation) & hidden


@pytest.mark.parametrize("name", RECIPES)
def test_tasks_are_a_function_of_split_and_seed(name: str):
    program, exam = load_program(name, {}), load_exam(name, {})
    assert program.tasks("train", 1) == load_program(name, {}).tasks("train", 1)
    assert program.tasks("train", 1) != program.tasks("train", 2)
    assert exam.tasks("hidden", 1) == load_exam(name, {}).tasks("hidden", 1)
    assert exam.tasks("hidden", 1) != exam.tasks("hidden", 2)
    assert len(exam.tasks("hidden", 1)) == 512


def test_hidden_games_have_ranges_and_secrets_that_training_has_not():
    program, exam = load_program("number_guessing", {}), load_exam("number_guessing", {})

    def instances(tasks: list[Task]) -> set[tuple[Any, ...]]:
        return {(task.public["low"], task.public["high"], task.private["secret"]) for task in tasks}

    known = instances(program.tasks("train", 0)) | instances(program.tasks("validation", 0))
    hidden = instances(exam.tasks("hidden", 0))
    whole = {instance for instance in hidden if instance[:2] == (1, 31)}
    assert not known & hidden
    assert whole
    assert not {instance[:2] for instance in hidden - whole} & {instance[:2] for instance in known}


def test_hidden_sums_have_operands_that_training_has_not():
    program, exam = load_program("arithmetic", {}), load_exam("arithmetic", {})

    def pairs(tasks: list[Task]) -> set[tuple[str, ...]]:
        return {tuple(re.findall("[0-9]+", str(task.public["question"]))) for task in tasks}

    known = pairs(program.tasks("train", 0)) | pairs(program.tasks("validation", 0))
    assert not known & pairs(exam.tasks("hidden", 0))


@pytest.mark.parametrize("name", RECIPES)
def test_filled_source_holds_the_asked_parameters_and_stays_one_program(name: str):
    asked = {"number_guessing": {"high": 99}, "arithmetic": {"operators": ["-"]}, "signalling": {"words": 4}}[name]
    source = program_source(name, asked)
    assert f"PARAMETERS = {checked_parameters(name, asked)!r}\n" in source
    assert checked_parameters(name, asked) == load_program(name, asked).PARAMETERS
    assert source.count("PARAMETERS = ") == 1


@pytest.mark.parametrize("name", RECIPES)
def test_defaults_of_the_program_are_those_of_the_recipe(name: str):
    assert program_source(name, {}).replace('"', "'") == (recipes()[name].folder / "program.py").read_text().replace(
        '"', "'"
    )


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("number_guessing", {"hihg": 31}, "no parameter 'hihg'"),
        ("number_guessing", {"high": 1000}, "high cannot be 1000"),
        ("number_guessing", {"low": -1}, "low cannot be -1"),
        ("number_guessing", {"turns": True}, "turns cannot be True"),
        ("number_guessing", {"turns": 2.5}, "turns cannot be 2.5"),
        ("number_guessing", {"low": 31}, "too small"),
        ("arithmetic", {"operators": []}, "operators cannot be"),
        ("arithmetic", {"operators": ["/"]}, "operators cannot be"),
        ("arithmetic", {"operators": ["+", "+"]}, "operators cannot be"),
        ("arithmetic", {"low": 8}, "too few"),
        ("signalling", {"objects": 9}, "objects cannot be 9"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(name: str, asked: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        checked_parameters(name, asked)


def test_unknown_recipe_is_not_found():
    with pytest.raises(NotFound, match="name one of: arithmetic, number_guessing, signalling"):
        load_exam("chess", {})


def test_hash_differs_between_recipes_and_stays():
    assert len({recipe_hash(name) for name in RECIPES}) == 3
    assert recipe_hash("arithmetic") == recipe_hash("arithmetic")


def bisection(task: Task) -> list[str]:
    low, high, secret = (int(str({**task.public, **task.private}[name])) for name in ("low", "high", "secret"))
    guesses = []
    while secret not in guesses:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if guesses[-1] < secret else (low, guesses[-1] - 1)
    return [str(guess) for guess in guesses]


def test_bisection_finds_every_number_from_1_to_31_in_five_turns():
    exam = load_exam("number_guessing", {})
    for task in exam.tasks("hidden", 3):
        transcript = guessed(task, bisection(task))
        assert exam.measure(task, transcript) == 1.0
        assert GUESSING.grade(task, transcript) == {"solved": 1.0}


def test_each_prompt_continues_the_one_before_word_for_word():
    task = load_exam("number_guessing", {}).tasks("hidden", 0)[0]
    transcript = guessed(task, ["99"])
    assert len(transcript.turns) == 5
    for before, after in zip(transcript.turns, transcript.turns[1:], strict=False):
        assert after.messages[: len(before.messages) + 1] == (*before.messages, before.reply)


@pytest.mark.parametrize("guess", ["", " 7", "7 ", "+7", "-7", "7\n", "7\x1f", "٧", "7.0", "0007", "7 8", "It is 7."])
def test_only_one_to_three_plain_digits_are_a_guess(guess: str):
    exam = load_exam("number_guessing", {})
    task = replace(exam.tasks("hidden", 0)[0], private={"secret": 7})
    for environment in (exam.environment(task), load_program("number_guessing", {}).environment(task)):
        assert environment.step(guess).text == "not a number"
    assert exam.measure(task, guessed(task, [guess])) == 0.0


def test_game_ends_with_its_turns_and_hints_are_true():
    exam = load_exam("number_guessing", {"turns": 3})
    task = replace(exam.tasks("hidden", 0)[0], private={"secret": 10})
    transcript = guessed(task, ["5", "20", "11"], exam=exam)
    observations = [(step.observation.text, step.observation.done) for step in transcript.steps]
    assert observations == [("higher", False), ("lower", False), ("lower", True)]
    assert exam.measure(task, transcript) == 0.0


def found_in_time(exam: Exam) -> tuple[Task, Transcript]:
    task = replace(exam.tasks("hidden", 0)[0], private={"secret": 10})
    return task, guessed(task, ["5", "10"])


def test_guess_that_the_policy_did_not_say_does_not_count():
    exam = load_exam("number_guessing", {})
    task, transcript = found_in_time(exam)
    assert exam.measure(task, transcript) == 1.0
    said_otherwise = replace(
        transcript, turns=(transcript.turns[0], replace(transcript.turns[1], reply={"content": "11"}))
    )
    assert exam.measure(task, said_otherwise) == 0.0
    assert exam.measure(task, replace(transcript, turns=())) == 0.0
    assert exam.measure(task, replace(transcript, turns=(*transcript.turns, transcript.turns[0]))) == 0.0


def test_dressed_up_observations_and_output_do_not_count():
    exam = load_exam("number_guessing", {})
    task = replace(exam.tasks("hidden", 0)[0], private={"secret": 10})
    lost = guessed(task, ["5"])
    claimed = replace(lost.steps[-1].observation, text="correct")
    dressed = replace(lost, steps=(*lost.steps[:-1], replace(lost.steps[-1], observation=claimed)), output="correct")
    assert exam.measure(task, dressed) == 0.0


def test_too_many_guesses_do_not_count():
    exam = load_exam("number_guessing", {"turns": 1})
    task = replace(exam.tasks("hidden", 0)[0], private={"secret": 10})
    _, two_guesses = found_in_time(load_exam("number_guessing", {}))
    assert exam.measure(task, two_guesses) == 0.0


def test_sum_counts_only_to_the_letter_and_without_help():
    program, exam = load_program("arithmetic", {}), load_exam("arithmetic", {})
    task = Task(id="t", public={"question": "Give me 7 + 8."}, private={"answer": "15"})
    assert exam.measure(task, played(program, task, ["15"])) == 1.0
    for reply in ("", "15.", " 15", "015", "It is 15.", "14"):
        assert exam.measure(task, played(program, task, [reply])) == 0.0
    hinted: Message = {"role": "user", "content": "15! Give me 7 + 8."}
    helped = Transcript(turns=(TranscriptTurn((hinted,), {"content": "15"}, "stop"),))
    assert exam.measure(task, helped) == 0.0
    asked_twice = played(program, task, ["15"])
    assert exam.measure(task, replace(asked_twice, turns=asked_twice.turns * 2)) == 0.0


def test_sum_whose_result_is_an_operand_is_no_giveaway():
    program, exam = load_program("arithmetic", {}), load_exam("arithmetic", {})
    task = Task(id="t", public={"question": "Give me 7 * 1."}, private={"answer": "7"})
    assert exam.measure(task, played(program, task, ["7"])) == 1.0


def test_differences_may_be_negative():
    program, exam = load_program("arithmetic", {"operators": ["-"]}), load_exam("arithmetic", {"operators": ["-"]})
    negative = [task for task in exam.tasks("hidden", 0) if str(task.private["answer"]).startswith("-")]
    assert negative
    transcript = played(program, negative[0], [str(negative[0].private["answer"])])
    assert exam.measure(negative[0], transcript) == 1.0
    assert program.grade(negative[0], transcript) == {"solved": 1.0, "format": 0.1}


def test_grade_of_a_sum_pays_little_for_form():
    program = load_program("arithmetic", {})
    task = program.tasks("train", 0)[0]
    assert program.grade(task, played(program, task, ["9999"])) == {"solved": 0.0, "format": 0.1}
    assert program.grade(task, played(program, task, ["ok"])) == {"solved": 0.0, "format": 0.0}


def signalled() -> tuple[Exam, Task, Transcript]:
    exam = load_exam("signalling", {})
    task = exam.tasks("hidden", 0)[0]
    transcript = played(load_program("signalling", {}), task, ["ki", str(task.public["target"])])
    return exam, task, transcript


def with_listener(transcript: Transcript, messages: list[Message]) -> Transcript:
    speaker, listener = transcript.turns
    return replace(transcript, turns=(speaker, replace(listener, messages=tuple(messages))))


def test_target_picked_from_the_word_alone_counts():
    exam, task, transcript = signalled()
    assert exam.measure(task, transcript) == 1.0
    assert load_program("signalling", {}).grade(task, transcript) == {"solved": 1.0, "format": 0.1}


def test_listener_who_is_told_anything_more_than_the_word_does_not_count():
    exam, task, transcript = signalled()
    listener = transcript.turns[1].messages
    prompt, target = listener[0]["content"], task.public["target"]
    leaks: list[list[Message]] = [
        [{"role": "user", "content": f"{prompt} {target}"}],
        [{"role": "user", "content": prompt + " "}],
        [{"role": "system", "content": f"It is {target}."}, *listener],
        [*transcript.turns[0].messages, transcript.turns[0].reply, *listener],
        [{**listener[0], "name": str(target)}],
        [{"role": "user", "content": prompt.replace(str(target), str(target).upper())}],
        [],
    ]
    for messages in leaks:
        assert exam.measure(task, with_listener(transcript, messages)) == 0.0


def test_speaker_who_says_the_target_or_no_word_does_not_count():
    exam, task, _ = signalled()
    program = load_program("signalling", {})
    for said in (str(task.public["target"]), "", "ki ki", "zz"):
        transcript = played(program, task, [said, str(task.public["target"])])
        assert len(transcript.turns) == 1
        assert exam.measure(task, transcript) == 0.0
        assert program.grade(task, transcript)["solved"] == 0.0


def test_listeners_prompt_names_every_object_once_and_no_target():
    program, exam = load_program("signalling", {}), load_exam("signalling", {})
    for task in [*program.tasks("train", 0), *exam.tasks("hidden", 0)]:
        listener = str(task.public["listener"])
        objects = task.public["objects"]
        assert isinstance(objects, list)
        assert [listener.count(str(thing)) for thing in objects] == [1] * 8
        assert listener.count("{word}") == 1


def test_order_of_a_listeners_objects_says_nothing_about_the_target():
    places = [0] * 8
    for task in load_exam("signalling", {}).tasks("hidden", 0):
        objects = task.public["objects"]
        assert isinstance(objects, list)
        places[objects.index(task.public["target"])] += 1
    assert max(abs(count - 64) for count in places) < 32


@pytest.mark.parametrize(("name", "parameters"), EDGES)
def test_demonstrations_are_dialogues_of_the_programs_own_prompts(name: str, parameters: dict[str, Any]):
    program = load_program(name, parameters)
    dialogues = program.demonstrations(4)
    assert dialogues == program.demonstrations(4)
    assert dialogues != program.demonstrations(5)
    assert len(dialogues) == 400
    for dialogue in dialogues:
        assert [message["role"] for message in dialogue] == ["user", "assistant"] * (len(dialogue) // 2)


def test_demonstrated_games_are_of_mixed_quality():
    program = load_program("number_guessing", {})
    games = [dialogue for seed in range(4) for dialogue in program.demonstrations(seed)]
    second_to_last = [dialogue[-2]["content"] for dialogue in games if len(dialogue) > 2]
    assert set(second_to_last) == {"higher", "lower"}
    lengths = [len(dialogue) // 2 for dialogue in games]
    assert max(lengths) == 5
    first = [int(dialogue[1]["content"]) for dialogue in games]
    assert len(set(first)) > 25, "some demonstrators begin anywhere"
    assert sum(15 <= guess <= 17 for guess in first) > len(games) / 4, "some begin in the middle"


def test_random_policy_rarely_solves():
    exam, program = load_exam("number_guessing", {}), load_program("number_guessing", {})
    choice = random.Random(0)
    scores = []
    for task in exam.tasks("hidden", 0)[:200]:
        replies = [str(choice.randint(1, 31)) for _ in range(5)]
        scores.append(exam.measure(task, played(program, task, replies, world=exam.environment(task))))
    assert 0.05 < sum(scores) / len(scores) < 0.3

"""Oracles against the recipes' own Programs and Exams: right replies solve, wrong ones never earn as much."""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace

import pytest

from a3r.episode import Step, Task, Transcript, TranscriptTurn
from a3r.errors import PlanRejected
from a3r.plan import Brief, BriefKind
from vibe.coder import CodingRequest, RecipeCoder, coding_messages
from vibe.oracles import Replies, oracle_of
from vibe.recipes.library import checked_parameters, load_exam, load_program, recipes
from vibe.source_gates import SOURCE_GATES

CASES = [
    ("number_guessing", {}),
    ("number_guessing", {"low": 0, "high": 99, "turns": 1}),
    ("arithmetic", {}),
    ("arithmetic", {"operators": ["-"], "low": 10, "high": 40}),
    ("signalling", {}),
    ("signalling", {"objects": 2, "words": 2}),
]


def brief_of(recipe: str, parameters: dict) -> Brief:
    return Brief(
        text="x",
        kind=BriefKind.TRAIN,
        recipe=recipe,
        parameters=checked_parameters(recipe, parameters),
        understood=recipe,
    )


def play(program: ModuleType, task: Task, replies: Replies, *, world: object) -> Transcript:
    turns: list[TranscriptTurn] = []
    steps: list[Step] = []

    def chat(messages: list[dict]) -> str:
        text = replies[min(len(turns), len(replies) - 1)]
        turns.append(TranscriptTurn(tuple(dict(m) for m in messages), {"role": "assistant", "content": text}, "stop"))
        return text

    def step(action: str) -> object:
        observation = world.step(action)
        steps.append(Step(action, observation))
        return observation

    output = program.run_episode(dict(task.public), SimpleNamespace(chat=chat, step=step))
    return Transcript(tuple(turns), tuple(steps), output)


@pytest.mark.parametrize(("recipe", "parameters"), CASES)
def test_right_replies_earn_more_than_every_wrong_script(recipe: str, parameters: dict):
    program, oracle = load_program(recipe, parameters), oracle_of(brief_of(recipe, parameters))

    def earned(task: Task, replies: Replies) -> float:
        world = program.environment(task) if hasattr(program, "environment") else None
        return sum(program.grade(task, play(program, task, replies, world=world)).values())

    for task in program.tasks("train", 0)[:60]:
        wrong = [*oracle.wrong(task), [""], ["???"]]
        assert earned(task, oracle.right(task)) > max(earned(task, replies) for replies in wrong)


@pytest.mark.parametrize(("recipe", "parameters"), CASES)
def test_exam_measures_right_replies_as_solved_and_wrong_ones_as_not(recipe: str, parameters: dict):
    program, exam = load_program(recipe, parameters), load_exam(recipe, parameters)
    oracle = oracle_of(brief_of(recipe, parameters))
    for task in exam.tasks("hidden", 7)[:60]:

        def measured(task: Task, replies: Replies) -> float:
            return exam.measure(task, play(program, task, replies, world=exam.environment(task)))

        assert measured(task, oracle.right(task)) == 1.0
        assert all(measured(task, replies) == 0.0 for replies in oracle.wrong(task))


@pytest.mark.parametrize(("recipe", "parameters"), CASES)
async def test_filled_recipe_passes_the_source_gates(recipe: str, parameters: dict):
    draft = await RecipeCoder().write(CodingRequest(brief_of(recipe, parameters)))
    for _, gate in SOURCE_GATES:
        finding = gate(draft.files, ())
        assert finding.passed, finding.detail


def test_every_recipe_has_an_oracle_and_rules_for_a_model():
    for recipe in recipes():
        brief = brief_of(recipe, {})
        assert oracle_of(brief)
        *_, user = coding_messages(CodingRequest(brief))
        assert "Rules of this task" in user["content"]


def test_model_is_not_shown_the_program_or_exam_of_its_own_task():
    for recipe in recipes():
        *_, user = coding_messages(CodingRequest(brief_of(recipe, {})))
        own = (recipes()[recipe].folder / "program.py").read_text()
        assert own.split('"""')[1] not in user["content"]
        assert "class Exam" not in user["content"]
        hidden = load_exam(recipe, {}).tasks("hidden", 0)
        assert not any(json.dumps(dict(task.public)) in user["content"] for task in hidden)
        assert '"id": "train-0"' in user["content"]


def test_task_without_a_recipe_has_no_oracle():
    brief = Brief(text="x", kind=BriefKind.TRAIN, recipe=None, understood="x")
    with pytest.raises(PlanRejected, match="Nothing can judge"):
        oracle_of(brief)

"""A Program written by a language model behind a scripted endpoint: drafts, repairs and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from a3r.errors import CoderFault, EnvironmentNotReady, PlanRejected
from a3r.plan import Brief, BriefKind
from tests.fakes.llm_endpoint import KEY, Answer, Endpoint, refusal, scripted_endpoint
from vibe.authoring import Attempt, read_reports, write_program
from vibe.brief import understand
from vibe.coder import Draft, OpenAICoder, ScriptedCoder
from vibe.gates import GateTools, all_passed
from vibe.llm import LLM
from vibe.workspace import Workspace, content_sha256

BROKEN = "def tasks(split, seed):\n    return [\n"


@pytest.fixture
def brief() -> Brief:
    return understand("Teach it to guess a number between 0 and 9", kind=BriefKind.TRAIN)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.create(tmp_path / "workspace")


def fenced(source: str) -> str:
    return f"Here you are.\n\n```python path=program.py\n{source}```\nIt should work."


def coder(endpoint: Endpoint, *, key: str = KEY, timeout_s: float = 5.0) -> OpenAICoder:
    return OpenAICoder(
        LLM(api_key=key, model="scripted", base_url=endpoint.base_url, timeout_s=timeout_s, max_retries=1)
    )


async def test_good_draft_is_accepted_at_once(brief: Brief, workspace: Workspace, tools: GateTools, good_program: str):
    with scripted_endpoint([Answer(fenced(good_program))]) as endpoint:
        program = await write_program(brief, coder=coder(endpoint), workspace=workspace, tools=tools)
    assert len(endpoint.requests) == 1
    assert (program.folder / "program.py").read_text() == good_program
    assert program.sha256 == content_sha256({"program.py": good_program})
    assert program.tokens == 120
    assert all_passed(program.reports)
    assert workspace.log() == [(program.commit, "Draft")]


async def test_broken_draft_is_repaired_with_the_gates_own_words(
    brief: Brief, workspace: Workspace, tools: GateTools, good_program: str
):
    attempts: list[Attempt] = []
    with scripted_endpoint([Answer(fenced(BROKEN)), Answer(fenced(good_program))]) as endpoint:
        program = await write_program(
            brief, coder=coder(endpoint), workspace=workspace, tools=tools, on_attempt=attempts.append
        )
    roles = [message["role"] for message in endpoint.requests[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert "parses: FAILED: program.py is not Python" in endpoint.requests[1]["messages"][-1]["content"]
    assert program.tokens == 240
    assert [subject for _, subject in workspace.log()] == ["Repair 1", "Draft"]
    first = workspace.log()[-1][0]
    assert workspace.show(first, "program.py") == BROKEN
    assert [report.passed for report in read_reports(workspace.note(first))] == [True, False]
    assert [attempt.commit for attempt in attempts] == [first, program.commit]


async def test_draft_that_stays_broken_is_refused_and_kept(brief: Brief, workspace: Workspace, tools: GateTools):
    with (
        scripted_endpoint([Answer(fenced(BROKEN))]) as endpoint,
        pytest.raises(PlanRejected, match=r"gate 'parses' after 2 draft") as caught,
    ):
        await write_program(brief, coder=coder(endpoint), workspace=workspace, tools=tools)
    assert len(endpoint.requests) == 2
    assert len(workspace.log()) == 2
    assert caught.value.__dict__["tokens"] == 240
    assert not caught.value.__dict__["reports"][-1].passed


@pytest.mark.parametrize("text", ["I would rather talk about the weather.", "", "```json\n{}\n```"])
async def test_nonsense_is_asked_again_once_and_then_a_coder_fault(
    brief: Brief, workspace: Workspace, tools: GateTools, text: str
):
    with scripted_endpoint([Answer(text)]) as endpoint, pytest.raises(CoderFault, match=r"holds no program\.py"):
        await write_program(brief, coder=coder(endpoint), workspace=workspace, tools=tools)
    assert len(endpoint.requests) == 2
    assert "no file program.py" in endpoint.requests[1]["messages"][-1]["content"]
    assert [subject for _, subject in workspace.log()] == ["Repair 1", "Draft"]


async def test_nonsense_and_then_a_program_is_good(
    brief: Brief, workspace: Workspace, tools: GateTools, good_program: str
):
    with scripted_endpoint([Answer(""), Answer(fenced(good_program))]) as endpoint:
        program = await write_program(brief, coder=coder(endpoint), workspace=workspace, tools=tools)
    assert all_passed(program.reports)


async def test_draft_that_reaches_outside_writes_nothing_there(
    brief: Brief, workspace: Workspace, tools: GateTools, good_program: str, tmp_path: Path
):
    escaping = fenced(good_program) + "\n```python path=../../escape.py\nx = 1\n```\n"
    with scripted_endpoint([Answer(escaping), Answer(fenced(good_program))]) as endpoint:
        program = await write_program(brief, coder=coder(endpoint), workspace=workspace, tools=tools)
    assert not list(tmp_path.rglob("escape.py"))
    assert all_passed(program.reports)


async def test_rate_limit_during_a_draft_is_waited_out(
    brief: Brief, workspace: Workspace, tools: GateTools, good_program: str
):
    answers = [refusal(429, "slow down", {"retry-after": "0.05"}), Answer(fenced(good_program))]
    with scripted_endpoint(answers) as endpoint:
        program = await write_program(brief, coder=coder(endpoint), workspace=workspace, tools=tools)
    assert len(endpoint.requests) == 2
    assert program.tokens == 120


async def test_endpoint_that_fails_ends_it_without_a_draft(brief: Brief, workspace: Workspace, tools: GateTools):
    with (
        scripted_endpoint([refusal(500, "boom", {"retry-after": "0.01"})]) as endpoint,
        pytest.raises(CoderFault, match="answered 500"),
    ):
        await write_program(brief, coder=coder(endpoint), workspace=workspace, tools=tools)
    with (
        scripted_endpoint([Answer("late", delay_s=0.5)]) as endpoint,
        pytest.raises(CoderFault, match="did not answer"),
    ):
        await write_program(brief, coder=coder(endpoint, timeout_s=0.05), workspace=workspace, tools=tools)
    with scripted_endpoint([Answer("hi")]) as endpoint, pytest.raises(EnvironmentNotReady, match="refuses the key"):
        await write_program(brief, coder=coder(endpoint, key="sk-wrong"), workspace=workspace, tools=tools)


async def test_scripted_coder_hands_out_its_drafts_in_order(
    brief: Brief, workspace: Workspace, tools: GateTools, good_program: str
):
    drafts = (Draft({}), Draft({"program.py": BROKEN}), Draft({"program.py": good_program}))
    program = await write_program(brief, coder=ScriptedCoder(drafts), workspace=workspace, tools=tools, num_repairs=2)
    assert all_passed(program.reports)
    assert len(workspace.log()) == 3

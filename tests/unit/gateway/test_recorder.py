"""History matching on the token-level cases, and the invariant that sampled ids are never touched."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.messages import MatchLevel
from gateway.recorder import ForkReason, Prompt, Recorder

S = {"role": "system", "content": "You are careful."}
U = {"role": "user", "content": "Find the key."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(text: str, *, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def look(at: str, *, call_id: str = "c1", spaced: bool = False) -> dict[str, Any]:
    arguments = json.dumps({"at": at}, indent=1 if spaced else None)
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tools(*names: str) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {}}
    return [
        {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
        for name in names
    ]


@dataclass
class Conversation:
    """Plays calls through a recorder, sampling what the reply would encode to unless told otherwise."""

    template: Any
    level: MatchLevel = MatchLevel.TOKEN
    turns: list[tuple[Prompt, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.template, level=self.level)

    def call(
        self,
        messages: list[dict[str, Any]],
        reply: dict[str, Any],
        *,
        sampled: tuple[int, ...] | None = None,
        closed: bool = True,
        tools: list[dict[str, Any]] | None = None,
        prefill: bool = False,
    ) -> Prompt:
        prompt = self.recorder.locate(messages, tools=tools, prefill=prefill)
        self.record(prompt, reply, sampled=sampled, closed=closed, prefill=messages[-1] if prefill else None)
        return prompt

    def record(self, prompt: Prompt, reply: dict[str, Any], *, sampled=None, closed=True, prefill=None) -> None:
        if sampled is None:
            end = self.template.closing_ids[:1] if closed else ()
            sampled = (*self.template.reply_ids(reply), *end)
        self.recorder.record(prompt, sampled, index=len(self.turns), reply=reply, prefill=prefill)
        self.turns.append((prompt, sampled))

    @property
    def num_rows(self) -> int:
        """Rows of a chain merge: whole turns that are no beginning of another row."""
        whole = sorted((prompt.ids + sampled for prompt, sampled in self.turns), key=len, reverse=True)
        rows: list[tuple[int, ...]] = []
        for ids, count in ((ids, whole.count(ids)) for ids in dict.fromkeys(whole)):
            if not any(row[: len(ids)] == ids for row in rows):
                rows += [ids] * count
        return len(rows)

    @property
    def reasons(self) -> list[ForkReason | None]:
        return [prompt.fork_reason for prompt, _ in self.turns]


@pytest.fixture
def talk(template) -> Conversation:
    return Conversation(template)


def test_a_plain_dialogue_is_one_row(talk):
    talk.call([S, U], said("A1"))
    second = talk.call([S, U, said("A1"), user("and then?")], said("A2"))
    assert talk.num_rows == 1
    first, sampled = talk.turns[0]
    assert second.ids[: len(first.ids) + len(sampled)] == first.ids + sampled
    assert talk.reasons == [None, None]


def test_a_continued_prompt_equals_the_templates_full_rendering(talk, template):
    messages = [S, U, said("A1"), user("and then?"), look("desk"), tool("a key")]
    talk.call(messages[:2], messages[2])
    talk.call(messages[:4], messages[4])
    last = talk.call(messages, said("found it"))
    assert list(last.ids) == template.prompt(messages)


def test_arrival_order_does_not_matter(talk):
    talk.call([S, U, said("A1"), user("and then?")], said("A2"))
    talk.call([S, U], said("A1"))
    assert talk.num_rows == 1
    assert talk.reasons == [None, ForkReason.BRANCH]


def test_two_samples_of_one_prompt_are_two_rows(talk):
    talk.call([S, U], said("A"))
    talk.call([S, U], said("B"))
    assert talk.num_rows == 2
    assert talk.reasons == [None, ForkReason.BRANCH]


def test_a_forgotten_failed_attempt_forks(talk):
    talk.call([S, U], said("A1"))
    talk.call([S, U, said("A1"), user("ERROR: bad arguments")], said("A2"))
    talk.call([S, U, said("A2"), user("result 7")], said("A3"))
    assert talk.num_rows == 2
    assert talk.reasons == [None, None, ForkReason.HISTORY_REWRITTEN]


def test_compaction_starts_a_new_row(talk):
    summary = user("Summary: key is red")
    talk.call([S, U], said("A1"))
    talk.call([S, U, said("A1"), tool("r1")], said("A2"))
    talk.call([S, summary], said("A3"))
    talk.call([S, summary, said("A3"), tool("r3")], said("A4"))
    assert talk.num_rows == 2
    assert talk.reasons == [None, None, ForkReason.NEW_CONVERSATION, None]


def test_interleaved_agents_keep_a_row_each(talk):
    planner, doer = {"role": "system", "content": "planner"}, {"role": "system", "content": "doer"}
    talk.call([planner, U], said("P1"))
    talk.call([doer, user("P1")], said("D1"))
    talk.call([planner, U, said("P1"), user("D1 done")], said("P2"))
    talk.call([doer, user("P1"), said("D1"), user("more")], said("D2"))
    assert talk.num_rows == 2
    assert talk.reasons == [None, ForkReason.NEW_CONVERSATION, None, None]


def test_drift_is_flagged_and_the_sampled_ids_are_kept(talk, template):
    spelled = tuple(i for letter in "hello" for i in template.encode(letter))
    assert list(spelled) != template.encode("hello")
    sampled = (*spelled, template.closing_ids[0])
    talk.call([S, U], said("hello"), sampled=sampled)
    second = talk.call([S, U, said("hello"), user("go on")], said("A2"))
    assert talk.num_rows == 1
    first = talk.turns[0][0]
    assert second.ids[: len(first.ids) + len(sampled)] == first.ids + sampled
    assert [prompt.drift for prompt, _ in talk.turns] == [False, True]


def test_another_tool_list_is_never_one_row(talk):
    talk.call([S, U], said("A1"), tools=tools("look"))
    talk.call([S, U, said("A1"), user("go on")], said("A2"), tools=tools("look", "open"))
    assert talk.num_rows == 2
    assert talk.reasons == [None, ForkReason.TOOLS_CHANGED]


def test_an_empty_tool_list_is_no_tool_list(talk):
    talk.call([S, U], said("A1"), tools=[])
    talk.call([S, U, said("A1"), user("go on")], said("A2"))
    assert talk.num_rows == 1


def test_stripped_reasoning_forks(talk):
    talk.call([S, U], said("<think>hm</think>A1"))
    talk.call([S, U, said("A1"), user("go on")], said("A2"))
    assert talk.num_rows == 2
    assert talk.reasons == [None, ForkReason.HISTORY_REWRITTEN]


def test_a_branch_continues_the_shared_reply_twice(talk):
    talk.call([S, U], said("A"))
    talk.call([S, U, said("A"), user("X")], said("B"))
    talk.call([S, U, said("A"), user("Y")], said("C"))
    assert talk.num_rows == 2
    assert talk.reasons == [None, None, None]


def test_replies_that_differ_in_their_tool_call_only_are_two_rows(talk):
    talk.call([S, U], look("desk"))
    talk.call([S, U], look("bed"))
    assert talk.num_rows == 2


def test_a_tool_call_that_was_not_sampled_here_is_context(talk):
    talk.call([S, U], look("desk"))
    last = talk.call([S, U, look("bed", call_id="c2"), tool("a key", call_id="c2")], said("found it"))
    assert talk.num_rows == 2
    assert last.parent is None
    assert last.fork_reason is ForkReason.HISTORY_REWRITTEN


def test_respelled_tool_arguments_still_match(talk):
    talk.call([S, U], look("desk"))
    last = talk.call([S, U, look("desk", spaced=True), tool("a key")], said("found it"))
    assert last.parent == 0


def test_parallel_calls_are_rows_of_their_own(talk):
    prompts = [talk.recorder.locate([S, user(f"part {i}")]) for i in range(4)]
    for i, prompt in enumerate(prompts):
        talk.record(prompt, said(f"R{i}"))
    assert talk.num_rows == 4


def test_two_equal_samples_stay_two(talk):
    talk.call([S, U], said("A"))
    talk.call([S, U], said("A"))
    assert talk.num_rows == 2


def test_a_truncated_reply_is_closed_by_context(talk, template):
    talk.call([S, U], said("A long repl"), closed=False)
    second = talk.call([S, U, said("A long repl"), user("go on")], said("A2"))
    first, sampled = talk.turns[0]
    assert second.ids[: len(first.ids) + len(sampled)] == first.ids + sampled
    assert second.ids[len(first.ids) + len(sampled)] == template.closing_ids[0]
    assert talk.num_rows == 1


def test_a_prefill_goes_on_inside_the_unfinished_reply(talk, template):
    first = talk.call([S, U, said("Answer: ")], said("42"), prefill=True)
    assert template.decode(first.ids).endswith("Answer: ")
    second = talk.call([S, U, said("Answer: 42"), user("go on")], said("A2"))
    assert second.parent == 0
    assert talk.num_rows == 1


@pytest.mark.parametrize(
    ("level", "num_rows", "reason"),
    [(MatchLevel.TOKEN, 2, ForkReason.HISTORY_REWRITTEN), (MatchLevel.TEXT, 1, None)],
)
def test_white_space_counts_at_token_level_only(template, level, num_rows, reason):
    talk = Conversation(template, level=level)
    talk.call([S, U], said("A1\n"))
    talk.call([S, U, said("A1"), user("go on")], said("A2"))
    assert talk.num_rows == num_rows
    assert talk.reasons == [None, reason]


texts = st.text(alphabet="abhelo \n", min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_played_every_prompt_keeps_its_ancestors_sampled_ids(template, data):
    """Random trees of conversations with random samplings: matched ids are verbatim, the rest is one encoding."""
    talk = Conversation(template)
    histories: list[tuple[list[dict[str, Any]], int | None]] = [([S, U], None)]
    for _ in range(data.draw(st.integers(1, 7))):
        messages, parent = data.draw(st.sampled_from(histories))
        ids = data.draw(st.lists(st.integers(3, 250), max_size=5))
        closed = data.draw(st.booleans())
        sampled = (*ids, *(template.closing_ids[:1] if closed else ()))
        reply = said(template.decode(ids))
        prompt = talk.call(messages, reply, sampled=sampled)
        assert talk.turns[-1][1] == sampled
        if parent is not None:
            assert prompt.parent is not None
            before, kept = talk.turns[prompt.parent]
            assert prompt.ids[: len(before.ids) + len(kept)] == before.ids + kept
            assert prompt.fork_reason is None
        histories.append(([*messages, reply, user(data.draw(texts))], len(talk.turns) - 1))

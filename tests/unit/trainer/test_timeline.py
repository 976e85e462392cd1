from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3r.episode import Episode, EpisodeKind, FinishReason, Group, Turn
from a3r.errors import UsageError
from trainer.timeline import Row, merge_turns, samples_from_group


def turn(prompt: list[int], sampled: list[int], *, index: int = 0, version: int = 0, logprob: float = -1.0) -> Turn:
    return Turn(
        episode_id="e",
        index=index,
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        logprobs=tuple(logprob - 0.001 * position for position in range(len(sampled))),
        finish_reason=FinishReason.STOP,
        policy="p",
        version=version,
        temperature=1.0,
    )


def spans(rows: tuple[Row, ...]) -> Counter[tuple[tuple[int, ...], float]]:
    """Each trained token as (all ids up to and including it, its logprob)."""
    return Counter((row.ids[: t + 1], row.logprobs[t]) for row in rows for t, trained in enumerate(row.mask) if trained)


def sampled_spans(turns: list[Turn]) -> Counter[tuple[tuple[int, ...], float]]:
    return Counter(
        ((one.prompt_ids + one.sampled_ids)[: len(one.prompt_ids) + t + 1], one.logprobs[t])
        for one in turns
        for t in range(len(one.sampled_ids))
    )


# Message-level cases. Every message is a distinct range of ids, a prompt is the ids of its messages, and a reply is
# sampled as the ids that a later prompt shows for it.


@dataclass(frozen=True)
class Case:
    calls: list[tuple[list[str], str]]
    num_rows: int


CASES = {
    "linear": Case([(["S", "U"], "A1"), (["S", "U", "A1", "U2"], "A2")], 1),
    "longer call recorded first": Case([(["S", "U", "A1", "U2"], "A2"), (["S", "U"], "A1")], 1),
    "one prompt, two replies": Case([(["S", "U"], "A"), (["S", "U"], "B")], 2),
    "failed attempt forgotten": Case(
        [(["S", "U"], "A1"), (["S", "U", "A1", "E"], "A2"), (["S", "U", "A2", "T"], "A3")], 2
    ),
    "memory compaction": Case(
        [(["S", "U"], "A1"), (["S", "U", "A1", "T1"], "A2"), (["S", "M"], "A3"), (["S", "M", "A3", "T3"], "A4")], 2
    ),
    "two agents interleaved": Case(
        [(["P", "U"], "P1"), (["D", "P1"], "D1"), (["P", "U", "P1", "X"], "P2"), (["D", "P1", "D1", "Y"], "D2")], 2
    ),
    "tool list changed": Case([(["S+look", "U"], "A1"), (["S+look+open", "U", "A1", "U2"], "A2")], 2),
    "reasoning stripped from history": Case([(["S", "U"], "think A1"), (["S", "U", "A1", "U2"], "A2")], 2),
    "two continuations of one reply": Case(
        [(["S", "U"], "A"), (["S", "U", "A", "X"], "B"), (["S", "U", "A", "Y"], "C")], 2
    ),
    "replies that differ in a tool call only": Case([(["S", "U"], "call desk"), (["S", "U"], "call bed")], 2),
    "abandoned tool call": Case([(["S", "U"], "call desk"), (["S", "U", "call bed", "T"], "found")], 2),
    "parallel calls": Case([(["S", f"part {n}"], f"R{n}") for n in range(4)], 4),
    "same reply sampled twice": Case([(["S", "U"], "A"), (["S", "U"], "A")], 2),
    "truncated reply continued": Case([(["S", "U"], "A long repl"), (["S", "U", "A long repl", "end", "U2"], "A2")], 1),
    "reply continued from a prefill": Case([(["S", "U", "Answer: "], "42")], 1),
    "three samples of one request": Case([(["S", "U"], reply) for reply in "ABC"], 3),
    "an episode without calls": Case([], 0),
    "reply stripped of white space": Case([(["S", "U"], "A1\n"), (["S", "U", "A1", "U2"], "A2")], 2),
}


def encoded(case: Case) -> list[Turn]:
    ranges: dict[str, list[int]] = {}

    def ids(message: str) -> list[int]:
        start = 10 * len(ranges)
        return ranges.setdefault(message, list(range(start, start + 3)))

    return [
        turn([one for message in messages for one in ids(message)], ids(reply), index=index)
        for index, (messages, reply) in enumerate(case.calls)
    ]


@pytest.mark.parametrize("name", CASES)
def test_message_cases_make_the_expected_rows_and_train_each_reply_once(name: str) -> None:
    turns = encoded(CASES[name])
    rows = merge_turns(turns)
    assert len(rows) == CASES[name].num_rows
    assert spans(rows) == sampled_spans(turns)


def test_sampled_ids_are_kept_whatever_else_their_text_encodes_to() -> None:
    (row,) = merge_turns([turn([1, 2], [10, 11]), turn([1, 2, 10, 11, 3], [12], index=1)])
    assert row.ids == (1, 2, 10, 11, 3, 12)
    assert row.mask == (0, 0, 1, 1, 0, 1)


def test_a_prompt_continues_the_longest_row_it_extends() -> None:
    short, long = turn([1], [2], index=0), turn([1], [2, 3], index=1)
    rows = merge_turns([short, long, turn([1, 2, 3, 4], [5], index=2)])
    assert sorted(row.ids for row in rows) == [(1, 2), (1, 2, 3, 4, 5)]


def test_a_row_carries_the_oldest_version_it_trains() -> None:
    (row,) = merge_turns([turn([1], [2], version=3), turn([1, 2, 4], [5], index=1, version=4)])
    assert row.version == 3


def test_a_turn_that_sampled_nothing_makes_no_row() -> None:
    assert merge_turns([turn([1, 2], [])]) == ()


def test_a_turn_without_a_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="has no prompt"):
        merge_turns([turn([], [1])])


TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=5),
        st.lists(st.integers(0, 1), max_size=3),
        st.integers(0, 2),
        st.sampled_from([-0.5, -1.0]),
    ),
    max_size=8,
)


@given(TURNS, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_every_sampled_token_is_trained_once_in_any_arrival_order(drawn: list, shuffler) -> None:
    turns = [turn(p, s, index=i, version=v, logprob=lp) for i, (p, s, v, lp) in enumerate(drawn)]
    rows = merge_turns(turns)
    assert spans(rows) == sampled_spans(turns)
    assert all(len(row.ids) == len(row.mask) == len(row.logprobs) for row in rows)
    assert all(lp == 0.0 for row in rows for lp, trained in zip(row.logprobs, row.mask, strict=True) if not trained)
    shuffled = list(turns)
    shuffler.shuffle(shuffled)
    assert merge_turns(shuffled) == rows


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_turns_that_each_extend_the_last_make_one_row(pieces: list[list[int]]) -> None:
    history: list[int] = [7]
    turns = []
    for index, sampled in enumerate(pieces):
        turns.append(turn(history, sampled, index=index))
        history = history + sampled + [7]
    assert len(merge_turns(turns)) == 1


def test_samples_of_a_group_carry_their_episodes_advantage_on_trained_tokens_only() -> None:
    mine, partners = turn([1, 2], [3]), turn([8], [9], index=1)
    partners = Turn(**{name: getattr(partners, name) for name in Turn.__slots__} | {"policy": "partner"})
    first = Episode("e", "t", EpisodeKind.TRAIN, "p", 1.0, (mine, partners))
    without_turns = Episode("f", "t", EpisodeKind.TRAIN, "p", 0.0, ())
    (sample,) = samples_from_group(Group("t", (first, without_turns)), [0.5, -0.5])
    assert (sample.episode_id, sample.task_id, sample.ids) == ("e", "t", (1, 2, 3))
    assert sample.advantages == (0.0, 0.0, 0.5)
    assert sample.num_trained == 1

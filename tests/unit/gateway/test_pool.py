"""The batch rule and the fates, under random interleavings of clients, updates and time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from a3r.episode import Episode, EpisodeKind
from a3r.errors import Refused
from gateway.pool import Accepted, GroupView, Pool, Rules, ready_groups, settled, wanted_tasks

RULES = Rules(group_size=2, batch_tasks=2, max_staleness=1, num_updates=6)


def episode(name: str, *, task: str = "a") -> Episode:
    return Episode(id=name, task_id=task, kind=EpisodeKind.TRAIN, policy="p", reward=1.0, turns=())


def view(task: str, *versions: int, open: int = 0) -> GroupView:
    accepted = tuple(Accepted(episode(f"{task}{i}", task=task), v, v) for i, v in enumerate(versions))
    return GroupView((task, 0), frozenset(str(i) for i in range(open)), accepted)


def snapshot(*groups: GroupView) -> dict:
    return {group.key: group for group in groups}


def test_a_batch_needs_enough_complete_groups():
    assert ready_groups(snapshot(view("a", 0, 0), view("b", 0)), RULES, version=0) == ()
    assert ready_groups(snapshot(view("a", 0, 0), view("b", 0, 0)), RULES, version=0) == (("a", 0), ("b", 0))


def test_a_batch_takes_no_group_that_is_too_old_or_ahead():
    old, ahead = view("old", 0, 2), view("ahead", 2, 3)
    fresh = [view("a", 1, 2), view("b", 2, 2)]
    assert ready_groups(snapshot(old, ahead, *fresh), RULES, version=2) == (("a", 0), ("b", 0))


def test_staleness_and_the_last_updates_bound_the_tasks_that_are_wanted():
    assert wanted_tasks({}, RULES, version=0, in_update=0) == 4
    assert wanted_tasks(snapshot(view("a", open=1)), RULES, version=0, in_update=2) == 1
    assert wanted_tasks({}, RULES, version=5, in_update=0) == 2
    assert wanted_tasks({}, RULES, version=6, in_update=0) == 0


def test_a_place_is_numbered_by_its_claim_even_after_an_abort():
    pool = Pool(RULES, version=0, idle_s=60)
    places = [pool.admit("a", episode_id=name, now=0.0)[0].number for name in ("x", "y")]
    pool.leave("x", key=("a", 0), now=0.0)
    assert [*places, pool.admit("a", episode_id="z", now=0.0)[0].number] == [0, 1, 2]


def test_an_update_that_forgets_an_episode_is_an_error():
    with pytest.raises(ValueError, match="every episode"):
        settled(["x", "y"], consumed=["x"], filtered=[])


class Interleavings(RuleBasedStateMachine):
    """Every accepted episode is either waiting, in the update, or has exactly one fate."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(RULES, version=0, idle_s=5.0)
        self.now = 0.0
        self.count = 0
        self.running: dict[str, tuple[tuple[str, int], int]] = {}
        self.accepted: set[str] = set()
        self.fates: list[str] = []
        self.refusals: set[str] = set()
        self.in_update: tuple[str, ...] = ()

    @rule(task=st.sampled_from("abcde"))
    def claim(self, task: str) -> None:
        self.count += 1
        name = f"e{self.count}"
        try:
            place, evicted = self.pool.admit(task, episode_id=name, now=self.now)
        except Refused as refusal:
            self.refusals.add(refusal.code)
            return
        self.fates += evicted
        self.running[name] = ((task, place.group_index), self.pool.version)

    @rule(data=st.data(), ending=st.sampled_from(["rewarded", "aborted"]))
    def finish(self, data: st.DataObject, ending: str) -> None:
        if not self.running:
            return
        name = data.draw(st.sampled_from(sorted(self.running)))
        key, version = self.running.pop(name)
        if ending == "rewarded":
            self.accepted.add(name)
            done = Accepted(episode(name, task=key[0]), version, self.pool.version)
            self.fates += self.pool.accept(done, key=key, now=self.now)
        else:
            self.pool.leave(name, key=key, now=self.now)

    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        if self.in_update or self.pool.version >= RULES.num_updates or not self.pool.has_batch:
            return
        groups = self.pool.take_batch()
        assert [len(group.episodes) for group in groups] == [RULES.group_size] * RULES.batch_tasks
        self.in_update = self.pool.in_update

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if not self.in_update:
            return
        split = data.draw(st.integers(0, len(self.in_update)))
        self.fates += settled(self.in_update, consumed=self.in_update[:split], filtered=self.in_update[split:])
        self.in_update = ()
        self.fates += self.pool.finish_update(self.pool.version + 1)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_accepted_episode_is_in_exactly_one_place(self) -> None:
        waiting = [a.episode.id for group in self.pool.snapshot.values() for a in group.accepted]
        everywhere = [*waiting, *self.in_update, *self.fates]
        assert sorted(everywhere) == sorted(self.accepted)

    @invariant()
    def no_group_is_overfull_and_none_too_old_waits(self) -> None:
        assert self.refusals <= {"group_full", "batch_full"}
        for group in self.pool.snapshot.values():
            assert group.num_taken <= RULES.group_size
            assert all(a.oldest >= self.pool.version - RULES.max_staleness for a in group.accepted)

    def teardown(self) -> None:
        self.fates += self.pool.evict_all()
        assert sorted([*self.in_update, *self.fates]) == sorted(self.accepted)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

"""Which episodes may start, which make the next batch, and which never will.

A Group is gathered by task: `group_size` places, taken by claims and given back by aborts. A batch is ready when
`batch_tasks` groups are complete (rule C2). Claims beyond what coming updates can use are declined beforehand,
so that finished work is rarely thrown away; what still grows older than `max_staleness` is evicted by whole
groups, because the episodes that happened to finish in time are not a fair draw.

The rules are functions of a snapshot; `Pool` holds the snapshot and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from a3r.episode import Episode, Fate, Group
from a3r.errors import Refused

GroupKey: TypeAlias = tuple[str, int]
"""Task id, and which group of that task."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a trial's settings ask of the pool."""

    group_size: int
    batch_tasks: int
    max_staleness: int
    num_updates: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted episode and the policy versions behind it."""

    episode: Episode
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group as it stands."""

    key: GroupKey
    open: frozenset[str] = frozenset()
    """Ids of its running episodes."""
    accepted: tuple[Accepted, ...] = ()
    num_claims: int = 0
    """Places ever taken, given back or not."""
    is_repeat: bool = False
    """Whether it began while another group of its task waited."""
    touched_at: float = 0.0
    """Time of the last claim, end or abort."""

    @property
    def num_taken(self) -> int:
        return len(self.open) + len(self.accepted)


Snapshot: TypeAlias = Mapping[GroupKey, GroupView]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an admitted episode belongs."""

    group_index: int
    number: int
    """Counts the claims of its group, from 0."""


def is_complete(group: GroupView, rules: Rules) -> bool:
    """Whether a group has all its episodes."""
    return len(group.accepted) >= rules.group_size


def is_stale(group: GroupView, rules: Rules, *, version: int) -> bool:
    """Whether some accepted episode is older than an update from policy `version` may use."""
    return any(accepted.oldest < version - rules.max_staleness for accepted in group.accepted)


def is_ahead(group: GroupView, *, version: int) -> bool:
    """Whether some episode saw a policy that a resumed server has yet to reach again."""
    return any(accepted.newest > version for accepted in group.accepted)


def ready_groups(snapshot: Snapshot, rules: Rules, *, version: int) -> tuple[GroupKey, ...]:
    """Rule C2: the first `batch_tasks` complete, fresh groups; empty while there are fewer."""
    fit = [
        key
        for key, group in snapshot.items()
        if is_complete(group, rules)
        and not is_stale(group, rules, version=version)
        and not is_ahead(group, version=version)
    ]
    return tuple(fit[: rules.batch_tasks]) if len(fit) >= rules.batch_tasks else ()


def wanted_tasks(snapshot: Snapshot, rules: Rules, *, version: int, in_update: int) -> int:
    """Further tasks that coming updates can use within the staleness bound.

    `in_update` counts the groups of the batch that is being trained on.
    """
    batches = min(1 + rules.max_staleness, rules.num_updates - version)
    under_way = sum(not is_ahead(group, version=version) for group in snapshot.values())
    return max(0, batches * rules.batch_tasks - under_way - in_update)


class Pool:
    """The groups of one trial that wait for an update."""

    def __init__(self, rules: Rules, *, version: int, idle_s: float) -> None:
        """`idle_s`: an incomplete group without running episodes, untouched for so long, makes way for a new task."""
        self.rules = rules
        self.version = version
        self._idle_s = idle_s
        self._groups: dict[GroupKey, GroupView] = {}
        self._next_index: dict[str, int] = {}
        self._in_update: tuple[str, ...] = ()
        self._num_in_update = 0

    @property
    def snapshot(self) -> Snapshot:
        return dict(self._groups)

    @property
    def wanted_tasks(self) -> int:
        return wanted_tasks(self._groups, self.rules, version=self.version, in_update=self._num_in_update)

    @property
    def has_batch(self) -> bool:
        return bool(ready_groups(self._groups, self.rules, version=self.version))

    @property
    def in_update(self) -> tuple[str, ...]:
        """Episode ids of the batch that is being trained on."""
        return self._in_update

    @property
    def num_open(self) -> int:
        return sum(len(group.open) for group in self._groups.values())

    def admit(self, task_id: str, *, episode_id: str, now: float) -> tuple[Place, tuple[str, ...]]:
        """A place for a claimed episode, and the accepted episodes evicted to make room for it.

        Raises Refused: 409 `group_full` when the task's group needs no more, 429 `batch_full` when no further
        task is wanted.
        """
        group = self._gathering(task_id)
        evicted: tuple[str, ...] = ()
        if group is None or (is_complete(group, self.rules) and self._may_repeat()):
            evicted = self._room_for(task_id, now=now)
            index = self._next_index.get(task_id, 0)
            self._next_index[task_id] = index + 1
            group = GroupView((task_id, index), is_repeat=group is not None)
        elif group.num_taken >= self.rules.group_size:
            raise Refused(
                f"The group of task {task_id!r} is full",
                why=f"it has {group.num_taken} of {self.rules.group_size} episodes",
                next_step="claim another task",
                status=409,
                code="group_full",
            )
        number = group.num_claims
        self._groups[group.key] = replace(group, open=group.open | {episode_id}, num_claims=number + 1, touched_at=now)
        return Place(group.key[1], number), evicted

    def restore(
        self, key: GroupKey, *, place: int, now: float, accepted: Accepted | None = None, episode_id: str | None = None
    ) -> None:
        """Put back an episode that the ledger knows: accepted, or still running as `episode_id`."""
        group = self._groups.get(key, GroupView(key))
        self._groups[key] = replace(
            group,
            accepted=group.accepted if accepted is None else (*group.accepted, accepted),
            open=group.open if episode_id is None else group.open | {episode_id},
            num_claims=max(group.num_claims, place + 1),
            touched_at=now,
        )
        self.reserve(key)

    def reserve(self, key: GroupKey) -> None:
        """Never use this group index again."""
        task_id, index = key
        self._next_index[task_id] = max(self._next_index.get(task_id, 0), index + 1)

    def leave(self, episode_id: str, *, key: GroupKey, now: float) -> None:
        """Give back the place of an episode that ended without a reward."""
        group = self._groups[key]
        left = replace(group, open=group.open - {episode_id}, touched_at=now)
        if left.num_taken:
            self._groups[key] = left
        else:
            del self._groups[key]

    def accept(self, accepted: Accepted, *, key: GroupKey, now: float) -> tuple[str, ...]:
        """Count a rewarded episode. Returns the episodes evicted because this one came too late."""
        group = self._groups[key]
        self._groups[key] = replace(
            group,
            open=group.open - {accepted.episode.id},
            accepted=(*group.accepted, accepted),
            touched_at=now,
        )
        return self.evict_stale()

    def take_batch(self) -> tuple[Group, ...]:
        """The groups of the next update, which leave the pool; empty while the rule does not hold."""
        keys = ready_groups(self._groups, self.rules, version=self.version)
        groups = tuple(
            Group(key[0], tuple(accepted.episode for accepted in self._groups.pop(key).accepted)) for key in keys
        )
        self._in_update = tuple(episode.id for group in groups for episode in group.episodes)
        self._num_in_update = len(groups)
        return groups

    def finish_update(self, version: int) -> tuple[str, ...]:
        """The batch led to policy `version`. Returns the episodes that are too old from now on."""
        self._in_update, self._num_in_update = (), 0
        self.version = version
        return self.evict_stale()

    def evict_stale(self) -> tuple[str, ...]:
        return self._evict(key for key, g in self._groups.items() if is_stale(g, self.rules, version=self.version))

    def evict_all(self) -> tuple[str, ...]:
        """Evict every accepted episode that waits; running ones keep their places."""
        return self._evict(list(self._groups))

    def _gathering(self, task_id: str) -> GroupView | None:
        """The task's newest group that is not ahead of the policy."""
        found = None
        for key, group in self._groups.items():
            if key[0] == task_id and not is_ahead(group, version=self.version):
                found = group
        return found

    def _may_repeat(self) -> bool:
        """Whether a task may be gathered twice: only once no other group still needs claims for the first time.

        Without this, fewer tasks than a batch has would never fill it.
        """
        return all(is_complete(group, self.rules) or group.is_repeat for group in self._groups.values())

    def _room_for(self, task_id: str, *, now: float) -> tuple[str, ...]:
        if self.wanted_tasks:
            return ()
        for key, group in self._groups.items():
            if not group.open and not is_complete(group, self.rules) and now - group.touched_at > self._idle_s:
                return self._evict([key])
        raise Refused(
            f"No place for task {task_id!r}",
            why="the coming updates have all the tasks they can use",
            next_step="try again after the next update",
            status=429,
            code="batch_full",
        )

    def _evict(self, keys: Iterable[GroupKey]) -> tuple[str, ...]:
        evicted: list[str] = []
        for key in list(keys):
            group = self._groups[key]
            evicted += [accepted.episode.id for accepted in group.accepted]
            if group.open:
                self._groups[key] = replace(group, accepted=())
            else:
                del self._groups[key]
        return tuple(evicted)


def settled(batch: Collection[str], *, consumed: Collection[str], filtered: Collection[str]) -> dict[str, Fate]:
    """Fate of every episode of a batch. Raises ValueError unless each is in exactly one of the two lists."""
    fates: dict[str, Fate] = dict.fromkeys(consumed, Fate.CONSUMED)
    fates.update(dict.fromkeys(filtered, Fate.FILTERED))
    if len(fates) != len(consumed) + len(filtered) or fates.keys() != set(batch):
        raise ValueError("an update must say of every episode of its batch whether it was consumed or filtered")
    return fates

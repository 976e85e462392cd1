"""Timelines: the turns of an episode, merged into as few training rows as their tokens allow.

Merging compares token ids and nothing else: whether a prompt continues what was sampled was decided when the prompt
was made. A turn whose prompt begins with all ids of an open row continues that row, so history is computed once; a
turn that continues nothing starts a row of its own, with its prompt as untrained history. Every sampled token is
trained in exactly one row, with the engine's own id and logprob.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from a3r.episode import Episode, Group, Turn
from a3r.errors import UsageError
from a3r.sample import Sample


@dataclass(frozen=True, slots=True)
class Row:
    """One chain of turns of T tokens; position t of each column describes `ids[t]`."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    """1 where the token was sampled and is trained here."""
    logprobs: tuple[float, ...]
    """Behaviour logprob of trained tokens, 0 elsewhere."""
    version: int
    """Oldest policy version among the trained tokens."""


@dataclass(slots=True)
class _OpenRow:
    ids: tuple[int, ...] = ()
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def continue_with(self, turn: Turn) -> None:
        num_context = len(turn.prompt_ids) - len(self.ids)
        self.ids = turn.prompt_ids + turn.sampled_ids
        self.mask += [0] * num_context + [1] * len(turn.sampled_ids)
        self.logprobs += [0.0] * num_context + list(turn.logprobs)
        self.versions.append(turn.version)

    def closed(self) -> Row:
        return Row(ids=self.ids, mask=tuple(self.mask), logprobs=tuple(self.logprobs), version=min(self.versions))


def merge_turns(turns: Iterable[Turn]) -> tuple[Row, ...]:
    """Rows of one episode's turns, whatever the order they come in; turns without sampled tokens make none.

    A prompt that several open rows fit continues the longest. A row continued once is as long as its newest turn, so
    a second continuation of the earlier part no longer fits it and starts a row of its own. Two turns that sampled
    the same ids from the same prompt stay two rows. Raises UsageError for a turn with an empty prompt.
    """
    rows: list[_OpenRow] = []
    # A parent's ids are shorter than its child's prompt, so it comes first. The rest of the key makes the outcome a
    # function of the set of turns.
    for turn in sorted((turn for turn in turns if turn.sampled_ids), key=_merge_order):
        if not turn.prompt_ids:
            raise UsageError(f"A turn of episode {turn.episode_id} has no prompt", why="its first token has no context")
        row = _longest_prefix(rows, turn.prompt_ids)
        if row is None:
            row = _OpenRow()
            rows.append(row)
        row.continue_with(turn)
    return tuple(row.closed() for row in rows)


def _merge_order(turn: Turn) -> tuple[int, tuple[int, ...], tuple[int, ...], int, tuple[float, ...]]:
    return len(turn.prompt_ids), turn.prompt_ids, turn.sampled_ids, turn.version, turn.logprobs


def _longest_prefix(rows: Sequence[_OpenRow], prompt: tuple[int, ...]) -> _OpenRow | None:
    fitting = (row for row in rows if prompt[: len(row.ids)] == row.ids)
    return max(fitting, key=lambda row: len(row.ids), default=None)


def own_turns(episode: Episode) -> tuple[Turn, ...]:
    """The turns that the episode's own policy sampled. A frozen partner's are recorded but never trained."""
    return tuple(turn for turn in episode.turns if turn.policy == episode.policy)


def samples_from_group(group: Group, advantages: Sequence[float]) -> list[Sample]:
    """Training rows of a group; `advantages[i]` is given to every token that `episodes[i]`'s own turns sampled."""
    samples: list[Sample] = []
    for episode, advantage in zip(group.episodes, advantages, strict=True):
        for row in merge_turns(own_turns(episode)):
            samples.append(
                Sample(
                    episode_id=episode.id,
                    task_id=group.task_id,
                    ids=row.ids,
                    mask=row.mask,
                    logprobs=row.logprobs,
                    advantages=tuple(advantage if trained else 0.0 for trained in row.mask),
                    version=row.version,
                )
            )
    return samples

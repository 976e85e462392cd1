"""One running episode: its lease, its conversations and the turns sampled so far."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson

from a3r.episode import Ending, Episode, EpisodeKind, Message, Transcript, TranscriptTurn, Turn
from a3r.errors import Refused
from a3r.swarm.wire import Ended
from gateway.ledger import EpisodeRow, TurnValues
from gateway.pool import Accepted, GroupKey
from gateway.recorder import Prompt, Recorder

if TYPE_CHECKING:
    from gateway.calls import Answer
    from gateway.history import StoredTurn


@dataclass(frozen=True, slots=True)
class Closing:
    """How an episode is being ended; `done` once that is on disk."""

    ending: Ending
    reward: float | None
    components: Mapping[str, float]
    done: asyncio.Future[Ended]


class LiveEpisode:
    """An episode between claim and ending. Changes through its own methods only, on the event loop."""

    def __init__(self, row: EpisodeRow, *, recorder: Recorder, now: float) -> None:
        self.row = row
        self.recorder = recorder
        self.turns: list[Turn] = []
        self.said: list[TranscriptTurn] = []
        self.calls: dict[bytes, asyncio.Task[Answer]] = {}
        """Latest call of each request body, so that a retry joins it."""
        self.num_calls = 0
        self.num_in_flight = 0
        self.closing: Closing | None = None
        self._touched_at = now

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def kind(self) -> EpisodeKind:
        return EpisodeKind(self.row.kind)

    @property
    def group(self) -> GroupKey:
        return self.row.task_id, self.row.group_index

    def touch(self, now: float) -> None:
        """A heartbeat or call: the lease starts anew."""
        self._touched_at = now

    def is_expired(self, now: float) -> bool:
        """Whether nothing was heard for longer than the lease; a call in flight counts as being heard."""
        return not self.num_in_flight and self.closing is None and now - self._touched_at > self.row.lease_s

    def require_open(self) -> None:
        """Raises Refused (409, `episode_ended`) once the episode is sealed."""
        if self.closing is not None:
            raise ended_already(self.id, self.closing.ending)

    def record(
        self, prompt: Prompt, turn: Turn, *, messages: Sequence[Message], reply: Message, tools: object, prefill: bool
    ) -> TurnValues:
        """Add a sampled turn. What is returned belongs into the ledger before the reply leaves."""
        unfinished = messages[-1] if prefill else None
        self.recorder.record(prompt, turn.sampled_ids, index=turn.index, reply=reply, prefill=unfinished)
        self.turns.append(turn)
        self.said.append(TranscriptTurn(tuple(messages), reply, turn.finish_reason))
        parent = None if prompt.parent is None else self.turns[prompt.parent]
        num_known = 0 if parent is None else len(parent.prompt_ids) + len(parent.sampled_ids)
        return TurnValues(
            episode_id=self.id,
            index=turn.index,
            parent=prompt.parent,
            context_ids=array("i", turn.prompt_ids[num_known:]).tobytes(),
            sampled_ids=array("i", turn.sampled_ids).tobytes(),
            logprobs=array("d", turn.logprobs).tobytes(),
            finish_reason=turn.finish_reason,
            version=turn.version,
            temperature=turn.temperature,
            fork_reason=turn.fork_reason,
            drift=turn.drift,
            num_matched=prompt.num_matched,
            messages=orjson.dumps(messages[prompt.num_matched :]),
            reply=orjson.dumps(reply),
            tools=None if tools is None else orjson.dumps(tools),
            prefill=prefill,
        )

    def restore(self, stored: Sequence[StoredTurn]) -> None:
        """Take up the turns that the ledger holds, as if they had just been sampled."""
        for turn in stored:
            messages = turn.said.messages
            located = self.recorder.locate(messages, tools=turn.tools, prefill=turn.prefill)
            prompt = replace(located, ids=turn.turn.prompt_ids, drift=turn.turn.drift)
            unfinished = messages[-1] if turn.prefill else None
            self.recorder.record(
                prompt, turn.turn.sampled_ids, index=turn.turn.index, reply=turn.said.reply, prefill=unfinished
            )
            self.turns.append(turn.turn)
            self.said.append(turn.said)

    def transcript(self) -> Transcript:
        return Transcript(turns=tuple(self.said))

    def accepted(self, *, reward: float, components: Mapping[str, float]) -> Accepted:
        """The episode as it enters the pool."""
        episode = Episode(
            id=self.id,
            task_id=self.row.task_id,
            kind=self.kind,
            policy=self.row.policy,
            reward=reward,
            turns=tuple(self.turns),
            components=dict(components),
            client_id=self.row.client_id,
        )
        versions = [turn.version for turn in self.turns] or [self.row.version]
        return Accepted(episode, oldest=min(versions), newest=max(versions))


def has_failed(call: asyncio.Task[Answer]) -> bool:
    """Whether a call ended without an answer; its retry then starts anew."""
    return call.done() and (call.cancelled() or call.exception() is not None)


def ended_already(episode_id: str, ending: str) -> Refused:
    """The refusal of whatever comes too late."""
    return Refused(
        f"The episode {episode_id} has ended",
        why=f"its ending is {ending!r}",
        next_step="claim a new episode",
        status=409,
        code="episode_ended",
    )

"""Tasks, turns and episodes: what was asked, what was sampled, how it ended.

Records are frozen and torch-free. Token ids and logprobs are the engine's own and travel as one unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
Message: TypeAlias = dict[str, Any]
"""One chat message as the OpenAI API spells it: role, content, tool_calls, tool_call_id."""


class EpisodeKind(StrEnum):
    """What an episode is for."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """Why sampling of one turn stopped."""

    STOP = "stop"
    """The end-of-turn token (or a stop string) was sampled; it is part of `sampled_ids`."""
    LENGTH = "length"
    """A token limit cut the turn; there is no end-of-turn token."""
    TOOL_CALLS = "tool_calls"
    """The turn ended with parsed tool calls."""

    @property
    def is_truncated(self) -> bool:
        return self is FinishReason.LENGTH


class Ending(StrEnum):
    """How an episode ended."""

    REWARDED = "rewarded"
    """The client reported a reward."""
    ABORTED = "aborted"
    """The client gave it up on purpose."""
    EXPIRED = "expired"
    """No heartbeat within the lease."""
    CLIENT_FAULT = "client_fault"
    """The program or its client failed."""
    ENGINE_FAULT = "engine_fault"
    """Inference failed."""
    STOPPED = "stopped"
    """The server was stopped or configured anew while it ran."""

    @property
    def is_accepted(self) -> bool:
        """Whether the episode counts: it has a reward and may be trained on or measured."""
        return self is Ending.REWARDED

    @property
    def is_fault(self) -> bool:
        return self in (Ending.EXPIRED, Ending.CLIENT_FAULT, Ending.ENGINE_FAULT)


class Fate(StrEnum):
    """What became of an accepted training episode. Each gets exactly one."""

    CONSUMED = "consumed"
    """An update trained on it."""
    FILTERED = "filtered"
    """A batch dropped it by rule, such as a group of equal rewards."""
    EVICTED = "evicted"
    """It never entered a batch: too old, surplus, or its group stayed incomplete."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance. `public` goes to the agent; `private` only to environment, grade and metric."""

    id: str
    public: Mapping[str, Json]
    private: Mapping[str, Json] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "public": dict(self.public), "private": dict(self.private)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        return cls(id=value["id"], public=value["public"], private=value["private"])


@dataclass(frozen=True, slots=True)
class Turn:
    """One LLM call as it was sampled. `len(sampled_ids) == len(logprobs)`; logprobs are natural logs of
    the distribution that was sampled, that is after `temperature`."""

    episode_id: str
    index: int
    """Order of arrival within the episode, from 0."""
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy: str
    version: int
    """Policy version that sampled every token of this turn."""
    temperature: float
    fork_reason: str | None = None
    """Why the prompt did not continue an earlier turn's tokens; None where it did or was the first."""
    drift: bool = False
    """Whether some matched history would re-encode to other ids. The sampled ids were kept."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a Task, from claim to reward."""

    id: str
    task_id: str
    kind: EpisodeKind
    policy: str
    reward: float
    turns: tuple[Turn, ...]
    components: Mapping[str, float] = field(default_factory=dict)
    ending: Ending = Ending.REWARDED
    client_id: str = ""

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the turns; raises ValueError for an episode without turns."""
        return min(turn.version for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """All episodes of one Task that share an advantage baseline."""

    task_id: str
    episodes: tuple[Episode, ...]

    @property
    def has_equal_rewards(self) -> bool:
        return len({episode.reward for episode in self.episodes}) <= 1


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers to an action."""

    text: str
    done: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"text": self.text, "done": self.done}


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """One call as messages: what was sent and what came back."""

    messages: tuple[Message, ...]
    reply: Message
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Step:
    """One environment step, recorded by the judge and not by the agent."""

    action: str
    observation: Observation


@dataclass(frozen=True, slots=True)
class Transcript:
    """All that a grade or metric may look at. Turns come from the gateway, steps from the judge, so a
    program cannot dress them up; `output` is whatever `run_episode` returned."""

    turns: tuple[TranscriptTurn, ...] = ()
    steps: tuple[Step, ...] = ()
    output: Json = None

    @property
    def replies(self) -> tuple[str, ...]:
        """Text of every reply, in order."""
        return tuple(turn.reply.get("content") or "" for turn in self.turns)

    def as_json(self) -> dict[str, Any]:
        return {
            "turns": [
                {"messages": list(t.messages), "reply": t.reply, "finish_reason": t.finish_reason} for t in self.turns
            ],
            "steps": [{"action": s.action, "observation": s.observation.as_json()} for s in self.steps],
            "output": self.output,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Transcript:
        return cls(
            turns=tuple(
                TranscriptTurn(
                    messages=tuple(turn["messages"]), reply=turn["reply"], finish_reason=turn["finish_reason"]
                )
                for turn in value["turns"]
            ),
            steps=tuple(
                Step(action=step["action"], observation=Observation(**step["observation"])) for step in value["steps"]
            ),
            output=value["output"],
        )

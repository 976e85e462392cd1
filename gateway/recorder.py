"""Which earlier turn does a call continue? Answered here, once, for the whole system.

Messages are compared one by one in canonical form: role, text, tool calls with parsed arguments, tool ids. The
longest earlier conversation (prompt and reply) that the new messages begin with gives its ids, verbatim; only
the rest is encoded. A prompt that goes on from nothing sampled is a fork, and says why. Sampled ids are never
changed, repaired or re-encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import orjson

from a3r.episode import Message
from gateway.messages import MatchLevel, canonical, joined
from gateway.template import ChatTemplate

Tools = Sequence[dict[str, Any]]


class ForkReason(StrEnum):
    """Why a prompt does not go on from the latest sampled reply of its history."""

    NEW_CONVERSATION = "new_conversation"
    """It holds no reply: another agent, a summary in place of the history, or a parallel call."""
    BRANCH = "branch"
    """It holds no reply and begins an earlier conversation: another sample of the same prompt."""
    TOOLS_CHANGED = "tools_changed"
    """The history is known, under another list of tools."""
    HISTORY_REWRITTEN = "history_rewritten"
    """It holds a reply that was not sampled here in this place: edited, stripped, shortened or foreign."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Where a reply is to be sampled."""

    ids: tuple[int, ...]
    parent: int | None
    """Index of the turn whose prompt and reply `ids` begins with."""
    num_matched: int
    """How many of the messages that turn accounts for."""
    fork_reason: ForkReason | None
    drift: bool
    """Whether some matched reply would re-encode to other ids than were sampled."""
    links: tuple[bytes, ...] = field(repr=False)
    """Digest of the tools, then of every beginning of the messages."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    index: int
    prompt: Prompt
    sampled_ids: tuple[int, ...]
    reply: Message


class Recorder:
    """The conversations of one episode under one policy, in whatever order their calls arrive."""

    def __init__(self, template: ChatTemplate, *, level: MatchLevel = MatchLevel.TOKEN) -> None:
        self._template = template
        self._level = level
        self._ends: dict[bytes, _Recorded] = {}
        self._beginnings: set[bytes] = set()
        self._roots: dict[bytes, None] = {}

    def locate(self, messages: Sequence[Message], *, tools: Tools | None = None, prefill: bool = False) -> Prompt:
        """The prompt of a new call. With `prefill` the last message is an unfinished reply to go on from.

        Raises Refused (400) for messages that cannot be rendered.
        """
        links = self._links(_root(tools), messages)
        parent, matched = self._longest(links)
        if parent is None:
            ids = self._template.prompt(messages, tools=tools, prefill=prefill)
            drift = False
        else:
            closed = self._template.is_closed(parent.sampled_ids)
            bridge = self._template.bridge(messages[matched:], closed=closed, prefill=prefill)
            ids = [*parent.prompt.ids, *parent.sampled_ids, *bridge]
            drift = parent.prompt.drift or self._drifts(parent)
        reason = self._fork_reason(messages, links, matched=matched, prefill=prefill)
        index = None if parent is None else parent.index
        return Prompt(
            ids=tuple(ids), parent=index, num_matched=matched, fork_reason=reason, drift=drift, links=tuple(links)
        )

    def record(
        self,
        prompt: Prompt,
        sampled_ids: tuple[int, ...],
        *,
        index: int,
        reply: Message,
        prefill: Message | None = None,
    ) -> None:
        """Remember turn `index`: `reply` was sampled as `sampled_ids` at `prompt`.

        After a prefill, the history that a caller sends back holds one message made of both.
        """
        recorded = _Recorded(index=index, prompt=prompt, sampled_ids=sampled_ids, reply=reply)
        links = prompt.links
        if prefill is not None:
            links = links[:-1]
            reply = joined(prefill, reply)
        self._roots[links[0]] = None
        self._beginnings.update(links)
        self._ends.setdefault(_link(links[-1], canonical(reply, level=self._level)), recorded)

    def _links(self, root: bytes, messages: Sequence[Message]) -> list[bytes]:
        links = [root]
        for message in messages:
            links.append(_link(links[-1], canonical(message, level=self._level)))
        return links

    def _longest(self, links: Sequence[bytes]) -> tuple[_Recorded | None, int]:
        for length in range(len(links) - 1, 0, -1):
            recorded = self._ends.get(links[length])
            if recorded is not None:
                return recorded, length
        return None, 0

    def _fork_reason(
        self, messages: Sequence[Message], links: Sequence[bytes], *, matched: int, prefill: bool
    ) -> ForkReason | None:
        if not self._ends:
            return None
        rest = messages[matched : len(messages) - 1 if prefill else len(messages)]
        if any(message["role"] == "assistant" for message in rest):
            others = (root for root in self._roots if root != links[0])
            known = any(self._longest(self._links(root, messages))[1] > matched for root in others)
            return ForkReason.TOOLS_CHANGED if known else ForkReason.HISTORY_REWRITTEN
        if matched:
            return None
        return ForkReason.BRANCH if links[-1] in self._beginnings else ForkReason.NEW_CONVERSATION

    def _drifts(self, recorded: _Recorded) -> bool:
        sampled = list(self._template.without_end(recorded.sampled_ids))
        if recorded.reply.get("tool_calls"):
            return self._template.reply_ids(recorded.reply) != sampled
        return self._template.encode(self._template.decode(sampled)) != sampled


def _root(tools: Tools | None) -> bytes:
    return blake2b(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS) if tools else b"", digest_size=16).digest()


def _link(previous: bytes, message: bytes) -> bytes:
    return blake2b(previous + message, digest_size=16).digest()

"""What a chat message means, whatever way its JSON is spelled."""

from __future__ import annotations

import json
from enum import StrEnum

import orjson

from a3r.episode import Message
from a3r.errors import Refused


class MatchLevel(StrEnum):
    """How alike two messages must be."""

    TOKEN = "token"
    """To the letter: what would be rendered is what was sampled."""
    TEXT = "text"
    """Up to white space around the text."""


def canonical(message: Message, *, level: MatchLevel) -> bytes:
    """One message as comparable bytes: role, text, tool calls with parsed arguments, tool id, name."""
    text = text_of(message.get("content"))
    calls = [
        (call.get("id"), call["function"]["name"], _same_json(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    shown = text.strip() if level is MatchLevel.TEXT else text
    return orjson.dumps((message["role"], shown, calls, message.get("tool_call_id"), message.get("name")))


def joined(prefill: Message, reply: Message) -> Message:
    """A reply together with the unfinished message that it went on from, as a later history holds it."""
    return {**reply, "content": text_of(prefill.get("content")) + text_of(reply.get("content"))}


def text_of(content: object) -> str:
    """Text of a message's content: a string, nothing, or a list of text parts.

    Raises Refused (400, `unsupported_content`) for any other part, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise Refused(
        "This message content is not supported",
        why="the policy reads text only",
        next_step="send content as a string or as text parts",
        code="unsupported_content",
    )


def parsed_arguments(arguments: object) -> object:
    """Tool arguments as a value; text that is no JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _same_json(arguments: object) -> str:
    return json.dumps(parsed_arguments(arguments), sort_keys=True)

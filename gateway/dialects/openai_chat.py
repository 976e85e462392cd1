"""OpenAI chat completions: a request body in, replies and stream events out.

A parameter is honoured, pinned or refused by name; none is dropped in silence. Pinned parameters concern episodes
only: their distribution is the trial's, since the learner divides by its logprobs. A pinned parameter that the
caller asked for differently is listed in the reply's `x-a3r-pinned` header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from a3r.episode import FinishReason, Message
from a3r.errors import Refused

SHAPING = {
    "top_p": (1, 1.0, None),
    "top_k": (-1, 0, None),
    "min_p": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "frequency_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
}
"""Parameters that would bend the sampled distribution, with the values that leave it alone."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"}, None),
    "logit_bias": ({}, None),
    "top_logprobs": (0, None),
    "tool_choice": ("auto", "none", None),
    "parallel_tool_calls": (True, None),
    "store": (False, None),
    "user": (),
    "metadata": (),
    "safety_identifier": (),
}
"""Parameters accepted at these values only; an empty tuple takes any value, as it changes nothing."""

_READ = frozenset(
    {
        "model",
        "messages",
        "tools",
        "stream",
        "stream_options",
        "n",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "seed",
        "logprobs",
        "continue_final_message",
        "add_generation_prompt",
    }
)
_MESSAGE_KEYS = frozenset(["role", "content", "name", "tool_calls", "tool_call_id"])
_MESSAGE_NEUTRAL = frozenset(["refusal", "annotations", "audio", "function_call", "reasoning_content", "reasoning"])
_ROLES = frozenset(["system", "developer", "user", "assistant", "tool"])
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One validated request."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    model: str | None
    stream: bool
    include_usage: bool
    n: int
    stop: tuple[str, ...]
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    logprobs: bool
    prefill: bool
    """The last message is an unfinished reply to go on from."""
    parses_tools: bool
    shaping: tuple[str, ...]
    """Parameters that ask for another distribution than the policy's own."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled reply as its caller sees it."""

    reply: Message
    finish_reason: FinishReason
    tokens: tuple[str, ...]
    """Text of each sampled id, where logprobs were asked for."""
    logprobs: tuple[float, ...]
    num_sampled: int


def parse(body: bytes) -> ChatRequest:
    """The request in `body`. Raises Refused (400) naming the first thing that does not fit."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _bad("The request body is no JSON", why=str(error)) from error
    if not isinstance(fields, dict):
        raise _bad("The request body must be a JSON object")
    _refuse_unsupported(fields)
    prefill = _flag(fields, "continue_final_message")
    messages = _messages(fields.get("messages"))
    if prefill and messages[-1]["role"] != "assistant":
        raise _bad("continue_final_message needs an assistant message at the end", code="messages")
    if fields.get("add_generation_prompt", not prefill) is prefill:
        raise _bad("add_generation_prompt must be the opposite of continue_final_message", code="add_generation_prompt")
    tools = _tools(fields.get("tools"))
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _bad("stream_options must be an object", code="stream_options")
    return ChatRequest(
        messages=messages,
        tools=tools,
        model=fields.get("model"),
        stream=_flag(fields, "stream"),
        include_usage=options.get("include_usage") is True,
        n=_number(fields, "n", kind=int, low=1, high=MAX_CHOICES) or 1,
        stop=_stop(fields.get("stop")),
        max_tokens=_max_tokens(fields),
        temperature=_number(fields, "temperature", kind=float, low=0, high=2),
        seed=_number(fields, "seed", kind=int, low=-(2**63), high=2**63 - 1),
        logprobs=_flag(fields, "logprobs"),
        prefill=prefill,
        parses_tools=tools is not None and fields.get("tool_choice") != "none",
        shaping=tuple(name for name, neutral in SHAPING.items() if fields.get(name) not in neutral),
    )


def reply_of(text: str, *, parses_tools: bool, call_ids: str) -> Message:
    """The assistant message in a sampled text; `call_ids` starts the ids of its tool calls.

    Hermes calls (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`) are lifted out where `parses_tools`;
    a malformed call stays text, so that its author can see it.
    """
    found = list(_TOOL_CALL.finditer(text)) if parses_tools else []
    calls = [_tool_call(match[1], call_id=f"{call_ids}_{index}") for index, match in enumerate(found)]
    valid = [call for call in calls if call is not None]
    if not valid or len(valid) < len(calls):
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text[: found[0].start()].rstrip() or None, "tool_calls": valid}


def completion_body(
    choices: Sequence[Choice], *, request_id: str, created: int, model: str, num_prompt: int, with_logprobs: bool
) -> bytes:
    """The whole reply to a plain request."""
    return orjson.dumps(
        {
            "id": request_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": index,
                    "message": {"refusal": None, **choice.reply},
                    "finish_reason": choice.finish_reason,
                    "logprobs": _logprobs(choice) if with_logprobs else None,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage(choices, num_prompt=num_prompt),
        }
    )


def chunk(
    *, request_id: str, created: int, model: str, choices: Sequence[Mapping[str, Any]], usage: object = None
) -> bytes:
    """One server-sent event of a streamed reply."""
    body = {
        "id": request_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": choices,
    }
    return b"data: " + orjson.dumps(body if usage is None else {**body, "usage": usage}) + b"\n\n"


def last_delta(choice: Choice, *, index: int, sent: int, with_logprobs: bool) -> dict[str, Any]:
    """The delta that completes a streamed choice of which `sent` characters have left already."""
    delta: dict[str, Any] = {}
    rest = (choice.reply["content"] or "")[sent:]
    if rest:
        delta["content"] = rest
    if choice.reply.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(choice.reply["tool_calls"])]
    return {
        "index": index,
        "delta": delta,
        "finish_reason": choice.finish_reason,
        "logprobs": _logprobs(choice) if with_logprobs else None,
    }


def usage(choices: Sequence[Choice], *, num_prompt: int) -> dict[str, int]:
    """Token counts of a call."""
    sampled = sum(choice.num_sampled for choice in choices)
    return {"prompt_tokens": num_prompt, "completion_tokens": sampled, "total_tokens": num_prompt + sampled}


def error_body(error: Refused, *, kind: str = "invalid_request_error") -> bytes:
    """An error as OpenAI clients read it."""
    return orjson.dumps({"error": {"message": str(error), "type": kind, "code": error.code, "param": None}})


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _READ or name in SHAPING:
            continue
        if name not in _NEUTRAL:
            raise _bad(f"The parameter {name!r} is not supported", next_step="leave it out", code=name)
        allowed = _NEUTRAL[name]
        if allowed and value not in allowed:
            raise _bad(
                f"The parameter {name!r} is not supported with the value {value!r}",
                next_step=f"leave it out or send {json.dumps(allowed[0])}",
                code=name,
            )


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _bad("messages must be a list with at least one message", code="messages")
    return tuple(_message(message, place=place) for place, message in enumerate(value))


def _message(value: object, *, place: int) -> Message:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise _bad(f"messages[{place}] needs a role out of {', '.join(sorted(_ROLES))}", code="messages")
    for key in value.keys() - _MESSAGE_KEYS:
        if value[key] and key not in _MESSAGE_NEUTRAL:
            raise _bad(f"messages[{place}] has an unsupported field {key!r}", code="messages")
    message = {key: value[key] for key in value.keys() & _MESSAGE_KEYS if value[key] is not None}
    message.setdefault("content", None)
    if message["role"] == "developer":
        message["role"] = "system"
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(_is_tool_call(call) for call in calls):
        raise _bad(f"messages[{place}].tool_calls must be function calls with name and arguments", code="messages")
    return message


def _is_tool_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


def _tools(value: object) -> tuple[dict[str, Any], ...] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in value):
        raise _bad("tools must be a list of function tools", code="tools")
    return tuple(value)


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _bad("stop must be a string or a list of strings, none of them empty", code="stop")
    return tuple(stops)


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    limits = [_number(fields, name, kind=int, low=1, high=2**31) for name in ("max_tokens", "max_completion_tokens")]
    given = [limit for limit in limits if limit is not None]
    return min(given) if given else None


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _bad(f"{name} must be true or false", code=name)


def _number(fields: Mapping[str, Any], name: str, *, kind: type, low: float, high: float) -> Any:
    value = fields.get(name)
    if value is None:
        return None
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not fits or (kind is int and not isinstance(value, int)):
        raise _bad(f"{name} must be {'an integer' if kind is int else 'a number'} from {low} to {high}", code=name)
    return kind(value)


def _tool_call(text: str, *, call_id: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"].isascii():
        return None
    arguments = json.dumps(call.get("arguments", {}))
    return {"id": call_id, "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _logprobs(choice: Choice) -> dict[str, Any]:
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _bad(what: str, *, why: str = "", next_step: str = "", code: str = "invalid_request") -> Refused:
    return Refused(what, why=why, next_step=next_step, status=400, code=code)

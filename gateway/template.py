"""Messages to token ids, and back, without ever re-encoding what was sampled.

A conversation's ids are built in pieces. The first prompt is rendered by the model's own chat template and
encoded. A later prompt keeps the ids of the history that was matched (prompt and sampled reply, verbatim) and
encodes only what the template writes after that reply: the *bridge*. The bridge is read off a short stand-in
dialogue, so its cost does not grow with the history, and a template that rewrites old turns (strips their
reasoning, say) cannot change what the policy saw.

Text is cut where a reply begins, so a reply found in a history gets the ids that sampling at that place uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import orjson
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from a3r.episode import Message
from a3r.errors import EnvironmentNotReady, Refused
from gateway.messages import parsed_arguments, text_of

_MARK = "\u2042a3r-bridge\u2042"
_STAND_IN: tuple[Message, ...] = ({"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK})
_SHORT = 256
"""Characters up to which ids are cached: replies and observations of small tasks repeat."""
_MAX_BRIDGES = 4096
_KEPT_SPECIALS = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>"})


class ChatTemplate:
    """A tokenizer's chat template as increments of token ids.

    Raises EnvironmentNotReady when the tokenizer has no fast backend or no chat template, or when its template
    puts no end-of-turn token behind a reply.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast or not isinstance(tokenizer.chat_template, str):
            raise _unusable("it needs a fast tokenizer with one chat template")
        self._template: str = tokenizer.chat_template
        self._backend: Any = tokenizer.backend_tokenizer
        self._specials: dict[str, Any] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self._encode_short = lru_cache(maxsize=4096)(
            lambda text: tuple(self._backend.encode(text, add_special_tokens=False).ids)
        )
        self._bridges: dict[bytes, list[int]] = {}
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._hidden = frozenset(i for i, t in added.items() if t.special and t.content not in _KEPT_SPECIALS)
        self._closing_text = self._render(_STAND_IN).partition(_MARK)[2]
        self.closing_ids: tuple[int, ...] = tuple(self.encode(self._closing_text))
        """What the template writes behind a reply, its end-of-turn token first."""
        if not self.closing_ids or self.closing_ids[0] not in added:
            raise _unusable("its template writes no end-of-turn token behind a reply")
        self.end_ids: tuple[int, ...] = tuple(
            dict.fromkeys(i for i in (self.closing_ids[0], tokenizer.eos_token_id) if isinstance(i, int))
        )
        """Ids that end a reply: the template's end-of-turn token and the tokenizer's end of sequence."""
        try:
            self.preserves_prefix: bool = self._preserves_prefix()
        except Refused as refusal:
            raise _unusable(f"its template cannot render a plain dialogue: {refusal.why}") from refusal
        """Whether the template itself never rewrites earlier turns. Where it does, what was sampled is kept."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands: no token is added around it."""
        if len(text) <= _SHORT:
            return list(self._encode_short(text))
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Special tokens are left out, except those that spell tool calls and reasoning."""
        return self._backend.decode([i for i in ids if i not in self._hidden], skip_special_tokens=False)

    def prompt(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] | None = None, prefill: bool = False
    ) -> list[int]:
        """Ids of a whole conversation, up to where the next reply begins (or goes on, with `prefill`).

        Raises Refused (400) when the template cannot render the messages.
        """
        text = self._render(messages, tools=tools, prefill=prefill, open_reply=not prefill)
        return self._encode_pieces(text, messages, first=0, tools=tools)

    def bridge(self, messages: Sequence[Message], *, closed: bool, prefill: bool = False) -> list[int]:
        """Ids of what follows a sampled reply: its closing, then `messages`, then the head of the next reply.

        `closed` says that the reply's last id is the end-of-turn token, which is then not repeated.
        """
        key = orjson.dumps((messages, closed, prefill))
        if len(key) > _SHORT:
            return self._bridge(messages, closed=closed, prefill=prefill)
        known = self._bridges.get(key)
        if known is None:
            if len(self._bridges) >= _MAX_BRIDGES:
                self._bridges.clear()
            known = self._bridges[key] = self._bridge(messages, closed=closed, prefill=prefill)
        return known

    def _bridge(self, messages: Sequence[Message], *, closed: bool, prefill: bool) -> list[int]:
        dialogue = [*_STAND_IN, *messages]
        text = self._render(dialogue, prefill=prefill, open_reply=not prefill)
        start = text.find(_MARK) + len(_MARK)
        if _MARK not in text or not text.startswith(self._closing_text, start):
            raise _unusable("its template changes a reply or its closing once other messages follow")
        start += len(self._closing_text)
        rest = self._encode_pieces(text, dialogue, first=len(_STAND_IN), start=start)
        return [*self.closing_ids[1 if closed else 0 :], *rest]

    def reply_ids(self, reply: Message) -> list[int]:
        """Ids that a reply gets when its message, not what was sampled, is encoded; without the closing."""
        question = _STAND_IN[:1]
        head = self._render(question, open_reply=True)
        text = self._render([*question, reply])
        return self.encode(text[len(head) :].removesuffix(self._closing_text))

    def is_closed(self, ids: Sequence[int]) -> bool:
        """Whether a reply ends with the template's own end-of-turn token."""
        return bool(ids) and ids[-1] == self.closing_ids[0]

    def without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """A reply's ids without the end token it may have."""
        return ids[:-1] if ids and ids[-1] in self.end_ids else ids

    def _encode_pieces(
        self,
        text: str,
        messages: Sequence[Message],
        *,
        first: int,
        start: int = 0,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of `text[start:]`, cut where each assistant message from index `first` on begins."""
        ids: list[int] = []
        for index in range(first, len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            head = self._render(messages[:index], tools=tools, open_reply=True) if index else ""
            if len(head) > start and text.startswith(head):
                ids += self.encode(text[start : len(head)])
                start = len(head)
        return ids + self.encode(text[start:])

    def _render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        prefill: bool = False,
        open_reply: bool = False,
    ) -> str:
        try:
            texts, _ = render_jinja_template(
                conversations=[[_for_template(message) for message in messages]],
                tools=list(tools) if tools else None,
                chat_template=self._template,
                continue_final_message=prefill,
                add_generation_prompt=open_reply,
                **self._specials,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise Refused(
                "The chat template cannot render these messages",
                why=str(error),
                next_step="check roles, their order, and the tool definitions",
                code="bad_messages",
            ) from error
        # A tool argument may spell half a surrogate pair, which no tokenizer can take.
        return texts[0].encode(errors="replace").decode()

    def _preserves_prefix(self) -> bool:
        """Compare bridged ids with those of a full rendering on a dialogue with every usual turn."""
        question: Message = {"role": "user", "content": "a"}
        reply: Message = {"role": "assistant", "content": "<think>b</think>c"}
        for follow_up in ([question], [question, reply, question]):
            bridged = [*self.prompt([question]), *self.reply_ids(reply), *self.bridge(follow_up, closed=False)]
            if bridged != self.prompt([question, reply, *follow_up]):
                return False
        return True


def _for_template(message: Message) -> Message:
    """The message as templates expect it: content is text, tool arguments are objects."""
    content = text_of(message.get("content"))
    if not message.get("tool_calls"):
        return {**message, "content": content}
    calls = [
        {**call, "function": {**call["function"], "arguments": parsed_arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": content, "tool_calls": calls}


def _unusable(why: str) -> EnvironmentNotReady:
    return EnvironmentNotReady(
        "The model's tokenizer cannot serve chats", why=why, next_step="use an instruction-tuned model folder"
    )

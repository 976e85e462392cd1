"""Text of a reply while it is being sampled."""

from __future__ import annotations

from gateway.dialects.openai_chat import ChatRequest
from gateway.template import ChatTemplate

_TOOL_CALL = "<tool_call>"


class TextStream:
    """Turns sampled ids into text that is certain to be part of the reply.

    Held back are half a character, what may grow into a stop string or a tool call, and all that follows one.
    """

    def __init__(self, template: ChatTemplate, *, request: ChatRequest) -> None:
        self._template = template
        self._barriers = request.stop + ((_TOOL_CALL,) if request.parses_tools else ())
        self._strips = request.parses_tools
        self._ids: list[int] = []
        self._anchor = self._known = 0
        self._text = ""
        self._sent = 0
        self._ended = False

    def push(self, token: int) -> str:
        """The text that became certain with this id; may be empty."""
        if self._ended or token in self._template.end_ids:
            self._ended = True
            return ""
        self._ids.append(token)
        # Decoded together with the piece before it: some tokenizers drop a space at the start of a text.
        before = self._template.decode(self._ids[self._anchor : self._known])
        both = self._template.decode(self._ids[self._anchor :])
        if both.endswith("\ufffd"):
            return ""
        self._anchor, self._known = self._known, len(self._ids)
        self._text += both[len(before) :]
        certain = self._certain()
        piece, self._sent = self._text[self._sent : certain], max(self._sent, certain)
        return piece

    def _certain(self) -> int:
        """Length of the text in front of whatever is or may become a barrier."""
        places = [place for place in (self._text.find(barrier) for barrier in self._barriers) if place >= 0]
        if places:
            self._ended = True
            certain = min(places)
        else:
            certain = len(self._text) - max((_overlap(self._text, barrier) for barrier in self._barriers), default=0)
        if self._strips:
            # White space in front of a tool call is not part of the message's content.
            certain = len(self._text[:certain].rstrip())
        return certain


def _overlap(text: str, barrier: str) -> int:
    """Length of the longest end of `text` that begins `barrier`."""
    for length in range(min(len(text), len(barrier) - 1), 0, -1):
        if text.endswith(barrier[:length]):
            return length
    return 0

"""Which slot of the cache a call takes, and how much of what the slot holds it can keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Slot:
    """A row of the cache. Only the engine's thread changes `ids` of a busy slot."""

    index: int
    session: str = ""
    """Whose tokens these are; empty when nobody will ask for them again."""
    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the cache."""
    is_busy: bool = False
    used_at: int = 0
    """Step in which it was computed last."""


def take_slot(slots: Sequence[Slot], prompt: Sequence[int], *, session: str) -> Slot | None:
    """A free slot for a call, made busy and cut to what it shares with the prompt; None when all are busy.

    The session's own slot with the longest common prefix is taken, unless the call would throw away most of what
    it holds: parallel dialogues of a session keep a slot each. Otherwise the least recently used one, released
    ones first.
    """
    free = [slot for slot in slots if not slot.is_busy]
    if not free:
        return None
    shared = {slot.index: shared_prefix(slot.ids, prompt) for slot in free if session and slot.session == session}
    chosen = max(free, key=lambda slot: shared.get(slot.index, 0))
    kept = shared.get(chosen.index, 0)
    if kept == 0 or 2 * kept < len(chosen.ids):
        chosen, kept = min(free, key=lambda slot: (slot.session != "", slot.used_at)), 0
    del chosen.ids[kept:]
    chosen.session, chosen.is_busy = session, True
    return chosen


def forget(slot: Slot) -> None:
    """Nobody will ask for the slot's tokens again; a call that runs in it goes on."""
    slot.session = ""
    if not slot.is_busy:
        slot.ids.clear()


def shared_prefix(kept: Sequence[int], prompt: Sequence[int]) -> int:
    """Length of the common prefix that can be reused; the prompt's last token is always computed."""
    most = min(len(kept), len(prompt) - 1)
    if list(kept[:most]) == list(prompt[:most]):
        return most
    return next(index for index in range(most) if kept[index] != prompt[index])

"""Transcripts as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from a3r.episode import Transcript
    from flows.record import Shown


def transcript_lines(shown: Shown) -> list[str]:
    """An episode as lines: where it comes from, then each message that was new, by speaker."""
    episode = shown.episode
    head = f"{episode.task_id}  metric {episode.metric:g}  {shown.setting}  ({shown.trial_id}, {episode.episode_id})"
    if episode.transcript is None:
        return [head]
    return [head, *_turns(episode.transcript)]


def _turns(transcript: Transcript) -> Iterator[str]:
    said: tuple[dict[str, object], ...] = ()
    for turn in transcript.turns:
        new = turn.messages[len(said) :] if turn.messages[: len(said)] == said else turn.messages
        for message in new:
            yield f"  {message['role']:>9}: {message.get('content') or ''}"
        yield f"  {'assistant':>9}> {turn.reply.get('content') or ''}"
        said = (*turn.messages, turn.reply)

"""Where the swarm server's engine may go from where it is."""

from __future__ import annotations

from a3r.errors import IllegalTransition
from a3r.swarm.wire import EngineState

S = EngineState

TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    S.OFFLINE: frozenset({S.BOOTING}),
    S.BOOTING: frozenset({S.ROLLING, S.OFFLINE}),
    S.ROLLING: frozenset({S.ROLLING_POST, S.WEIGHT_EXPORTING, S.OFFLINE}),
    S.ROLLING_POST: frozenset({S.ROLLING, S.WEIGHT_SYNCING, S.OFFLINE}),
    S.WEIGHT_SYNCING: frozenset({S.ROLLING, S.WEIGHT_EXPORTING, S.OFFLINE}),
    S.WEIGHT_EXPORTING: frozenset({S.ROLLING, S.WEIGHT_SYNCING, S.OFFLINE}),
}
"""Every legal move. ROLLING_POST may fall back to ROLLING when training is stopped before the update."""

SERVING = frozenset({S.ROLLING, S.ROLLING_POST, S.WEIGHT_SYNCING, S.WEIGHT_EXPORTING})
"""States that hold a trial; calls are taken in all of them and wait where the engine is paused."""


OPEN = "open"
"""State of an episode that has not ended; otherwise it is its Ending."""


def moved(state: EngineState, to: EngineState) -> EngineState:
    """`to`, when the table allows the move. Raises IllegalTransition naming both ends otherwise."""
    if to in TRANSITIONS[state]:
        return to
    allowed = ", ".join(sorted(TRANSITIONS[state]))
    raise IllegalTransition(f"The engine cannot go from {state} to {to}", why=f"from {state} it may go to {allowed}")

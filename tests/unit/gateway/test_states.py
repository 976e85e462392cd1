from __future__ import annotations

import itertools

import pytest

from a3r.errors import IllegalTransition
from a3r.swarm.wire import EngineState as S
from gateway.states import TRANSITIONS, moved


def test_a_training_loop_is_a_legal_walk():
    state = S.OFFLINE
    for to in (
        S.BOOTING, S.ROLLING, S.ROLLING_POST, S.WEIGHT_SYNCING, S.WEIGHT_EXPORTING, S.WEIGHT_SYNCING, S.ROLLING,
        S.WEIGHT_EXPORTING, S.ROLLING, S.OFFLINE,
    ):  # fmt: skip
        state = moved(state, to)
    assert state is S.OFFLINE


def test_every_other_move_is_refused_with_both_ends_named():
    for state, to in itertools.product(S, S):
        if to in TRANSITIONS[state]:
            continue
        with pytest.raises(IllegalTransition, match=f"from {state} to {to}"):
            moved(state, to)


def test_every_state_can_be_stopped():
    assert all(S.OFFLINE in TRANSITIONS[state] for state in S if state is not S.OFFLINE)

"""What every part of the gateway shares: the engine's state, the open trial, and word of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from a3r.errors import IllegalTransition, Refused
from a3r.swarm.wire import EngineState
from gateway.states import SERVING, moved
from gateway.trial import OpenTrial


class Stage:
    """The engine's state and the trial it serves. Lives on one event loop."""

    def __init__(self) -> None:
        self.state = EngineState.OFFLINE
        self.trial: OpenTrial | None = None
        self._changed = asyncio.Event()

    def move(self, to: EngineState) -> None:
        """Raises IllegalTransition for a move that the table does not allow."""
        self.state = moved(self.state, to)
        self.notify()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, *, timeout_s: float | None = None) -> None:
        """Until something changed, or the time is over."""
        try:
            await asyncio.wait_for(self._changed.wait(), None if timeout_s is None else max(timeout_s, 0))
        except TimeoutError:
            return

    async def until(self, trial: OpenTrial, holds: Callable[[], bool]) -> None:
        """Until `holds()`. Raises IllegalTransition when the trial is closed meanwhile."""
        while not holds():
            await self.change()
            if self.trial is not trial:
                raise IllegalTransition("The trial was closed while its next batch was awaited")

    def open_trial(self) -> OpenTrial:
        """The trial, for the learner's side. Raises IllegalTransition when there is none."""
        if self.trial is None:
            raise IllegalTransition("No trial is open", next_step="configure one first")
        return self.trial

    def serving_trial(self) -> OpenTrial:
        """The trial, for a client. Raises Refused (503, `not_ready`) when none is served."""
        if self.trial is None or self.state not in SERVING:
            raise Refused(
                "The swarm server has no trial to serve",
                why=f"its engine is {self.state}",
                next_step="wait until it is rolling, or configure and start a trial",
                status=503,
                code="not_ready",
            )
        return self.trial

"""The swarm server's heart: it owns the trial, its episodes and the engine's state.

A learner's loop over it reads:

    await gateway.open_trial(configure)
    while gateway.version < num_updates:
        groups = await gateway.next_batch()
        consumed, filtered = learner.update(groups)
        await gateway.commit_update(gateway.version + 1, consumed=consumed, filtered=filtered)
    await gateway.finish_training()

All methods run on one event loop. Whatever was acknowledged to a client is on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from a3r.episode import Ending, Group
from a3r.errors import Refused
from a3r.swarm.wire import Configure, EngineState, Status
from gateway import history
from gateway.desk import Desk, Options
from gateway.engine import Engine
from gateway.keys import KeyRing
from gateway.ledger import Ledger
from gateway.pool import settled
from gateway.stage import Stage
from gateway.states import moved
from gateway.template import ChatTemplate
from gateway.trial import OpenTrial, canonical_config, new_row, restored


class Gateway:
    """Episodes, batches and calls of one engine, one trial at a time. `desk` is its clients' side."""

    def __init__(
        self, engine: Engine, *, template: ChatTemplate, ledger: Ledger, keys: KeyRing, options: Options
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._options = options
        self._stage = Stage()
        self._sweeper: asyncio.Task[None] | None = None
        self._is_paused = False
        self.desk = Desk(self._stage, engine=engine, template=template, ledger=ledger, keys=keys, options=options)

    @property
    def state(self) -> EngineState:
        return self._stage.state

    @property
    def version(self) -> int:
        """Current policy version."""
        return self._engine.version

    @property
    def policy(self) -> str:
        """Name of the served policy."""
        return self._options.policy

    def boot(self) -> None:
        """OFFLINE to BOOTING, while weights for a trial are being loaded. `open_trial` does it when left out."""
        self._stage.move(EngineState.BOOTING)

    async def open_trial(self, configure: Configure, *, consumed: Collection[str] = ()) -> None:
        """Start a trial at the engine's policy version, or take up one that the ledger knows.

        For a trial that is taken up, `consumed` lists all episodes that the loaded checkpoint was trained on;
        episodes that later updates used return to the pool, and running ones go on.
        Raises Refused (409, `trial_exists`) when the ledger knows the trial with other settings.
        """
        if self._stage.state is not EngineState.BOOTING:
            moved(self._stage.state, EngineState.BOOTING)
        known = history.read_trial(self._ledger.path, trial_id=configure.trial_id)
        if known is not None and known != canonical_config(configure):
            raise Refused(
                f"The trial {configure.trial_id!r} exists with other settings",
                next_step="configure a trial under a new name",
                status=409,
                code="trial_exists",
            )
        if self._stage.state is EngineState.OFFLINE:
            self.boot()
        trial = OpenTrial(
            configure,
            policy=self.policy,
            version=self.version,
            max_model_tokens=self._options.max_model_tokens,
            group_idle_s=self._options.group_idle_s,
        )
        if known is None:
            await self._ledger.add(new_row(trial, now=self._options.clock()))
        else:
            await restored(
                trial, self._ledger, consumed=consumed, recorder=self.desk.recorder, now=self._options.clock()
            )
        self._stage.trial = trial
        self._stage.move(EngineState.ROLLING)
        self._sweeper = asyncio.create_task(self.desk.sweep(trial))
        if trial.num_updates <= self.version:
            await self.finish_training()

    async def next_batch(self) -> tuple[Group, ...]:
        """Wait for the groups of the next update. On return no call is being computed and the engine is paused.

        Without staleness, running training episodes finish first; evaluation goes on and merely waits.
        Raises IllegalTransition when the trial is closed meanwhile.
        """
        trial = self._stage.open_trial()
        await self._stage.until(trial, lambda: trial.pool.has_batch)
        self._stage.move(EngineState.ROLLING_POST)
        try:
            if trial.pool.rules.max_staleness == 0:
                await self._stage.until(trial, lambda: trial.pool.num_open == 0)
        except asyncio.CancelledError:
            if self._stage.state is EngineState.ROLLING_POST:
                self._stage.move(EngineState.ROLLING)
            raise
        groups = trial.pool.take_batch()
        self._stage.move(EngineState.WEIGHT_SYNCING)
        self._is_paused = True
        await self._engine.pause()
        return groups

    async def commit_update(
        self, update_version: int, *, consumed: Collection[str], filtered: Collection[str] = ()
    ) -> None:
        """The batch led to policy `update_version`: note its episodes' fates, publish the weights, go on.

        Raises ValueError unless every episode of the batch is in exactly one of the lists.
        """
        trial = self._stage.open_trial()
        fates = settled(trial.pool.in_update, consumed=consumed, filtered=filtered)
        await self._ledger.mark_fates(fates, version=update_version)
        await self._engine.publish(update_version)
        await self.desk.evict(trial.pool.finish_update(update_version), version=update_version)
        await self._resume()
        if update_version >= trial.num_updates:
            await self.finish_training()

    @asynccontextmanager
    async def exporting(self) -> AsyncIterator[None]:
        """Hold the engine in WEIGHT_EXPORTING while weights are written, from ROLLING or during an update."""
        before, was_paused = self._stage.state, self._is_paused
        self._stage.move(EngineState.WEIGHT_EXPORTING)
        if not was_paused:
            await self._engine.pause()
        try:
            yield
        finally:
            if self._stage.state is EngineState.WEIGHT_EXPORTING:
                self._stage.move(before)
            if not was_paused:
                await self._engine.resume()

    async def finish_training(self) -> None:
        """No further training episode is taken; those that wait are evicted. Evaluation goes on."""
        trial = self._stage.open_trial()
        trial.training_done = True
        await self.desk.evict(trial.pool.evict_all(), version=self.version)
        self._stage.notify()

    def fail_training(self, reason: str) -> None:
        """Training cannot go on: status shows `reason`, and training claims are refused. Evaluation goes on."""
        self._stage.open_trial().failure = reason
        self._stage.notify()

    async def abandon_update(self) -> None:
        """Leave an update that failed: its episodes are evicted and the engine resumes with the weights it has."""
        trial = self._stage.open_trial()
        await self.desk.evict(trial.pool.in_update, version=self.version)
        trial.pool.finish_update(self.version)
        await self._resume()

    async def close_trial(self) -> None:
        """Stop every running episode, evict those that wait, and go OFFLINE. Harmless without a trial.

        A server that is to resume later is not closed but simply ended.
        """
        trial, self._stage.trial = self._stage.trial, None
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if trial is not None:
            trial.training_done = True
            for episode in list(trial.episodes.values()):
                if episode.closing is None:
                    await self.desk.close(trial, episode, ending=Ending.STOPPED, reason="the trial was closed")
                else:
                    await asyncio.wait([episode.closing.done])
            await self.desk.evict((*trial.pool.in_update, *trial.pool.evict_all()), version=self.version)
        if self._stage.state is not EngineState.OFFLINE:
            self._stage.move(EngineState.OFFLINE)
        if self._is_paused:
            self._is_paused = False
            await self._engine.resume()

    def status(self) -> Status:
        trial = self._stage.trial
        if trial is None:
            return Status(
                state=self._stage.state, trial_id=None, policy=self.policy, version=self.version, num_updates=0,
                training_done=False, group_size=0, wanted_tasks=0, open_episodes=0, accepted=0,
            )  # fmt: skip
        ended = trial.training_done or trial.failure is not None
        return Status(
            state=self._stage.state,
            trial_id=trial.id,
            policy=self.policy,
            version=self.version,
            num_updates=trial.num_updates,
            training_done=trial.training_done,
            group_size=trial.pool.rules.group_size,
            wanted_tasks=0 if ended else trial.pool.wanted_tasks,
            open_episodes=len(trial.episodes),
            accepted=trial.num_accepted,
            failure=trial.failure,
        )

    async def _resume(self) -> None:
        self._is_paused = False
        await self._engine.resume()
        self._stage.move(EngineState.ROLLING)

"""Keeping many episodes in flight: whole groups of tasks, through restarts of the server, until training is done.

A task is begun when the server gives a place to the first episode of its group; only then are the others of the
group claimed. So a client that waits for places waits with one claim, and never holds up a group it has begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from a3r.episode import EpisodeKind, Task
from a3r.errors import InfrastructureFault, Refused
from a3r.swarm.client import ClaimedEpisode, Outcome

if TYPE_CHECKING:
    from a3r.swarm.client import SwarmClient


ATTEMPTS = 3
"""How often a place is tried when the agent fails in it."""
IDLE_S = 0.2
_UNWANTED = frozenset({"group_full", "batch_full", "not_rolling"})
_OVER = frozenset({"training_done", "training_failed"})
_OWN_FAULTS = frozenset({"episode_ended", "already_ended", "engine_fault"})
"""Refusals that cost an episode and do not stop a rollout."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What came of a rollout."""

    rewards: tuple[float, ...]
    """Rewards that were accepted, in the order in which their episodes ended."""
    failures: tuple[str, ...]
    """What went wrong in each failed attempt, in order."""
    training_done: bool
    """Whether it stopped because the server wants no more."""


class Rollout:
    """Plays tasks with a function `run(task, episode) -> reward`. Good for one `play`."""

    def __init__(
        self,
        client: SwarmClient,
        run: Callable[[Task, ClaimedEpisode], Outcome | float],
        *,
        kind: EpisodeKind,
        temperature: float | None,
        lease_s: float,
        patience_s: float,
    ) -> None:
        """`patience_s`: how long a place is waited for, across updates and restarts of the server."""
        self._client = client
        self._run = run
        self._kind = kind
        self._temperature = temperature
        self._lease_s = lease_s
        self._patience_s = patience_s
        self._rewards: list[float] = []
        self._failures: list[str] = []
        self._stopped_by: list[BaseException] = []

    def play(self, tasks: Iterable[Task], *, concurrency: int) -> Tally:
        """Play until the tasks are used up or training is done.

        A training task is played by as many episodes as a group has; an evaluation task once. An episode whose
        agent fails is aborted and its place tried again, up to three times in all. Raises InfrastructureFault
        when the server stays away, and Refused for any refusal that waiting does not help.
        """
        slots = threading.Semaphore(concurrency)

        def ended(future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                self._stopped_by.append(error)
            slots.release()

        with ThreadPoolExecutor(concurrency, thread_name_prefix="a3r-rollout") as pool:
            for task in tasks:
                slots.acquire()
                if self._stopped_by:
                    break
                first = self._begin(task)
                if first is None:
                    slots.release()
                    continue
                pool.submit(self._play_place, task, first).add_done_callback(ended)
                for _ in range(self._num_further()):
                    slots.acquire()
                    pool.submit(self._play_place, task, None).add_done_callback(ended)
        for error in self._stopped_by:
            if not _is_over(error):
                raise error
        return Tally(tuple(self._rewards), tuple(self._failures), training_done=bool(self._stopped_by))

    def _begin(self, task: Task) -> ClaimedEpisode | None:
        """The first episode of a task, or None when others are at its group or nothing more is wanted."""
        try:
            return self._claim(task)
        except Refused as refusal:
            if refusal.code == "group_full":
                # Without a pause, a list of few tasks would be asked for in a spin.
                time.sleep(IDLE_S)
            elif refusal.code not in _UNWANTED:
                self._stopped_by.append(refusal)
        except InfrastructureFault as fault:
            self._stopped_by.append(fault)
        return None

    def _num_further(self) -> int:
        if self._kind is EpisodeKind.EVAL:
            return 0
        return self._client.status(patience_s=self._patience_s).group_size - 1

    def _play_place(self, task: Task, claimed: ClaimedEpisode | None) -> None:
        for _ in range(ATTEMPTS):
            try:
                episode = claimed or self._claim(task)
            except Refused as refusal:
                if refusal.code in _UNWANTED:
                    return
                raise
            claimed = None
            if self._play_once(task, episode):
                return

    def _play_once(self, task: Task, episode: ClaimedEpisode) -> bool:
        """Whether the episode ended with a reward. Raises what is not the agent's failure."""
        try:
            with self._client.attending(episode, lease_s=self._lease_s):
                outcome = Outcome.of(self._run(task, episode))
                episode.end(outcome)
        except Exception as error:
            if isinstance(error, InfrastructureFault):
                raise
            if isinstance(error, Refused) and error.code not in _OWN_FAULTS:
                raise
            self._failures.append(f"{task.id}: {type(error).__name__}: {error}")
            return False
        self._rewards.append(outcome.reward)
        return True

    def _claim(self, task: Task) -> ClaimedEpisode:
        return self._client.claim(
            task.id,
            kind=self._kind,
            temperature=self._temperature,
            lease_s=self._lease_s,
            patience_s=self._patience_s,
        )


def _is_over(error: BaseException) -> bool:
    return isinstance(error, Refused) and error.code in _OVER

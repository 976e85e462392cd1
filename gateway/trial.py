"""The trial that a gateway serves: its settings, its pool and its running episodes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection

from a3r.episode import Ending, EpisodeKind, Fate
from a3r.swarm.wire import Claim, Configure
from gateway import history
from gateway.calls import Limits
from gateway.episodes import LiveEpisode
from gateway.ledger import EpisodeRow, Ledger, TrialRow
from gateway.pool import Accepted, Pool, Rules
from gateway.recorder import Recorder


class OpenTrial:
    """All that lives and dies with one trial. Changed by the gateway only, on its event loop."""

    def __init__(
        self, configure: Configure, *, policy: str, version: int, max_model_tokens: int, group_idle_s: float
    ) -> None:
        trainer = configure.config.trainer
        self.configure = configure
        self.id = configure.trial_id
        self.policy = policy
        self.num_updates = trainer.num_updates
        self.limits = Limits(
            policy=policy,
            seed=configure.config.seed,
            max_reply_tokens=trainer.max_reply_tokens,
            max_model_tokens=max_model_tokens,
        )
        rules = Rules(
            group_size=trainer.group_size,
            batch_tasks=trainer.batch_tasks,
            max_staleness=trainer.max_staleness,
            num_updates=trainer.num_updates,
        )
        self.pool = Pool(rules, version=version, idle_s=group_idle_s)
        self.episodes: dict[str, LiveEpisode] = {}
        self.claims: dict[str, str] = {}
        """Episode id by claim id, of all episodes of the trial."""
        self.num_accepted = 0
        self.training_done = False
        self.failure: str | None = None
        self._eval_claims: Counter[str] = Counter()

    def admit(self, claim: Claim, *, episode_id: str, version: int, now: float) -> tuple[EpisodeRow, tuple[str, ...]]:
        """The row of a new episode, and accepted episodes evicted to make room. Raises Refused without a place."""
        evicted: tuple[str, ...] = ()
        if claim.kind is EpisodeKind.TRAIN:
            place, evicted = self.pool.admit(claim.task_id, episode_id=episode_id, now=now)
            group_index, number = place.group_index, place.number
            temperature: float | None = self.configure.config.trainer.temperature
        else:
            group_index, number = 0, self._eval_claims[claim.task_id]
            self._eval_claims[claim.task_id] += 1
            temperature = claim.temperature
        row = EpisodeRow(
            id=episode_id,
            trial_id=self.id,
            task_id=claim.task_id,
            kind=claim.kind,
            policy=self.policy,
            client_id=claim.client_id,
            claim_id=claim.claim_id,
            lease_s=claim.lease_s,
            group_index=group_index,
            place=number,
            temperature=temperature,
            version=version,
            claimed_at=now,
        )
        return row, evicted

    def settle(self, episode: LiveEpisode, *, now: float) -> tuple[str, ...]:
        """Take up what became of an ended episode; returns the accepted episodes that no update will use."""
        closing = episode.closing
        is_accepted = closing is not None and closing.ending.is_accepted and episode.kind is EpisodeKind.TRAIN
        self.num_accepted += is_accepted
        if closing is None or closing.reward is None or not is_accepted or self.training_done:
            self.forget(episode, now=now)
            return (episode.id,) if is_accepted else ()
        del self.episodes[episode.id]
        accepted = episode.accepted(reward=closing.reward, components=closing.components)
        return self.pool.accept(accepted, key=episode.group, now=now)

    def forget(self, episode: LiveEpisode, *, now: float) -> None:
        """Give back an episode's place."""
        del self.episodes[episode.id]
        if episode.kind is EpisodeKind.TRAIN:
            self.pool.leave(episode.id, key=episode.group, now=now)


def canonical_config(configure: Configure) -> str:
    """The trial's settings as comparable text."""
    return json.dumps(configure.config.model_dump(mode="json"), sort_keys=True)


def new_row(trial: OpenTrial, *, now: float) -> TrialRow:
    """The ledger's row of a trial that begins."""
    return TrialRow(id=trial.id, config=canonical_config(trial.configure), policy=trial.policy, created_at=now)


async def restored(
    trial: OpenTrial,
    ledger: Ledger,
    *,
    consumed: Collection[str],
    recorder: Callable[[], Recorder],
    now: float,
) -> None:
    """Fill a trial from the ledger: fates as the checkpoint has them, what waits, and what is running.

    Running episodes that saw a policy newer than the checkpoint's are ended as STOPPED.
    """
    version = trial.pool.version
    changes = history.reconcile_fates(ledger.path, trial_id=trial.id, version=version, consumed=consumed)
    await ledger.mark_fates(changes, version=version)
    for task_id, index in history.read_group_indices(ledger.path, trial_id=trial.id).items():
        trial.pool.reserve((task_id, index))
    for waiting in history.read_waiting(ledger.path, trial_id=trial.id):
        versions = [turn.version for turn in waiting.episode.turns] or [waiting.version]
        accepted = Accepted(waiting.episode, oldest=min(versions), newest=max(versions))
        key = (waiting.episode.task_id, waiting.group_index)
        trial.pool.restore(key, place=waiting.place, now=now, accepted=accepted)
    trial.claims.update(history.read_ended_claims(ledger.path, trial_id=trial.id))
    trial.num_accepted = sum(history.read_counts(ledger.path, trial_id=trial.id).values())
    for running in history.read_open(ledger.path, trial_id=trial.id):
        episode = LiveEpisode(EpisodeRow(**running.row), recorder=recorder(), now=now)
        newest = max((stored.turn.version for stored in running.turns), default=episode.row.version)
        trial.claims[episode.row.claim_id] = episode.id
        if newest > version:
            await ledger.end_episode(
                episode.id, state=Ending.STOPPED, ended_at=now, reason="the server resumed from an older policy"
            )
            continue
        episode.restore(running.turns)
        trial.episodes[episode.id] = episode
        if episode.kind is EpisodeKind.TRAIN:
            trial.pool.restore(episode.group, place=episode.row.place, now=now, episode_id=episode.id)
    await ledger.mark_fates(dict.fromkeys(trial.pool.evict_stale(), Fate.EVICTED), version=version)

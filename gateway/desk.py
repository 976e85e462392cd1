"""The clients' side of the gateway: claims, leases, endings and calls of episodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from secrets import token_hex

from a3r.episode import Ending, EpisodeKind, Fate, Transcript
from a3r.errors import InfrastructureFault, NotFound, Refused
from a3r.swarm.wire import Abort, Claim, Claimed, End, Ended, EngineState, Lease
from gateway import history
from gateway.calls import Answer, Caller, Listener
from gateway.dialects.openai_chat import ChatRequest
from gateway.engine import Engine
from gateway.episodes import Closing, LiveEpisode, ended_already, has_failed
from gateway.keys import Claims, KeyRing, Role
from gateway.ledger import Ledger
from gateway.messages import MatchLevel
from gateway.recorder import Recorder
from gateway.stage import Stage
from gateway.template import ChatTemplate
from gateway.trial import OpenTrial

KEY_LIFETIME_S = 24 * 3600.0
SWEEP_S = 1.0
_WAITABLE = frozenset({"batch_full", "not_rolling"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """How a gateway behaves towards its clients."""

    policy: str
    """Name of the served policy."""
    max_model_tokens: int
    """Most tokens that prompt and reply may have together."""
    match_level: MatchLevel = MatchLevel.TOKEN
    claim_wait_s: float = 20.0
    """How long a claim waits for a place before it is told to come back."""
    group_idle_s: float = 30.0
    """How long an incomplete group keeps its place in the batch while nobody works on it."""
    clock: Callable[[], float] = time.time


class Desk:
    """Takes what clients ask for. Whatever it acknowledges is on disk."""

    def __init__(
        self,
        stage: Stage,
        *,
        engine: Engine,
        template: ChatTemplate,
        ledger: Ledger,
        keys: KeyRing,
        options: Options,
    ) -> None:
        self._stage = stage
        self._engine = engine
        self._template = template
        self._ledger = ledger
        self._keys = keys
        self._options = options
        self._policy = options.policy
        self._clock = options.clock
        self._caller = Caller(engine, template=template, ledger=ledger, clock=options.clock)

    def verified(self, token: str) -> Claims:
        """What a key says. Raises Refused (401) when it is not good."""
        return self._keys.verify(token, now=self._clock())

    async def claim(self, claim: Claim) -> Claimed:
        """An episode for a client; the same claim again gives the same episode.

        Waits for a place as long as it is worth it. Raises Refused: 503 `not_ready`, 409 `training_done`,
        `group_full`, `claim_conflict` or `claim_ended`, 429 `batch_full` or `not_rolling`.
        """
        deadline = time.monotonic() + self._options.claim_wait_s
        while True:
            trial = self._stage.serving_trial()
            known = trial.claims.get(claim.claim_id)
            if known is not None:
                return await self._claim_again(trial, claim, episode_id=known)
            try:
                self._require_place(trial, claim)
                return await self._open(trial, claim)
            except Refused as refusal:
                if refusal.code not in _WAITABLE or time.monotonic() >= deadline:
                    raise
            await self._stage.change(timeout_s=deadline - time.monotonic())

    async def heartbeat(self, claims: Claims, episode_id: str) -> Lease:
        """Keep an episode. Raises Refused (409, `episode_ended`) when it has ended."""
        episode = await self._live(claims, episode_id)
        episode.touch(self._clock())
        return Lease(lease_s=episode.row.lease_s)

    async def end(self, claims: Claims, episode_id: str, end: End) -> Ended:
        """Accept an episode with its reward. Repeating the same body is harmless.

        Raises Refused: 409 `already_ended` for another body, 409 `episode_ended` when it ended otherwise.
        """
        trial, episode = self._find(claims, episode_id)
        if trial is None or episode is None:
            state, reward, components = await self._ending(episode_id)
            return _same_end(episode_id, end, ending=state, reward=reward, components=components)
        if episode.closing is not None:
            known = episode.closing
            ended = _same_end(episode_id, end, ending=known.ending, reward=known.reward, components=known.components)
            await asyncio.shield(known.done)
            return ended
        return await self.close(trial, episode, ending=Ending.REWARDED, reward=end.reward, components=end.components)

    async def abort(self, claims: Claims, episode_id: str, abort: Abort) -> Ended:
        """Give an episode up. One that has ended already keeps its ending, which is returned.

        Raises Refused (400) for an ending that a client may not report.
        """
        if abort.ending not in (Ending.ABORTED, Ending.CLIENT_FAULT):
            raise Refused(
                f"An episode cannot be aborted as {abort.ending}",
                next_step=f"send {Ending.ABORTED} or {Ending.CLIENT_FAULT}",
                code="bad_ending",
            )
        trial, episode = self._find(claims, episode_id)
        if trial is None or episode is None:
            return Ended(ending=Ending((await self._ending(episode_id))[0]))
        if episode.closing is not None:
            return await asyncio.shield(episode.closing.done)
        return await self.close(trial, episode, ending=abort.ending, reason=abort.reason)

    async def transcript(self, claims: Claims, episode_id: str) -> Transcript:
        """What was said in an episode so far, ended or not."""
        _, episode = self._find(claims, episode_id)
        if episode is not None:
            return episode.transcript()
        try:
            return await asyncio.to_thread(history.read_transcript, self._ledger.path, episode_id)
        except NotFound as error:
            raise _no_episode(episode_id) from error

    async def chat(
        self, claims: Claims, request: ChatRequest, *, digest: bytes, retried: bool, listener: Listener | None = None
    ) -> Answer:
        """Answer a call. `digest` identifies the request's body: a retry joins the call it repeats.

        Raises Refused, EngineFault or InfrastructureFault.
        """
        trial = self._stage.serving_trial()
        if claims.role is not Role.EPISODE:
            claims.require(Role.CLIENT)
            return await self._caller.chat(request, limits=trial.limits, listener=listener)
        episode = await self._live(claims, claims.subject.partition("/")[0])
        episode.touch(self._clock())
        running = episode.calls.get(digest) if retried else None
        if running is None or has_failed(running):
            running = asyncio.create_task(self._episode_chat(trial, episode, request, listener=listener))
            episode.calls[digest] = running
        return await asyncio.shield(running)

    async def _episode_chat(
        self, trial: OpenTrial, episode: LiveEpisode, request: ChatRequest, *, listener: Listener | None
    ) -> Answer:
        episode.num_in_flight += 1
        try:
            return await self._caller.episode_chat(request, episode=episode, limits=trial.limits, listener=listener)
        except InfrastructureFault:
            # Its turn is not on disk, so what follows it could not be trusted either.
            if episode.closing is None:
                await self.close(trial, episode, ending=Ending.ENGINE_FAULT, reason="a turn was not written")
            raise
        finally:
            episode.num_in_flight -= 1
            episode.touch(self._clock())
            if episode.closing is not None and not episode.num_in_flight:
                await self._engine.release(episode.id)

    def _require_place(self, trial: OpenTrial, claim: Claim) -> None:
        """Refuse a training claim that no update will use, or not now."""
        if claim.kind is EpisodeKind.EVAL:
            return
        if trial.training_done or trial.failure is not None:
            raise Refused(
                f"Training of trial {trial.id!r} has ended",
                why=trial.failure or f"all {trial.num_updates} updates are done",
                status=409,
                code="training_done" if trial.failure is None else "training_failed",
            )
        if trial.pool.rules.max_staleness == 0 and self._stage.state is not EngineState.ROLLING:
            raise Refused(
                "No training episode starts while the policy is being updated",
                next_step="try again shortly",
                status=429,
                code="not_rolling",
            )

    async def _open(self, trial: OpenTrial, claim: Claim) -> Claimed:
        row, evicted = trial.admit(
            claim, episode_id=f"ep_{token_hex(8)}", version=self._engine.version, now=self._clock()
        )
        episode = LiveEpisode(row, recorder=self.recorder(), now=self._clock())
        trial.episodes[episode.id] = episode
        trial.claims[claim.claim_id] = episode.id
        added = self._ledger.add(row)
        await self.evict(evicted, version=self._engine.version)
        await added
        return self._claimed(episode, epoch=row.lease_epoch)

    async def _claim_again(self, trial: OpenTrial, claim: Claim, *, episode_id: str) -> Claimed:
        episode = trial.episodes.get(episode_id)
        if episode is None or episode.closing is not None:
            raise Refused(
                f"The episode of claim {claim.claim_id!r} has ended", next_step="claim under a new id",
                status=409, code="claim_ended",
            )  # fmt: skip
        if (claim.task_id, claim.kind) != (episode.row.task_id, episode.kind):
            raise Refused(
                f"The claim {claim.claim_id!r} was made for another task or kind", next_step="use a new claim id",
                status=409, code="claim_conflict",
            )  # fmt: skip
        episode.row.lease_epoch += 1
        episode.touch(self._clock())
        epoch = episode.row.lease_epoch
        await self._ledger.renew_claim(episode_id, lease_epoch=epoch)
        return self._claimed(episode, epoch=epoch)

    def _claimed(self, episode: LiveEpisode, *, epoch: int) -> Claimed:
        key = self._keys.sign(
            role=Role.EPISODE, subject=f"{episode.id}/{epoch}", expires_at=self._clock() + KEY_LIFETIME_S
        )
        return Claimed(
            episode_id=episode.id,
            api_key=key,
            policy=self._policy,
            version=episode.row.version,
            lease_s=episode.row.lease_s,
        )

    async def close(
        self,
        trial: OpenTrial,
        episode: LiveEpisode,
        *,
        ending: Ending,
        reward: float | None = None,
        components: dict[str, float] | None = None,
        reason: str = "",
    ) -> Ended:
        """Seal an episode, write its ending, then let the pool know. The place is held until it is on disk."""
        done: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        episode.closing = Closing(ending, reward, components or {}, done)
        try:
            await self._ledger.end_episode(
                episode.id,
                state=ending,
                ended_at=self._clock(),
                reason=reason,
                reward=reward,
                components=components,
            )
        except InfrastructureFault as fault:
            # The ledger keeps it open, so that a restarted server takes it up; this one forgets it.
            trial.forget(episode, now=self._clock())
            done.set_exception(fault)
            raise
        evicted = trial.settle(episode, now=self._clock())
        await self.evict(evicted, version=self._engine.version)
        done.set_result(Ended(ending=ending))
        self._stage.notify()
        if not episode.num_in_flight:
            await self._engine.release(episode.id)
        return await done

    async def evict(self, episodes: Collection[str], *, version: int) -> None:
        await self._ledger.mark_fates(dict.fromkeys(episodes, Fate.EVICTED), version=version)

    async def sweep(self, trial: OpenTrial) -> None:
        """End episodes of clients that are gone."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._clock()
            for episode in [one for one in trial.episodes.values() if one.is_expired(now)]:
                try:
                    await self.close(trial, episode, ending=Ending.EXPIRED, reason="no heartbeat within the lease")
                except InfrastructureFault as fault:
                    _log.error("%s", fault)

    def recorder(self) -> Recorder:
        return Recorder(self._template, level=self._options.match_level)

    def _find(self, claims: Claims, episode_id: str) -> tuple[OpenTrial | None, LiveEpisode | None]:
        """The episode that a key opens, if it is live. Raises Refused (403) when the key is another's."""
        claims.require(Role.EPISODE)
        subject, _, epoch = claims.subject.partition("/")
        if subject != episode_id:
            raise Refused(
                "The key belongs to another episode", next_step="use the key of this claim",
                status=403, code="wrong_episode",
            )  # fmt: skip
        episode = None if self._stage.trial is None else self._stage.trial.episodes.get(episode_id)
        if episode is not None and int(epoch) != episode.row.lease_epoch:
            raise Refused(
                "The key was replaced when its episode was claimed again", next_step="use the newer key",
                status=403, code="superseded",
            )  # fmt: skip
        return self._stage.trial, episode

    async def _live(self, claims: Claims, episode_id: str) -> LiveEpisode:
        _, episode = self._find(claims, episode_id)
        if episode is None:
            raise ended_already(episode_id, (await self._ending(episode_id))[0])
        episode.require_open()
        return episode

    async def _ending(self, episode_id: str) -> tuple[str, float | None, dict[str, float]]:
        try:
            return await asyncio.to_thread(history.read_ending, self._ledger.path, episode_id)
        except NotFound as error:
            raise _no_episode(episode_id) from error


def _same_end(episode_id: str, end: End, *, ending: str, reward: float | None, components: object) -> Ended:
    if ending != Ending.REWARDED:
        raise ended_already(episode_id, ending)
    if (reward, components) != (end.reward, end.components):
        raise Refused(
            f"The episode {episode_id} has ended with another reward",
            next_step="keep the first; an episode has one reward",
            status=409,
            code="already_ended",
        )
    return Ended(ending=Ending.REWARDED)


def _no_episode(episode_id: str) -> Refused:
    return Refused(f"There is no episode {episode_id!r}", status=404, code="no_episode")

"""Trials, batches and episodes: claims, drains, fates, restarts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from a3r.episode import Ending, EpisodeKind, Fate
from a3r.errors import IllegalTransition, Refused
from a3r.swarm.wire import Abort, Claim, End, EngineState
from gateway.dialects import openai_chat
from gateway.history import Order, read_counts, read_episode, read_episodes, read_transcript
from gateway.keys import Claims, Role

BODY = b'{"messages": [{"role": "user", "content": "Find the key."}]}'


@pytest.fixture
async def desk(workshop, make_trial):
    """Opens gateways in process; all are closed with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def begin(*, engine=None, consumed=(), trial_id="trial", options=None, **settings):
            ledger = stack.enter_context(workshop.ledger())
            gateway = workshop.gateway(engine or workshop.engine(), ledger, **(options or {}))
            await gateway.open_trial(make_trial(trial_id, **settings), consumed=consumed)
            stack.push_async_callback(gateway.close_trial)
            return gateway

        yield begin


class Player:
    """A client in process."""

    def __init__(self, gateway) -> None:
        self.gateway = gateway
        self.desk = gateway.desk
        self._count = 0

    async def claim(self, task: str = "a", *, claim_id: str | None = None, **fields) -> Claims:
        self._count += 1
        claim = Claim(client_id="c", claim_id=claim_id or f"claim-{self._count}", task_id=task, **fields)
        claimed = await self.desk.claim(claim)
        return self.desk.verified(claimed.api_key)

    async def call(self, claims: Claims):
        return await self.desk.chat(claims, openai_chat.parse(BODY), digest=BODY, retried=False)

    async def end(self, claims: Claims, reward: float = 1.0):
        return await self.desk.end(claims, episode_id(claims), End(reward=reward, components={"right": reward}))

    async def play(self, task: str, reward: float = 1.0) -> str:
        claims = await self.claim(task)
        await self.call(claims)
        await self.end(claims, reward)
        return episode_id(claims)


def episode_id(claims: Claims) -> str:
    return claims.subject.partition("/")[0]


async def fill(player: Player, *tasks: str) -> list[str]:
    return [await player.play(task, reward) for task in tasks for reward in (0.0, 1.0)]


async def test_a_batch_is_whole_groups_and_every_episode_meets_its_fate(desk):
    gateway = await desk()
    player = Player(gateway)
    played = await fill(player, "a", "b")
    groups = await gateway.next_batch()
    assert gateway.state is EngineState.WEIGHT_SYNCING
    assert [(group.task_id, len(group.episodes)) for group in groups] == [("a", 2), ("b", 2)]
    assert groups[0].episodes[0] == read_episode(gateway._ledger.path, played[0])

    await gateway.commit_update(1, consumed=played[:2], filtered=played[2:])
    assert (gateway.state, gateway.version) == (EngineState.ROLLING, 1)
    assert read_counts(gateway._ledger.path, trial_id="trial") == {"consumed": 2, "filtered": 2}


async def test_an_update_must_account_for_its_whole_batch(desk):
    gateway = await desk()
    played = await fill(Player(gateway), "a", "b")
    await gateway.next_batch()
    for consumed, filtered in ((played[:3], []), (played, played[:1]), ([*played, "other"], [])):
        with pytest.raises(ValueError, match="every episode"):
            await gateway.commit_update(1, consumed=consumed, filtered=filtered)


async def test_no_claim_beyond_what_the_batch_can_use(desk):
    player = Player(await desk())
    claims = [await player.claim(task) for task in ("a", "a", "b", "b")]
    with pytest.raises(Refused) as full:
        await player.claim("a")
    assert (full.value.status, full.value.code) == (409, "group_full")
    with pytest.raises(Refused) as batch:
        await player.claim("c")
    assert (batch.value.status, batch.value.code) == (429, "batch_full")

    await player.desk.abort(claims[3], episode_id(claims[3]), Abort(reason="changed its mind"))
    await player.claim("b")


async def test_fewer_tasks_than_a_batch_has_still_fill_it(desk):
    gateway = await desk(batch_tasks=3)
    await fill(Player(gateway), "a", "b", "a")
    assert [group.task_id for group in await gateway.next_batch()] == ["a", "b", "a"]


async def test_an_idle_incomplete_group_makes_way(desk):
    player = Player(await desk())
    lonely = await player.play("a")
    await player.claim("b")
    await asyncio.sleep(0.15)
    await player.claim("c")
    (summary,) = [e for e in read_episodes(player.gateway._ledger.path) if e.id == lonely]
    assert summary.fate is Fate.EVICTED


async def test_the_same_claim_gives_the_same_episode_and_fences_the_older_key(desk):
    player = Player(await desk())
    first = await player.claim("a", claim_id="x")
    second = await player.claim("a", claim_id="x")
    assert episode_id(first) == episode_id(second)
    with pytest.raises(Refused) as superseded:
        await player.call(first)
    assert superseded.value.code == "superseded"
    with pytest.raises(Refused) as conflict:
        await player.claim("b", claim_id="x")
    assert conflict.value.code == "claim_conflict"
    await player.end(second)
    with pytest.raises(Refused) as ended:
        await player.claim("a", claim_id="x")
    assert ended.value.code == "claim_ended"


async def test_ending_twice_is_harmless_and_differently_is_refused(desk):
    player = Player(await desk())
    claims = await player.claim()
    both = await asyncio.gather(player.end(claims), player.end(claims))
    assert [ended.ending for ended in both] == [Ending.REWARDED] * 2
    assert (await player.end(claims)).ending is Ending.REWARDED
    with pytest.raises(Refused) as other:
        await player.end(claims, 0.5)
    assert (other.value.status, other.value.code) == (409, "already_ended")
    assert (await player.desk.abort(claims, episode_id(claims), Abort())).ending is Ending.REWARDED


async def test_a_key_opens_its_own_episode_only(desk):
    player = Player(await desk())
    one, other = await player.claim(), await player.claim()
    with pytest.raises(Refused) as refused:
        await player.desk.end(one, episode_id(other), End(reward=1.0))
    assert (refused.value.status, refused.value.code) == (403, "wrong_episode")


async def test_a_silent_client_loses_its_episode_and_the_place_is_free_again(desk):
    player = Player(await desk(batch_tasks=1))
    silent, _ = await player.claim(lease_s=0.05), await player.claim()
    await asyncio.sleep(1.2)
    with pytest.raises(Refused) as late:
        await player.call(silent)
    assert late.value.code == "episode_ended"
    await player.claim()


async def test_without_staleness_a_ready_batch_waits_for_running_training_episodes_only(desk):
    gateway = await desk(batch_tasks=1, max_staleness=0)
    player = Player(gateway)
    evaluation = await player.claim("hidden", kind=EpisodeKind.EVAL)
    await fill(player, "a")
    await asyncio.wait_for(gateway.next_batch(), 2)
    call = asyncio.create_task(player.call(evaluation))
    with pytest.raises(Refused) as refused:
        await player.claim("b")
    assert (refused.value.status, refused.value.code) == (429, "not_rolling")
    assert not call.done()
    waiting = asyncio.create_task(player.claim("b"))
    await gateway.commit_update(1, consumed=gateway._stage.trial.pool.in_update)
    await waiting
    assert (await call).choices[0].reply["content"] == "hello world"


async def test_with_staleness_claims_go_on_and_old_groups_are_evicted_whole(desk):
    gateway = await desk(batch_tasks=1, max_staleness=1, num_updates=9)
    player = Player(gateway)
    await player.play("old")
    old = await player.claim("old")
    for version in (1, 2):
        await fill(player, f"new-{version}")
        await gateway.next_batch()
        await gateway.commit_update(version, consumed=gateway._stage.trial.pool.in_update)
    assert read_counts(gateway._ledger.path, trial_id="trial") == {"consumed": 4, "evicted": 1}
    await player.end(old)
    assert read_counts(gateway._ledger.path, trial_id="trial") == {"consumed": 4, "evicted": 2}


async def test_after_the_last_update_training_is_done_and_evaluation_goes_on(desk):
    gateway = await desk(batch_tasks=1, num_updates=1)
    player = Player(gateway)
    await fill(player, "a")
    await gateway.next_batch()
    await gateway.commit_update(1, consumed=gateway._stage.trial.pool.in_update)
    with pytest.raises(Refused) as done:
        await player.claim("b")
    assert done.value.code == "training_done"
    await player.call(await player.claim("hidden", kind=EpisodeKind.EVAL))
    assert gateway.status().training_done


async def test_a_failed_update_is_abandoned_and_shown(desk):
    gateway = await desk(batch_tasks=1)
    player = Player(gateway)
    await fill(player, "a")
    await gateway.next_batch()
    gateway.fail_training("the loss became nan")
    await gateway.abandon_update()
    assert gateway.status().failure == "the loss became nan"
    with pytest.raises(Refused) as failed:
        await player.claim("b")
    assert failed.value.code == "training_failed"
    assert read_counts(gateway._ledger.path, trial_id="trial") == {"evicted": 2}


async def test_closing_a_trial_leaves_nothing_without_ending_or_fate(desk):
    gateway = await desk()
    player = Player(gateway)
    await player.play("a")
    running = await player.claim("b")
    late = asyncio.create_task(player.end(running))
    await asyncio.sleep(0)
    await gateway.close_trial()
    await late
    assert gateway.state is EngineState.OFFLINE
    states = {e.state for e in read_episodes(gateway._ledger.path)}
    assert states == {"rewarded"}
    assert read_counts(gateway._ledger.path, trial_id="trial") == {"evicted": 2}
    with pytest.raises(Refused) as refused:
        await player.claim("c")
    assert (refused.value.status, refused.value.code) == (503, "not_ready")


async def test_closing_a_trial_ends_the_wait_for_a_batch(desk):
    gateway = await desk()
    waiting = asyncio.create_task(gateway.next_batch())
    await asyncio.sleep(0.01)
    await gateway.close_trial()
    with pytest.raises(IllegalTransition):
        await waiting


async def test_exporting_holds_calls(desk):
    gateway = await desk()
    player = Player(gateway)
    claims = await player.claim()
    async with gateway.exporting():
        assert gateway.state is EngineState.WEIGHT_EXPORTING
        call = asyncio.create_task(player.call(claims))
        await asyncio.sleep(0.02)
        assert not call.done()
    await call
    assert gateway.state is EngineState.ROLLING


async def test_a_restarted_server_takes_up_accepted_and_running_episodes(desk, workshop):
    before = await desk()
    player = Player(before)
    await player.play("a", 0.0)
    running = await player.claim("a", claim_id="mine")
    await player.call(running)
    # The first server is simply gone: nothing of it is closed before the second one opens the ledger.
    after = await desk()
    assert after.status().accepted == 1
    again = Player(after)
    same = await again.claim("a", claim_id="mine")
    assert episode_id(same) == episode_id(running)
    history = (
        b'{"messages": [{"role": "user", "content": "Find the key."},'
        b'{"role": "assistant", "content": "hello world"}, {"role": "user", "content": "go on"}]}'
    )
    await again.desk.chat(same, openai_chat.parse(history), digest=history, retried=False)
    await again.end(same)
    await fill(again, "b")
    groups = await asyncio.wait_for(after.next_batch(), 2)
    resumed = groups[0].episodes[1]
    first, second = resumed.turns
    assert second.prompt_ids[: len(first.prompt_ids + first.sampled_ids)] == first.prompt_ids + first.sampled_ids
    assert second.fork_reason is None
    said = read_transcript(after._ledger.path, resumed.id)
    assert [len(turn.messages) for turn in said.turns] == [1, 3]


async def test_the_checkpoint_rules_over_the_ledgers_marks(desk, workshop):
    before = await desk(batch_tasks=1, num_updates=3)
    player = Player(before)
    first = await fill(player, "a")
    await before.next_batch()
    await before.commit_update(1, consumed=first)
    second = await fill(player, "b")
    await before.next_batch()
    await before.commit_update(2, consumed=second[:1], filtered=second[1:])

    after = await desk(engine=workshop.engine(version=1), batch_tasks=1, num_updates=3, consumed=first)
    (group,) = await asyncio.wait_for(after.next_batch(), 2)
    assert [episode.id for episode in group.episodes] == second
    await after.commit_update(2, consumed=second)
    assert read_counts(after._ledger.path, trial_id="trial") == {"consumed": 4}


async def test_episodes_of_policies_that_were_lost_wait_until_they_are_reached_again(desk, workshop):
    before = await desk(batch_tasks=1, num_updates=3)
    player = Player(before)
    first = await fill(player, "a")
    await before.next_batch()
    await before.commit_update(1, consumed=first)
    second = await fill(player, "a")
    await before.next_batch()

    after = await desk(batch_tasks=1, num_updates=3)
    for version, expected in ((1, first), (2, second)):
        (group,) = await asyncio.wait_for(after.next_batch(), 2)
        assert [episode.id for episode in group.episodes] == expected
        await after.commit_update(version, consumed=expected)


async def test_another_configuration_under_the_same_name_is_refused(desk):
    await desk(batch_tasks=1)
    with pytest.raises(Refused) as refused:
        await desk(batch_tasks=2)
    assert refused.value.code == "trial_exists"


async def test_listings_show_the_best_and_the_worst(desk):
    gateway = await desk()
    await fill(Player(gateway), "a", "b")
    path = gateway._ledger.path
    assert [e.reward for e in read_episodes(path, order=Order.BEST, limit=2)] == [1.0, 1.0]
    assert [e.reward for e in read_episodes(path, order=Order.WORST, limit=1)] == [0.0]
    assert read_episodes(path, trial_id="other") == []
    assert read_episodes(path, limit=1)[0].components == {"right": 1.0}


async def test_the_control_plane_needs_its_roles(start, make_trial, make_key):
    import httpx

    swarm = await start(make_trial())
    async with httpx.AsyncClient(base_url=swarm.url) as client:
        for role, path, status in (
            (Role.CLIENT, "/swarm/start", 403),
            (Role.EPISODE, "/swarm/claim", 403),
            (Role.ADMIN, "/swarm/start", 200),
        ):
            headers = {"authorization": f"Bearer {make_key(role)}"}
            body = {"client_id": "c", "claim_id": "1", "task_id": "t"}
            reply = await client.post(path, json=body, headers=headers)
            assert reply.status_code == status
        assert (await client.get("/swarm/status")).json()["error"]["code"] == "bad_key"
        expired = {"authorization": f"Bearer {make_key(Role.CLIENT, expires_at=1.0)}"}
        assert (await client.get("/swarm/status", headers=expired)).json()["error"]["code"] == "key_expired"
        bad = await client.post(
            "/swarm/claim", json={"task": 1}, headers={"authorization": f"Bearer {make_key(Role.CLIENT)}"}
        )
        assert (bad.status_code, bad.json()["error"]["type"]) == (422, "refused")

"""The client SDK against a real server, and a server that is killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from a3r.episode import Ending, EpisodeKind, Observation, Task
from a3r.errors import InfrastructureFault, Refused, UsageError
from a3r.swarm import Outcome, SwarmClient
from a3r.swarm.http import Address
from gateway.history import read_counts, read_episodes, read_turns
from gateway.keys import Role

USER = {"role": "user", "content": "Find the key."}
REPOSITORY = Path(__file__).parents[3]


async def test_an_episode_from_claim_to_reward(start, make_trial):
    swarm = await start(make_trial())

    def play() -> str:
        with swarm.client().episode("task-7") as episode:
            assert episode.chat([USER]) == "hello world"
            transcript = episode.transcript()
            assert transcript.replies == ("hello world",)
            assert transcript.turns[0].messages == (USER,)
            episode.end(Outcome(0.5, {"right": 0.5}))
            return episode.id

    episode_id = await asyncio.to_thread(play)
    (summary,) = read_episodes(swarm.ledger.path)
    assert (summary.id, summary.reward, summary.components) == (episode_id, 0.5, {"right": 0.5})


async def test_calls_of_one_episode_may_overlap(start, make_trial, workshop):
    swarm = await start(make_trial(), engine=workshop.engine(delay_s=0.02))
    episode = await asyncio.to_thread(swarm.client().claim, "task")
    began = time.monotonic()
    replies = await asyncio.gather(*(episode.achat([USER]) for _ in range(20)))
    assert set(replies) == {"hello world"}
    assert time.monotonic() - began < 20 * 3 * 0.02
    assert len(read_turns(swarm.ledger.path, episode.id)) == 20


async def test_an_exception_aborts_the_episode_as_a_client_fault(start, make_trial):
    swarm = await start(make_trial())

    def play() -> None:
        with swarm.client().episode("task"):
            raise ZeroDivisionError("oops")

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(play)
    (summary,) = read_episodes(swarm.ledger.path)
    assert (summary.state, summary.reason) == (Ending.CLIENT_FAULT, "ZeroDivisionError: oops")


async def test_leaving_without_a_reward_is_an_error(start, make_trial):
    swarm = await start(make_trial())

    def play() -> None:
        with swarm.client().episode("task"):
            pass

    with pytest.raises(UsageError, match="without a reward"):
        await asyncio.to_thread(play)
    assert read_episodes(swarm.ledger.path)[0].state == Ending.CLIENT_FAULT


async def test_heartbeats_keep_a_quiet_episode(start, make_trial):
    swarm = await start(make_trial())

    def play() -> None:
        with swarm.client().episode("task", lease_s=0.6) as episode:
            time.sleep(2.2)
            episode.end(1.0)

    await asyncio.to_thread(play)
    assert read_episodes(swarm.ledger.path)[0].reward == 1.0


async def test_steps_go_to_the_environment_that_was_attached(start, make_trial):
    class Echo:
        def step(self, action: str) -> Observation:
            return Observation(text=f"you said {action}", done=True)

    swarm = await start(make_trial())
    with_world = await asyncio.to_thread(lambda: swarm.client().claim("task", environment=Echo()))
    assert with_world.step("look") == Observation("you said look", done=True)
    without = await asyncio.to_thread(swarm.client().claim, "task")
    with pytest.raises(UsageError, match="no environment"):
        without.step("look")


async def test_refusals_carry_status_and_code(start, make_trial):
    swarm = await start(make_trial())
    episode = await asyncio.to_thread(swarm.client().claim, "task")
    with pytest.raises(Refused) as refused:
        await asyncio.to_thread(episode.complete, [USER], suffix="x")
    assert (refused.value.status, refused.value.code) == (400, "suffix")


async def learn(gateway, *, num_updates: int) -> None:
    for version in range(1, num_updates + 1):
        groups = await gateway.next_batch()
        ids = [episode.id for group in groups for episode in group.episodes]
        await asyncio.sleep(0.05)
        await gateway.commit_update(version, consumed=ids)


async def test_a_rollout_plays_whole_groups_until_training_is_done(start, make_trial):
    swarm = await start(make_trial(num_updates=3, batch_tasks=2, group_size=4), claim_wait_s=1.0, group_idle_s=30.0)
    crashes = itertools.count()

    def run(task: Task, episode) -> float:
        episode.chat([USER])
        if next(crashes) == 5:
            raise ValueError("a bug in the agent")
        return float(task.id == "t1")

    tasks = itertools.cycle([Task(id=f"t{i}", public={}) for i in range(3)])
    learner = asyncio.create_task(learn(swarm.gateway, num_updates=3))
    tally = await asyncio.to_thread(lambda: swarm.client().rollout(tasks, run, concurrency=8))
    await learner
    assert tally.training_done
    assert len(tally.rewards) == 24
    assert [failure.partition(":")[2] for failure in tally.failures] == [" ValueError: a bug in the agent"]
    assert read_counts(swarm.ledger.path, trial_id="trial") == {"consumed": 24}


async def test_an_evaluation_plays_each_task_once(start, make_trial):
    swarm = await start(make_trial())
    tasks = [Task(id=f"t{i}", public={}) for i in range(10)]
    tally = await asyncio.to_thread(
        lambda: swarm.client().rollout(
            tasks, lambda _task, episode: len(episode.chat([USER])), kind=EpisodeKind.EVAL, concurrency=4
        )
    )
    assert tally.rewards == (11.0,) * 10
    assert not tally.training_done


async def test_a_server_that_is_not_there_is_an_infrastructure_fault():
    client = SwarmClient("http://127.0.0.1:9", "key")
    with pytest.raises(InfrastructureFault, match=r"127\.0\.0\.1:9 cannot be reached"):
        await asyncio.to_thread(client.status)
    with pytest.raises(UsageError):
        Address("127.0.0.1:9")


class Nursery:
    """A process that is loaded once and begins servers at a word."""

    def __init__(self, folder: Path, port: int) -> None:
        script = Path(__file__).with_name("scripted_server.py")
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(folder), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )

    def begin(self) -> int:
        """Process id of a new server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_kill_9_under_load_loses_no_acknowledged_turn_and_clients_go_on(tmp_path, free_port, make_key):
    """Eight clients chat; the server is killed and started again; every acknowledged turn is in the ledger."""
    acknowledged: list[tuple[str, int]] = []
    faults: list[BaseException] = []
    stop = threading.Event()
    client = SwarmClient(f"http://127.0.0.1:{free_port}", make_key(Role.CLIENT))

    def chat_on(name: str) -> None:
        episode = client.claim(name, claim_id=name, kind=EpisodeKind.EVAL, patience_s=60)
        messages = [USER]
        while not stop.is_set():
            reply = episode.chat(messages)
            acknowledged.append((episode.id, len(messages) // 2))
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
            if len(messages) > 9:
                messages = [USER]

    def guarded(name: str) -> None:
        try:
            chat_on(name)
        except (Refused, InfrastructureFault) as error:
            faults.append(error)

    nursery = Nursery(tmp_path, free_port)
    server = nursery.begin()
    threads = [threading.Thread(target=guarded, args=(f"task-{i}",)) for i in range(8)]
    try:
        for thread in threads:
            thread.start()
        wait_for(lambda: len(acknowledged) > 100)
        os.kill(server, signal.SIGKILL)
        seen = list(acknowledged)
        counts = {episode: len(read_turns(tmp_path / "ledger.db", episode)) for episode, _ in seen}
        for episode, stored in counts.items():
            assert stored >= sum(1 for one, _ in seen if one == episode)

        nursery.begin()
        wait_for(lambda: len(acknowledged) > len(seen) + 50)
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)
        nursery.close()
    assert not faults
    played = {episode for episode, _ in acknowledged}
    turns = [turn for episode in played for turn in read_turns(tmp_path / "ledger.db", episode)]
    assert len(turns) >= len(acknowledged)
    assert len(read_episodes(tmp_path / "ledger.db")) == 8


def wait_for(holds, *, timeout_s: float = 45.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)

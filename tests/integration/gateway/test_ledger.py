"""The books: what is acknowledged is on disk, and a disk that refuses costs one episode."""

from __future__ import annotations

import asyncio
import sqlite3

import httpx
import pytest

from a3r.episode import EpisodeKind
from a3r.errors import EnvironmentNotReady, InfrastructureFault, NotFound
from gateway.history import read_episode, read_episodes, read_transcript, read_turns
from gateway.ledger import Ledger, TrialRow


def trial_row(name: str) -> TrialRow:
    return TrialRow(id=name, config="{}", policy="small", created_at=0.0)


async def test_a_thousand_concurrent_writes_are_few_commits_and_all_there(workshop):
    with workshop.ledger() as ledger:
        await asyncio.gather(*(ledger.add(trial_row(f"t{i}")) for i in range(1000)))
        with sqlite3.connect(ledger.path) as reader:
            assert reader.execute("SELECT count(*) FROM trial").fetchone() == (1000,)
            assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)


async def test_a_refused_write_fails_its_waiters_and_the_next_goes_through(workshop):
    with workshop.ledger() as ledger:
        await ledger.add(trial_row("t"))
        with pytest.raises(InfrastructureFault, match="did not take a record"):
            await ledger.add(trial_row("t"))
        await ledger.add(trial_row("other"))


async def test_a_closed_ledger_says_so(workshop):
    ledger = workshop.ledger()
    ledger.close()
    ledger.close()
    with pytest.raises(InfrastructureFault, match="closed"):
        await ledger.add(trial_row("t"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentNotReady, match="file/ledger"):
        Ledger(tmp_path / "file" / "ledger.db")


def test_reading_what_is_not_there_is_not_found(tmp_path, workshop):
    with pytest.raises(NotFound, match="no ledger"):
        read_episodes(tmp_path / "none.db")
    workshop.ledger().close()
    with pytest.raises(NotFound, match="no episode 'x'"):
        read_turns(workshop.folder / "ledger.db", "x")


async def test_a_turn_that_cannot_be_written_is_not_answered_and_costs_its_episode(start, make_trial):
    swarm = await start(make_trial())
    episode = await asyncio.to_thread(swarm.client().claim, "task")
    with sqlite3.connect(swarm.ledger.path) as saboteur:
        saboteur.execute("CREATE TRIGGER full BEFORE INSERT ON turn BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    async with httpx.AsyncClient(base_url=swarm.url) as client:
        headers = {"authorization": f"Bearer {episode.api_key}"}
        body = {"messages": [{"role": "user", "content": "x"}]}
        reply = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 500
        assert "disk full" in reply.json()["error"]["message"]
    assert [(e.state, e.num_turns) for e in read_episodes(swarm.ledger.path)] == [("engine_fault", 0)]
    assert swarm.gateway.status().open_episodes == 0


async def test_a_stored_conversation_reads_back_whole_with_prefills_and_branches(start, make_trial):
    swarm = await start(make_trial())
    episode = await asyncio.to_thread(swarm.client().claim, "task", kind=EpisodeKind.EVAL)
    user = {"role": "user", "content": "Find the key."}
    unfinished = {"role": "assistant", "content": "Well: "}
    history = [user, {"role": "assistant", "content": "Well: hello world"}, {"role": "user", "content": "go on"}]
    prefill = {"continue_final_message": True, "add_generation_prompt": False}
    for messages, parameters in (([user, unfinished], prefill), (history, {}), (history, {}), ([user], {})):
        await asyncio.to_thread(lambda: episode.complete(messages, **parameters))  # noqa: B023
    live = await asyncio.to_thread(episode.transcript)
    await asyncio.to_thread(episode.end, 1.0)
    stored = read_transcript(swarm.ledger.path, episode.id)
    assert [len(turn.messages) for turn in stored.turns] == [2, 3, 3, 1]
    assert stored == live
    assert await asyncio.to_thread(episode.transcript) == stored
    first, second, third, _ = read_episode(swarm.ledger.path, episode.id).turns
    assert second.prompt_ids == third.prompt_ids
    assert second.prompt_ids[: len(first.prompt_ids + first.sampled_ids)] == first.prompt_ids + first.sampled_ids
    assert second.fork_reason is None

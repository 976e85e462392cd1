"""A real swarm server in its own process, with the shipped policy, judged by a real judge in real sandboxes."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from a3r.config import TrialConfig
from a3r.errors import PlanRejected, Refused
from a3r.swarm import SwarmClient
from flows.judge import Assignment, run_trial, tasks_sha256
from flows.processes import ProcessIdentity, end_group
from flows.swarm_pool import SwarmPool
from vibe.recipes.library import load_exam, program_source

ROOT = Path(__file__).parents[3]
RECIPE, PARAMETERS, HIDDEN_SEED = "signalling", {"objects": 8, "words": 8}, 11
TINY = {
    "trainer.num_updates": 2,
    "trainer.batch_tasks": 2,
    "trainer.group_size": 4,
    "judge.eval_tasks": 8,
    "judge.concurrency": 8,
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = SwarmPool(tmp_path_factory.mktemp("swarm"))
    yield pool
    pool.close()


def assignment(server, folder, *, trial_id, config, sha256=None):
    program = folder / "program"
    program.mkdir(parents=True, exist_ok=True)
    (program / "program.py").write_text(program_source(RECIPE, PARAMETERS))
    hidden = load_exam(RECIPE, PARAMETERS).tasks("hidden", HIDDEN_SEED)
    return Assignment(
        trial_id=trial_id,
        config=config,
        program_folder=str(program),
        recipe=RECIPE,
        parameters=PARAMETERS,
        hidden_seed=HIDDEN_SEED,
        hidden_sha256=sha256 or tasks_sha256(hidden),
        swarm_url=server.url,
        swarm_socket=server.socket,
        client_key=server.client_key,
        folder=str(folder),
        code_is_shipped=True,
    )


def trial(pool, folder, *, trial_id, config):
    """Train and measure; the metric events of server and judge."""

    async def go():
        server = await pool.server("small")
        async with server.trial(trial_id, config=config, folder=folder):
            await run_trial(assignment(server, folder, trial_id=trial_id, config=config))

    asyncio.run(go())
    lines = (folder / "swarm.jsonl").read_text() + (folder / "judge.jsonl").read_text()
    return [json.loads(line) for line in lines.splitlines()]


def figures(events):
    """What must repeat: rewards, losses, lengths and scores, but not clocks."""
    timed = ("seconds", "_s", "tokens_per_s", "wall")
    return [
        (event["step"], {k: v for k, v in event["values"].items() if not k.endswith(timed)})
        for event in events
        if event["kind"] == "metrics"
    ]


def test_a_serial_trial_repeats_bit_for_bit(pool, tmp_path):
    config = TrialConfig().updated(TINY | {"judge.serial": True, "seed": 3})
    first = figures(trial(pool, tmp_path / "a", trial_id="serial-a", config=config))
    second = figures(trial(pool, tmp_path / "b", trial_id="serial-b", config=config))
    assert len(first) == 4
    assert first == second


def test_engine_and_learner_agree_on_what_was_sampled(pool, tmp_path):
    config = TrialConfig().updated(TINY | {"trainer.temperature": 0.8})
    events = trial(pool, tmp_path, trial_id="agreement", config=config)
    mismatch = [
        event["values"]["train/mismatch_max"] for event in events if "train/mismatch_max" in event.get("values", {})
    ]
    assert mismatch
    assert max(mismatch) <= 1e-5


def test_hidden_tasks_that_are_not_those_of_the_plan_are_refused(pool, tmp_path):
    async def go():
        server = await pool.server("small")
        config = TrialConfig().updated(TINY)
        async with server.trial("other-tasks", config=config, folder=tmp_path):
            await run_trial(assignment(server, tmp_path, trial_id="other-tasks", config=config, sha256="0" * 64))

    with pytest.raises(PlanRejected, match="hidden tasks"):
        asyncio.run(go())


def test_an_episode_key_and_a_client_key_cannot_control_the_server(pool, tmp_path):
    async def go():
        server = await pool.server("small")
        from a3r.swarm.admin import SwarmAdmin

        for key in (server.client_key, "nonsense"):
            with pytest.raises(Refused) as refused:
                SwarmAdmin(server.url, key).stop()
            assert refused.value.status in (401, 403)
        config = TrialConfig().updated(TINY)
        async with server.trial("keys", config=config, folder=tmp_path):
            client = SwarmClient(server.url, server.client_key)
            one, other = client.claim("task-1"), client.claim("task-2")
            with pytest.raises(Refused) as refused:
                SwarmAdmin(server.url, one.api_key).stop()
            assert refused.value.status == 403
            one.id = other.id
            with pytest.raises(Refused) as refused:
                one.end(1.0)
            assert refused.value.status == 403

    asyncio.run(go())


def test_the_readme_agent_trains_on_a_standalone_server(tmp_path):
    code = re.search(r"```python\n(from a3r.swarm.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "ui.cli.main", "swarm", "serve", "--port", "0", "--folder", str(tmp_path)),
            *("--set", "trainer.num_updates=2", "--set", "trainer.batch_tasks=2", "--set", "trainer.group_size=4"),
        ],
        cwd=ROOT,
        env=os.environ | {"A3R_HOME": str(tmp_path / "lab"), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert server.stderr is not None
        said = ""
        while "Ctrl-C" not in said:
            line = server.stderr.readline()
            assert line, said
            said += line
        variables = dict(re.findall(r"export (A3R_SWARM_\w+)=(\S+)", said))
        done = subprocess.run(
            [sys.executable, "-c", code[1]],
            cwd=ROOT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        status = SwarmClient(variables["A3R_SWARM_URL"], variables["A3R_SWARM_KEY"]).status()
        assert (status.version, status.training_done) == (2, True)
    finally:
        end_group(ProcessIdentity.of(server.pid))
        server.wait()
        server.stderr.close() if server.stderr else None

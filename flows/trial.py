"""One Trial: a supervised judge against a warm swarm server, its events written into the record.

The trial's row is opened before anything happens and closed after; a finished trial is never repeated.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from a3r.campaign import TrialState
from a3r.errors import BudgetExhausted, InfrastructureFault
from a3r.store.records import TrialRecord
from flows.desk import Cancelled, Desk, owner_of
from flows.judge import Assignment
from flows.processes import ProcessIdentity, end_group, spawn, tail
from flows.recording import Recorder

_FOLLOW_EVERY_S = 0.5
_STOP_EVERY_S = 2.0


def _is_infrastructure(_task: Any, _run: Any, state: Any) -> bool:
    return isinstance(state.data, InfrastructureFault)


@task(
    name="trial",
    task_run_name="{trial_id}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=2,
    retry_condition_fn=_is_infrastructure,
)
async def trial(campaign_id: str, trial_id: str) -> None:
    """Train and measure one Setting with one seed. Prefect tries again only when our own machinery failed."""
    with Desk.open(campaign_id) as desk:
        await run_trial(desk, trial_id)


async def run_trial(desk: Desk, trial_id: str) -> None:
    """Run a trial to its end and record it. Does nothing for one that is over.

    Raises Cancelled or BudgetExhausted when the campaign must end, InfrastructureFault when our machinery failed;
    the trial is then open for another attempt, or cancelled.
    """
    planned = desk.store.trial(trial_id)
    if planned.state.is_over:
        return
    desk.check_stop()
    server = await desk.pool.server(planned.config.model)
    if planned.state is TrialState.RUNNING:
        planned = desk.store.replan_trial(trial_id, reason="an earlier attempt was interrupted")
    running = desk.store.start_trial(trial_id, owner=owner_of(ProcessIdentity.current()))
    assignment = desk.assignment(running, server=server)
    folder = Path(assignment.folder)
    recorder = Recorder.open(desk.store, running, campaign=desk.campaign, folder=folder)
    try:
        async with server.trial(assignment.trial_id, config=assignment.config, folder=folder):
            judge = start_judge(assignment)
            try:
                await _follow(judge, recorder=recorder, desk=desk)
            finally:
                _end(judge)
        await recorder.catch_up()
    except (Cancelled, BudgetExhausted) as stop:
        await _close(desk, running, recorder, state=TrialState.CANCELLED, reason=str(stop))
        raise
    except InfrastructureFault as fault:
        recorder.close(TrialState.FAILED)
        desk.store.replan_trial(trial_id, reason=str(fault))
        raise
    if judge.returncode == 0:
        await _close(desk, running, recorder, state=TrialState.FINISHED, reason="")
    else:
        why = recorder.failure or tail(folder / "judge.err", num_lines=1) or f"the judge ended with {judge.returncode}"
        await _close(desk, running, recorder, state=TrialState.FAILED, reason=why)


def start_judge(assignment: Assignment) -> subprocess.Popen[bytes]:
    """Start the judge of a trial as a supervised process. Call it on the main thread, which it dies with."""
    folder = Path(assignment.folder)
    folder.mkdir(parents=True, exist_ok=True)
    description = folder / "assignment.json"
    description.touch(mode=0o600)
    description.write_text(assignment.model_dump_json())
    return spawn([sys.executable, "-m", "flows.judge", str(description)], folder=folder, name="judge")


async def _follow(judge: subprocess.Popen[bytes], *, recorder: Recorder, desk: Desk) -> None:
    """Write what the judge and the server say into the record until the judge ends."""
    since_check = 0.0
    while judge.poll() is None:
        await recorder.catch_up()
        await asyncio.sleep(_FOLLOW_EVERY_S)
        since_check += _FOLLOW_EVERY_S
        if since_check >= _STOP_EVERY_S:
            since_check = 0.0
            desk.check_stop()


def _end(judge: subprocess.Popen[bytes]) -> None:
    if judge.poll() is None:
        end_group(ProcessIdentity.of(judge.pid))
        judge.wait()


async def _close(desk: Desk, row: TrialRecord, recorder: Recorder, *, state: TrialState, reason: str) -> None:
    await recorder.catch_up()
    desk.store.close_trial(row.id, state, reason=reason)
    recorder.close(state)

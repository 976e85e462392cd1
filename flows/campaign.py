"""A Campaign as a Prefect flow: the program once, then each hypothesis, then the report.

Only ids travel. Every step finds what it did before, so the flow may be killed and run again at any point.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from prefect import flow
from prefect.runtime import flow_run

from a3r.campaign import CampaignState
from a3r.errors import A3RError, BudgetExhausted
from a3r.store.records import ProgramRecord
from flows.curves import campaign_links
from flows.desk import Cancelled, Desk, owner_of
from flows.experiment import experiment
from flows.experiment import judge as judge_experiment
from flows.judge import tasks_sha256
from flows.llm_settings import forget_llm_settings
from flows.processes import ProcessIdentity
from flows.programming import write_checked_program
from flows.report import write_report
from vibe.recipes.library import load_exam


@flow(name="campaign", flow_run_name="campaign {campaign_id}", validate_parameters=False)
async def campaign(campaign_id: str) -> None:
    """Write the program, test each hypothesis, report."""
    with Desk.open(campaign_id) as desk, _alone(desk) as is_alone:
        if not is_alone or not desk.campaign.state.is_resumable:
            return
        desk.store.own_campaign(campaign_id, owner_of(ProcessIdentity.current()))
        desk.store.set_campaign_state(campaign_id, CampaignState.RUNNING)
        desk.store.add_links(campaign_id, campaign_links(desk.campaign, flow_run_id=str(flow_run.id)))
        try:
            await research(desk)
        except Cancelled as stop:
            _conclude(desk, CampaignState.CANCELLED, reason=str(stop))
        except BudgetExhausted as stop:
            _conclude(desk, CampaignState.EXHAUSTED, reason=str(stop))
        except A3RError as fault:
            _conclude(desk, CampaignState.FAILED, reason=str(fault))
            raise
        except Exception as bug:
            _conclude(desk, CampaignState.FAILED, reason=f"a bug of ours: {type(bug).__name__}: {bug}")
            raise
        else:
            _conclude(desk, CampaignState.FINISHED)
        finally:
            desk.pool.close()


@contextmanager
def _alone(desk: Desk) -> Iterator[bool]:
    """Whether no other process runs this campaign; the lock goes with the process, however it ends."""
    desk.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(desk.folder / "campaign.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


async def research(desk: Desk) -> None:
    """From the approved plan to the last verdict."""
    fix_hidden_tasks(desk)
    program = await ensure_program(desk)
    for index in range(max(1, len(desk.campaign.plan.hypotheses))):
        opened = desk.store.open_experiment(desk.campaign_id, program_id=program.id, hypothesis_index=index)
        await experiment(desk.campaign_id, opened.id)


def fix_hidden_tasks(desk: Desk) -> None:
    """Draw the hidden tasks' seed and keep their hash, before any program is written."""
    campaign_row = desk.campaign
    if campaign_row.hidden_sha256 is not None:
        return
    brief = campaign_row.plan.brief
    if brief.recipe is None:
        raise AssertionError("a brief without a recipe is refused before approval")
    seed = secrets.randbelow(2**31)
    tasks = load_exam(brief.recipe, brief.parameters).tasks("hidden", seed)
    desk.store.set_hidden_tasks(desk.campaign_id, seed=seed, sha256=tasks_sha256(tasks))


async def ensure_program(desk: Desk) -> ProgramRecord:
    """The campaign's program: the one that passed its gates before, or a new one."""
    written = desk.store.programs(desk.campaign_id)
    if written and Path(written[-1].path).exists():
        return written[-1]
    return await write_checked_program(desk)


def _conclude(desk: Desk, state: CampaignState, *, reason: str = "") -> None:
    """Judge what finished, write the report (whole or partial), close the campaign."""
    for row in desk.store.experiments(desk.campaign_id):
        if desk.store.scores(row.id):
            judge_experiment(desk, row.id)
    if not state.is_resumable:
        forget_llm_settings(desk.folder)
    desk.end(state, reason=reason)
    paths = write_report(desk.store, desk.campaign_id, desk.folder / "report", links=dict(desk.campaign.links))
    desk.store.add_links(desk.campaign_id, {"report": str(paths.html)})
    desk.note(f"report: {paths.html}")

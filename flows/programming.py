"""Has a coder write a campaign's program and the gates check it, and records what passed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from a3r.config import TrialConfig
from a3r.errors import UsageError
from a3r.plan import Brief
from a3r.store.records import ProgramRecord
from flows.desk import Desk, judge_assignment
from flows.gate_tools import REHEARSAL_TEMPERATURE, open_gate_tools
from flows.llm_settings import llm_settings
from flows.play import Exam
from vibe.authoring import Attempt, write_program
from vibe.coder import Coder, OpenAICoder, RecipeCoder
from vibe.llm import LLM
from vibe.recipes.library import load_exam
from vibe.sandbox import choose_sandbox
from vibe.workspace import Workspace

CODERS = ("recipes", "openai")


def coder_named(name: str, *, environment: Mapping[str, str]) -> Coder:
    """The coder a person asked for. Raises UsageError for an unknown name, EnvironmentNotReady without its key."""
    if name == "recipes":
        return RecipeCoder()
    if name == "openai":
        return OpenAICoder(LLM.from_environment(environment))
    raise UsageError(f"There is no coder {name!r}", next_step=f"use one of {', '.join(CODERS)}")


async def write_checked_program(desk: Desk) -> ProgramRecord:
    """Write, check and record the program of a campaign. Raises PlanRejected or CoderFault when no draft passes."""
    campaign = desk.campaign
    brief, coder_name = campaign.plan.brief, str(campaign.options["coder"])
    desk.note(f"program: {coder_name} writes it")
    server = await desk.pool.server(campaign.plan.base.model)
    sandbox = choose_sandbox(code_is_shipped=coder_name == "recipes", asked=_asked_sandbox(desk))
    rehearsal = judge_assignment(
        campaign, trial_id="rehearsal", program_folder="", folder=desk.folder / "rehearsal", server=server
    ).updated({"config": _rehearsal_config(campaign.plan.base).model_dump(mode="json")})
    attempts: list[Attempt] = []

    def on_attempt(attempt: Attempt) -> None:
        attempts.append(attempt)
        for report in attempt.reports:
            desk.note(f"gate {report.name}: {'passed' if report.passed else 'FAILED'}: {report.detail}")

    async with open_gate_tools(brief, exam=_exam(brief), sandbox=sandbox, server=server, rehearsal=rehearsal) as tools:
        program = await write_program(
            brief,
            coder=coder_named(coder_name, environment=llm_settings(desk.folder)),
            workspace=Workspace.create(desk.folder / "program"),
            tools=tools,
            on_attempt=on_attempt,
        )
    return desk.store.add_program(
        desk.campaign_id,
        sha256=program.sha256,
        commit=program.commit,
        path=str(Path(program.folder).absolute()),
        coder=coder_name,
        attempts=len(attempts),
        gates={report.name: report.detail for report in program.reports},
    )


def _exam(brief: Brief) -> Exam:
    if brief.recipe is None:
        raise AssertionError("a brief without a recipe is refused before approval")
    return load_exam(brief.recipe, brief.parameters)


def _asked_sandbox(desk: Desk) -> str | None:
    asked = desk.campaign.options["sandbox"]
    return None if asked is None else str(asked)


def _rehearsal_config(base: TrialConfig) -> TrialConfig:
    return base.updated({"trainer.num_updates": 0, "judge.eval_temperature": REHEARSAL_TEMPERATURE})

"""What gates may use of the outside, composed: sandboxes, a scripted policy, the exam, and a real swarm server.

`vibe` starts no server; it is handed these callables.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from a3r.episode import EpisodeKind, Task, Transcript
from a3r.plan import Brief
from a3r.swarm import ClaimedEpisode
from flows.judge import Assignment, open_judge
from flows.play import Exam, ExamSide, ProgramSide, Side, perform
from flows.scripted_policy import ScriptedPolicy, serve_scripted_policy
from flows.swarm_pool import WarmServer
from vibe.gates import GateTools, Rehearsal, Replies
from vibe.oracles import oracle_of
from vibe.program_process import ProgramProcess
from vibe.sandbox import Limits, Sandbox
from vibe.workspace import content_sha256

NUM_PRACTICE_TASKS = 8
SCRIPTED_EPISODE_TIMEOUT_S = 20.0
REHEARSAL_TEMPERATURE = 1.0


@dataclass
class _Stage:
    """One Program's agent and reward processes, kept as long as its files stay the same."""

    sandbox: Sandbox
    policy: ScriptedPolicy
    packages: tuple[str, ...]
    logs: Path
    _opened: AsyncExitStack = field(default_factory=AsyncExitStack)
    _sha256: str = ""
    _agent: ProgramProcess | None = None
    _program: ProgramSide | None = None

    async def cast(self, folder: Path) -> tuple[ProgramProcess, ProgramSide]:
        sha256 = content_sha256({path.name: path.read_text() for path in sorted(folder.glob("*.py"))})
        if self._agent is None or self._program is None or sha256 != self._sha256:
            await self.close()
            self._agent = await self._start(folder, role="agent", gateway_socket=self.policy.socket)
            self._program = await ProgramSide.of(await self._start(folder, role="reward", gateway_socket=None))
            self._sha256 = sha256
        return self._agent, self._program

    async def close(self) -> None:
        self._agent = self._program = None
        await self._opened.aclose()
        self._opened = AsyncExitStack()

    async def _start(
        self, folder: Path, *, role: Literal["agent", "reward"], gateway_socket: Path | None
    ) -> ProgramProcess:
        process = await ProgramProcess.start(
            folder,
            sandbox=self.sandbox,
            limits=Limits(),
            log=self.logs / f"gates-{role}.err",
            gateway_socket=gateway_socket,
            role=role,
            packages=self.packages,
        )
        return await self._opened.enter_async_context(process)

    async def play(self, task: Task, replies: Replies, *, agent: ProgramProcess, side: Side) -> Transcript:
        script = self.policy.open(replies)
        claimed = ClaimedEpisode(
            id=script.key, api_key=script.key, base_url="http://localhost/v1", task_id=task.id, policy="scripted"
        )
        try:
            done = await perform(task, claimed, agent=agent, side=side, timeout_s=SCRIPTED_EPISODE_TIMEOUT_S)
        finally:
            self.policy.close(script)
        return Transcript(turns=tuple(script.turns), steps=done.steps, output=done.output)


@asynccontextmanager
async def open_gate_tools(
    brief: Brief,
    *,
    exam: Exam,
    sandbox: Sandbox,
    server: WarmServer,
    rehearsal: Assignment,
) -> AsyncIterator[GateTools]:
    """Tools for the gates of one brief. `rehearsal` says how real episodes of the starting policy are judged; its
    Program folder and trial id are filled in here."""
    folder = Path(tempfile.mkdtemp(prefix="a3r-gates-"))
    try:
        async with serve_scripted_policy(folder / "policy.sock") as policy:
            logs = Path(rehearsal.folder)
            logs.mkdir(parents=True, exist_ok=True)
            stage = _Stage(sandbox=sandbox, policy=policy, packages=brief.allowed_packages, logs=logs)
            try:
                yield _tools(brief, exam=exam, stage=stage, server=server, rehearsal=rehearsal)
            finally:
                await stage.close()
    finally:
        shutil.rmtree(folder)


def _tools(brief: Brief, *, exam: Exam, stage: _Stage, server: WarmServer, rehearsal: Assignment) -> GateTools:
    oracle = oracle_of(brief)

    async def play(folder: Path, task: Task, replies: Replies) -> Transcript:
        agent, program = await stage.cast(folder)
        return await stage.play(task, replies, agent=agent, side=program)

    async def examine(folder: Path, replies_to: Callable[[Task], Replies]) -> float:
        agent, _ = await stage.cast(folder)
        side = ExamSide(exam)
        # Practice tasks come from a fresh seed: the hidden ones stay unseen.
        tasks = exam.tasks("hidden", secrets.randbelow(2**31))[:NUM_PRACTICE_TASKS]
        scores = [
            exam.measure(task, await stage.play(task, replies_to(task), agent=agent, side=side)) for task in tasks
        ]
        return sum(scores) / len(scores)

    async def rehearse(folder: Path, num_tasks: int, group_size: int) -> Sequence[Rehearsal]:
        return await rehearse_program(
            _with_program(rehearsal, folder), server=server, num_tasks=num_tasks, group_size=group_size
        )

    def start(folder: Path) -> AbstractAsyncContextManager[ProgramProcess]:
        return _fresh_grader(folder, stage=stage)

    return GateTools(start=start, play=play, oracle=oracle, rehearse=rehearse, examine=examine)


@asynccontextmanager
async def _fresh_grader(folder: Path, *, stage: _Stage) -> AsyncIterator[ProgramProcess]:
    process = await ProgramProcess.start(
        folder,
        sandbox=stage.sandbox,
        limits=Limits(),
        log=stage.logs / "gates-fresh.err",
        role="reward",
        packages=stage.packages,
    )
    async with process:
        yield process


def _with_program(assignment: Assignment, folder: Path) -> Assignment:
    """The assignment for another Program folder, under a fresh trial id so that no claim is taken for an old one."""
    return Assignment.model_validate(
        assignment.model_dump()
        | {"program_folder": str(folder), "trial_id": f"{assignment.trial_id}-{secrets.token_hex(4)}"}
    )


async def rehearse_program(
    assignment: Assignment, *, server: WarmServer, num_tasks: int, group_size: int
) -> list[Rehearsal]:
    """Real episodes of the starting policy, graded by the Program; none of them is ever trained on."""
    async with (
        server.trial(assignment.trial_id, config=assignment.config, folder=Path(assignment.folder)),
        open_judge(assignment) as judge,
    ):
        tasks = await judge.program_side.process.tasks(split="train", seed=0)
        played = await judge.play_all(
            [(task, f"{task.id}@{place}") for task in tasks[:num_tasks] for place in range(group_size)],
            kind=EpisodeKind.EVAL,
            side=judge.program_side,
        )
    return [
        Rehearsal(task_id=episode.task_id, components=episode.components, transcript=episode.transcript)
        for episode in played
        if episode.ending.is_accepted
    ]

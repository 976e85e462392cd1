"""The judge: owns hidden tasks, the metric and the grading, and runs a Program's code in two sandboxes.

It claims an episode, lets the Program's agent play it in the first sandbox with the episode's key and the
task's public part, reads the transcript from the gateway, has the Program's reward grade it in the second
sandbox, and ends the episode. On hidden tasks it measures the metric itself. `python -m flows.judge FILE`
runs one trial; a trial's process imports neither Prefect nor MLflow nor torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from a3r.config import Config, JudgeConfig, TrialConfig
from a3r.episode import Ending, EpisodeKind, Task, Transcript
from a3r.errors import A3RError, ClientFault, Fault, InfrastructureFault, PlanRejected, Refused
from a3r.swarm import ClaimedEpisode, Outcome, SwarmClient
from flows.events import EventKind, EventLog
from flows.play import Exam, ExamSide, ProgramSide, Side, perform
from vibe.program_process import ProgramProcess
from vibe.recipes.library import load_exam
from vibe.sandbox import Limits, choose_sandbox


class Assignment(Config):
    """All that a judge needs to run one trial on a swarm server that is already started."""

    trial_id: str
    config: TrialConfig
    program_folder: str
    """Folder of the Program's files."""
    recipe: str
    """Recipe whose Exam holds the hidden tasks and the metric."""
    parameters: dict[str, JsonValue]
    """The recipe's parameters, for the Exam."""
    hidden_seed: int
    """Seed of the hidden tasks; no coder ever sees it."""
    hidden_sha256: str
    """Hash of the hidden tasks, made before the coder started."""
    swarm_url: str
    swarm_socket: str
    """Unix socket of the same server, which the agent's sandbox reaches the gateway through."""
    client_key: str
    folder: str
    """Where `judge.jsonl` and the sandboxes' logs go."""
    code_is_shipped: bool
    """Whether the Program is a shipped recipe whose hash was checked."""
    sandbox: str | None = None
    """Sandbox that a person asked for by name."""
    packages: tuple[str, ...] = ()
    """Distributions that the brief allows."""


@dataclass(frozen=True, slots=True)
class Played:
    """One judged episode."""

    episode_id: str
    task_id: str
    kind: EpisodeKind
    ending: Ending
    reward: float
    """Reward of a training episode, metric of a hidden one; meaningless when the ending is a fault."""
    components: dict[str, float]
    transcript: Transcript
    fault: str = ""


def hidden_tasks(assignment: Assignment, exam: Exam) -> list[Task]:
    """The hidden tasks of an assignment, checked against the hash that was taken before any code was written."""
    tasks = exam.tasks("hidden", assignment.hidden_seed)
    if tasks_sha256(tasks) != assignment.hidden_sha256:
        raise PlanRejected(
            "The hidden tasks are not those of the plan",
            why="their hash changed since it was taken",
            next_step="start a new campaign; this one's results would not be comparable",
        )
    return tasks


def tasks_sha256(tasks: Sequence[Task]) -> str:
    """Content hash of tasks, in order."""
    return hashlib.sha256(json.dumps([task.as_json() for task in tasks], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Judge:
    """Plays episodes of one assignment. Made by `open_judge`."""

    assignment: Assignment
    swarm: SwarmClient
    agent: ProgramProcess
    exam_side: ExamSide
    program_side: ProgramSide
    hidden: list[Task]
    log: EventLog
    threads: ThreadPoolExecutor
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def concurrency(self) -> int:
        return _concurrency(self.assignment.config.judge)

    @property
    def eval_temperature(self) -> float:
        return self.assignment.config.judge.eval_temperature

    async def train(self) -> None:
        """Play training tasks, group by group, until the server has made all its updates."""
        tasks = await self.program_side.process.tasks(split="train", seed=self.assignment.config.seed)
        status = await self._in_thread(self.swarm.status)
        places = _places(tasks, group_size=status.group_size, seed=self.assignment.config.seed)
        async with asyncio.TaskGroup() as workers:
            for _ in range(self.concurrency):
                workers.create_task(self._train_until_done(places))

    async def _train_until_done(self, places: Iterator[tuple[Task, str, int]]) -> None:
        for task, group, place in places:
            try:
                await self.play(task, kind=EpisodeKind.TRAIN, side=self.program_side, group=group, place=place)
            except Refused as refusal:
                if refusal.code == "training_done":
                    return
                if refusal.code != "group_full":
                    raise
            self._stop_if_hopeless()

    async def evaluate(self, *, step: int) -> float:
        """Play every hidden task once at the evaluation temperature; log and return the mean metric.

        Faults of the Program count as unsolved and are logged apart. Faults of ours raise.
        """
        config = self.assignment.config.judge
        places = [(task, f"{task.id}@{step}") for task in self.hidden[: config.eval_tasks]]
        played = await self.play_all(places, kind=EpisodeKind.EVAL, side=self.exam_side)
        scores = [episode.reward if episode.ending.is_accepted else 0.0 for episode in played]
        success = sum(scores) / len(scores)
        self.log.metrics(
            {
                "eval/success": success,
                "eval/episodes": len(scores),
                "eval/faults": sum(episode.ending.is_fault for episode in played),
                "eval/temperature": config.eval_temperature,
            },
            step=step,
        )
        self._log_episodes(played, step=step)
        return success

    async def play_all(self, places: Sequence[tuple[Task, str]], *, kind: EpisodeKind, side: Side) -> list[Played]:
        """One episode for each task and group name, as many at once as the judge allows; in the given order."""
        waiting = iter(enumerate(places))
        played: dict[int, Played] = {}

        async def work() -> None:
            for number, (task, group) in waiting:
                played[number] = await self.play(task, kind=kind, side=side, group=group, place=number)

        async with asyncio.TaskGroup() as workers:
            for _ in range(self.concurrency):
                workers.create_task(work())
        return [played[number] for number in range(len(places))]

    async def play(self, task: Task, *, kind: EpisodeKind, side: Side, group: str, place: int) -> Played:
        """One episode from claim to end. A fault of the Program aborts it and is returned as data.

        Raises Refused when the server declines the claim, InfrastructureFault when it is gone.
        """
        claimed = await self._claim(kind=kind, group=group, place=place)
        timeout_s = self.assignment.config.judge.episode_timeout_s
        self.counts["episodes"] += 1
        try:
            done = await perform(task, claimed, agent=self.agent, side=side, timeout_s=timeout_s)
            recorded = await self._in_thread(claimed.transcript)
            transcript = replace(recorded, steps=done.steps, output=done.output)
            components = await side.grade(task, transcript)
        except ClientFault as fault:
            return await self._abort(claimed, task=task, kind=kind, fault=fault)
        reward = float(sum(components.values()))
        await self._in_thread(lambda: claimed.end(Outcome(reward=reward, components=components)))
        self.counts["turns"] += len(transcript.turns)
        return Played(claimed.id, task.id, kind, Ending.REWARDED, reward, components, transcript)

    async def _claim(self, *, kind: EpisodeKind, group: str, place: int) -> ClaimedEpisode:
        config = self.assignment.config.judge
        return await self._in_thread(
            lambda: self.swarm.claim(
                group,
                kind=kind,
                claim_id=f"{self.assignment.trial_id}:{kind}:{group}:{place}",
                temperature=self.eval_temperature if kind is EpisodeKind.EVAL else None,
                lease_s=config.episode_timeout_s + 30,
            )
        )

    async def _abort(self, claimed: ClaimedEpisode, *, task: Task, kind: EpisodeKind, fault: ClientFault) -> Played:
        self.counts["faults"] += 1
        self.log.write(EventKind.FAULT, boundary=fault.boundary, text=str(fault)[:500], task=task.id)
        await self._in_thread(lambda: claimed.abort(str(fault)[:500], ending=Ending.CLIENT_FAULT))
        return Played(claimed.id, task.id, kind, Ending.CLIENT_FAULT, 0.0, {}, Transcript(), fault=str(fault))

    def _stop_if_hopeless(self) -> None:
        faults, episodes = self.counts["faults"], self.counts["episodes"]
        if faults >= 50 and faults > episodes / 2:
            raise ClientFault(
                "The program fails in most of its episodes",
                why=f"{faults} of {episodes} episodes ended in a fault of the program",
                next_step=f"read {self.assignment.folder}/judge.jsonl and repair the program",
            )

    def _log_episodes(self, played: Sequence[Played], *, step: int) -> None:
        ranked = sorted(played, key=lambda episode: (episode.reward, -len(episode.transcript.turns)))
        shown = {episode.episode_id for episode in [*ranked[:3], *ranked[-3:]]}
        for episode in played:
            self.log.write(
                EventKind.EPISODE,
                step=step,
                episode=episode.episode_id,
                task=episode.task_id,
                episode_kind=episode.kind.value,
                ending=episode.ending.value,
                reward=episode.reward,
                turns=len(episode.transcript.turns),
                transcript=episode.transcript.as_json() if episode.episode_id in shown else None,
            )

    async def _in_thread(self, call: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)


@asynccontextmanager
async def open_judge(assignment: Assignment) -> AsyncIterator[Judge]:
    """A judge with its two sandboxes started; they end with the context."""
    exam = load_exam(assignment.recipe, assignment.parameters)
    folder = Path(assignment.folder)
    folder.mkdir(parents=True, exist_ok=True)
    sandbox = choose_sandbox(code_is_shipped=assignment.code_is_shipped, asked=assignment.sandbox)
    program = Path(assignment.program_folder)
    log = EventLog(folder / "judge.jsonl")
    with ThreadPoolExecutor(
        max_workers=_concurrency(assignment.config.judge) + 4, thread_name_prefix="swarm"
    ) as threads:
        async with (
            await ProgramProcess.start(
                program,
                sandbox=sandbox,
                limits=Limits(),
                log=folder / "agent.err",
                gateway_socket=Path(assignment.swarm_socket),
                role="agent",
                packages=assignment.packages,
            ) as agent,
            await ProgramProcess.start(
                program,
                sandbox=sandbox,
                limits=Limits(),
                log=folder / "reward.err",
                role="reward",
                packages=assignment.packages,
            ) as grader,
        ):
            swarm = SwarmClient(assignment.swarm_url, assignment.client_key, client_id=assignment.trial_id)
            yield Judge(
                assignment=assignment,
                swarm=swarm,
                agent=agent,
                exam_side=ExamSide(exam),
                program_side=await ProgramSide.of(grader),
                hidden=hidden_tasks(assignment, exam),
                log=log,
                threads=threads,
            )
    log.close()


async def run_trial(assignment: Assignment) -> None:
    """Train until the server is done, then measure on the hidden tasks."""
    started = time.monotonic()
    async with open_judge(assignment) as judge:
        num_updates = assignment.config.trainer.num_updates
        if num_updates:
            await judge.train()
        await judge.evaluate(step=num_updates)
        judge.log.metrics(
            {
                "cost/wall_s": time.monotonic() - started,
                "cost/turns": judge.counts["turns"],
                "cost/episodes": judge.counts["episodes"],
                "cost/faults": judge.counts["faults"],
            },
            step=num_updates,
        )


def _places(tasks: Sequence[Task], *, group_size: int, seed: int) -> Iterator[tuple[Task, str, int]]:
    """Places in groups, task after task, epoch after epoch, in an order that the seed fixes."""
    if not tasks:
        raise ClientFault("The program has no training tasks", why="tasks('train', seed) is empty")
    order = random.Random(seed)
    epoch = 0
    while True:
        for task in order.sample(tasks, len(tasks)):
            for place in range(group_size):
                yield task, f"{task.id}@{epoch}", place
        epoch += 1


def _concurrency(config: JudgeConfig) -> int:
    return 1 if config.serial else config.concurrency


def main(arguments: Sequence[str]) -> int:
    """Run the trial that the assignment file describes; a fault is logged and becomes the exit status 1."""
    assignment = Assignment.model_validate_json(Path(arguments[0]).read_text())
    faults: list[A3RError] = []
    try:
        asyncio.run(run_trial(assignment))
    except* A3RError as group:
        faults.append(_first(group))
    for fault in faults:
        _log_end(assignment, fault)
    return 1 if faults else 0


def _log_end(assignment: Assignment, fault: A3RError) -> None:
    log = EventLog(Path(assignment.folder) / "judge.jsonl")
    boundary = fault.boundary if isinstance(fault, Fault) else InfrastructureFault.boundary
    log.write(EventKind.FAULT, boundary=boundary, text=str(fault), ends_trial=True)
    log.close()


def _first(group: BaseExceptionGroup[A3RError]) -> A3RError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

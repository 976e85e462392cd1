"""The checks that a Program passes before anything is trained on it.

They run in order, cheapest first, and stop at the first failure: a later one would only repeat it. What they
need of the outside (a sandboxed process, a scripted or a real engine) comes in as callables of `GateTools`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias

from a3r.episode import Task, Transcript
from a3r.errors import ClientFault
from vibe.oracles import Oracle, Replies
from vibe.source_gates import SOURCE_GATES, Finding, failed, passed

MAX_ABS_REWARD = 10.0
NUM_FIXTURE_TASKS = 3
NUM_REHEARSAL_TASKS = 4
REHEARSAL_GROUP_SIZE = 8
_MIN_SEPARATION = 1e-6


class RunningProgram(Protocol):
    """A Program's task and reward side in its sandbox. A fault of it is a ClientFault."""

    async def tasks(self, *, split: str, seed: int) -> list[Task]: ...

    async def grade(self, task: Task, transcript: Transcript) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One real episode of the starting policy."""

    task_id: str
    components: Mapping[str, float]
    transcript: Transcript

    @property
    def reward(self) -> float:
        return sum(self.components.values())


@dataclass(frozen=True, slots=True)
class GateTools:
    """All that gates need of the outside. Callables raise ClientFault where the Program is at fault; any other
    fault passes through, since a coder cannot repair it."""

    start: Callable[[Path], AbstractAsyncContextManager[RunningProgram]]
    """Starts the reward side of the Program in a folder, in a fresh sandboxed process."""
    play: Callable[[Path, Task, Replies], Awaitable[Transcript]]
    """Runs the Program's agent (and its own environment) on one of its tasks against scripted replies."""
    oracle: Oracle
    """Right and wrong replies to a task of this brief."""
    rehearse: Callable[[Path, int, int], Awaitable[Sequence[Rehearsal]]]
    """Real episodes with the starting policy: folder, number of tasks, episodes of each."""
    examine: Callable[[Path, Callable[[Task], Replies]], Awaitable[float]]
    """Mean metric (0 to 1) of the agent on practice tasks made by the exam, from another seed than the hidden
    ones, when a scripted policy gives the replies."""


@dataclass(frozen=True, slots=True)
class GateReport:
    """What one gate found."""

    name: str
    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Fixture:
    """One task with a transcript that solves it and some that do not."""

    task: Task
    right: Transcript
    wrong: tuple[Transcript, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A Program under test, with what earlier gates found out about it."""

    folder: Path
    tools: GateTools
    tasks: tuple[Task, ...] = ()
    fixtures: tuple[Fixture, ...] = ()
    rehearsals: tuple[Rehearsal, ...] = ()


Gate: TypeAlias = "Callable[[Case], Awaitable[tuple[Finding, Case]]]"


async def run_gates(
    files: Mapping[str, str], *, folder: Path, tools: GateTools, allowed_packages: Sequence[str] = ()
) -> tuple[GateReport, ...]:
    """Reports of all gates up to the first failure. `files` is the draft, `folder` where it was written."""
    reports: list[GateReport] = []
    for name, check in SOURCE_GATES:
        start = time.monotonic()
        finding = check(files, allowed_packages)
        reports.append(_report(name, finding, start=start))
        if not finding.passed:
            return tuple(reports)
    case = Case(folder=folder, tools=tools)
    for name, gate in GATES:
        start = time.monotonic()
        try:
            finding, case = await gate(case)
        except ClientFault as fault:
            finding = failed(str(fault))
        reports.append(_report(name, finding, start=start))
        if not finding.passed:
            break
    return tuple(reports)


def all_passed(reports: Sequence[GateReport]) -> bool:
    """Whether every gate ran and passed."""
    return len(reports) == len(SOURCE_GATES) + len(GATES) and all(report.passed for report in reports)


def _report(name: str, finding: Finding, *, start: float) -> GateReport:
    return GateReport(name, finding.passed, finding.detail, time.monotonic() - start)


async def tasks_are_sound(case: Case) -> tuple[Finding, Case]:
    """Distinct ids, JSON values, train unlike validation, and the same again for the same seed."""
    async with case.tools.start(case.folder) as program:
        train = await program.tasks(split="train", seed=0)
        again = await program.tasks(split="train", seed=0)
        validation = await program.tasks(split="validation", seed=0)
    async with case.tools.start(case.folder) as program:
        restarted = await program.tasks(split="train", seed=0)
    faults = _task_faults("train", train) + _task_faults("validation", validation)
    if train != again:
        faults.append("tasks('train', 0) gives other tasks when it is called twice")
    if train != restarted:
        faults.append("tasks('train', 0) gives other tasks in another process: seed every choice")
    if not faults and _contents(train) == _contents(validation):
        faults.append("train and validation are the same tasks")
    if faults:
        return failed("; ".join(faults)), case
    detail = f"{len(train)} training and {len(validation)} validation tasks, the same for the same seed"
    return passed(detail), replace(case, tasks=tuple(train))


def _task_faults(split: str, tasks: Sequence[Task]) -> list[str]:
    ids = [task.id for task in tasks]
    faults = [f"tasks({split!r}, 0) gives {len(ids)} tasks; at least 2 are needed"] if len(ids) < 2 else []
    if len(set(ids)) != len(ids):
        faults.append(f"tasks({split!r}, 0) uses an id twice")
    return faults + [f"task {task.id!r} of {split!r} is not JSON" for task in tasks if not _is_json(task)][:1]


def _is_json(task: Task) -> bool:
    try:
        return json.loads(json.dumps(task.as_json(), allow_nan=False)) == task.as_json()
    except (TypeError, ValueError):
        return False


def _contents(tasks: Sequence[Task]) -> set[str]:
    return {json.dumps([task.public, task.private], sort_keys=True) for task in tasks}


async def agent_plays(case: Case) -> tuple[Finding, Case]:
    """The agent plays some tasks to their end, whatever the policy says."""
    fixtures = tuple([await _fixture(case, task) for task in case.tasks[:NUM_FIXTURE_TASKS]])
    silent = [f.task.id for f in fixtures if not all(t.turns for t in (f.right, *f.wrong))]
    if silent:
        return failed(f"the agent made no call to the model on task {silent[0]!r}"), case
    calls = sum(len(t.turns) for f in fixtures for t in (f.right, *f.wrong))
    played = sum(1 + len(f.wrong) for f in fixtures)
    return passed(f"{played} scripted episodes with {calls} calls"), replace(case, fixtures=fixtures)


async def _fixture(case: Case, task: Task) -> Fixture:
    """Beside the oracle's own wrong answers: silence, noise, and the task thrown back."""
    oracle, play = case.tools.oracle, case.tools.play
    wrong: list[Replies] = [*oracle.wrong(task), [""], ["???"], [json.dumps(dict(task.public))]]
    return Fixture(
        task=task,
        right=await play(case.folder, task, oracle.right(task)),
        wrong=tuple([await play(case.folder, task, replies) for replies in wrong]),
    )


async def reward_is_sound(case: Case) -> tuple[Finding, Case]:
    """Named finite parts, a bounded sum, and the same again, also after a restart."""
    first = await _grades(case, repeats=2)
    second = await _grades(case, repeats=1)
    faults = [fault for components in first for fault in _reward_faults(components)]
    half = len(first) // 2
    if first[:half] != first[half:]:
        faults.append("grade gives another reward when it is called twice on the same transcript")
    if first[:half] != second:
        faults.append("grade gives another reward in another process")
    if faults:
        return failed("; ".join(dict.fromkeys(faults))), case
    rewards = [sum(components.values()) for components in second]
    return passed(f"{len(rewards)} transcripts graded from {min(rewards):g} to {max(rewards):g}, repeatably"), case


async def _grades(case: Case, *, repeats: int) -> list[dict[str, float]]:
    async with case.tools.start(case.folder) as program:
        return [
            await program.grade(fixture.task, transcript)
            for _ in range(repeats)
            for fixture in case.fixtures
            for transcript in (fixture.right, *fixture.wrong)
        ]


def _reward_faults(components: Mapping[str, float]) -> list[str]:
    if not components:
        return ["grade gives no components"]
    unfit = [name for name, value in components.items() if not math.isfinite(value)]
    if unfit:
        return [f"reward component {unfit[0]!r} is not a finite number"]
    total = sum(components.values())
    return [f"a reward of {total:g} is out of bounds (±{MAX_ABS_REWARD:g})"] if abs(total) > MAX_ABS_REWARD else []


async def reward_separates(case: Case) -> tuple[Finding, Case]:
    """A solved episode earns more than every unsolved one of the same task."""
    gaps: list[float] = []
    async with case.tools.start(case.folder) as program:
        for fixture in case.fixtures:
            right = sum((await program.grade(fixture.task, fixture.right)).values())
            for transcript in fixture.wrong:
                wrong = sum((await program.grade(fixture.task, transcript)).values())
                gaps.append(right - wrong)
                if gaps[-1] < _MIN_SEPARATION:
                    said = ", ".join(map(repr, transcript.replies[:3]))
                    detail = (
                        f"task {fixture.task.id!r}: solving it earns {right:g}, and the replies {said} earn {wrong:g}"
                    )
                    return failed(detail), case
    return passed(f"solved beats unsolved by at least {min(gaps):g} in {len(gaps)} comparisons"), case


async def agent_fits_exam(case: Case) -> tuple[Finding, Case]:
    """On tasks that the exam makes, right replies measure as solved and wrong ones as not."""
    oracle, examine = case.tools.oracle, case.tools.examine
    right = await examine(case.folder, oracle.right)
    wrong = await examine(case.folder, lambda task: oracle.wrong(task)[0])
    if right < 0.999:
        return failed(f"with the right replies the agent solves only {right:.0%} of practice exam tasks"), case
    if wrong > 0.001:
        return failed(f"with wrong replies the agent still solves {wrong:.0%} of practice exam tasks"), case
    return passed("right replies solve all practice exam tasks and wrong ones none"), case


async def real_episodes_run(case: Case) -> tuple[Finding, Case]:
    """The starting policy plays whole episodes through the gateway and each is rewarded."""
    rehearsals = tuple(await case.tools.rehearse(case.folder, NUM_REHEARSAL_TASKS, REHEARSAL_GROUP_SIZE))
    if not rehearsals:
        return failed("no real episode ended with a reward"), case
    faults = [fault for rehearsal in rehearsals for fault in _reward_faults(rehearsal.components)]
    if any(not rehearsal.transcript.turns for rehearsal in rehearsals):
        faults.append("an episode ended without a call to the model")
    if faults:
        return failed("; ".join(dict.fromkeys(faults))), case
    mean = sum(rehearsal.reward for rehearsal in rehearsals) / len(rehearsals)
    detail = f"{len(rehearsals)} real episodes with a mean reward of {mean:.3g}"
    return passed(detail), replace(case, rehearsals=rehearsals)


async def reward_varies(case: Case) -> tuple[Finding, Case]:
    """Some group has unequal rewards: without that, a policy gradient has nothing to learn from."""
    groups: dict[str, set[float]] = {}
    for rehearsal in case.rehearsals:
        groups.setdefault(rehearsal.task_id, set()).add(rehearsal.reward)
    varied = sum(len(rewards) > 1 for rewards in groups.values())
    detail = f"rewards differ within {varied} of {len(groups)} groups of the starting policy"
    return (passed(detail) if varied else failed(detail + ": nothing can be learned")), case


GATES: tuple[tuple[str, Gate], ...] = (
    ("tasks", tasks_are_sound),
    ("agent", agent_plays),
    ("reward", reward_is_sound),
    ("separation", reward_separates),
    ("exam", agent_fits_exam),
    ("episodes", real_episodes_run),
    ("variance", reward_varies),
)
"""Checks that run the Program, in order."""

"""Gates: a good Program passes all of them, and each kind of bad one fails where it should."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from a3r.episode import Transcript
from a3r.errors import ClientFault, EngineFault
from vibe.gates import GATES, GateReport, GateTools, Rehearsal, all_passed, run_gates
from vibe.source_gates import SOURCE_GATES, imports_are_allowed


async def check(source: str, *, folder: Path, tools: GateTools, **more: object) -> tuple[GateReport, ...]:
    (folder / "program.py").write_text(source)
    return await run_gates({"program.py": source}, folder=folder, tools=tools, **more)


async def test_good_program_passes_every_gate(good_program: str, tools: GateTools, tmp_path: Path):
    reports = await check(good_program, folder=tmp_path, tools=tools)
    assert [report.name for report in reports] == [name for name, _ in (*SOURCE_GATES, *GATES)]
    assert all_passed(reports), reports
    assert all(report.seconds >= 0 and report.detail for report in reports)


GRADE = '    return {"form"'

BREAKAGES = [
    ("parses", "import random\n", "import random\nif\n", "not Python"),
    ("imports", "import random\n", "import random\nimport torch\n", "uses torch"),
    ("imports", "import random\n", "import random\nfrom a3r.store import tables\n", "uses a3r.store"),
    ("imports", "import random\n", "import random\nfrom a3r import store\n", "uses a3r.store"),
    ("imports", "import random\n", "import random\nimport subprocess\n", "uses subprocess"),
    ("imports", "int(reply) ==", "eval(reply) ==", r"uses eval\(\)"),
    ("contract", "def grade(task, transcript)", "def score(task, transcript)", "grade.* is missing"),
    ("contract", "def grade(task, transcript)", "def grade(transcript, task)", "grade takes"),
    ("contract", "def grade(task, transcript)", "def grade(task, transcript, hints)", "grade takes"),
    ("contract", "def tasks(split, seed)", "async def tasks(split, seed)", "must not be async"),
    ("tasks", "for n in range(6)", "for n in range(1)", "at least 2"),
    ("tasks", 'id=f"{split}-{n}"', 'id="same"', "uses an id twice"),
    ("tasks", 'public={"high": 9}', 'public={"high": {9}}', "not JSON"),
    ("tasks", 'public={"high": 9}', 'public={"high": float("nan")}', "not JSON"),
    ("tasks", 'random.Random(f"{split}-{seed}")', "random.Random()", "other tasks"),
    (
        "tasks",
        'random.Random(f"{split}-{seed}")',
        "random.Random(str(seed))",
        "train and validation are the same tasks",
    ),
    ("tasks", "    choice =", "    raise ValueError('no data')\n    choice =", "ValueError: no data"),
    ("agent", "    return await episode.ask", "    return '4' or await episode.ask", "made no call"),
    ("agent", "    return await episode.ask", "    1 / 0\n    return await episode.ask", "ZeroDivisionError"),
    ("reward", GRADE, "    return {}\n" + GRADE, "no components"),
    ("reward", GRADE, "    return {'x': float('inf')}\n" + GRADE, "not a finite number"),
    ("reward", GRADE, "    return {'x': 1e6}\n" + GRADE, "out of bounds"),
    ("reward", GRADE, "    return {'x': random.random()}\n" + GRADE, "called twice"),
    ("reward", GRADE, "    return {'x': id(tasks) % 997 / 997}\n" + GRADE, "another process"),
    ("separation", "int(reply) == task", "int(reply) != task", "solving it earns"),
    ("separation", '"right": float(', '"right": 0 * float(', "solving it earns"),
    ("separation", '{"form": 0.1 * is_digit', '{"form": 2.0 * (len(reply) > 1)', "'12345'"),
    (
        "exam",
        "    return await episode.ask",
        "    return '!' + await episode.ask",
        "right replies the agent solves only 0%",
    ),
]


@pytest.mark.parametrize(("gate", "old", "new", "detail"), BREAKAGES)
async def test_broken_program_fails_at_its_gate(
    gate: str, old: str, new: str, detail: str, good_program: str, tools: GateTools, tmp_path: Path
):
    assert old in good_program
    reports = await check(good_program.replace(old, new), folder=tmp_path, tools=tools)
    assert reports[-1].name == gate
    assert not all_passed(reports)
    assert not reports[-1].passed
    assert re.search(detail, reports[-1].detail), reports[-1].detail
    assert all(report.passed for report in reports[:-1])


async def test_reward_that_never_varies_is_refused(good_program: str, tools: GateTools, tmp_path: Path):
    async def alike(folder: Path, num_tasks: int, group_size: int) -> list[Rehearsal]:
        episodes = await tools.rehearse(folder, num_tasks, group_size)
        return [replace(episode, components={"form": 0.1}) for episode in episodes]

    reports = await check(good_program, folder=tmp_path, tools=replace(tools, rehearse=alike))
    assert (reports[-1].name, reports[-1].passed) == ("variance", False)
    assert "nothing can be learned" in reports[-1].detail


async def test_episodes_that_all_fail_are_refused(good_program: str, tools: GateTools, tmp_path: Path):
    async def nothing(folder: Path, num_tasks: int, group_size: int) -> list[Rehearsal]:
        return []

    async def crash(folder: Path, num_tasks: int, group_size: int) -> list[Rehearsal]:
        raise ClientFault("run_episode raised KeyError: 'high'")

    for rehearse, detail in ((nothing, "no real episode"), (crash, "KeyError")):
        reports = await check(good_program, folder=tmp_path, tools=replace(tools, rehearse=rehearse))
        assert reports[-1].name == "episodes"
        assert detail in reports[-1].detail


async def test_fault_of_the_platform_is_not_the_programs(good_program: str, tools: GateTools, tmp_path: Path):
    async def broken(folder: Path, task: object, replies: object) -> Transcript:
        raise EngineFault("the engine died")

    with pytest.raises(EngineFault):
        await check(good_program, folder=tmp_path, tools=replace(tools, play=broken))


async def test_exam_that_wrong_replies_pass_is_noticed(good_program: str, tools: GateTools, tmp_path: Path):
    async def lenient(folder: Path, replies: object) -> float:
        return 1.0

    reports = await check(good_program, folder=tmp_path, tools=replace(tools, examine=lenient))
    assert "with wrong replies the agent still solves 100%" in reports[-1].detail


async def test_allowed_package_may_be_imported(good_program: str, tools: GateTools, tmp_path: Path):
    source = good_program.replace("import random\n", "import random\nimport yaml\n")
    assert (await check(source, folder=tmp_path, tools=tools))[-1].name == "imports"
    reports = await check(source, folder=tmp_path, tools=tools, allowed_packages=["PyYAML"])
    assert all_passed(reports)


def test_client_sdk_and_own_modules_may_be_imported(good_program: str):
    source = "import a3r.swarm\nfrom a3r import swarm\nfrom a3r.swarm import Task as T\nimport mine\n" + good_program
    assert imports_are_allowed({"program.py": source, "mine.py": "x = 1"}, ()).passed
    assert not imports_are_allowed({"program.py": source}, ()).passed


async def test_draft_without_program_or_with_escaping_paths_fails_first(tools: GateTools, tmp_path: Path):
    for files, detail in (({}, "no file program.py"), ({"program.py": "", "../x.py": ""}, "not a path within")):
        reports = await run_gates(files, folder=tmp_path, tools=tools)
        assert [report.name for report in reports] == ["files"]
        assert detail in reports[0].detail

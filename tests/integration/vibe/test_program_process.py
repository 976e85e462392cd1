"""Programs in real sandboxes, well-behaved and not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent

import pytest
import uvicorn

from a3r.episode import EpisodeKind, Observation, Step, Task, Transcript
from a3r.errors import ClientFault, InfrastructureFault, UsageError
from a3r.swarm import ClaimedEpisode
from vibe.program_process import ProgramProcess, Role
from vibe.recipes.library import load_exam
from vibe.sandbox import BubblewrapSandbox, Limits, PlainSandbox, Sandbox

ROOT = Path(__file__).resolve().parents[3]
TASK = Task("t1", {"n": 1}, {"answer": "one"})
SDK = "from a3r.swarm import ClaimedEpisode, Observation, Task, Transcript\n"

Start = Callable[..., object]


@asynccontextmanager
async def running(
    folder: Path,
    code: str,
    *,
    role: Role = "agent",
    sandbox: Sandbox | None = None,
    limits: Limits | None = None,
    gateway_socket: Path | None = None,
) -> AsyncIterator[ProgramProcess]:
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    (workspace / "program.py").write_text(SDK + dedent(code))
    process = await ProgramProcess.start(
        workspace,
        sandbox=sandbox or BubblewrapSandbox(),
        limits=limits or Limits(wall_s=60),
        role=role,
        gateway_socket=gateway_socket,
        log=folder / "log",
    )
    async with process:
        yield process


def claimed(name: str = "e1") -> ClaimedEpisode:
    return ClaimedEpisode(
        id=name,
        api_key=f"key-of-{name}",
        base_url="http://127.0.0.1:1/v1",
        task_id="t1",
        kind=EpisodeKind.TRAIN,
        policy="small",
    )


async def shout(action: str) -> Observation:
    return Observation(action.upper(), done=action == "stop")


async def play(process: ProgramProcess, public: dict | None = None, *, timeout_s: float = 20.0) -> object:
    return await process.run_episode(public or {}, claimed(), on_step=shout, timeout_s=timeout_s)


@pytest.mark.parametrize("sandbox", [BubblewrapSandbox(), PlainSandbox()], ids=lambda sandbox: sandbox.name)
async def test_a_shipped_recipe_makes_tasks_plays_and_is_graded(tmp_path: Path, sandbox: Sandbox) -> None:
    code = (ROOT / "vibe" / "recipes" / "number_guessing" / "program.py").read_text()
    async with running(tmp_path, code, role="reward", sandbox=sandbox) as reward:
        assert await reward.describe() == {"tasks", "run_episode", "grade", "environment", "demonstrations"}
        tasks = await reward.tasks(split="train", seed=0)
        assert len(tasks) == 512
        assert tasks == await reward.tasks(split="train", seed=0)
        dialogues = await reward.demonstrations(seed=1)
        assert {message["role"] for dialogue in dialogues for message in dialogue} == {"user", "assistant"}
        secret = str(tasks[0].private["secret"])
        world = await reward.open_environment(tasks[0])
        steps = [Step(action, await world.step(action)) for action in ("0", secret)]
        await world.close()
        assert [step.observation.text for step in steps] == ["higher", "correct"]
        assert steps[-1].observation.done
        assert await reward.grade(tasks[0], Transcript(steps=tuple(steps))) == {"solved": 1.0}
        assert await reward.grade(tasks[0], Transcript(steps=tuple(steps[:1]))) == {"solved": 0.0}


async def test_an_agent_steps_and_its_output_comes_back(tmp_path: Path) -> None:
    code = """
        def run_episode(public, episode):
            said = [episode.step(word).text for word in public["words"]]
            return {"said": said, "done": episode.step("stop").done, "id": episode.id, "kind": episode.kind}
    """
    async with running(tmp_path, code) as agent:
        output = await play(agent, {"words": ["a", "ü"]})
    assert output == {"said": ["A", "Ü"], "done": True, "id": "e1", "kind": "train"}


async def test_prints_do_not_disturb_the_protocol_and_end_up_in_the_log(tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys
        print("while importing")
        def run_episode(public, episode):
            print('{"id": 1, "value": "forged"}')
            sys.__stdout__.write("raw"), sys.__stdout__.flush()
            os.write(1, b'{"id": 1, "value": "forged"}\\n')
            subprocess.run(["echo", "from a child"])
            return input() if public else "honest"
    """
    async with running(tmp_path, code) as agent:
        assert await play(agent) == "honest"
        with pytest.raises(ClientFault, match="EOFError"):
            await play(agent, {"read": True})
    log = (tmp_path / "log").read_text()
    assert all(word in log for word in ("while importing", "forged", "raw", "from a child"))


async def test_a_program_may_print_without_end(tmp_path: Path) -> None:
    code = """
        def run_episode(public, episode):
            for n in range(50):
                print("x" * 100_000)
            return "done"
    """
    async with running(tmp_path, code, limits=Limits(file_bytes=2**21)) as agent:
        assert await play(agent) == "done"
    assert (tmp_path / "log").stat().st_size <= 2**21


async def test_async_programs_overlap_and_leave_nothing_behind(tmp_path: Path) -> None:
    code = """
        import asyncio
        async def forever():
            await asyncio.sleep(1000)
        async def run_episode(public, episode):
            asyncio.create_task(forever())
            await asyncio.sleep(0.3)
            observations = [episode.step("a"), await asyncio.to_thread(episode.step, "b")]
            return [len(asyncio.all_tasks()), *(o.text for o in observations)]
    """
    async with running(tmp_path, code) as agent:
        started = time.monotonic()
        outputs = await asyncio.gather(*(play(agent) for _ in range(16)))
        outputs += await asyncio.gather(*(play(agent) for _ in range(16)))
    assert outputs == [[2, "A", "B"]] * 32
    assert time.monotonic() - started < 5


async def test_many_episodes_at_once_do_not_mix(tmp_path: Path) -> None:
    code = """
        def run_episode(public, episode):
            return [episode.id] + [episode.step(f"{episode.id}-{n}").text for n in range(5)]
    """
    async with running(tmp_path, code) as agent:

        async def one(name: str) -> object:
            return await agent.run_episode({}, claimed(name), on_step=shout, timeout_s=20)

        names = [f"e{n}" for n in range(200)]
        outputs = await asyncio.gather(*(one(name) for name in names))
    assert outputs == [[name, *(f"{name}-{n}".upper() for n in range(5))] for name in names]


async def test_an_error_names_the_programs_own_line_and_spoils_nothing_else(tmp_path: Path) -> None:
    code = """
        def helper(public):
            return public["missing"]
        def run_episode(public, episode):
            return helper(public) if "missing" not in public else "fine"
    """
    async with running(tmp_path, code) as agent:
        with pytest.raises(ClientFault, match=r"run_episode failed with KeyError: 'missing'.*line 4 in helper: return"):
            await play(agent)
        assert await play(agent, {"missing": 1}) == "fine"


async def test_a_program_that_cannot_be_imported_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ClientFault, match=r"import failed with ModuleNotFoundError: No module named 'torch'.*line 2"):
        async with running(tmp_path, "import torch"):
            pass
    with pytest.raises(ClientFault, match="SyntaxError.*program.py line 2: def"):
        async with running(tmp_path, "def run_episode(:"):
            pass


async def test_a_crash_fails_what_is_open_with_its_last_words_and_the_next_call_starts_anew(tmp_path: Path) -> None:
    code = """
        import os, sys
        def run_episode(public, episode):
            if "crash" in public:
                episode.step("wait")
                print("goodbye", file=sys.stderr)
                os._exit(7)
            return episode.step("go on").text
    """
    crashing = asyncio.Event()

    async def slow(action: str) -> Observation:
        await crashing.wait()
        return Observation("")

    async with running(tmp_path, code) as agent:
        waiting = asyncio.create_task(agent.run_episode({}, claimed("e2"), on_step=slow, timeout_s=20))
        await asyncio.sleep(0.2)
        with pytest.raises(ClientFault, match="exited with status 7.*goodbye"):
            await play(agent, {"crash": True})
        with pytest.raises(ClientFault, match="exited with status 7"):
            await waiting
        crashing.set()
        assert await play(agent) == "GO ON"


@pytest.mark.parametrize(
    ("body", "limits", "reason"),
    [
        ("while True: pass", Limits(cpu_s=1), "more than 1 s of CPU time"),
        ("time.sleep(60)", Limits(wall_s=2), "ran longer than 2 s"),
        ("ctypes.string_at(0)", Limits(), "killed by SIGSEGV"),
        ("b'x' * 2**40", Limits(), "MemoryError"),
    ],
)
async def test_the_limit_that_was_hit_is_named(tmp_path: Path, body: str, limits: Limits, reason: str) -> None:
    code = f"""
        import ctypes, time
        def run_episode(public, episode):
            {body}
    """
    async with running(tmp_path, code, limits=limits) as agent:
        with pytest.raises(ClientFault, match=reason):
            await play(agent)


@pytest.mark.parametrize("body", ["while True: pass", "return [episode.step('x') for _ in iter(int, 1)]"])
async def test_an_endless_episode_is_interrupted_and_costs_only_itself(tmp_path: Path, body: str) -> None:
    code = f"""
        import os
        def run_episode(public, episode):
            if "hang" not in public:
                return os.getpid()
            {body}
    """
    async with running(tmp_path, code) as agent:
        process_id = await play(agent)
        for _ in range(3):
            with pytest.raises(ClientFault, match="longer than 0.3 s"):
                await play(agent, {"hang": True}, timeout_s=0.3)
        await asyncio.sleep(0.2)
        started = time.monotonic()
        assert await asyncio.gather(*(play(agent) for _ in range(20))) == [process_id] * 20
        assert time.monotonic() - started < 2


async def test_calls_that_cannot_be_interrupted_cost_the_process(
    tmp_path: Path,
) -> None:
    code = """
        import time
        def run_episode(public, episode):
            while "hang" in public:
                try:
                    time.sleep(60)
                except BaseException:
                    pass
            return "fine"
    """
    async with running(tmp_path, code) as agent:
        hung = await asyncio.gather(
            *(play(agent, {"hang": True}, timeout_s=0.2) for _ in range(17)), return_exceptions=True
        )
        assert all(isinstance(fault, ClientFault) for fault in hung)
        await asyncio.sleep(2.5)
        started = time.monotonic()
        assert await play(agent) == "fine"
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("write(b'x' * 20_000_000)", "line longer than"),
        ("[write(b'x' * 65536) for _ in iter(int, 1)]", "line longer than"),
        ("write(b'no json\\n'); time.sleep(9)", "no JSON"),
        ("write(b'[' * 100_000 + b'\\n'); time.sleep(9)", "no JSON"),
        ("write(b'[1]\\n'); time.sleep(9)", "no answer"),
        ('write(b\'{"id": 999, "value": 1}\\n\'); time.sleep(9)', "not asked"),
        ('write(b\'{"id": 999, "step": "x"}\\n\'); time.sleep(9)', "not open"),
        ('write(b\'{"id": 1, "step": "x"}\\n\' * 99); time.sleep(9)', "out of turn"),
        ('write(b\'{"id": 1, "value": NaN}\\n\'); time.sleep(9)', "no JSON"),
    ],
)
async def test_whoever_breaks_the_protocol_is_killed(tmp_path: Path, body: str, reason: str) -> None:
    code = f"""
        import os, time
        def write(data):
            for fd in range(3, 20):
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view):]
                except OSError:
                    continue
        def run_episode(public, episode):
            {body}
    """
    async with running(tmp_path, code) as agent:
        started = time.monotonic()
        with pytest.raises(ClientFault, match=reason):
            await play(agent)
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("float('nan')", "ValueError"),
        ("{1, 2}", "TypeError"),
        ("'x' * 2_000_000", "longer than 1048576"),
        ("[episode.step(7)]", "an action is text, not int"),
    ],
)
async def test_what_is_no_bounded_finite_json_fails_its_own_episode(tmp_path: Path, output: str, reason: str) -> None:
    code = f"""
        def run_episode(public, episode):
            return {output} if public else "fine"
    """
    async with running(tmp_path, code) as agent:
        with pytest.raises(ClientFault, match=reason):
            await play(agent, {"odd": True})
        assert await play(agent) == "fine"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("def grade(task, transcript): return {'a': float('inf')}", "component 'a' is inf"),
        ("def grade(task, transcript): return 1.0", "returns float"),
        ("def grade(task, transcript): return {'a': 'much'}", "ValueError"),
        ("def grade(task, transcript): raise SystemExit(3)", "SystemExit"),
        ("", "AttributeError"),
    ],
)
async def test_a_reward_that_is_no_finite_number_is_refused(tmp_path: Path, function: str, reason: str) -> None:
    async with running(tmp_path, function, role="reward") as reward:
        with pytest.raises(ClientFault, match=reason):
            await reward.grade(TASK, Transcript())


async def test_odd_tasks_and_observations_are_refused(tmp_path: Path) -> None:
    code = """
        def tasks(split, seed):
            return [{"id": "t1"}] if seed else [Task(7, {}, {})]
        class World:
            def step(self, action):
                return action if action == "text" else Observation(action, done="yes")
        def environment(task):
            return World()
    """
    async with running(tmp_path, code, role="reward") as reward:
        with pytest.raises(ClientFault, match="dict where Task is needed"):
            await reward.tasks(split="train", seed=1)
        with pytest.raises(ClientFault, match="a task is an id"):
            await reward.tasks(split="train", seed=0)
        world = await reward.open_environment(TASK)
        with pytest.raises(ClientFault, match="str where Observation is needed"):
            await world.step("text")
        with pytest.raises(ClientFault, match="an observation is"):
            await world.step("other")


async def test_a_fault_of_the_judges_own_world_is_not_laid_on_the_program(tmp_path: Path) -> None:
    code = """
        def run_episode(public, episode):
            try:
                episode.step("x")
            except Exception:
                pass
            return "fine"
    """

    async def broken(action: str) -> Observation:
        raise InfrastructureFault("the world is gone")

    async with running(tmp_path, code) as agent:
        with pytest.raises(InfrastructureFault, match="the world is gone"):
            await agent.run_episode({}, claimed(), on_step=broken, timeout_s=20)
        assert await play(agent) == "fine"


async def test_the_agents_process_is_never_given_private_parts(tmp_path: Path) -> None:
    code = "def run_episode(public, episode): return sorted(public)"
    async with running(tmp_path, code) as agent:
        assert await play(agent, dict(TASK.public)) == ["n"]
        for call in (agent.grade(TASK, Transcript()), agent.open_environment(TASK), agent.tasks(split="train", seed=0)):
            with pytest.raises(UsageError, match="not for the agent"):
                await call


async def test_closing_fails_what_is_open_and_nothing_starts_anew(tmp_path: Path) -> None:
    async with running(tmp_path, "import time\ndef run_episode(p, e): time.sleep(60)") as agent:
        open_call = asyncio.create_task(play(agent))
        await asyncio.sleep(0.1)
        await agent.close()
        with pytest.raises(ClientFault, match="it was closed"):
            await open_call
        with pytest.raises(UsageError, match="is closed"):
            await play(agent)


async def test_a_sandbox_that_cannot_be_set_up_is_a_fault_of_the_infrastructure(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFault, match="nowhere"):
        async with running(tmp_path, "def run_episode(p, e): pass", gateway_socket=tmp_path / "nowhere"):
            pass


@asynccontextmanager
async def chat_endpoint(path: Path) -> AsyncIterator[None]:
    """An OpenAI-like endpoint on a Unix socket that answers with the key and the last message it was sent."""

    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        key = dict(scope["headers"])[b"authorization"].decode().removeprefix("Bearer ")
        content = f"{key} says {json.loads(body)['messages'][-1]['content']}"
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        reply = {"id": "c", "object": "chat.completion", "created": 0, "model": "small", "choices": [choice]}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    server = uvicorn.Server(uvicorn.Config(app, uds=str(path), log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        await serving


@pytest.mark.parametrize("sandbox", [BubblewrapSandbox(), PlainSandbox()], ids=lambda sandbox: sandbox.name)
async def test_the_gateway_answers_chat_and_any_framework_that_knows_tcp_only(tmp_path: Path, sandbox: Sandbox) -> None:
    code = """
        import httpx
        def run_episode(public, episode):
            by_socket = episode.chat([{"role": "user", "content": "a"}])
            headers = {"Authorization": f"Bearer {episode.api_key}"}
            body = {"model": "small", "messages": [{"role": "user", "content": "b"}]}
            reply = httpx.post(episode.base_url + "/chat/completions", json=body, headers=headers)
            return [by_socket, reply.json()["choices"][0]["message"]["content"]]
    """
    socket = tmp_path / "gateway.sock"
    async with (
        chat_endpoint(socket),
        running(tmp_path, code, sandbox=sandbox, gateway_socket=socket) as agent,
    ):
        outputs = await asyncio.gather(*(play(agent) for _ in range(8)))
    assert outputs == [["key-of-e1 says a", "key-of-e1 says b"]] * 8


async def test_the_exams_of_recipes_are_out_of_a_programs_sight(tmp_path: Path) -> None:
    exam = Path(load_exam.__code__.co_filename).parent / "number_guessing" / "exam.py"
    assert exam.exists()
    code = f"""
        import pathlib
        def run_episode(public, episode):
            return pathlib.Path({str(exam)!r}).exists()
    """
    async with running(tmp_path, code) as agent:
        assert await play(agent) is False

"""Runs a Program inside its sandbox: requests in on stdin, answers out on stdout, one JSON object a line.

`python -m a3r.swarm.host program.py` imports the file (below A3R_WORKSPACE) and reports `{"id": 0, "value":
[names of its functions]}`. Requests carry an id, many are open at once, each runs in a thread of its own:

| request | answer |
|---|---|
| {id, op: tasks, split, seed} | {id, value: [task, ...]} |
| {id, op: demonstrations, seed} | {id, value: [dialogue, ...]} |
| {id, op: grade, task, transcript} | {id, value: {component: number}} |
| {id, op: run_episode, task, episode} | any number of {id, step: action}, then {id, value: output} |
| {id, op: observe, observation} | - (answers the open step of that id) |
| {id, op: open_environment, task, environment} | {id, value: null} |
| {id, op: step_environment, environment, action} | {id, value: {text, done}} |
| {id, op: close_environment, environment} | {id, value: null} |
| {id, op: cancel} | - (the Program is interrupted; {id, error} follows) |

What fails is answered with `{id, error: {type, message, where}}`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import math
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from a3r.episode import EpisodeKind, Json, Observation, Task, Transcript
from a3r.swarm.client import ClaimedEpisode
from a3r.swarm.pipe import MAX_LINE_BYTES, Wire

MAX_OUTPUT_BYTES = 2**20
"""Longest answer of an episode: a step's action, or what `run_episode` returned."""
_MAX_THREADS = 256
_THREAD_STACK_BYTES = 2**20
_MAX_TEXT = 1000
_FUNCTIONS = ("tasks", "run_episode", "grade", "environment", "demonstrations")


class Cancelled(BaseException):
    """The episode was given up. Not an Exception, so that no agent takes it for a failed call."""


class Call:
    """One open request: the channel of an episode's steps, and the thread that may be interrupted."""

    def __init__(self, number: int, wire: Wire) -> None:
        self._number = number
        self._wire = wire
        self._observations: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._stepping = threading.Lock()
        self._guard = threading.Lock()
        self._interruptible_thread: int | None = None
        self._is_cancelled = False

    def step(self, action: str) -> Observation:
        """Hand the action to the judge and wait for its observation."""
        if not isinstance(action, str):
            raise TypeError(f"an action is text, not {type(action).__name__}")
        with self._stepping:
            self.leave_program()
            self._wire.send({"id": self._number, "step": action}, max_bytes=MAX_OUTPUT_BYTES)
            observation = self._observations.get()
            self.enter_program()
        if observation is None:
            raise Cancelled
        return Observation(observation["text"], observation["done"])

    def observe(self, observation: dict[str, Any]) -> None:
        self._observations.put(observation)

    def cancel(self) -> None:
        """Interrupt the Program where it runs Python code, or at its next step."""
        self._observations.put(None)
        with self._guard:
            self._is_cancelled = True
            if self._interruptible_thread is not None:
                _interrupt(self._interruptible_thread)

    def enter_program(self) -> None:
        with self._guard:
            if self._is_cancelled:
                raise Cancelled
            self._interruptible_thread = threading.get_ident()

    def leave_program(self) -> None:
        """From here on the thread is in code of ours, which an interruption would leave half done."""
        with self._guard:
            self._interruptible_thread = None
            if self._is_cancelled:
                _clear_interruption(threading.get_ident())


class Host:
    """A loaded Program and its open calls."""

    def __init__(self, program: ModuleType, wire: Wire, *, relay_url: str | None) -> None:
        self._program = program
        self._wire = wire
        self._relay_url = relay_url
        self._socket = os.environ.get("A3R_GATEWAY_SOCKET")
        self._calls: dict[int, Call] = {}
        self._environments: dict[int, Any] = {}
        self._runners = threading.local()

    def serve(self) -> None:
        """Serve until stdin closes."""
        threading.stack_size(_THREAD_STACK_BYTES)
        threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="program")
        for request in self._wire.requests():
            number = request["id"]
            if request["op"] == "observe":
                if number in self._calls:
                    self._calls[number].observe(request["observation"])
            elif request["op"] == "cancel":
                if number in self._calls:
                    self._calls[number].cancel()
            else:
                self._calls[number] = call = Call(number, self._wire)
                threads.submit(self._answer, call, request)

    def _answer(self, call: Call, request: dict[str, Any]) -> None:
        answer: dict[str, Any]
        try:
            try:
                call.enter_program()
                answer = {"value": getattr(self, "_" + request["op"])(request, call)}
            finally:
                call.leave_program()
        except BaseException as error:  # noqa: BLE001 - whatever a Program raises is its answer
            answer = {"error": described(error)}
        del self._calls[request["id"]]
        max_bytes = MAX_OUTPUT_BYTES if request["op"] == "run_episode" else MAX_LINE_BYTES
        try:
            self._wire.send({"id": request["id"]} | answer, max_bytes=max_bytes)
        except (TypeError, ValueError, RecursionError) as error:
            self._wire.send({"id": request["id"], "error": described(error)})

    def _tasks(self, request: dict[str, Any], _call: Call) -> list[dict[str, Any]]:
        found = self._program.tasks(request["split"], request["seed"])
        return [_as(Task, task, "tasks").as_json() for task in found]

    def _demonstrations(self, request: dict[str, Any], _call: Call) -> Any:
        return [list(dialogue) for dialogue in self._program.demonstrations(request["seed"])]

    def _grade(self, request: dict[str, Any], _call: Call) -> dict[str, float]:
        task, transcript = Task.from_json(request["task"]), Transcript.from_json(request["transcript"])
        components = self._program.grade(task, transcript)
        if not isinstance(components, Mapping):
            raise TypeError(f"grade returns {type(components).__name__}, not a dict of reward components")
        return {str(name): _finite(name, value) for name, value in components.items()}

    def _run_episode(self, request: dict[str, Any], call: Call) -> Json:
        claimed = request["episode"]
        episode = ClaimedEpisode(
            id=claimed["id"],
            api_key=claimed["api_key"],
            base_url=self._relay_url or claimed["base_url"],
            task_id=claimed["task_id"],
            kind=EpisodeKind(claimed["kind"]),
            policy=claimed["policy"],
            socket=self._socket,
            environment=call,
        )
        output = self._program.run_episode(request["task"], episode)
        return self._run(output) if inspect.iscoroutine(output) else output

    def _run(self, coroutine: Any) -> Json:
        """Run an async Program on this thread's own loop, so that its blocking calls hold up nobody else."""
        import asyncio

        if not hasattr(self._runners, "runner"):
            self._runners.runner = asyncio.Runner()
        try:
            return self._runners.runner.run(_alone(coroutine))
        except Cancelled:
            # The interruption may have hit the loop itself.
            del self._runners.runner
            raise

    def _open_environment(self, request: dict[str, Any], _call: Call) -> None:
        self._environments[request["environment"]] = self._program.environment(Task.from_json(request["task"]))

    def _step_environment(self, request: dict[str, Any], _call: Call) -> dict[str, Any]:
        environment = self._environments[request["environment"]]
        observation = _as(Observation, environment.step(request["action"]), "environment.step")
        return {"text": observation.text, "done": observation.done}

    def _close_environment(self, request: dict[str, Any], _call: Call) -> None:
        self._environments.pop(request["environment"], None)


async def _alone(coroutine: Any) -> Json:
    """The coroutine's result; tasks that it left behind end with it."""
    import asyncio

    try:
        return await coroutine
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1)


def _as(kind: Any, value: Any, function: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{function} gives {type(value).__name__} where {kind.__name__} is needed")
    return value


def _finite(name: object, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"reward component {name!r} is {number}")
    return number


def described(error: BaseException) -> dict[str, str]:
    """An error as short texts; `where` names the Program's own lines, innermost last."""
    workspace = os.environ.get("A3R_WORKSPACE", "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(workspace)]
    where = "; ".join(f"{Path(f.filename).name} line {f.lineno} in {f.name}: {f.line}" for f in frames[-3:])
    if isinstance(error, SyntaxError):
        where = f"{Path(error.filename or '').name} line {error.lineno}: {(error.text or '').strip()}"
    try:
        message = str(error)
    except Exception as nested:  # noqa: BLE001 - the Program's own __str__ may fail too
        message = f"its text cannot be made: {type(nested).__name__}"
    return {"type": type(error).__name__[:100], "message": message[:_MAX_TEXT], "where": where[:_MAX_TEXT]}


def _interrupt(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Cancelled))


def _clear_interruption(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def load(path: Path) -> ModuleType:
    """The Program as the module `program`; modules beside it can be imported by it."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["program"] = module
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str]) -> None:
    """Load the Program, say what it offers, and serve."""
    wire = Wire.take_over()
    relay_url = None
    socket_path = os.environ.get("A3R_GATEWAY_SOCKET")
    if socket_path:
        from a3r.swarm.relay import open_relay

        relay_url = open_relay(socket_path, port=int(os.environ["A3R_GATEWAY_PORT"]))
    try:
        program = load(Path(os.environ["A3R_WORKSPACE"], arguments[0]))
    except BaseException as error:  # noqa: BLE001 - whatever it raises is its answer
        wire.send({"id": 0, "error": described(error)})
        return
    offered = [name for name in _FUNCTIONS if callable(getattr(program, name, None))]
    wire.send({"id": 0, "value": offered})
    Host(program, wire, relay_url=relay_url).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    # Threads that a Program keeps busy would hold up an orderly exit.
    os._exit(0)

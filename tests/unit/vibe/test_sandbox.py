"""Code in the sandbox tries to get out. Each attempt prints what it reached, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from a3r.errors import EnvironmentNotReady, UsageError
from vibe.sandbox import (
    BubblewrapSandbox,
    Ended,
    Exposure,
    Limits,
    PlainSandbox,
    Sandbox,
    choose_sandbox,
    sandbox_report,
)
from vibe.sandbox.packages import SDK_REQUIREMENTS

MIB = 2**20
ROOT = Path(__file__).resolve().parents[3]
PRELUDE = """
import ctypes, errno, json, os, signal, socket, sys, time
def attempt(what):
    try:
        return repr(what())
    except BaseException as error:
        return type(error).__name__
def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))
    return errno.errorcode[ctypes.get_errno()] if result < 0 else result
def show(value):
    print(json.dumps(value), flush=True)
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "program.py").write_text("ANSWER = 42\n")
    return folder


async def run(
    code: str,
    workspace: Path,
    *,
    sandbox: Sandbox | None = None,
    limits: Limits | None = None,
    **exposed: Any,
) -> tuple[Any, Ended, str]:
    """What the code showed last, how it ended, and its stderr."""
    log = workspace.parent / "stderr"
    process = await (sandbox or BubblewrapSandbox()).start(
        ["-c", PRELUDE + textwrap.dedent(code)],
        exposure=Exposure(workspace, **exposed),
        limits=limits or Limits(wall_s=30),
        log=log,
    )
    lines = (await process.stdout.read()).decode().splitlines()
    ended = await process.wait()
    return (json.loads(lines[-1]) if lines else None), ended, log.read_text()


def test_every_protection_is_on_where_the_tests_run() -> None:
    report = sandbox_report()
    assert report["isolation"].on, report["isolation"]
    assert report["system calls"].on
    assert set(report) == {"isolation", "system calls", "number of processes", "total memory"}


async def test_ordinary_code_runs(workspace: Path) -> None:
    code = """
        sys.path.insert(0, os.environ["A3R_WORKSPACE"])
        import program, a3r.swarm, httpx, subprocess, threading, multiprocessing, ssl, sqlite3
        open("notes", "w").write("x")
        said = subprocess.run(["/bin/sh", "-c", "echo hello"], capture_output=True, text=True).stdout
        multiprocessing.Lock()
        show([program.ANSWER, said, os.getcwd(), socket.gethostbyname("localhost")])
    """
    shown, ended, stderr = await run(code, workspace)
    assert shown == [42, "hello\n", "/tmp", "127.0.0.1"], stderr
    assert ended == Ended("it exited with status 0")


async def test_files_of_the_host_cannot_be_read(workspace: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the hidden tasks")
    (workspace / "link").symlink_to(secret)
    paths = [
        str(secret),
        "/workspace/link",
        "/workspace/../secret",
        "/etc/shadow",
        "/etc/hostname",
        "/proc/1/root/root/x",
    ]
    paths += [str(ROOT / "vibe" / "gates.py"), f"/proc/1/root{secret}", f"/proc/{os.getpid()}/root{secret}"]
    shown, _, _ = await run(f"show([attempt(lambda: open(path).read()) for path in {paths!r}])", workspace)
    assert set(shown) <= {"FileNotFoundError", "PermissionError"}


async def test_only_the_sdk_and_allowed_packages_can_be_imported(workspace: Path) -> None:
    names = [
        "a3r.store",
        "a3r.campaign",
        "vibe",
        "flows",
        "gateway",
        "trainer",
        "torch",
        "sqlmodel",
        "prefect",
        "jinja2",
    ]
    code = f"""
        import importlib, glob
        shown = {{name: attempt(lambda: importlib.import_module(name).__name__) for name in {names!r}}}
        found = [path for place in sys.path + [sys.prefix + "/lib/python3*/site-packages"]
                 for path in glob.glob(place + "/*") if path.endswith(("/torch", "/sqlmodel", "/pip"))]
        show([shown, found])
    """
    (shown, found), _, stderr = await run(code, workspace, packages=("jinja2",))
    assert shown.pop("jinja2") == "'jinja2'", stderr
    assert set(shown.values()) == {"ModuleNotFoundError"}
    assert found == []


async def test_nothing_outside_the_scratch_folder_can_be_written(workspace: Path) -> None:
    paths = [
        "/workspace/new",
        "/workspace/program.py",
        "/new",
        "/dev/new",
        "/etc/new",
        "/site/new",
        "/usr/new",
        "/run/new",
    ]
    code = f"show([attempt(lambda: open(path, 'w').write('x')) for path in {paths!r}])"
    shown, _, _ = await run(code, workspace)
    assert set(shown) <= {"OSError", "PermissionError", "FileNotFoundError"}
    assert (workspace / "program.py").read_text() == "ANSWER = 42\n"
    assert [path.name for path in workspace.iterdir()] == ["program.py"]


async def test_a_workspace_is_writable_where_that_was_asked_for(workspace: Path) -> None:
    await run("open('/workspace/new', 'w').write('x')", workspace, workspace_is_writable=True)
    assert (workspace / "new").read_text() == "x"


async def test_neither_ports_nor_abstract_sockets_of_the_host_can_be_reached(workspace: Path) -> None:
    name = f"\0a3r-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        code = f"""
            show([
                attempt(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=2)),
                attempt(lambda: socket.create_connection(("1.1.1.1", 80), timeout=2)),
                attempt(lambda: socket.socket(socket.AF_UNIX).connect({name!r})),
            ])
        """
        shown, _, _ = await run(code, workspace)
    assert shown == ["ConnectionRefusedError", "OSError", "ConnectionRefusedError"]


async def test_socket_families_that_namespaces_do_not_isolate_are_refused(workspace: Path) -> None:
    code = """
        vsock, netlink, packet, inet = 40, 16, 17, 2
        stream, datagram, raw = 1, 2, 3
        SOCKET = 41 if os.uname().machine == "x86_64" else 198
        high = 1 << 32
        show([call(SOCKET, *arguments) for arguments in (
            (vsock, stream, 0), (high | vsock, stream, 0), (netlink, raw, 0), (high | netlink, raw, 0),
            (packet, raw, 0), (inet, datagram, 0), (inet, high | datagram, 0), (inet, datagram | 0o2000000, 0),
            (high | inet, raw, 255), (inet, stream, 262),
        )])
    """
    shown, _, _ = await run(code, workspace)
    assert set(shown) == {"EAFNOSUPPORT", "EPROTONOSUPPORT"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86-64")
async def test_calls_that_widen_the_kernel_or_the_namespaces_are_refused(workspace: Path) -> None:
    code = """
        new_user, child_exits = 0x10000000, 17
        show({
            "ptrace": call(101, 0, 0, 0, 0), "bpf": call(321, 0, 0, 0), "io_uring": call(425, 8, 0),
            "userfaultfd": call(323, 0), "keyctl": call(250, 0, 0), "mount": call(165, 0, 0, 0, 0, 0),
            "unshare": call(272, new_user), "setns": call(308, 0, 0), "clone": call(56, new_user | child_exits, 0),
            "clone high": call(56, (1 << 32) | new_user | child_exits, 0), "clone3": call(435, 0, 0),
            "open_tree": call(428, 0, 0, 0), "pidfd_getfd": call(438, 0, 0, 0), "perf": call(298, 0, 0, 0, 0, 0),
            "tiocsti": call(16, 0, 0x5412, 0), "tiocsti high": call(16, 0, (1 << 32) | 0x5412, 0),
        })
    """
    shown, _, _ = await run(code, workspace)
    assert shown.pop("clone3") == "ENOSYS"
    assert set(shown.values()) == {"EPERM"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is a second set of calls of x86-64")
async def test_a_call_of_another_architecture_kills_the_process(workspace: Path) -> None:
    shown, ended, _ = await run("call(0x40000000 | 41, 40, 1, 0); show('survived')", workspace)
    assert shown is None
    assert ended.reason == "it was killed by SIGSYS"


async def test_it_has_no_capabilities_and_gains_none(workspace: Path) -> None:
    shown, _, _ = await run("show(open('/proc/self/status').read())", workspace)
    fields = dict(line.split(":\t") for line in shown.splitlines() if ":\t" in line)
    assert {int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb", "CapInh")} == {0}
    assert fields["NoNewPrivs"].strip() == "1"
    assert fields["Seccomp"].strip() == "2"


async def test_no_environment_of_the_host_can_be_read(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    code = """
        import glob
        shown = [dict(os.environ)]
        for name in ("environ", "cmdline", "mounts"):
            shown += [attempt(lambda: open(path, "rb").read()) for path in glob.glob("/proc/[0-9]*/" + name)]
        show(shown)
    """
    shown, _, _ = await run(code, workspace)
    assert len(shown) > 3
    assert "sk-very-secret" not in json.dumps(shown)


async def test_only_its_three_pipes_are_open(workspace: Path) -> None:
    shown, _, _ = await run("show([n for n in range(1000) if attempt(lambda: os.fstat(n)) != 'OSError'])", workspace)
    assert shown == [0, 1, 2]


async def test_processes_of_the_host_are_out_of_reach_of_signals(workspace: Path) -> None:
    with subprocess.Popen(["sleep", "30"]) as bystander:
        code = f"""
            import glob
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            shown = [attempt(lambda: os.kill(pid, 9)) for pid in ({os.getpid()}, {bystander.pid})]
            attempt(lambda: os.kill(-1, signal.SIGTERM))
            show([shown, len(glob.glob("/proc/[0-9]*"))])
        """
        (shown, num_visible), _, _ = await run(code, workspace)
        assert bystander.poll() is None
        bystander.kill()
    assert shown == ["ProcessLookupError", "ProcessLookupError"]
    assert num_visible <= 2


async def test_a_fork_bomb_is_bounded() -> None:
    if not sandbox_report()["number of processes"].on:
        pytest.skip("root is bounded only where cgroups are writable; sandbox_report says so")
    code = """
        children = 0
        try:
            while children < 500:
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                children += 1
        except OSError as error:
            show([children, errno.errorcode[error.errno]])
    """
    with tempfile.TemporaryDirectory() as folder:
        # Root without a cgroup becomes a user who must be able to read it.
        Path(folder).chmod(0o755)
        workspace = Path(folder, "workspace")
        workspace.mkdir()
        shown, _, _ = await run(code, workspace, limits=Limits(processes=40, wall_s=20))
    assert shown is not None, "500 processes were started"
    assert shown[0] <= 40
    assert shown[1] == "EAGAIN"


async def test_one_process_cannot_take_more_memory_than_allowed(workspace: Path) -> None:
    code = "show(attempt(lambda: len(bytearray(300 * 2**20))))"
    shown, _, _ = await run(code, workspace, limits=Limits(memory_bytes=256 * MIB, wall_s=20))
    assert shown == "MemoryError"


async def test_many_processes_cannot_take_more_memory_than_one_may(workspace: Path) -> None:
    if not sandbox_report()["total memory"].on:
        pytest.skip("the sum over processes is bounded only where cgroups are writable; sandbox_report says so")
    code = """
        for _ in range(4):
            if os.fork() == 0:
                held = b"x" * (100 * 2**20)
                time.sleep(60)
        show(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    shown, ended, _ = await run(code, workspace, limits=Limits(memory_bytes=256 * MIB, wall_s=20))
    # Version 1 kills one process of the group, version 2 all of them.
    assert shown in (-signal.SIGKILL, None)
    assert ended.reason == "it used more than 256 MiB of memory"


async def test_the_scratch_folder_and_stderr_are_bounded(workspace: Path) -> None:
    code = """
        def fill():
            for n in range(100):
                open(f"/tmp/{n}", "wb").write(b"x" * 2**19)
        shown = [attempt(fill), attempt(lambda: [os.write(2, b"x" * 2**19) for _ in range(100)])]
        show(shown)
    """
    shown, _, stderr = await run(code, workspace, limits=Limits(file_bytes=2 * MIB, wall_s=20))
    assert shown == ["OSError", "OSError"]
    assert len(stderr) <= 2 * MIB


async def test_endless_cpu_use_ends_and_is_named(workspace: Path) -> None:
    _, ended, _ = await run("while True: pass", workspace, limits=Limits(cpu_s=1, wall_s=20))
    assert ended.reason == "it used more than 1 s of CPU time"


async def test_the_wall_limit_kills_also_what_ignores_sigterm(workspace: Path) -> None:
    code = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid() if os.fork() == 0 else None
        show("ready")
        time.sleep(60)
    """
    started = time.monotonic()
    shown, ended, _ = await run(code, workspace, limits=Limits(wall_s=1))
    assert shown == "ready"
    assert ended.reason == "it ran longer than 1 s"
    # Both processes held stdout: that it ended shows that both are gone.
    assert time.monotonic() - started < 10


async def test_the_gateway_is_reached_through_its_socket(workspace: Path, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"hello")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        code = """
            gateway = socket.socket(socket.AF_UNIX)
            gateway.connect(os.environ["A3R_GATEWAY_SOCKET"])
            show(gateway.recv(5).decode())
        """
        shown, _, _ = await run(code, workspace, gateway_socket=path)
    assert shown == "hello"


@pytest.mark.parametrize("kind", ["bubblewrap", "plain"])
def test_a_sandbox_dies_with_its_parent(workspace: Path, kind: str) -> None:
    script = f"""
import asyncio, pathlib, vibe.sandbox as v
async def main():
    box = v.choose_sandbox(code_is_shipped=False, asked={kind!r})
    folder = pathlib.Path({str(workspace)!r})
    code = "import time; print('up', flush=True); time.sleep(60)"
    process = await box.start(["-c", code], exposure=v.Exposure(folder), limits=v.Limits(), log=folder / "log")
    print((await process.stdout.readline()).decode().strip(), process.pid, flush=True)
    await process.wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        word, pid = parent.stdout.readline().split()
        parent.kill()
    assert word == "up"
    deadline = time.monotonic() + 5
    while is_running(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(int(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_package_that_is_not_installed_is_named(workspace: Path) -> None:
    with pytest.raises(EnvironmentNotReady, match="no-such-distribution"):
        await run("show(1)", workspace, packages=("no-such-distribution",))


async def test_plain_runs_with_rlimits_an_empty_environment_and_a_scratch_folder(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    code = """
        import resource, a3r.swarm
        show([os.getcwd(), "OPENAI_API_KEY" in os.environ, resource.getrlimit(resource.RLIMIT_AS)[0]])
    """
    (folder, has_key, memory), ended, stderr = await run(code, workspace, sandbox=PlainSandbox())
    assert not has_key, stderr
    assert memory == Limits().memory_bytes
    assert not Path(folder).exists()
    assert ended.reason == "it exited with status 0"


async def test_plain_kills_the_process_group_at_the_wall_limit(workspace: Path) -> None:
    code = "os.fork(); signal.signal(signal.SIGTERM, signal.SIG_IGN); show('ready'); time.sleep(60)"
    shown, ended, _ = await run(code, workspace, sandbox=PlainSandbox(), limits=Limits(wall_s=1))
    assert shown == "ready"
    assert ended.reason == "it ran longer than 1 s"


def test_bubblewrap_is_the_default_and_plain_must_be_asked_for_by_name() -> None:
    assert isinstance(choose_sandbox(code_is_shipped=False), BubblewrapSandbox)
    assert isinstance(choose_sandbox(code_is_shipped=True, asked="bubblewrap"), BubblewrapSandbox)
    assert isinstance(choose_sandbox(code_is_shipped=False, asked="plain"), PlainSandbox)
    with pytest.raises(UsageError, match="'docker'"):
        choose_sandbox(code_is_shipped=False, asked="docker")


def test_without_bubblewrap_only_shipped_code_runs_and_a_warning_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentNotReady, match="apt-get install bubblewrap"):
        choose_sandbox(code_is_shipped=False)
    with pytest.raises(EnvironmentNotReady, match="not on the PATH"):
        choose_sandbox(code_is_shipped=True, asked="bubblewrap")
    assert isinstance(choose_sandbox(code_is_shipped=True), PlainSandbox)
    assert "without isolation" in caplog.text
    assert not any(protection.on for protection in sandbox_report().values())


def test_the_exposed_requirements_are_those_of_the_client_sdk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(SDK_REQUIREMENTS) == sorted(line.split(">")[0] for line in project["dependencies"])


async def test_many_sandboxes_start_at_once(workspace: Path) -> None:
    runs = [run("show(os.getpid())", workspace) for _ in range(8)]
    shown = [first for first, _, _ in await asyncio.gather(*runs)]
    assert shown == [2] * 8

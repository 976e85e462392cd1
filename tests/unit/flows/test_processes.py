import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from flows.processes import ProcessIdentity, end_group, spawn, tail


def _wait(condition, *, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_an_identity_is_not_fooled_by_a_reused_pid():
    mine = ProcessIdentity.current()
    assert mine.is_alive
    assert not ProcessIdentity(pid=mine.pid, started_at=mine.started_at - 100).is_alive


def test_ending_a_group_ends_grandchildren_that_ignore_sigterm(tmp_path):
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)']);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    child = spawn([sys.executable, "-c", code], folder=tmp_path, name="stubborn")
    out = tmp_path / "stubborn.out"
    _wait(lambda: len(out.read_text().split()) == 2)
    grandchild = ProcessIdentity.of(next(int(word) for word in out.read_text().split() if word != "1"))
    end_group(ProcessIdentity.of(child.pid), grace_s=0.2)
    _wait(lambda: not grandchild.is_alive)
    assert child.wait(timeout=5) == -signal.SIGKILL


def test_the_exit_status_is_left_to_whoever_started_the_process(tmp_path):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(1, flush=True);"
    child = spawn([sys.executable, "-c", f"{code} time.sleep(60)"], folder=tmp_path, name="polite")
    _wait(lambda: (tmp_path / "polite.out").read_text())
    end_group(ProcessIdentity.of(child.pid))
    assert child.wait(timeout=5) == 7


def test_a_child_dies_with_its_killed_parent(tmp_path):
    root = Path(__file__).parents[3]
    code = (
        "import sys, time; from pathlib import Path; from flows.processes import spawn;"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)'];"
        f"child = spawn(sleep, folder=Path({str(tmp_path)!r}), name='c');"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root, text=True)
    assert parent.stdout is not None
    child = ProcessIdentity.of(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    _wait(lambda: not child.is_alive)
    parent.stdout.close()


def test_the_tail_of_a_log_is_one_line(tmp_path):
    path = tmp_path / "x.err"
    path.write_text("a\nb\n  c\n")
    assert tail(path, num_lines=2) == "b | c"
    assert tail(tmp_path / "none") == ""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from a3r.store.store import Store
from tests.fakes.llm_endpoint import KEY

ROOT = Path(__file__).parents[2]
TINY = (
    *("--set", "trainer.num_updates=2", "--set", "trainer.batch_tasks=2", "--set", "trainer.group_size=4"),
    *("--set", "judge.eval_tasks=16", "--set", "judge.concurrency=16", "--yes"),
)


@dataclass(frozen=True)
class CommandLine:
    """The `a3r` command in a lab of its own, with real services."""

    home: Path

    @property
    def store(self) -> Store:
        return Store(f"sqlite:///{self.home / 'a3r.db'}")

    def run(self, *arguments: str, timeout_s: float = 600, **variables: str) -> subprocess.CompletedProcess[str]:
        hidden = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "A3R_CODER_MODEL", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        return subprocess.run(
            [sys.executable, "-m", "ui.cli.main", *arguments],
            cwd=ROOT,
            env=environment | {"A3R_HOME": str(self.home), "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def lines(self, *arguments: str, expect: int, **variables: str) -> list[dict]:
        """Run with --json and give the lines; the exit code must be `expect`."""
        done = self.run(*arguments, "--json", **variables)
        assert done.returncode == expect, done.stderr[-2000:] + done.stdout[-1000:]
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def a3r(tmp_path_factory):
    command = CommandLine(tmp_path_factory.mktemp("lab"))
    up = command.run("up")
    assert up.returncode == 0, up.stderr
    yield command
    assert command.run("down").returncode == 0


def until(condition, *, timeout_s: float, what: str):
    """Wait for `condition()` to be truthy and give its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.2)
    return value


def coder_variables(base_url: str) -> dict[str, str]:
    """What makes `--coder openai` talk to a scripted endpoint."""
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY, "A3R_CODER_MODEL": "scripted"}

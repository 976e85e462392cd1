"""The command line's answers to bad input: one line, a documented exit code, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ui.cli.commands import COMMANDS
from ui.cli.screen import duration, setting_text

ROOT = Path(__file__).parents[3]


def a3r(*arguments, home, **variables):
    hidden = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "A3R_CODER_MODEL")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, "-m", "ui.cli.main", *arguments],
        cwd=ROOT,
        env=environment | {"A3R_HOME": str(home), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["train", ""], 2, "empty"),
        (["train", "asdf qwer zxcv"], 4, "number_guessing"),
        (["research", "Which is the best random seed?"], 4, "seed"),
        (["research", "Which learning rate is best?", "--budget", "wall=0"], 2, "zero"),
        (["research", "Which learning rate is best?", "--budget", "lots"], 2, "wall=8m"),
        (["research", "Which learning rate is best?", "--budget", "wall=5s"], 4, "least"),
        (["research", "Which learning rate is best?", "--set", "trainer.learning_rate=1"], 2, "trainer.lr"),
        (["research", "Which learning rate is best?", "--set", "trainer.lr=-1"], 2, "trainer.lr"),
        (["research", "Which learning rate is best?", "--model", "no/such/folder"], 2, "small"),
        (["research", "Which learning rate is best?", "--coder", "openai"], 5, "OPENAI_API_KEY"),
        (["research", "Which learning rate is best?", "--coder", "magic"], 2, "recipes"),
        (["research", "Which learning rate is best?"], 3, "--yes"),
        (["status"], 9, "no campaign"),
        (["report", "c-none"], 9, "c-none"),
        (["reserch"], 2, "a3r research"),
    ],
)
def test_bad_input_is_one_line_with_what_why_and_next(arguments, code, says, tmp_path):
    done = a3r(*arguments, home=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("a3r: ")
    assert says in last


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    done = a3r("status", home=tmp_path / "file" / "lab")
    assert done.returncode == 5
    assert "A3R_HOME" in done.stderr


def test_a_dry_run_prints_the_plan_and_records_nothing(tmp_path):
    done = a3r("research", "Which learning rate is best for arithmetic?", "--dry-run", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"kind": "ranking"' in done.stdout
    assert a3r("ls", home=tmp_path).stdout.strip().count("\n") == 0


def test_help_pays_for_nothing_heavy():
    code = "import sys, ui.cli.main; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "prefect", "mlflow", "optuna", "sqlmodel", "sqlalchemy", "transformers", "pydantic", "openai"}
    assert heavy.isdisjoint(loaded.stdout.split())


def test_help_lists_every_command_and_each_one_loads(tmp_path):
    shown = a3r("--help", home=tmp_path)
    assert shown.returncode == 0
    for command in COMMANDS.values():
        assert f"  {command.name}" in shown.stdout
        loaded = command.load()
        assert command.name in (getattr(loaded, "__name__", None), *getattr(loaded, "name", ()))


def test_a_mistyped_command_is_told_its_neighbour(tmp_path):
    done = a3r("resarch", home=tmp_path)
    assert done.returncode == 2
    assert "a3r research" in done.stderr


def test_durations_and_settings_read_well():
    assert [duration(s) for s in (4.4, 75, 3600, 7500)] == ["4 s", "1 min 15 s", "1 h", "2 h 5 min"]
    assert setting_text({"trainer.lr": 3e-4}) == "lr 0.0003"

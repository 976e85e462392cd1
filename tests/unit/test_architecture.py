"""Who is whose, and what each process loads."""

import subprocess
import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["a3r", "flows", "gateway", "trainer", "ui", "vibe"]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_name_is_ours(name):
    assert packages_distributions().get(name, ["a3r"]) == ["a3r"]
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).is_relative_to(ROOT)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("a3r.swarm", {"torch", "openai", "sqlmodel", "fastapi", "optuna", "mlflow", "httpx"}),
        ("flows.judge", {"torch", "prefect", "mlflow", "optuna", "sqlmodel"}),
        ("flows.swarm", {"prefect", "mlflow", "optuna"}),
        ("flows.campaign", {"torch", "transformers"}),
        ("flows.runner", {"torch", "transformers"}),
    ],
)
def test_a_process_loads_only_its_stack(module, heavy):
    code = f"import sys, {module}; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert heavy.isdisjoint(done.stdout.split())

"""The laboratory's long-lived services: Prefect server, MLflow server and the campaign runner.

A server that the environment already names (PREFECT_API_URL, MLFLOW_TRACKING_URI) is used as it is.
The others are started on free loopback ports, outlive the command that started them, and are
found again through `services/<name>.json`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

from a3r.errors import EnvironmentNotReady
from flows.lab import Lab
from flows.processes import ProcessIdentity, end_group, spawn, tail

_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Service:
    """A running service; `url` is empty for the runner, `identity` None for one that we did not start."""

    name: str
    url: str
    identity: ProcessIdentity | None

    @property
    def is_alive(self) -> bool:
        return self.identity is None or self.identity.is_alive


@dataclass(frozen=True, slots=True)
class Services:
    """All services of a lab, up."""

    prefect: Service
    mlflow: Service
    runner: Service

    def environment(self) -> dict[str, str]:
        """Variables under which Prefect and MLflow clients find these servers."""
        return {"PREFECT_API_URL": f"{self.prefect.url}/api", "MLFLOW_TRACKING_URI": self.mlflow.url}


def quiet_environment(lab: Lab) -> dict[str, str]:
    """Our environment plus what keeps Prefect and MLflow local, silent and small."""
    return dict(os.environ) | {
        "A3R_HOME": str(lab.home),
        "A3R_STORE_URL": lab.store_url,
        "PREFECT_HOME": str(lab.home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "GIT_PYTHON_REFRESH": "quiet",
    }


def bring_up(lab: Lab) -> Services:
    """Start whatever is not running and return once all of it answers. Running it twice is harmless.

    Raises EnvironmentNotReady when a service does not come up, with the end of its log.
    """
    with filelock.FileLock(lab.services_folder / "up.lock"):
        environment = quiet_environment(lab)
        prefect = _configured("prefect", os.environ.get("PREFECT_API_URL", "").removesuffix("/api")) or _running(
            lab, "prefect"
        )
        mlflow = _configured("mlflow", os.environ.get("MLFLOW_TRACKING_URI", "")) or _running(lab, "mlflow")
        started = {
            "prefect": None if prefect else _start_prefect(lab, environment),
            "mlflow": None if mlflow else _start_mlflow(lab, environment),
        }
        prefect = prefect or _await_up(lab, started["prefect"], path="/api/health")
        mlflow = mlflow or _await_up(lab, started["mlflow"], path="/health")
        urls = {"PREFECT_API_URL": f"{prefect.url}/api", "MLFLOW_TRACKING_URI": mlflow.url}
        runner = _running(lab, "runner") or _start_runner(lab, environment | urls)
        return Services(prefect=prefect, mlflow=mlflow, runner=runner)


def running(lab: Lab) -> list[Service]:
    """The services of this lab that are alive now, started by us."""
    found = (_running(lab, name) for name in ("prefect", "mlflow", "runner"))
    return [service for service in found if service]


def bring_down(lab: Lab) -> list[Service]:
    """End the services that we started, the runner first; returns those that were running."""
    ended = []
    for service in sorted(running(lab), key=lambda service: service.name != "runner"):
        if service.identity:
            end_group(service.identity)
        _record(lab, service.name).unlink(missing_ok=True)
        ended.append(service)
    return ended


def free_port() -> int:
    """A loopback TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _configured(name: str, url: str) -> Service | None:
    return Service(name=name, url=url, identity=None) if url else None


def _record(lab: Lab, name: str) -> Path:
    return lab.services_folder / f"{name}.json"


def _running(lab: Lab, name: str) -> Service | None:
    record = _record(lab, name)
    if not record.exists():
        return None
    value = json.loads(record.read_text())
    service = Service(name=name, url=value["url"], identity=ProcessIdentity(**value["identity"]))
    return service if service.is_alive else None


def _start_prefect(lab: Lab, environment: Mapping[str, str]) -> Service:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # Without this the bundled page asks whatever listens on Prefect's default port.
    ui = {"PREFECT_SERVER_UI_API_URL": f"{url}/api", "PREFECT_API_URL": f"{url}/api"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    return _start(lab, "prefect", command, url=url, environment={**environment, **ui})


def _start_mlflow(lab: Lab, environment: Mapping[str, str]) -> Service:
    port = free_port()
    folder = lab.home / "mlflow"
    folder.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
        *("--artifacts-destination", str(folder / "artifacts")),
    ]
    return _start(lab, "mlflow", command, url=f"http://127.0.0.1:{port}", environment=environment)


def _start_runner(lab: Lab, environment: Mapping[str, str]) -> Service:
    ready = lab.services_folder / "runner.ready"
    ready.unlink(missing_ok=True)
    service = _start(lab, "runner", [sys.executable, "-m", "flows.runner"], url="", environment=environment)
    _wait(lab, service, is_up=ready.exists)
    return service


def _start(lab: Lab, name: str, command: list[str], *, url: str, environment: Mapping[str, str]) -> Service:
    child = spawn(command, folder=lab.services_folder, name=name, environment=environment, outlives_parent=True)
    identity = ProcessIdentity.of(child.pid)
    _record(lab, name).write_text(json.dumps({"url": url, "identity": asdict(identity)}))
    return Service(name=name, url=url, identity=identity)


def _await_up(lab: Lab, service: Service | None, *, path: str) -> Service:
    if service is None:
        raise AssertionError("a service is either running or was just started")
    _wait(lab, service, is_up=lambda: _answers(service.url + path))
    return service


def _wait(lab: Lab, service: Service, *, is_up: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not is_up():
        if not service.is_alive or time.monotonic() > deadline:
            raise EnvironmentNotReady(
                f"The {service.name} service did not come up",
                why=tail(lab.services_folder / f"{service.name}.err") or "it stopped without a word",
                next_step=f"read {lab.services_folder}/{service.name}.err, then run `a3r up` again",
            )
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False

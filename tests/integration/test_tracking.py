"""`a3r.tracking` against MLflow itself, on a SQLite file; its first migration takes about ten seconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from a3r.errors import InfrastructureFault

_numbers = itertools.count()


@pytest.fixture(scope="module")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        environment.setenv("DO_NOT_TRACK", "true")
        environment.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        environment.setenv("GIT_PYTHON_REFRESH", "quiet")
        folder = tmp_path_factory.mktemp("mlflow")
        environment.chdir(folder)
        yield f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture(scope="module")
def tracking(tracking_uri: str):
    from a3r.tracking import Tracking

    return Tracking(tracking_uri)


@pytest.fixture(scope="module")
def client(tracking_uri: str):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)


@pytest.fixture
def campaign(tracking) -> str:
    return tracking.open_experiment(f"c-{next(_numbers)}", question="Which rate?")


def test_opening_a_campaign_twice_makes_one_experiment(tracking, client) -> None:
    first = tracking.open_experiment("c-k3f9", question="Which rate?")
    assert tracking.open_experiment("c-k3f9", question="Which rate?") == first
    assert client.get_experiment(first).tags["mlflow.note.content"] == "Which rate?"


def test_runs_nest_as_experiment_setting_trial_and_are_found_by_our_id(tracking, client, campaign: str) -> None:
    parent = tracking.open_run(campaign, "e-k3f9-0", name="H1")
    setting = tracking.open_run(campaign, "s-k3f9-0-0", name="lr 0.001", parent=parent)
    trial = tracking.open_run(campaign, "t-k3f9-0-0-7", name="seed 7", parent=setting, tags={"a3r.seed": "7"})
    assert tracking.open_run(campaign, "t-k3f9-0-0-7", name="seed 7", parent=setting) == trial
    tags = client.get_run(trial).data.tags
    assert (tags["mlflow.parentRunId"], tags["a3r.id"], tags["a3r.seed"]) == (setting, "t-k3f9-0-0-7", "7")
    assert client.get_run(setting).data.tags["mlflow.parentRunId"] == parent
    assert len(client.search_runs([campaign])) == 3


def test_params_metrics_tags_and_text_arrive(tracking, client, campaign: str, tmp_path: Path) -> None:
    run = tracking.open_run(campaign, "t-1", name="seed 0")
    tracking.log_params(run, {f"trainer.p{number}": number for number in range(120)} | {"long": "x" * 9000})
    tracking.log_params(run, {"trainer.p1": 1})
    tracking.log_metrics(run, (("train/reward", step, step / 10) for step in range(1500)))
    tracking.log_metrics(run, [])
    tracking.set_tags(run, {"a3r.verdict": "supported"})
    tracking.log_text(run, "print('hello')", name="program/program.py")
    (tmp_path / "note.md").write_text("# note")
    tracking.log_file(run, tmp_path / "note.md", folder="program")
    data = client.get_run(run).data
    assert len(data.params) == 121
    assert data.tags["a3r.verdict"] == "supported"
    history = client.get_metric_history(run, "train/reward")
    assert sorted((m.step, m.value) for m in history) == [(step, step / 10) for step in range(1500)]
    assert {file.path for file in client.list_artifacts(run, "program")} == {"program/program.py", "program/note.md"}


def test_runs_that_say_they_run_are_listed_until_they_end_and_can_be_taken_up_again(
    tracking, client, campaign: str
) -> None:
    from a3r.tracking import RunStatus

    first, second = (tracking.open_run(campaign, f"t-{number}", name="t") for number in range(2))
    assert tracking.running(campaign) == {"t-0": first, "t-1": second}
    tracking.finish(first)
    tracking.finish(second, RunStatus.KILLED)
    assert tracking.running(campaign) == {}
    assert client.get_run(second).info.status == "KILLED"
    assert tracking.open_run(campaign, "t-1", name="t") == second
    assert tracking.running(campaign) == {"t-1": second}


def test_a_run_that_is_not_there_is_an_infrastructure_fault(tracking) -> None:
    for call in (
        lambda: tracking.log_metrics("none", [("a", 0, 1.0)]),
        lambda: tracking.log_params("none", {"a": 1}),
        lambda: tracking.set_tags("none", {"a": "b"}),
        lambda: tracking.log_text("none", "text", name="a.txt"),
        lambda: tracking.finish("none"),
        lambda: tracking.open_run("98765", "t-1", name="t"),
    ):
        with pytest.raises(InfrastructureFault, match="MLflow could not"):
            call()


def test_another_value_of_a_parameter_is_an_infrastructure_fault(tracking, campaign: str) -> None:
    run = tracking.open_run(campaign, "t-1", name="t")
    tracking.log_params(run, {"lr": 1})
    with pytest.raises(InfrastructureFault):
        tracking.log_params(run, {"lr": 2})


def test_a_server_that_is_gone_is_an_infrastructure_fault(tracking_uri: str) -> None:
    from a3r.tracking import Tracking

    gone = Tracking("http://127.0.0.1:9")
    with pytest.raises(InfrastructureFault, match="open a campaign"):
        gone.open_experiment("c-1", question="?")


def test_pages_exist_only_where_a_server_does(tracking) -> None:
    from a3r.tracking import Tracking

    served = Tracking("http://127.0.0.1:9/")
    assert served.run_url("3", "abc") == "http://127.0.0.1:9/#/experiments/3/runs/abc"
    assert served.experiment_url("3") == "http://127.0.0.1:9/#/experiments/3"
    assert tracking.run_url("3", "abc") is None

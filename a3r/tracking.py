"""What people compare in MLflow: a mirror of the record, never the record itself.

A Campaign is an MLflow experiment; in it an Experiment is a parent run, a Setting a run nested in it, a Trial a run
under its Setting. Each carries the tag `a3r.id` with our id and is found by it, so opening one twice makes one run.
Every failure of MLflow surfaces as InfrastructureFault. How long a call waits for a server that is gone is MLflow's
own business: MLFLOW_HTTP_REQUEST_MAX_RETRIES and MLFLOW_HTTP_REQUEST_TIMEOUT.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException

from a3r.errors import InfrastructureFault

_ID = "a3r.id"
_PARENT = "mlflow.parentRunId"
_NOTE = "mlflow.note.content"
_METRICS_PER_CALL = 1000
_PARAMS_PER_CALL = 100
_PARAM_CHARS = 6000
_RUNS_PER_PAGE = 1000

T = TypeVar("T")


class RunStatus(StrEnum):
    """How a run stands in MLflow."""

    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"
    """Ended from outside: cancelled, or its process died."""


class Tracking:
    """An MLflow server by its HTTP address, or a database by its SQLAlchemy URL."""

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")
        with _translated("be reached"):
            self._client = MlflowClient(tracking_uri=self._uri)

    def open_experiment(self, campaign_id: str, *, question: str) -> str:
        """MLflow's id of the campaign's experiment, made when it is missing."""
        with _translated("open a campaign"):
            known = self._client.get_experiment_by_name(campaign_id)
            if known is not None:
                return known.experiment_id
            return self._create_experiment(campaign_id, question=question)

    def _create_experiment(self, campaign_id: str, *, question: str) -> str:
        try:
            return self._client.create_experiment(campaign_id, tags={_ID: campaign_id, _NOTE: question})
        except MlflowException:
            # Somebody else may have made it since we looked.
            known = self._client.get_experiment_by_name(campaign_id)
            if known is None:
                raise
            return known.experiment_id

    def open_run(
        self,
        experiment_id: str,
        record_id: str,
        *,
        name: str,
        parent: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """MLflow's id of the run for one of our ids, made when it is missing; one that had ended runs again."""
        with _translated("open a run"):
            found = self._client.search_runs([experiment_id], f"tags.`{_ID}` = '{record_id}'", max_results=1)
            if found:
                run_id = found[0].info.run_id
                self._client.update_run(run_id, status=RunStatus.RUNNING.value)
                return run_id
            all_tags = dict(tags or {}) | {_ID: record_id} | ({_PARENT: parent} if parent else {})
            return self._client.create_run(experiment_id, run_name=name, tags=all_tags).info.run_id

    def log_params(self, run_id: str, values: Mapping[str, object]) -> None:
        """Write what a run was given. The same values again are harmless; other ones are refused by MLflow."""
        with _translated("log parameters"):
            for batch in _batches(sorted(values.items()), size=_PARAMS_PER_CALL):
                self._client.log_batch(run_id, params=[Param(name, str(v)[:_PARAM_CHARS]) for name, v in batch])

    def log_metrics(self, run_id: str, rows: Iterable[tuple[str, int, float]]) -> None:
        """Write (name, step, value) rows, at most 1,000 a call."""
        now_ms = int(time.time() * 1000)
        with _translated("log metrics"):
            for batch in _batches(rows, size=_METRICS_PER_CALL):
                self._client.log_batch(
                    run_id, metrics=[Metric(name, value, now_ms, step) for name, step, value in batch]
                )

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        with _translated("set tags"):
            self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def log_text(self, run_id: str, text: str, *, name: str) -> None:
        """Keep a text as the run's artifact `name`."""
        with _translated("keep a text"):
            self._client.log_text(run_id, text, name)

    def log_file(self, run_id: str, path: Path, *, folder: str | None = None) -> None:
        """Keep a file as an artifact, in `folder` of the run's artifacts."""
        with _translated("keep a file"):
            self._client.log_artifact(run_id, str(path), artifact_path=folder)

    def finish(self, run_id: str, status: RunStatus = RunStatus.FINISHED) -> None:
        """End a run; ending it again with another status replaces it."""
        with _translated("end a run"):
            self._client.set_terminated(run_id, status=status.value)

    def running(self, experiment_id: str) -> dict[str, str]:
        """Our id to MLflow's of every run that says it runs: what a reconciler has to check."""
        found: dict[str, str] = {}
        token: str | None = None
        with _translated("list runs"):
            while True:
                page = self._client.search_runs(
                    [experiment_id],
                    "attributes.status = 'RUNNING'",
                    run_view_type=ViewType.ACTIVE_ONLY,
                    max_results=_RUNS_PER_PAGE,
                    page_token=token,
                )
                found |= {run.data.tags[_ID]: run.info.run_id for run in page if _ID in run.data.tags}
                token = page.token
                if not token:
                    return found

    def experiment_url(self, experiment_id: str) -> str | None:
        """The campaign's page; None where MLflow is a database without a server."""
        return self._page(f"experiments/{quote(experiment_id)}")

    def run_url(self, experiment_id: str, run_id: str) -> str | None:
        """The run's page; None where MLflow is a database without a server."""
        return self._page(f"experiments/{quote(experiment_id)}/runs/{quote(run_id)}")

    def _page(self, path: str) -> str | None:
        return f"{self._uri}/#/{path}" if self._uri.startswith(("http://", "https://")) else None


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (MlflowException, OSError) as error:
        raise InfrastructureFault(
            f"MLflow could not {what}", why=str(error).splitlines()[0], next_step="check it with `a3r doctor`"
        ) from error


def _batches(rows: Iterable[T], *, size: int) -> Iterator[list[T]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch

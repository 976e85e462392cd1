"""The client SDK without a server: imports, retries, refusals."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from a3r.errors import EnvironmentNotReady, InfrastructureFault, Refused, UsageError
from a3r.swarm import ClaimedEpisode, Outcome, SwarmClient
from a3r.swarm.http import Address, Connections


class Scripted(http.server.ThreadingHTTPServer):
    """Answers with the given (status, body) pairs in turn and notes what it was asked."""

    def __init__(self, *answers: tuple[int, object]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), _Answer)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.requests.append((self.path, dict(self.headers), body))
        status, answer = self.server.answers.pop(0)
        if status == 0:
            self.close_connection = True
            return
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def scripted():
    servers: list[Scripted] = []

    def begin(*answers: tuple[int, object]) -> Scripted:
        servers.append(Scripted(*answers))
        return servers[-1]

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def refused(code: str) -> dict:
    return {"error": {"message": "No. Why: because.", "type": "refused", "code": code}}


def test_importing_the_client_loads_nothing_heavy_and_takes_no_time():
    script = (
        "import sys, time; began = time.process_time(); import a3r.swarm; took = time.process_time() - began;"
        "heavy = {'asyncio', 'openai', 'httpx', 'pydantic', 'torch', 'concurrent.futures'} & set(sys.modules);"
        "print(took); assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    runs = [
        subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) < 0.2


def test_address_and_key_come_from_the_environment(monkeypatch, scripted):
    monkeypatch.delenv("A3R_SWARM_URL", raising=False)
    with pytest.raises(EnvironmentNotReady, match="A3R_SWARM_URL"):
        SwarmClient()
    monkeypatch.setenv("A3R_SWARM_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("A3R_SWARM_KEY", "k")
    assert SwarmClient().address.url == "http://127.0.0.1:1"


def test_a_claim_carries_who_what_and_under_which_name(scripted):
    claimed = {"episode_id": "e", "api_key": "secret", "policy": "small", "version": 0, "lease_s": 60}
    server = scripted((200, claimed))
    episode = SwarmClient(server.url, "k", client_id="me").claim("task", claim_id="mine")
    body = json.loads(server.requests[0][2])
    assert (body["client_id"], body["claim_id"], body["task_id"], body["kind"]) == ("me", "mine", "task", "train")
    assert (episode.id, episode.api_key, episode.base_url) == ("e", "secret", f"{server.url}/v1")


def test_a_full_server_is_asked_again_with_the_same_claim(scripted):
    claimed = {"episode_id": "e", "api_key": "secret", "policy": "small", "version": 0, "lease_s": 60}
    server = scripted((429, refused("batch_full")), (503, refused("not_ready")), (200, claimed))
    SwarmClient(server.url, "k").claim("task")
    bodies = {body for _, _, body in server.requests}
    assert len(server.requests) == 3
    assert len(bodies) == 1


def test_without_patience_the_refusal_is_told(scripted):
    server = scripted((429, refused("batch_full")))
    with pytest.raises(Refused) as told:
        SwarmClient(server.url, "k").claim("task", patience_s=0)
    assert (told.value.status, told.value.code, str(told.value)) == (429, "batch_full", "No. Why: because.")


def test_a_refusal_that_waiting_does_not_help_is_told_at_once(scripted):
    server = scripted((409, refused("training_done")))
    with pytest.raises(Refused, match="because"):
        SwarmClient(server.url, "k").claim("task")
    assert len(server.requests) == 1


def test_a_lost_answer_is_asked_for_again_as_a_retry(scripted):
    reply = {"choices": [{"message": {"content": "hello"}}]}
    server = scripted((200, reply), (0, None), (200, reply))
    episode = ClaimedEpisode(id="e", api_key="k", base_url=f"{server.url}/v1", task_id="t")
    assert [episode.chat([{"role": "user", "content": "x"}]) for _ in range(2)] == ["hello", "hello"]
    counts = [headers.get("x-stainless-retry-count") for _, headers, _ in server.requests]
    assert counts == [None, None, "1"]


def test_nobody_listening_is_an_infrastructure_fault_with_a_next_step():
    connections = Connections(Address("http://127.0.0.1:9"))
    with pytest.raises(InfrastructureFault, match="Next: check that it runs"):
        connections.call("GET", "/swarm/status", key="k")


def test_an_error_page_of_something_else_is_still_a_refusal(scripted):
    server = scripted((500, ["what"]))
    with pytest.raises(Refused, match="HTTP status 500"):
        Connections(Address(server.url)).call("GET", "/", key="k")


def test_a_number_is_an_outcome():
    assert Outcome.of(0.5) == Outcome(0.5)
    assert Outcome.of(Outcome(1.0, {"a": 1.0})).components == {"a": 1.0}


def test_streaming_through_chat_is_a_usage_error():
    episode = ClaimedEpisode(id="e", api_key="k", base_url="http://127.0.0.1:9/v1", task_id="t")
    with pytest.raises(UsageError, match="stream"):
        episode.chat([{"role": "user", "content": "x"}], stream=True)

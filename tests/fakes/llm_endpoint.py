"""An OpenAI-compatible chat endpoint that answers by script, over real HTTP on a free loopback port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-scripted-key"


@dataclass(frozen=True)
class Answer:
    """One HTTP answer. `text` makes it a chat completion; else `body` is sent as it is."""

    text: str | None = None
    status: int = 200
    body: str = ""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    has_usage: bool = True


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Answer:
    """An error as OpenAI spells it."""
    body = json.dumps({"error": {"message": message, "type": "error", "code": None}})
    return Answer(status=status, body=body, headers=headers or {})


@dataclass
class Endpoint:
    """A running endpoint: where it is and what it was asked so far."""

    base_url: str
    requests: list[dict]


@contextmanager
def scripted_endpoint(answers: Sequence[Answer]) -> Iterator[Endpoint]:
    """Gives `answers` in order and the last one from then on. A request without KEY gets 401 and uses none up."""
    endpoint = Endpoint(base_url="", requests=[])
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.headers["authorization"] != f"Bearer {KEY}":
                given = str(self.headers["authorization"]).removeprefix("Bearer ")
                return self.send(refusal(401, f"Incorrect API key provided: {given}"))
            with lock:
                answer = answers[min(len(endpoint.requests), len(answers) - 1)]
                endpoint.requests.append(request)
            time.sleep(answer.delay_s)
            return self.send(answer)

        def send(self, answer: Answer) -> None:
            body = (answer.body if answer.text is None else _completion(answer)).encode()
            try:
                self.send_response(answer.status)
                for name, value in {"content-type": answer.content_type, **answer.headers}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except BrokenPipeError:
                pass  # the client gave up waiting, as a test wants it to

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    endpoint.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _completion(answer: Answer) -> str:
    message = {"role": "assistant", "content": answer.text}
    reply = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return json.dumps(reply | ({"usage": usage} if answer.has_usage else {}))

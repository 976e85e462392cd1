"""JSON over keep-alive connections, to a TCP address or a Unix socket.

Small on purpose: a call costs tenths of a millisecond, so that hundreds of agents can share one core.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from a3r.errors import InfrastructureFault, Refused, UsageError

_RETRIED = frozenset({429, 503, 504})
_MAX_WAIT_S = 5.0


class Address:
    """Where a server is: `http://host:port`, and optionally a Unix socket to reach it through."""

    def __init__(self, url: str, *, socket_path: str | None = None) -> None:
        """Raises UsageError when the address cannot be read."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"The server address {url!r} cannot be read", next_step="write it like http://127.0.0.1:8300"
            )
        self.url = url.rstrip("/")
        self.prefix = parts.path.rstrip("/")
        self.socket_path = socket_path
        self._host = parts.hostname
        self._port = parts.port
        self._is_tls = parts.scheme == "https"

    def __str__(self) -> str:
        return self.url if self.socket_path is None else f"{self.url} through {self.socket_path}"

    def connection(self, *, timeout_s: float) -> http.client.HTTPConnection:
        """A new connection, opened by its first request."""
        if self.socket_path is not None:
            return _UnixConnection(self.socket_path, timeout_s=timeout_s)
        kind = _TlsConnection if self._is_tls else _Connection
        return kind(self._host, self._port, timeout=timeout_s)


class _Connection(http.client.HTTPConnection):
    """Sends head and body of a request in one piece: half the system calls, which are most of its cost."""

    _pending = b""

    def send(self, data: Any) -> None:
        self._pending += data

    def getresponse(self) -> http.client.HTTPResponse:
        pending, self._pending = self._pending, b""
        super().send(pending)
        return super().getresponse()


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    pass


class _UnixConnection(_Connection):
    def __init__(self, path: str, *, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP reply."""

    status: int
    body: bytes
    retry_after_s: float

    def json(self) -> Any:
        """Its body; raises Refused for an error status, as the server worded it."""
        if self.status < 400:
            return json.loads(self.body)
        raise refusal(self.status, self.body)


class Connections:
    """Connections to one address, shared by any number of threads; each carries one request at a time."""

    def __init__(self, address: Address, *, timeout_s: float = 600.0) -> None:
        """`timeout_s`: longest silence of the server within one request."""
        self.address = address
        self._timeout_s = timeout_s
        self._idle: deque[http.client.HTTPConnection] = deque()

    def call(self, method: str, path: str, *, key: str, body: object = None, patience_s: float = 0.0) -> Any:
        """The JSON that the server answers.

        A server that is away, full or not ready is asked again for `patience_s`; the repeats say so in
        `x-stainless-retry-count`, so that no reply is sampled twice.
        Raises Refused as the server worded it, or InfrastructureFault when it cannot be reached.
        """
        data = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + patience_s
        for attempt in count():
            wait_s = _backoff_s(attempt)
            try:
                reply = self._exchange(method, path, key=key, data=data, attempt=attempt)
            except (OSError, http.client.HTTPException) as error:
                fault: Exception = self._unreachable(error)
            else:
                if reply.status not in _RETRIED:
                    return reply.json()
                fault = refusal(reply.status, reply.body)
                wait_s = max(wait_s, reply.retry_after_s)
            if time.monotonic() + wait_s > deadline:
                raise fault
            time.sleep(wait_s)
        raise AssertionError("unreachable: the loop above has no end")

    def close(self) -> None:
        """Close idle connections. The next request opens new ones."""
        while self._idle:
            self._idle.pop().close()

    def _exchange(self, method: str, path: str, *, key: str, data: bytes | None, attempt: int) -> Reply:
        """One request. A kept connection that the server has closed meanwhile is replaced by a new one."""
        try:
            kept = self._idle.pop()
        except IndexError:
            return self._send(self._new(), method, path, key=key, data=data, attempt=attempt)
        try:
            return self._send(kept, method, path, key=key, data=data, attempt=attempt)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            return self._send(self._new(), method, path, key=key, data=data, attempt=attempt + 1)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        *,
        key: str,
        data: bytes | None,
        attempt: int,
    ) -> Reply:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        if attempt:
            headers["x-stainless-retry-count"] = str(attempt)
        try:
            connection.request(method, self.address.prefix + path, data, headers)
            response = connection.getresponse()
            content = response.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return Reply(response.status, content, _seconds(response.getheader("retry-after", "")))

    def _new(self) -> http.client.HTTPConnection:
        return self.address.connection(timeout_s=self._timeout_s)

    def _unreachable(self, error: Exception) -> InfrastructureFault:
        fault = InfrastructureFault(
            f"The swarm server at {self.address} cannot be reached",
            why=str(error) or type(error).__name__,
            next_step="check that it runs and that the address is right",
        )
        fault.__cause__ = error
        return fault


def refusal(status: int, body: bytes) -> Refused:
    """An error reply as the refusal that the server meant."""
    try:
        error = json.loads(body)["error"]
        return Refused(error["message"], status=status, code=error["code"])
    except (ValueError, KeyError, TypeError):
        return Refused(f"The server answered with HTTP status {status}", status=status, code="http_error")


def _backoff_s(attempt: int) -> float:
    return min(0.1 * 2**attempt, _MAX_WAIT_S) * random.uniform(0.75, 1.25)


def _seconds(value: str) -> float:
    return float(value) if value.isdecimal() else 0.0

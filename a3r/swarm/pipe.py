"""JSON lines between a Program's host and whoever runs it, out of the reach of what the Program prints."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 16 * 2**20
"""Longest answer."""
_READ_BYTES = 2**18
_MAX_PRINTED_BYTES = 2**20


class Printed(io.TextIOBase):
    """What a Program prints, to stderr at once; past a bound it is dropped, and printing never fails."""

    def __init__(self) -> None:
        self._bytes_left = _MAX_PRINTED_BYTES

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, text: str, /) -> int:
        data = text.encode(errors="replace")[: max(0, self._bytes_left)]
        self._bytes_left -= len(data)
        if data:
            # The file may be full of what children of the Program wrote.
            with suppress(OSError):
                os.write(2, data)
        return len(text)


class Lines:
    """Whole lines out of chunks, in time linear in their length."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.num_waiting_bytes = 0
        """Length of the line that has not ended yet."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that the chunk ends."""
        *ends, rest = chunk.split(b"\n")
        if not ends:
            self._parts.append(rest)
            self.num_waiting_bytes += len(rest)
            return []
        ends[0] = b"".join([*self._parts, ends[0]])
        self._parts = [rest]
        self.num_waiting_bytes = len(rest)
        return ends


class Wire:
    """The private ends of stdin and stdout. What the Program prints goes to stderr instead."""

    def __init__(self, requests_fd: int, answers_fd: int) -> None:
        self._requests_fd = requests_fd
        self._answers_fd = answers_fd
        self._outbox: deque[bytes] = deque()
        self._writing = threading.Lock()

    @classmethod
    def take_over(cls) -> Wire:
        wire = cls(os.dup(0), os.dup(1))
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        sys.stdout = sys.stderr = Printed()
        return wire

    def requests(self) -> Iterator[dict[str, Any]]:
        """Requests until the other side closes."""
        lines = Lines()
        while chunk := os.read(self._requests_fd, _READ_BYTES):
            for line in lines.feed(chunk):
                yield json.loads(line)

    def send(self, answer: Mapping[str, Any], *, max_bytes: int = MAX_LINE_BYTES) -> None:
        """Raises ValueError or TypeError, and sends nothing, when the answer is no finite JSON or too long."""
        line = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if len(line) > max_bytes:
            raise ValueError(f"an answer of {len(line)} bytes is longer than {max_bytes}")
        self._outbox.append(line)
        # Whoever holds the lock writes for all: lines that gather meanwhile go out in one call.
        while self._outbox and self._writing.acquire(blocking=False):
            try:
                self._write_all()
            finally:
                self._writing.release()

    def _write_all(self) -> None:
        lines: list[bytes] = []
        while self._outbox:
            lines.append(self._outbox.popleft())
        data = b"".join(lines)
        while data:
            data = data[os.write(self._answers_fd, data) :]

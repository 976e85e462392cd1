"""A policy that says what a script tells it, behind the chat API on a Unix socket.

Gates play a Program's agent against it: with the right replies the reward must be high, with wrong ones low,
and no model is needed to find that out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from a3r.episode import FinishReason, Message, TranscriptTurn
from a3r.errors import InfrastructureFault

_START_TIMEOUT_S = 10.0


@dataclass
class Script:
    """The replies of one episode, in order; the last one is repeated. Records the turns it answered."""

    key: str
    replies: Sequence[str]
    turns: list[TranscriptTurn] = field(default_factory=list)

    def answer(self, messages: list[Message]) -> Message:
        text = self.replies[min(len(self.turns), len(self.replies) - 1)]
        reply: Message = {"role": "assistant", "content": text}
        self.turns.append(TranscriptTurn(messages=tuple(messages), reply=reply, finish_reason=FinishReason.STOP.value))
        return reply


@dataclass
class ScriptedPolicy:
    """Serves any number of scripts at once, told apart by their keys."""

    socket: Path
    _scripts: dict[str, Script] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def open(self, replies: Sequence[str]) -> Script:
        script = Script(key=f"script-{next(self._numbers)}", replies=replies)
        self._scripts[script.key] = script
        return script

    def close(self, script: Script) -> None:
        self._scripts.pop(script.key)

    async def _complete(self, request: Request) -> JSONResponse:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in self._scripts:
            return _refusal("unknown key", status=401)
        body = await request.json()
        if body.get("stream"):
            return _refusal("the scripted policy does not stream", status=400)
        return JSONResponse(_completion(self._scripts[key].answer(body["messages"]), body=body))

    def _app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self._complete, methods=["POST"])])


@asynccontextmanager
async def serve_scripted_policy(socket: Path) -> AsyncIterator[ScriptedPolicy]:
    """A scripted policy that answers on `socket` while the context lasts."""
    policy = ScriptedPolicy(socket=socket)
    config = uvicorn.Config(policy._app(), uds=str(socket), log_level="error", lifespan="off")  # noqa: SLF001
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve(), name="scripted policy")  # noqa: SLF001 - serve() takes our signals
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn tells by a flag only
                await asyncio.sleep(0.01)
        if serving.done():
            raise InfrastructureFault("The scripted policy did not start", why=f"{socket} cannot be listened on")
        yield policy
    finally:
        server.should_exit = True
        await serving
        socket.unlink(missing_ok=True)


def _completion(reply: Message, *, body: dict[str, object]) -> dict[str, object]:
    choice = {"index": 0, "message": reply, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", "scripted"),
        "choices": [choice],
        "usage": usage,
    }


def _refusal(message: str, *, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": "refused", "type": "refused"}}, status_code=status)

"""The swarm server's HTTP face.

The control plane is FastAPI over the wire models. Chat completions, the hot path, are raw ASGI in front of it:
bodies go through orjson, and streamed tokens leave as they are sampled, the last event after the commit.
"""

# No postponed annotations here: FastAPI must see the dependencies that the routes below close over.
import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import blake2b
from secrets import token_hex
from typing import Annotated, Any, Protocol, TypeAlias

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from a3r.errors import A3RError, EngineFault, IllegalTransition, Refused
from a3r.swarm.wire import Abort, Claim, Claimed, Configure, End, Ended, Lease, Status
from gateway.calls import Answer
from gateway.dialects import openai_chat
from gateway.episode_routes import CLAIM_PATH, EPISODES_PREFIX, EpisodeRoutes, invalid
from gateway.gateway import Gateway
from gateway.keys import Claims, Role

Dependency: TypeAlias = Callable[..., Awaitable[Claims]]
Scope: TypeAlias = MutableMapping[str, Any]
Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]

RETRY_AFTER_S = 1
MAX_BODY_BYTES = 16 * 2**20


class Controller(Protocol):
    """Whoever composes gateway and trainer: starts and stops trials when an admin asks."""

    async def configure(self, configure: Configure) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class GatewayApp:
    """The whole server as one ASGI application. `api` is its FastAPI part.

    Over a Unix socket, which is bound into sandboxes, only `/v1` is served: whoever plays an episode there can
    neither end it nor read anything but its own replies.
    """

    def __init__(self, gateway: Gateway, *, api: FastAPI) -> None:
        self.api = api
        self._gateway = gateway
        self._episodes = EpisodeRoutes(gateway.desk)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.api(scope, receive, send)
        elif scope["path"] == "/v1/chat/completions" and scope["method"] == "POST":
            await self._chat(scope, receive, send)
        elif _is_unix(scope) and not scope["path"].startswith("/v1/"):
            await _send_refusal(send, _not_here(), kind="refused")
        elif scope["path"] == CLAIM_PATH or scope["path"].startswith(EPISODES_PREFIX):
            await self._episode(scope, receive, send)
        else:
            await self.api(scope, receive, send)

    async def _episode(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            token = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            answer = await self._episodes.answer(
                scope["method"],
                scope["path"],
                claims=lambda: _verified(self._gateway, token),
                body=await _read(receive) if scope["method"] == "POST" else b"",
            )
            if answer is None:
                raise Refused(f"There is no {scope['method']} {scope['path']}", status=404, code="no_route")
            await _send_json(send, 200, answer, [])
        except A3RError as error:
            await _send_refusal(send, as_refusal(error), kind="refused")

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream: _Stream | None = None
        try:
            headers = dict(scope["headers"])
            claims = _verified(self._gateway, headers.get(b"authorization", b"").decode("latin-1"))
            body = await _read(receive)
            request = openai_chat.parse(body)
            digest = blake2b(body, digest_size=16).digest()
            retried = headers.get(b"x-stainless-retry-count", b"0") != b"0"
            if not request.stream:
                answer = await self._gateway.desk.chat(claims, request, digest=digest, retried=retried)
                await _send_json(send, 200, _plain(answer, request, policy=self._gateway.policy), _pins(answer.pinned))
                return
            stream = _Stream(send, request=request, policy=self._gateway.policy, created=int(time.time()))
            answering = asyncio.create_task(
                self._gateway.desk.chat(claims, request, digest=digest, retried=retried, listener=stream)
            )
            await stream.run(answering)
        except A3RError as error:
            refusal = as_refusal(error)
            if stream is not None and stream.has_begun:
                await stream.fail(refusal)
            else:
                await _send_refusal(send, refusal, kind=_kind(refusal))


class _Stream:
    """Server-sent events of one call."""

    def __init__(self, send: Send, *, request: openai_chat.ChatRequest, policy: str, created: int) -> None:
        self.has_begun = False
        self._send = send
        self._request = request
        self._policy = policy
        self._pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        self._sent = [0] * request.n
        self._pinned: tuple[str, ...] = ()
        self._id = f"chatcmpl-{token_hex(12)}"
        self._created = created

    def pinned(self, names: tuple[str, ...]) -> None:
        self._pinned = names

    def text(self, choice: int, piece: str) -> None:
        self._pieces.put_nowait((choice, piece))

    async def run(self, answering: asyncio.Task[Answer]) -> None:
        """Send pieces as they come, then what completes the reply. Raises what the call raises."""
        answering.add_done_callback(lambda _: self._pieces.put_nowait(None))
        while (piece := await self._pieces.get()) is not None:
            choice, text = piece
            await self._begin()
            self._sent[choice] += len(text)
            await self._event([{"index": choice, "delta": {"content": text}, "finish_reason": None}])
        answer = await answering
        await self._begin(answer)
        for index, choice in enumerate(answer.choices):
            with_logprobs = self._request.logprobs
            await self._event(
                [openai_chat.last_delta(choice, index=index, sent=self._sent[index], with_logprobs=with_logprobs)]
            )
        if self._request.include_usage:
            await self._event([], usage=openai_chat.usage(answer.choices, num_prompt=answer.num_prompt))
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def fail(self, refusal: Refused) -> None:
        """End a stream that has begun with an error event."""
        body = b"data: " + openai_chat.error_body(refusal, kind=_kind(refusal)) + b"\n\n"
        await self._send({"type": "http.response.body", "body": body})

    async def _begin(self, answer: Answer | None = None) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        headers += _pins(self._pinned if answer is None else answer.pinned)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        roles = [{"index": i, "delta": {"role": "assistant", "content": ""}} for i in range(self._request.n)]
        await self._event([{**role, "finish_reason": None} for role in roles])

    async def _event(self, choices: list[dict[str, Any]], *, usage: object = None) -> None:
        body = openai_chat.chunk(
            request_id=self._id, created=self._created, model=self._policy, choices=choices, usage=usage
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


def build_app(gateway: Gateway, controller: Controller) -> GatewayApp:
    """The server's application. `controller` carries out what an admin asks for."""
    api = FastAPI(title="A3R swarm server", docs_url=None, redoc_url=None)
    api.add_exception_handler(A3RError, _on_error)
    api.add_exception_handler(RequestValidationError, _on_invalid)

    # Asynchronous although they wait for nothing: FastAPI runs plain functions in a thread each time.
    async def caller(request: Request) -> Claims:
        return _verified(gateway, request.headers.get("authorization", ""))

    async def admin(claims: Annotated[Claims, Depends(caller)]) -> Claims:
        return claims.require(Role.ADMIN)

    async def client(claims: Annotated[Claims, Depends(caller)]) -> Claims:
        return claims.require(Role.CLIENT)

    _add_control(api, gateway, controller, admin=admin)
    _add_episodes(api, gateway, caller=caller, client=client)
    return GatewayApp(gateway, api=api)


def _add_control(api: FastAPI, gateway: Gateway, controller: Controller, *, admin: Dependency) -> None:
    @api.post("/swarm/configure", dependencies=[Depends(admin)])
    async def configure(body: Configure) -> Status:
        await controller.configure(body)
        return gateway.status()

    @api.post("/swarm/start", dependencies=[Depends(admin)])
    async def start() -> Status:
        await controller.start()
        return gateway.status()

    @api.post("/swarm/stop", dependencies=[Depends(admin)])
    async def stop() -> Status:
        await controller.stop()
        return gateway.status()


def _add_episodes(api: FastAPI, gateway: Gateway, *, caller: Dependency, client: Dependency) -> None:
    @api.get("/swarm/status", dependencies=[Depends(caller)])
    async def status() -> Status:
        return gateway.status()

    @api.post("/swarm/claim", dependencies=[Depends(client)])
    async def claim(body: Claim) -> Claimed:
        return await gateway.desk.claim(body)

    @api.post("/swarm/episodes/{episode_id}/heartbeat")
    async def heartbeat(episode_id: str, claims: Annotated[Claims, Depends(caller)]) -> Lease:
        return await gateway.desk.heartbeat(claims, episode_id)

    @api.get("/swarm/episodes/{episode_id}/transcript")
    async def transcript(episode_id: str, claims: Annotated[Claims, Depends(caller)]) -> Response:
        said = await gateway.desk.transcript(claims, episode_id)
        return Response(orjson.dumps(said.as_json()), media_type="application/json")

    @api.post("/swarm/episodes/{episode_id}/end")
    async def end(episode_id: str, body: End, claims: Annotated[Claims, Depends(caller)]) -> Ended:
        return await gateway.desk.end(claims, episode_id, body)

    @api.post("/swarm/episodes/{episode_id}/abort")
    async def abort(episode_id: str, body: Abort, claims: Annotated[Claims, Depends(caller)]) -> Ended:
        return await gateway.desk.abort(claims, episode_id, body)

    @api.get("/v1/models", dependencies=[Depends(caller)])
    async def models() -> dict[str, Any]:
        model = {"id": gateway.policy, "object": "model", "created": 0, "owned_by": "a3r"}
        return {"object": "list", "data": [model]}


def as_refusal(error: A3RError) -> Refused:
    """Any error of ours as a refusal with an HTTP status."""
    if isinstance(error, Refused):
        return error
    status, code = 500, "internal"
    if isinstance(error, EngineFault):
        status, code = 502, "engine_fault"
    elif isinstance(error, IllegalTransition):
        status, code = 409, "illegal_transition"
    elif error.exit_code in (2, 3, 4):
        status, code = 400, "bad_request"
    elif error.exit_code == 9:
        status, code = 404, "not_found"
    elif error.exit_code == 5:
        status, code = 503, "not_ready"
    return Refused(error.what, why=error.why, next_step=error.next_step, status=status, code=code)


async def _on_error(_request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, A3RError):
        raise error
    refusal = as_refusal(error)
    body = orjson.loads(openai_chat.error_body(refusal, kind="refused"))
    headers = {"retry-after": str(RETRY_AFTER_S)} if refusal.status in (429, 503) else None
    return JSONResponse(body, status_code=refusal.status, headers=headers)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    return await _on_error(request, invalid(error.errors()[0]))


def _verified(gateway: Gateway, authorization: str) -> Claims:
    scheme, _, token = authorization.partition(" ")
    return gateway.desk.verified(token.strip() if scheme.lower() == "bearer" else "")


def _plain(answer: Answer, request: openai_chat.ChatRequest, *, policy: str) -> bytes:
    return openai_chat.completion_body(
        answer.choices,
        request_id=answer.request_id,
        created=answer.created,
        model=policy,
        num_prompt=answer.num_prompt,
        with_logprobs=request.logprobs,
    )


def _pins(names: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    return [(b"x-a3r-pinned", ", ".join(names).encode())] if names else []


def _kind(refusal: Refused) -> str:
    return "invalid_request_error" if refusal.status < 500 else "server_error"


def _is_unix(scope: Scope) -> bool:
    server = scope.get("server")
    return server is not None and server[1] is None


def _not_here() -> Refused:
    return Refused(
        "The control plane is not served on this socket",
        why="it is shared with sandboxes",
        next_step="use the server's TCP address",
        status=403,
        code="wrong_socket",
    )


async def _read(receive: Receive) -> bytes:
    event = await receive()
    body: bytes = event.get("body", b"")
    while event.get("more_body", False):
        event = await receive()
        body += event.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise Refused("The request body is too large", status=413, code="too_large")
    return body


async def _send_json(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_refusal(send: Send, refusal: Refused, *, kind: str) -> None:
    headers = [(b"retry-after", b"%d" % RETRY_AFTER_S)] if refusal.status in (429, 503) else []
    await _send_json(send, refusal.status, openai_chat.error_body(refusal, kind=kind), headers)

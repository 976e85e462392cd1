"""Claims, endings and transcripts without FastAPI's cost per call.

A short episode makes as many of these as model calls. FastAPI declares the same routes, for their documentation;
requests are answered here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, TypeVar

import orjson
from pydantic import ValidationError

from a3r.config import Config
from a3r.errors import Refused
from a3r.swarm.wire import Abort, Claim, End
from gateway.desk import Desk
from gateway.keys import Claims, Role

C = TypeVar("C", bound=Config)
Route: TypeAlias = Callable[[Claims, str, bytes], Awaitable[bytes]]
"""Takes the caller's claims, the episode id and the body; gives the reply's JSON."""

CLAIM_PATH = "/swarm/claim"
EPISODES_PREFIX = "/swarm/episodes/"


class EpisodeRoutes:
    """Answers by method and path."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._routes: Mapping[tuple[str, str], Route] = {
            ("POST", "heartbeat"): self._heartbeat,
            ("POST", "end"): self._end,
            ("POST", "abort"): self._abort,
            ("GET", "transcript"): self._transcript,
        }

    async def answer(self, method: str, path: str, *, claims: Callable[[], Claims], body: bytes) -> bytes | None:
        """The reply's JSON, or None for a route that is not of an episode. Raises Refused."""
        if method == "POST" and path == CLAIM_PATH:
            claims().require(Role.CLIENT)
            wanted = read(Claim, body)
            return (await self._desk.claim(wanted)).model_dump_json().encode()
        if not path.startswith(EPISODES_PREFIX):
            return None
        episode_id, _, action = path.removeprefix(EPISODES_PREFIX).partition("/")
        route = self._routes.get((method, action))
        return None if route is None else await route(claims(), episode_id, body)

    async def _heartbeat(self, claims: Claims, episode_id: str, _body: bytes) -> bytes:
        return (await self._desk.heartbeat(claims, episode_id)).model_dump_json().encode()

    async def _end(self, claims: Claims, episode_id: str, body: bytes) -> bytes:
        return (await self._desk.end(claims, episode_id, read(End, body))).model_dump_json().encode()

    async def _abort(self, claims: Claims, episode_id: str, body: bytes) -> bytes:
        return (await self._desk.abort(claims, episode_id, read(Abort, body))).model_dump_json().encode()

    async def _transcript(self, claims: Claims, episode_id: str, _body: bytes) -> bytes:
        return orjson.dumps((await self._desk.transcript(claims, episode_id)).as_json())


def read(kind: type[C], body: bytes) -> C:
    """The body as a wire model. Raises Refused (422) that names the first field that does not fit."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error.errors()[0]) from error


def invalid(first: Mapping[str, object]) -> Refused:
    """A validation error of pydantic as a refusal."""
    location = first["loc"]
    path = ".".join(str(part) for part in location) if isinstance(location, tuple) else str(location)
    return Refused(f"{path or 'the body'} does not fit", why=str(first["msg"]), status=422, code="invalid")

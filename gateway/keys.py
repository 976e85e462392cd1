"""Signed, expiring keys: who is calling, and what the caller may touch.

A key is `a3r_<claims>.<mac>`: the claims are readable by anyone, the HMAC-SHA256 over them can be made only by
the holder of the secret. Nothing about a key is stored, so a restarted server with the same secret knows every
key it gave out. Keys never go into logs or error messages.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import dataclass
from enum import StrEnum

from a3r.errors import Refused

_PREFIX = "a3r_"


class Role(StrEnum):
    """What a key is for. An admin may do whatever a client may."""

    ADMIN = "admin"
    CLIENT = "client"
    EPISODE = "episode"


@dataclass(frozen=True, slots=True)
class Claims:
    """What a verified key says."""

    role: Role
    subject: str
    """Name of the holder; for an episode key, the episode and its lease epoch as `id/epoch`."""
    expires_at: float
    """Unix time in seconds."""

    def require(self, *roles: Role) -> Claims:
        """Itself when the role is among `roles`; raises Refused (403, `wrong_role`) otherwise."""
        if self.role in roles or (self.role is Role.ADMIN and Role.CLIENT in roles):
            return self
        raise Refused(
            f"A key of role {self.role} may not do this",
            why=f"it takes the role {' or '.join(roles)}",
            next_step="use the key that the server printed for that role",
            status=403,
            code="wrong_role",
        )


class KeyRing:
    """Signs and verifies keys with one secret of at least 16 bytes."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise ValueError("a signing secret needs at least 16 bytes")
        # Copied per key: OpenSSL's one-shot digest gives up the GIL, which then takes far longer to get back.
        self._hmac = hmac.new(secret, digestmod=hashlib.sha256)

    def sign(self, *, role: Role, subject: str, expires_at: float) -> str:
        """A key for `subject` that is good until `expires_at` (unix seconds)."""
        claims = json.dumps([role, subject, expires_at], separators=(",", ":")).encode()
        return f"{_PREFIX}{_text(claims)}.{_text(self._mac(claims))}"

    def verify(self, token: str, *, now: float) -> Claims:
        """The claims of a genuine, unexpired key. Raises Refused (401) otherwise."""
        body, _, mac = token.removeprefix(_PREFIX).partition(".")
        try:
            claims, given = _bytes(body), _bytes(mac)
        except (ValueError, binascii.Error) as error:
            raise _bad_key() from error
        if not token.startswith(_PREFIX) or not hmac.compare_digest(self._mac(claims), given):
            raise _bad_key()
        role, subject, expires_at = json.loads(claims)
        if now >= expires_at:
            raise Refused(
                "The key has expired",
                next_step="claim a new episode, or restart the server for new role keys",
                status=401,
                code="key_expired",
            )
        return Claims(role=Role(role), subject=subject, expires_at=expires_at)

    def _mac(self, claims: bytes) -> bytes:
        mac = self._hmac.copy()
        mac.update(claims)
        return mac.digest()


def _bad_key() -> Refused:
    return Refused(
        "The key is not one of this server's",
        why="it is missing, mistyped, or signed with another secret",
        next_step="send the key as `Authorization: Bearer KEY`",
        status=401,
        code="bad_key",
    )


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)

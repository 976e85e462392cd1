from __future__ import annotations

import pytest

from a3r.errors import Refused
from gateway.keys import KeyRing, Role

RING = KeyRing(b"sixteen bytes at least")


def signed(role: Role = Role.EPISODE, *, expires_at: float = 100.0) -> str:
    return RING.sign(role=role, subject="ep_1/0", expires_at=expires_at)


def test_a_key_gives_back_its_claims():
    claims = RING.verify(signed(), now=99.0)
    assert (claims.role, claims.subject, claims.expires_at) == (Role.EPISODE, "ep_1/0", 100.0)


def test_an_expired_key_is_refused():
    with pytest.raises(Refused) as refused:
        RING.verify(signed(), now=100.0)
    assert (refused.value.status, refused.value.code) == (401, "key_expired")


def test_every_changed_character_spoils_a_key():
    token = signed()
    for place in range(len(token) - 1):
        changed = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
        with pytest.raises(Refused) as refused:
            RING.verify(changed, now=0.0)
        assert refused.value.status == 401


@pytest.mark.parametrize("token", ["", "a3r_", "a3r_x.y", "sk-foreign", "a3r_\u00e9.x", signed() + "."])
def test_what_is_no_key_is_refused(token):
    with pytest.raises(Refused, match="not one of this server's"):
        RING.verify(token, now=0.0)


def test_another_secret_knows_no_key():
    with pytest.raises(Refused):
        KeyRing(b"another secret of length").verify(signed(), now=0.0)


def test_a_refusal_never_shows_the_key():
    token = signed()
    with pytest.raises(Refused) as refused:
        RING.verify(token[:-1] + "_", now=0.0)
    assert token[4:20] not in str(refused.value)


def test_an_admin_may_what_a_client_may_and_an_episode_may_not():
    RING.verify(signed(Role.ADMIN), now=0.0).require(Role.CLIENT)
    with pytest.raises(Refused) as refused:
        RING.verify(signed(), now=0.0).require(Role.CLIENT)
    assert refused.value.status == 403
    with pytest.raises(Refused):
        RING.verify(signed(Role.CLIENT), now=0.0).require(Role.ADMIN)


def test_a_short_secret_is_no_secret():
    with pytest.raises(ValueError, match="16 bytes"):
        KeyRing(b"short")

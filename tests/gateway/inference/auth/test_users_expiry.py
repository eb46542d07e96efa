"""The gateway caches verified tokens, apps' keys and backends' failures for a limited time."""

import asyncio
from unittest.mock import Mock

import pytest

from gateway.accounts.jose import jwt
from gateway.errors import TokenInvalid
from gateway.inference.auth.users import TOKEN_SECONDS, UserLimits, Users
from gateway.settings import Settings
from tests.fakes.backend import private_key
from tests.fakes.server import answer
from tests.gateway.inference.auth.verifier import Verifier
from tests.gateway.inference.key_hosts import Hosts, age, an_app, token
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the checks of signatures."""
    checks = Mock(side_effect=jwt.verify_signature)
    monkeypatch.setattr(jwt, "verify_signature", checks)
    return checks


@pytest.mark.parametrize("user_limits", [UserLimits(token_seconds=0, fetch_interval=0)], ids=["forgetful"])
async def test_a_signature_is_checked_once_while_its_keys_are_fresh(users: Users, hosts: Hosts, checks: Mock) -> None:
    """Neither the token, nor the key, nor the app has changed."""
    key = hosts.keys["victim.apps.example"] = private_key("ES256")
    known = token(key, "ana")
    for _ in range(3):
        assert await users.verify(an_app(), known) == "ana"
    assert (checks.call_count, len(hosts.fetched)) == (1, 1)
    age(users, 301)
    assert await users.verify(an_app(), known) == "ana"  # also starts a fetch of the keys
    await asyncio.sleep(0.1)
    for _ in range(3):
        assert await users.verify(an_app(), known) == "ana"
    assert (checks.call_count, len(hosts.fetched)) == (2, 2)


@pytest.mark.parametrize("user_limits", [UserLimits(fetch_interval=0)], ids=["often"])
async def test_a_token_with_an_unknown_key_does_not_invalidate_others(users: Users, hosts: Hosts, checks: Mock) -> None:
    """It causes a fetch of the keys. The tokens that they verified are not verified again."""
    hosts.keys["victim.apps.example"] = key = private_key("ES256")
    known = token(key, "ana")
    assert await users.verify(an_app(), known) == "ana"
    with pytest.raises(TokenInvalid):
        await users.verify(an_app(), token(private_key("ES256"), "mallory", "unknown"))
    assert await users.verify(an_app(), known) == "ana"
    assert (checks.call_count, len(hosts.fetched)) == (1, 2)


@pytest.mark.parametrize("user_limits", [UserLimits(fetch_interval=0)], ids=["often"])
async def test_a_verified_token_ends_with_its_key(users: Users, hosts: Hosts) -> None:
    """It is refused as soon as the gateway has fetched a key set without its key."""
    old, new = private_key("ES256"), private_key("ES256")
    hosts.keys["victim.apps.example"], hosts.kid = old, "old"
    known = token(old, "ana", "old")
    assert await users.verify(an_app(), known) == "ana"
    hosts.keys["victim.apps.example"], hosts.kid = new, "new"
    assert await users.verify(an_app(), token(new, "ana", "new")) == "ana"
    with pytest.raises(TokenInvalid):
        await users.verify(an_app(), known)


@pytest.mark.parametrize("user_limits", [UserLimits(origins=1)], ids=["one"])
async def test_a_verified_token_keeps_no_key_set(users: Users, hosts: Hosts) -> None:
    """If its key set had to be dropped, the token is verified again with a new one."""
    old, other, new = (private_key("ES256") for _ in range(3))
    hosts.keys = {"victim.apps.example": old, "other.apps.example": other}
    known = token(old, "ana")
    assert await users.verify(an_app(), known) == "ana"
    assert await users.verify(an_app(id="other", name="other"), token(other, "ben", "other.apps.example")) == "ben"
    hosts.keys["victim.apps.example"] = new
    with pytest.raises(TokenInvalid):
        await users.verify(an_app(), known)


async def test_a_signed_out_user_is_out_within_a_minute(alone: Verifier) -> None:
    """The test's minute takes 0.3 seconds."""
    assert TOKEN_SECONDS == 60
    users = Users(Settings(), alone.vault, alone.http, limits=UserLimits(token_seconds=0.3))
    app, known = an_app(auth=alone.pocketbase()), alone.backend.token().encode()
    assert await users.verify(app, known) == "ana"
    alone.backend.refresh = answer(401, {"message": "signed out"})
    assert await users.verify(app, known) == "ana"
    await asyncio.sleep(0.3)
    with pytest.raises(TokenInvalid):
        await users.verify(app, known)


@pytest.mark.parametrize("user_limits", [UserLimits(fetch_interval=0)], ids=["often"])
async def test_forged_signatures_do_not_delay_users(users: Users, hosts: Hosts) -> None:
    key = hosts.keys["victim.apps.example"] = private_key("ES256")
    assert await users.verify(an_app(), token(key, "ana")) == "ana"
    hosts.gate.clear()
    forged = [asyncio.create_task(users.verify(an_app(), token(private_key("ES256"), f"m{n}"))) for n in range(3)]
    await wait_until(lambda: len(hosts.fetched) == 2)
    for n in range(5):
        assert await asyncio.wait_for(users.verify(an_app(), token(key, f"u{n}")), 2) == f"u{n}"
    hosts.gate.set()
    refusals = await asyncio.gather(*forged, return_exceptions=True)
    assert [type(each) for each in refusals] == [TokenInvalid] * 3
    assert len(hosts.fetched) == 2, "they share the fetch"

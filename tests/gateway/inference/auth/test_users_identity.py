"""The keys that verify an app's tokens after it was renamed, moved or created again."""

import pytest
from msgspec.structs import replace

from gateway.accounts.records import JwksAuth
from gateway.errors import AppBackendUnreachable, TokenInvalid
from gateway.inference.auth.users import UserLimits, Users
from tests.fakes.backend import private_key
from tests.gateway.inference.key_hosts import Hosts, an_app, token

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_renamed_app_takes_its_keys_from_its_new_address(users: Users, hosts: Hosts) -> None:
    """Keys from the old host are not used."""
    first, second = private_key("ES256"), private_key("ES256")
    hosts.keys["victim.apps.example"] = first
    assert await users.verify(an_app(), token(first, "ana")) == "ana"
    hosts.keys = {"final.apps.example": second}
    renamed = an_app(name="final")
    assert await users.verify(renamed, token(second, "ana", "final.apps.example")) == "ana"
    with pytest.raises(TokenInvalid):
        await users.verify(renamed, token(first, "ana"))
    assert hosts.fetched == ["victim.apps.example", "final.apps.example"]


@pytest.mark.parametrize("user_limits", [UserLimits(fetch_interval=0)], ids=["often"])
async def test_an_app_that_takes_a_former_name_cannot_forge_tokens(users: Users, hosts: Hosts) -> None:
    """The keys at the name `mid` do not verify tokens of the app that had this name before."""
    mallory, own = private_key("ES256"), private_key("ES256")
    hosts.kid = "own"
    hosts.keys["mid.apps.example"] = own
    await users.verify(an_app(name="mid"), token(own, "ana", "own"))
    hosts.kid = "forged"
    hosts.keys["mid.apps.example"] = mallory
    for attempt in range(3):
        with pytest.raises((TokenInvalid, AppBackendUnreachable)):
            await users.verify(an_app(name="final"), token(mallory, f"forged-{attempt}", "forged"))


@pytest.mark.parametrize("change", [{"account": "acc_2"}, {"createdAt": "2026-11-21T00:00:00.001Z"}])
async def test_a_verified_token_ends_with_its_app(users: Users, hosts: Hosts, change: dict[str, str]) -> None:
    """The old owner's tokens and keys do not pass at an app that another account creates under the same name."""
    key = private_key("ES256")
    app = an_app(auth=JwksAuth(url="https://keys.example/jwks.json"))
    hosts.keys["keys.example"] = key
    known = token(key, "ana", "keys.example")
    assert await users.verify(app, known) == "ana"
    hosts.keys["keys.example"] = private_key("ES256")
    for each in (known, token(key, "ben", "keys.example")):
        with pytest.raises(TokenInvalid):
            await users.verify(replace(app, **change), each)

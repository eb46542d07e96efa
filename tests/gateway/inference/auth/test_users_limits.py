"""Hostile key sets and floods of bad tokens have a limited cost, and only for their own app."""

import asyncio
import time

import pytest

from gateway.accounts.jose.jwk import MAX_TRIED, PublicKey
from gateway.accounts.records import JwksAuth
from gateway.errors import AppBackendUnreachable, ServiceError, TokenInvalid, TokensLimited
from gateway.inference.auth.key_sets import KeySet
from gateway.inference.auth.users import UserLimits, Users
from gateway.outbound.client import Client
from tests.fakes import FakeAppBackend
from tests.fakes.backend import private_key
from tests.fakes.server import HANG
from tests.gateway.inference.auth.verifier import Verifier
from tests.gateway.inference.key_hosts import Hosts, an_app, token
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_app_that_used_up_its_time_serves_users_with_verified_tokens(users: Users, hosts: Hosts) -> None:
    """test_verification_budget.py says when the app recovers, and tests/hostile/test_attacks.py attacks it."""
    key = hosts.keys["victim.apps.example"] = private_key("ES256")
    known = token(key, "known")
    assert await users.verify(an_app(), known) == "known"
    verification = await users._limits.begin(an_app())
    verification.charge(60)
    with pytest.raises(TokensLimited):
        await users.verify(an_app(), token(key, "new"))
    assert await users.verify(an_app(), known) == "known"
    assert (await users.check(an_app(), token(key, "new"))).user == "new", "checks by the owner have their own time"


async def test_one_token_causes_few_signature_checks() -> None:
    """This holds for a token without `kid`, and if all keys have the same `kid`."""
    key_set = KeySet(Client(allow_private=True), "http://127.0.0.1:1/", "acc")
    key_set._fetched_at = time.monotonic()
    for kids in ([None] * 100, ["k"] * 100, [None] * 50 + ["k"] * 50):
        key_set._keys = [PublicKey(kid, ("ES256",), number) for number, kid in enumerate(kids)]
        for kid in (None, "k"):
            assert len(key_set.find(kid, "ES256") or []) == MAX_TRIED
    found = key_set.find("k", "ES256")
    assert found is not None
    assert [key.key for key in found] == [50, 51, 52, 53], "those with the token's `kid` come first"


async def test_a_backend_that_hangs_gets_few_calls_and_then_a_pause(alone: Verifier) -> None:
    alone.backend.refresh = [HANG]
    asks = [asyncio.create_task(ask(alone, f"u{n}")) for n in range(100)]
    await wait_until(lambda: alone.backend.refreshes == 8)
    await asyncio.sleep(0.2)
    assert alone.backend.refreshes == 8
    assert {type(each) for each in await asyncio.gather(*asks)} == {AppBackendUnreachable}
    calls, refusal = alone.backend.refreshes, await ask(alone, "late")
    assert isinstance(refusal, AppBackendUnreachable)
    assert alone.backend.refreshes == calls
    alone.backend.refresh = None
    assert refusal.retry_after is not None
    await asyncio.sleep(refusal.retry_after)
    assert await ask(alone, "late") == "late"


async def ask(verifier: Verifier, user: str) -> str | ServiceError:
    """Returns the user whom the backend names, or the refusal."""
    try:
        return await verifier.users.verify(an_app(auth=verifier.pocketbase()), verifier.backend.token(user).encode())
    except ServiceError as refusal:
        return refusal


async def test_one_token_that_fails_does_not_block_others(alone: Verifier) -> None:
    """Otherwise, a token that makes the backend fail could lock out the app's users."""
    for n in range(4):
        alone.backend.refresh = [HANG]
        bad = asyncio.create_task(ask(alone, "bad"))
        await wait_until(lambda: alone.backend.exchanges and not alone.backend.exchanges[-1].finished)
        alone.backend.refresh = None
        assert await ask(alone, f"ben {n}") == f"ben {n}"
        bad.cancel()


async def test_requests_that_wait_for_keys_are_limited() -> None:
    async with FakeAppBackend() as backend, Client(allow_private=True) as http:
        backend.gate.clear()
        key_set = KeySet(http, backend.jwks_url, "acc", max_waiting=5)
        assert key_set.find(None, "ES256") is None
        waiting = [asyncio.create_task(key_set.fetch(None, "ES256")) for _ in range(20)]
        await wait_until(lambda: backend.fetches)
        assert sum(task.done() for task in waiting) == 15
        backend.gate.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(result, list) for result in results) == 5
        assert backend.fetches == 1, "they share the fetch"


async def test_a_changed_address_replaces_the_key_set(users: Users, hosts: Hosts) -> None:
    """If key sets were kept, a thousand changes with a garbage token each would take 450 MiB."""
    for n in range(50):
        app = an_app(auth=JwksAuth(url=f"https://h{n}.example/"))
        hosts.keys[f"h{n}.example"] = private_key("ES256")
        with pytest.raises(TokenInvalid):
            await users.verify(app, token(private_key("ES256"), "ana", f"h{n}.example"))
    assert len(hosts.fetched) == 50
    assert [key_set.size for _, key_set in users._key_sets.values()] == [1]


@pytest.mark.parametrize("user_limits", [UserLimits(account_keys=3, keys=5)], ids=["few"])
async def test_the_keys_of_an_account_and_of_all_accounts_are_limited(users: Users, hosts: Hosts) -> None:
    """An account that creates and deletes apps forgets its own keys first."""

    async def visit(account: str, name: str) -> None:
        key = hosts.keys.setdefault(f"{name}.apps.example", private_key("ES256"))
        assert await users.verify(an_app(id=name, name=name, account=account), token(key, "a", f"{name}.apps.example"))

    for n in range(2):
        await visit("other", f"o{n}")
    for n in range(9):
        await visit("hog", f"h{n}")
    assert list(users._key_sets) == ["o0", "o1", "h6", "h7", "h8"]
    await visit("third", "t0")
    assert list(users._key_sets) == ["o1", "h6", "h7", "h8", "t0"]

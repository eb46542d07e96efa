"""Hostile key sets and floods of bad tokens have a limited cost, and only for their own app."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.accounts.jose.jwk import MAX_TRIED, PublicKey
from gateway.accounts.records import JwksAuth
from gateway.errors import TokenInvalid, TokensLimited
from gateway.inference.auth.key_sets import KeySet
from gateway.inference.auth.users import UserLimits, Users
from gateway.outbound.client import Client
from tests.fakes import FakeAppBackend
from tests.fakes.backend import private_key
from tests.fakes.server import HANG, Script
from tests.gateway.conftest import Launch
from tests.gateway.inference.key_hosts import Hosts, an_app, token
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused

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


async def test_a_flood_of_bad_tokens_is_limited(launch: Launch) -> None:
    """The budget is a thousandth of the real one."""
    rate = {"gateway.inference.auth.verification_budget.APP_RATE": 0.0001}
    async with launch(rate) as gw, FakeAppBackend() as backend:
        app = await gw.app(backend)
        kid, stranger = {"kid": backend.keys["ES256"][0]}, private_key("ES256")

        async def is_limited() -> httpx.Response | None:
            response = await app.ask("x", token=app.token(secrets.token_hex(4), key=stranger, headers=kid))
            return None if response.status_code == 401 else response

        limited = await wait_until(is_limited)
        assert "invalid" in refused(limited, 429, "TOKENS_LIMITED")["message"]
        assert int(limited.headers["Retry-After"]) >= 1
        assert limited.headers["RateLimit-Remaining"] == "0"
        assert limited.headers["RateLimit-Reset"] == limited.headers["Retry-After"]


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


@contextlib.asynccontextmanager
async def asked_app(gw: Gateway, refresh: Script | None = None) -> AsyncIterator[App]:
    """Yields an app whose backend verifies each token."""
    async with FakeAppBackend() as backend:
        backend.refresh = refresh
        auth = {"kind": "backend", "url": backend.refresh_url, "method": "POST", "userField": "record.id"}
        yield await gw.app(backend, auth=auth)


async def ask_many(app: App, count: int) -> list[Any]:
    return await asyncio.gather(*(app.ask("x", token=app.token(f"u{n}")) for n in range(count)))


async def test_a_backend_that_hangs_gets_few_calls_and_then_a_pause(brisk: Gateway) -> None:
    async with asked_app(brisk, [HANG]) as app:
        asks = asyncio.create_task(ask_many(app, 100))
        await wait_until(lambda: app.backend.refreshes == 8)
        await asyncio.sleep(0.3)
        assert app.backend.refreshes == 8
        assert {response.status_code for response in await asyncio.wait_for(asks, 10)} == {503}
        calls = app.backend.refreshes
        response = await app.ask("x")
        refused(response, 503, "APP_BACKEND_UNREACHABLE")
        assert app.backend.refreshes == calls
        app.backend.refresh = None
        await asyncio.sleep(int(response.headers["Retry-After"]))
        assert (await app.ask("x")).status_code == 200


async def test_one_token_that_fails_does_not_block_others(gw: Gateway) -> None:
    """Otherwise, a token that makes the backend fail could lock out the app's users."""
    async with asked_app(gw) as app:
        for _ in range(4):
            app.backend.refresh = [HANG]
            bad = asyncio.create_task(app.ask("x"))
            await wait_until(lambda: app.backend.exchanges and not app.backend.exchanges[-1].finished)
            app.backend.refresh = None
            assert (await app.ask("x", token=app.token("ben", jti=secrets.token_hex(4)))).status_code == 200
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

"""The app's public keys: which the gateway fetches, for how long it keeps them, and what they may cost."""

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from gateway.accounts.jose.jwk import MAX_TRIED, PublicKey
from gateway.accounts.records import JwksAuth
from gateway.errors import AppBackendUnreachable, ServiceError, TokenInvalid, TokensLimited
from gateway.inference.auth.key_sets import KeySet
from gateway.inference.auth.users import TOKEN_SECONDS, UserLimits, Users
from gateway.outbound.client import Client
from gateway.settings import Settings
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.backend import private_key
from tests.fakes.provider import tokens
from tests.fakes.server import CLOSE, HANG, Head, Script, answer
from tests.gateway.inference.auth.conftest import Verifier
from tests.gateway.inference.key_hosts import Hosts, age, an_app, token
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


@contextlib.asynccontextmanager
async def own(gw: Gateway) -> AsyncIterator[App]:
    """Yields an app with its own backend."""
    async with FakeAppBackend() as backend:
        yield await gw.app(backend)


async def passes(app: App) -> bool:
    return (await app.ask("x")).status_code == 200


async def test_keys_outlive_their_backend(gw: Gateway) -> None:
    async with own(gw) as app:
        assert await passes(app)
    assert (await app.ask("x", token=app.token("another"))).status_code == 200
    assert (await app.ask("x", token=FakeAppBackend().token())).status_code in (401, 503)


# What the backend answers instead of its keys, and why tokens are then refused.
BROKEN: dict[str, tuple[Script, str]] = {
    "500": (answer(500), "503 backend-status"),
    "closed": ([CLOSE], "503 backend-unreachable"),
    "cut": (
        [Head(200, {"Content-Type": "application/json", "Content-Length": "100"}), b'{"keys"', CLOSE],
        "503 backend-unreachable",
    ),
    "silent": ([HANG], "503 backend-unreachable"),
    "endless": ([Head(200, {"Content-Type": "application/json"}), *[b" ", 0.2] * 10], "503 backend-unreachable"),
    "a redirect": (answer(302, b"", {"Location": "http://127.0.0.1:1/"}), "503 backend-status"),
    "not a key set": (answer(200, {"message": "hello"}), "503 keys-unreadable"),
    "deep nesting": (answer(200, b"[" * 100_000), "503 keys-unreadable"),
    "a compressed bomb": (
        answer(200, gzip.compress(b'{"keys":[' + b" " * 20_000_000 + b"]}"), {"Content-Encoding": "gzip"}),
        "503 keys-unreadable",
    ),
    "megabytes": (
        [Head(200, {"Content-Type": "application/json"}), *[b" " * 65536] * 256, b'{"keys":[]}'],
        "503 keys-unreadable",
    ),
    "no keys": (answer(200, {"keys": []}), "401 keys-unreadable"),
    "no usable key": (answer(200, {"keys": [{"kty": "oct", "k": "AA"}, {}]}), "401 keys-unreadable"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_backend_fails_closed(alone: Verifier, case: str) -> None:
    """Nothing is known about its tokens, not even that they have expired."""
    alone.backend.jwks, verdict = BROKEN[case]
    for expires in (3600, -60):
        assert await alone.verdict(alone.backend.token(expires=expires)) == verdict
    assert alone.backend.fetches == (2 if verdict.startswith("401") else 1), (
        "a set without the key is fetched again, once"
    )
    assert alone.backend.exchanges[-1].written < 8 * 2**20


async def test_a_broken_backend_on_the_wire(gw: Gateway, provider: FakeProvider) -> None:
    async with own(gw) as app:
        app.backend.jwks = answer(500)
        prompt = provider.plays(tokens("x"))
        response = await app.ask(prompt)
        refused(response, 503, "APP_BACKEND_UNREACHABLE")
        assert int(response.headers["Retry-After"]) >= 1
        assert provider.asked(prompt) == []
        for _ in range(20):
            refused(await app.ask("x"), 503, "APP_BACKEND_UNREACHABLE")
        assert app.backend.fetches <= 3, "not for every request"
        app.backend.jwks = None
        await wait_until(lambda: passes(app), 12, 0.5)


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


@pytest.mark.parametrize("kid", ["the next", "victim.apps.example"], ids=["another kid", "the same kid"])
async def test_a_new_key_is_found_at_once_and_then_every_ten_seconds(users: Users, hosts: Hosts, kid: str) -> None:
    first, second, third = (private_key("ES256") for _ in range(3))
    hosts.keys["victim.apps.example"] = first
    assert await users.verify(an_app(), token(first, "ana")) == "ana"
    hosts.keys["victim.apps.example"], hosts.kid = second, kid
    assert await users.verify(an_app(), token(second, "ana", kid)) == "ana"
    hosts.keys["victim.apps.example"], hosts.kid = third, kid + "!"
    for seconds, passes_now in ((0, False), (9, False), (1.1, True)):
        age(users, seconds)
        try:
            passed = await users.verify(an_app(), token(third, "ana", kid + "!")) == "ana"
        except TokenInvalid:
            passed = False
        assert passed == passes_now, seconds
    assert len(hosts.fetched) == 3


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
    assert hosts.fetched == ["victim.apps.example", "final.apps.example", "final.apps.example"]


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


async def test_an_app_that_used_up_its_time_serves_users_with_verified_tokens(users: Users, hosts: Hosts) -> None:
    """tests/hostile/test_attacks.py attacks it."""
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

"""The app's public keys: one fetch at a time, at a limited rate, and only from the app's own backend."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import pytest
from httpx import Response

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.backend import jwk, private_key
from tests.fakes.jwks import READ, publish
from tests.fakes.provider import tokens
from tests.fakes.server import CLOSE, HANG, Head, Script, answer
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


async def test_simultaneous_requests_share_one_fetch(gw: Gateway) -> None:
    async with own(gw) as app:
        app.backend.gate.clear()
        asks = [asyncio.create_task(app.ask("x", token=app.token(f"u{n}"))) for n in range(10)]
        await wait_until(lambda: app.backend.fetches)
        await asyncio.sleep(0.1)
        app.backend.gate.set()
        assert [r.status_code for r in await asyncio.gather(*asks)] == [200] * 10
        assert await passes(app)
        assert app.backend.fetches == 1


async def test_unknown_keys_are_fetched_once_in_ten_seconds(gw: Gateway) -> None:
    async with own(gw) as app:
        assert await passes(app)
        mallory = FakeAppBackend()
        for n in range(20):
            token = mallory.token(headers={"kid": f"unknown-{n}"})
            refused(await app.ask("x", token=token), 401, "TOKEN_INVALID")
        together = [app.ask("x", token=mallory.token(headers={"kid": f"more-{n}"})) for n in range(20)]
        assert {r.status_code for r in await asyncio.gather(*together)} == {401}
        assert app.backend.fetches <= 2
        assert await passes(app), "other apps are not affected"


async def test_forged_signatures_fetch_the_keys_once_in_ten_seconds(gw: Gateway) -> None:
    async with own(gw) as app:
        assert await passes(app)
        kid, _ = app.backend.keys["ES256"]
        mallory = FakeAppBackend()
        forged = [mallory.token(f"m{n}", headers={"kid": kid}) for n in range(40)]
        for token in forged[:20]:
            refused(await app.ask("x", token=token), 401, "TOKEN_INVALID")
        together = [app.ask("x", token=token) for token in forged[20:]]
        assert {r.status_code for r in await asyncio.gather(*together)} == {401}
        assert app.backend.fetches == 1, "the keys are less than ten seconds old"


async def test_forged_signatures_do_not_delay_users(brisk: Gateway) -> None:
    async with own(brisk) as app:
        assert await passes(app)
        kid, _ = app.backend.keys["ES256"]
        mallory = FakeAppBackend()
        app.backend.gate.clear()
        waiting: list[asyncio.Task[Response]] = []

        async def fetches() -> bool:
            token = mallory.token(f"m{len(waiting)}", headers={"kid": kid})
            waiting.append(asyncio.create_task(app.ask("x", token=token)))
            return app.backend.fetches == 2

        await wait_until(fetches, 10, 0.2)
        for n in range(5):
            assert (await asyncio.wait_for(app.ask("x", token=app.token(f"u{n}")), 2)).status_code == 200
        app.backend.gate.set()
        assert {r.status_code for r in await asyncio.gather(*waiting)} == {401}
        assert app.backend.fetches == 2, "they share the fetch"


async def test_keys_outlive_their_backend(gw: Gateway) -> None:
    async with own(gw) as app:
        assert await passes(app)
    assert (await app.ask("x", token=app.token("another"))).status_code == 200
    assert (await app.ask("x", token=FakeAppBackend().token())).status_code in (401, 503)


BROKEN: dict[str, Script] = {
    "500": answer(500),
    "404": answer(404),
    "204": [Head(204, {})],
    "closed": [CLOSE],
    "cut": [Head(200, {"Content-Type": "application/json", "Content-Length": "100"}), b'{"keys"', CLOSE],
    "not JSON": answer(200, b"<html>"),
    "not a key set": answer(200, {"message": "hello"}),
    "a list": answer(200, []),
    "deep nesting": answer(200, b"[" * 100_000),
    "megabytes": [Head(200, {"Content-Type": "application/json"}), *[b" " * 65536] * 256, b'{"keys":[]}'],
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_backend_fails_closed(gw: Gateway, provider: FakeProvider, case: str) -> None:
    async with own(gw) as app:
        app.backend.jwks = BROKEN[case]
        prompt = provider.plays(tokens("x"))
        response = await app.ask(prompt)
        refused(response, 503, "APP_BACKEND_UNREACHABLE")
        assert int(response.headers["Retry-After"]) >= 1
        assert provider.asked(prompt) == []
        assert app.backend.exchanges[-1].written < 8 * 2**20


async def test_backends_that_never_finish(brisk: Gateway) -> None:
    """One backend never answers; the other one sends an endless body in quick pieces."""

    async def refuses(script: Script) -> None:
        async with own(brisk) as app:
            app.backend.jwks = script
            refused(await asyncio.wait_for(app.ask("x"), 8), 503, "APP_BACKEND_UNREACHABLE")

    drip: Script = [Head(200, {"Content-Type": "application/json"}), *[b" ", 0.2] * 100]
    await asyncio.gather(refuses([HANG]), refuses(drip), a_refresh_that_hangs(brisk))


async def a_refresh_that_hangs(gw: Gateway) -> None:
    async with FakeAppBackend() as backend:
        auth = {"kind": "backend", "url": backend.refresh_url, "method": "POST", "userField": "record.id"}
        app = await gw.app(backend, auth=auth)
        backend.refresh = [HANG]
        refused(await asyncio.wait_for(app.ask("x"), 8), 503, "APP_BACKEND_UNREACHABLE")


async def test_a_redirect_is_not_followed(gw: Gateway) -> None:
    async with own(gw) as app, FakeAppBackend() as elsewhere:
        app.backend.jwks = answer(302, b"", {"Location": elsewhere.jwks_url})
        refused(await app.ask("x", token=elsewhere.token()), 503, "APP_BACKEND_UNREACHABLE")
        assert elsewhere.exchanges == []


async def test_a_slow_backend_slows_only_its_app(gw: Gateway, app: App) -> None:
    async with own(gw) as slow:
        slow.backend.gate.clear()
        waiting = asyncio.create_task(slow.ask("x"))
        await wait_until(lambda: slow.backend.fetches)
        assert (await asyncio.wait_for(app.ask("x"), 2)).status_code == 200
        slow.backend.gate.set()
        assert (await waiting).status_code == 200


@pytest.mark.parametrize("name", READ)
async def test_a_key_that_is_read(gw: Gateway, name: str) -> None:
    """Keys that are left out do no harm, nor does another one of the same `kid`."""
    async with own(gw) as app:
        published = publish(name)
        app.backend.jwks = answer(200, published.document)
        token = app.backend.token(alg=published.alg, key=published.private, headers={"kid": published.kid})
        assert (await app.ask("x", token=token)).status_code == 200


async def test_a_symmetric_key_verifies_nothing(gw: Gateway) -> None:
    async with own(gw) as app:
        secret = {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "kid": "s", "alg": "HS256"}
        app.backend.jwks = answer(200, {"keys": [secret]})
        forged = app.backend.token(alg="HS256", key=b"secret" * 6, headers={"kid": "s"})
        refused(await app.ask("x", token=forged), 401, "TOKEN_INVALID")


async def test_no_keys_at_all(gw: Gateway) -> None:
    async with own(gw) as app:
        app.backend.jwks = answer(200, {"keys": []})
        refused(await app.ask("x"), 401, "TOKEN_INVALID")


async def test_a_key_without_alg_is_of_its_curves_algorithm_only(gw: Gateway) -> None:
    async with own(gw) as app:
        kid, key = app.backend.keys["ES256"]
        app.backend.jwks = answer(200, {"keys": [jwk("ES256", key, kid) | {"alg": None}]})
        assert await passes(app)
        other = app.backend.token(alg="ES384", key=private_key("ES384"), headers={"kid": kid})
        refused(await app.ask("x", token=other), 401, "TOKEN_INVALID")


async def test_a_compressed_key_set_with_a_byte_order_mark(gw: Gateway) -> None:
    async with own(gw) as app:
        kid, key = app.backend.keys["ES256"]
        document = b"\xef\xbb\xbf" + json.dumps({"keys": [jwk("ES256", key, kid)]}).encode()
        app.backend.jwks = answer(200, gzip.compress(document), {"Content-Encoding": "gzip"})
        assert await passes(app)


async def test_a_compressed_bomb_is_no_key_set(gw: Gateway) -> None:
    async with own(gw) as app:
        document = b'{"keys":[' + b" " * 100_000_000 + b"]}"
        app.backend.jwks = answer(200, gzip.compress(document), {"Content-Encoding": "gzip"})
        refused(await app.ask("x"), 503, "APP_BACKEND_UNREACHABLE")


PRIVATE = [
    {"kind": "jwks", "url": "http://127.0.0.1:{port}/jwks.json"},
    {"kind": "jwks", "url": "https://127.0.0.1:{port}/jwks.json"},
    {"kind": "jwks", "url": "https://localhost:{port}/jwks.json"},
    {"kind": "jwks", "url": "https://[::1]:{port}/jwks.json"},
    {"kind": "jwks", "url": "https://[::ffff:127.0.0.1]:{port}/jwks.json"},
    {"kind": "jwks", "url": "https://2130706433:{port}/jwks.json"},
    {"kind": "jwks", "url": "https://0:{port}/jwks.json"},
    {"kind": "backend", "url": "https://127.0.0.1:{port}/me", "method": "POST", "userField": "id"},
]


async def test_private_addresses_are_not_reached(strict: Gateway) -> None:
    """They are refused when the app is stored, or at the latest when its keys are fetched."""
    async with FakeAppBackend() as backend:
        account = await strict.account()
        for number, auth in enumerate(PRIVATE):
            auth = {**auth, "url": auth["url"].format(port=backend.port)}
            put = await strict.platform("PUT", f"apps/private-{number}", {"account": account.id, "auth": auth})
            if put.status_code == 400:
                continue
            app = App(account, f"private-{number}", backend)
            refused(await app.ask("x"), 503, "APP_BACKEND_UNREACHABLE")
        assert backend.connections == 0

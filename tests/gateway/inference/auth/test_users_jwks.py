"""The app's public keys: one fetch at a time, at a limited rate, and only from the app's own backend."""

import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.backend import jwk, private_key
from tests.fakes.jwks import READ, publish
from tests.fakes.provider import tokens
from tests.fakes.server import CLOSE, HANG, Head, Script, answer
from tests.gateway.inference.auth.verifier import Verifier
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
    assert alone.backend.fetches == 1
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


@pytest.mark.parametrize("name", READ)
async def test_a_key_that_is_read(alone: Verifier, name: str) -> None:
    """Keys that are left out do no harm, nor does another one of the same `kid`."""
    published = publish(name)
    alone.backend.jwks = answer(200, published.document)
    token = alone.backend.token(alg=published.alg, key=published.private, headers={"kid": published.kid})
    assert await alone.verdict(token) == "ana"


async def test_a_key_without_alg_is_of_its_curves_algorithm_only(alone: Verifier) -> None:
    kid, key = alone.backend.keys["ES256"]
    alone.backend.jwks = answer(200, {"keys": [jwk("ES256", key, kid) | {"alg": None}]})
    assert await alone.verdict(alone.backend.token()) == "ana"
    other = alone.backend.token(alg="ES384", key=private_key("ES384"), headers={"kid": kid})
    assert await alone.verdict(other) == "401 algorithm"


async def test_a_compressed_key_set_with_a_byte_order_mark(alone: Verifier) -> None:
    kid, key = alone.backend.keys["ES256"]
    document = b"\xef\xbb\xbf" + json.dumps({"keys": [jwk("ES256", key, kid)]}).encode()
    alone.backend.jwks = answer(200, gzip.compress(document), {"Content-Encoding": "gzip"})
    assert await alone.verdict(alone.backend.token()) == "ana"

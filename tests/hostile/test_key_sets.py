"""A flood of garbage tokens for one app hardly delays other apps, whatever the app's key set is.

`pytest -s` prints the figures. The goal is a p99 that rises by less than 20 ms at 500 tokens per second, on a quiet
machine with two cores. Because tests share their machine, the assertion is lenient, and one round of three must hold.
`HOSTILE_SECONDS` sets the length of a measurement, and runs all key sets and all rounds.
"""

import asyncio
import base64
import os
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.backend import jwk, private_key
from tests.fakes.provider import tokens
from tests.fakes.server import Raw, answer
from tests.hostile.victim import measure_first_tokens, percentile, run_flood
from tests.support.accounts import App
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATE = 500  # garbage tokens per second
ALL = "HOSTILE_SECONDS" in os.environ
SECONDS = float(os.environ.get("HOSTILE_SECONDS", "1.5"))
ALLOWED_RISE_MS = 100.0


def make_number(bits: int, *, last: int = 1) -> str:
    value = secrets.randbits(bits) | 1 << (bits - 1) | last
    return base64.urlsafe_b64encode(value.to_bytes((bits + 7) // 8, "big")).rstrip(b"=").decode()


def make_keys_without_kid(alg: str, count: int) -> list[dict[str, Any]]:
    return [{k: v for k, v in jwk(alg, private_key(alg), "k").items() if k != "kid"} for _ in range(count)]


# By name: the app's keys, and the header of the garbage tokens.
KEY_SETS: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "100 P-384 keys, no kid": (make_keys_without_kid("ES384", 100), {"alg": "ES384"}),
    "100 P-521 keys, no kid": (make_keys_without_kid("ES512", 100), {"alg": "ES512"}),
    "100 RSA-8192 keys with a large e": (
        [{"kty": "RSA", "n": make_number(8192), "e": "_____w"} for _ in range(100)],
        {"alg": "RS256"},
    ),
    "100 RSA-16384 keys": (
        [{"kty": "RSA", "n": make_number(16384), "e": "AQAB"} for _ in range(80)],
        {"alg": "RS256"},
    ),
    "a private key without primes": (
        [{"kty": "RSA", "n": make_number(8192), "e": make_number(8192), "d": make_number(16384), "kid": "k"}],
        {"alg": "RS256", "kid": "other"},
    ),
    "one P-256 key under the right kid": (
        [jwk("ES256", private_key("ES256"), "k")],
        {"alg": "ES256", "kid": "k"},
    ),
    "an unknown kid": ([jwk("ES256", private_key("ES256"), "k")], {"alg": "ES256", "kid": "other"}),
}
IN_SHORT = ["100 P-384 keys, no kid", "a private key without primes", "an unknown kid"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Runs a gateway whose rate limits admit the measurement."""
    limits = {"GATEWAY_RATE_LIMITS": "app=1000000,user=1000000", "GATEWAY_LOG_LEVEL": "info"}
    async with (
        FakeProvider() as provider,
        gateway_with_redis(provider, tmp_path_factory.mktemp("hostile"), **limits) as running,
    ):
        # The answer is sent in one piece, because Nagle's algorithm would delay the first token by 40 ms.
        events = b"".join(tokens("x"))
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(events)
        provider.default = [Raw(head + events)]
        yield running


@pytest.mark.parametrize("name", list(KEY_SETS) if ALL else IN_SHORT)
async def test_garbage_tokens_of_one_app_do_not_delay_another(busy: Gateway, name: str) -> None:
    keys, header = KEY_SETS[name]
    async with FakeAppBackend() as backend, FakeAppBackend() as hostile:
        hostile.jwks = answer(200, {"keys": keys})
        victim, attacked = await busy.app(backend), await busy.app(hostile)
        await measure_first_tokens(victim, 1)
        rises = []
        for _ in range(3):
            began = busy.cpu_seconds
            before = await measure_first_tokens(victim, SECONDS)
            idle = busy.cpu_seconds - began
            began = busy.cpu_seconds
            async with run_flood(attacked, RATE, SECONDS, header) as answers:
                during = await measure_first_tokens(victim, SECONDS)
            cost = (busy.cpu_seconds - began - idle) / SECONDS
            assert answers.keys() <= {"401", "429", "503"}
            rises.append(percentile(during, 0.99) - percentile(before, 0.99))
            quiet, hit = ([f"{percentile(times, share):.1f}" for share in (0.5, 0.99)] for times in (before, during))
            print(
                f"\n{name}: p50/p99 {'/'.join(quiet)} ms, then {'/'.join(hit)} ms, {rises[-1]:+.1f};"
                f" {cost:+.1%} CPU; {answers}"
            )
            if not ALL and rises[-1] < ALLOWED_RISE_MS:
                break
    assert min(rises) < ALLOWED_RISE_MS


async def read_status(app: App, token: str) -> int:
    return (await app.ask("x", token=token)).status_code


async def test_users_pass_while_their_app_is_flooded(busy: Gateway) -> None:
    """A user with a verified token always passes, a user with a new token after a few attempts."""
    key = private_key("ES384")
    async with FakeAppBackend("ES384") as hostile:
        hostile.keys["ES384"] = ("k", key)
        app = await busy.app(hostile)
        known = app.token("known", "ES384")
        assert await read_status(app, known) == 200
        stranger = FakeAppBackend("ES384")

        async def is_limited() -> bool:
            return await read_status(app, stranger.token(headers={"kid": "k"}, alg="ES384")) == 429

        async with run_flood(app, RATE, SECONDS + 4, {"alg": "ES384", "kid": "k"}) as answers:
            await wait_until(is_limited, 10)
            seen, attempts = [], []
            for number in range(10):
                seen.append(await read_status(app, known))
                attempt, token = 1, app.token(f"new-{number}", "ES384")
                while await read_status(app, token) != 200:
                    attempt += 1
                    assert attempt < 300
                    await asyncio.sleep(0.01)
                attempts.append(attempt)
        assert seen == [200] * 10
        print(f"\nattempts until a new token passed: {attempts}; {answers}")
        await wait_until(lambda: is_accepted(app, app.token("later", "ES384")))


async def is_accepted(app: App, token: str) -> bool:
    return await read_status(app, token) == 200

"""The explanations of Redis's failures, with real servers where they can be made to fail."""

import ssl
from typing import Any

import pytest
from redis.exceptions import ResponseError

from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store
from gateway.redis.errors import advise, code_of, describe, map_redis_errors
from gateway.redis.scripts import increment_counters
from tests.support.redis_servers import RedisServer, free_port
from tests.support.stores import opened


async def faults_of(url: str, **options: Any) -> list[tuple[str, str]]:
    """Returns code and reason of the failures of a script and of another command."""
    store, met = Store(url, **options), []
    try:
        for attempt in (
            lambda: increment_counters(store, "{p09}:n", "hash", 60, {"n": 1}),
            lambda: store.get("secret-key"),
        ):
            with pytest.raises(BackboneUnavailable) as raised, map_redis_errors():
                await attempt()
            cause = raised.value.__cause__
            met.append((code_of(cause), describe(cause)))
            assert "GATEWAY_REDIS_URL" in advise(cause)
    finally:
        await store.close()
    assert not any(secret in text for pair in met for text in pair for secret in ("secret", "127.0.0.1"))
    return met


@pytest.mark.parametrize(
    ("host", "expected"),
    [(f"127.0.0.1:{free_port()}", "Redis is not running"), ("redis.invalid", "the host of Redis has no address")],
    ids=["nothing listens", "no address"],
)
async def test_a_server_that_is_not_there(host: str, expected: str) -> None:
    for _, reason in await faults_of(f"redis://:secret@{host}"):
        assert reason == expected


async def test_a_certificate_that_is_not_trusted(tls: tuple[ssl.SSLContext, str]) -> None:
    port, (_, file) = free_port(), tls
    options = ("--tls-port", str(port), "--tls-cert-file", file, "--tls-key-file", file, "--tls-auth-clients", "no")
    url = f"rediss://:secret@127.0.0.1:{port}"
    with RedisServer("redis", *options) as server:
        for _, reason in await faults_of(url):
            assert reason == "the certificate of Redis is not trusted"
        with server.client() as client:
            client.config_set("requirepass", "secret")
        async with opened(url, ca_file=file) as store:
            assert await store.check_writes() == (1, [])
            await increment_counters(store, "{p09}:n", "hash", 60, {"n": 1})


async def test_a_password_that_is_wrong() -> None:
    with RedisServer("valkey") as server:
        with server.client() as client:
            client.config_set("requirepass", "another")
        wrong = ("WRONGPASS",)
        for login, codes in (("", ("NOAUTH", *wrong)), (":secret@", wrong), ("me:secret@", wrong)):
            for met, reason in await faults_of(f"redis://{login}127.0.0.1:{server.port}"):
                assert met in codes
                assert "password" in reason


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("MISCONF Errors writing to the AOF file", "MISCONF", "Redis cannot save its data to disk (MISCONF)"),
        ("OOM command not allowed. script: 1a2b", "OOM", "the memory of Redis is full (OOM)"),
        ("the text of a fault", "ResponseError", "Redis cannot be reached (ResponseError)"),
    ],
)
def test_an_error_is_known_by_its_code(text: str, code: str, reason: str) -> None:
    assert (code_of(ResponseError(text)), describe(ResponseError(text))) == (code, reason)

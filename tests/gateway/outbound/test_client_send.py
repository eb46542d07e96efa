"""Calls that need only the status, such as deliveries: their outcome, budget and limits."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from gateway.outbound import client as outbound
from gateway.outbound.addresses import CallFailed, resolve
from gateway.outbound.client import Client
from tests.fakes.receiver import HUGE_ANSWER, FakeReceiver, drip
from tests.fakes.server import CLOSE, HANG, RESET, Head, Raw, Script, answer
from tests.support.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")
BODY = b'{"type":"app.crashed"}'
BAD_CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"


@pytest_asyncio.fixture(loop_scope="session")
async def client() -> AsyncIterator[Client]:
    async with Client(allow_private=True) as client:
        yield client


async def post(client: Client, url: str, *, budget: float = 5, drain: int = 65536) -> int:
    headers = {"Content-Type": "application/json", "X-Service-Event": "app.crashed"}
    answer = await client.send(
        "POST", url, headers=headers, content=BODY, tenant="acc", budget=budget, drain_bytes=drain
    )
    return answer.status


async def failure(client: Client, url: str, *, budget: float = 5) -> str:
    with pytest.raises(CallFailed) as failed:
        await post(client, url, budget=budget)
    assert "s3cret" not in str(failed.value)
    return failed.value.reason


async def test_requests_are_sent_unchanged(client: Client, receiver: FakeReceiver) -> None:
    assert await post(client, receiver.url("/a%2Fb/%7Bx%7D?q=%20+&r=é")) == 204
    (exchange,) = receiver.exchanges
    assert (exchange.method, exchange.path) == ("POST", "/a%2Fb/%7Bx%7D?q=%20+&r=%C3%A9")
    assert exchange.body == BODY
    assert exchange.header("x-service-event") == "app.crashed"
    assert exchange.header("content-length") == str(len(BODY))
    assert exchange.header("transfer-encoding") is None
    assert exchange.header("host") == f"127.0.0.1:{receiver.port}"
    assert exchange.header("accept-encoding") == "identity"


@pytest.mark.parametrize("status", [204, 307, 410, 599])
async def test_every_status_is_returned(client: Client, receiver: FakeReceiver, status: int) -> None:
    other = receiver.url("/elsewhere")
    receiver.plays("/events", answer(status, b"x" if status != 204 else b"", {"Location": other}))
    assert await post(client, receiver.url()) == status
    assert len(receiver.exchanges) == 1, "neither followed nor repeated"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([CLOSE], "connect"),
        ([RESET], "connect"),
        ([Raw(b"HTTP/1.1 20"), CLOSE], "connect"),
        ([Raw(b"SSH-2.0-OpenSSH_9.2\r\n"), CLOSE], "connect"),
        ([Raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 8_191 + b"\r\n\r\n"), HANG], "too-large"),
        ([Raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 65 + b"\r\n"), HANG], "too-large"),
        ([Raw(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50), HANG], "timeout"),
        (drip(pause=0.05), "timeout"),
    ],
)
async def test_calls_without_a_response_fail(
    client: Client, receiver: FakeReceiver, script: Script, reason: str
) -> None:
    receiver.plays("/s3cret", script)
    began = time.monotonic()
    assert await failure(client, receiver.url("/s3cret"), budget=0.5) == reason
    assert time.monotonic() - began < PATIENCE_SECONDS
    await asyncio.sleep(0.05)
    assert len(receiver.exchanges) == 1, "tried once"


@pytest.mark.parametrize(
    "body",
    [
        [Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), CLOSE],
        [Raw(BAD_CHUNK), HANG],
        [Raw(b"HTTP/1.1 103 Early Hints\r\n\r\n" + BAD_CHUNK), HANG],
        [Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more"), HANG],
        [Raw(BAD_CHUNK[:-6]), 0.1, Raw(BAD_CHUNK[-6:]), HANG],
        [Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"), *drip(pause=0.05)],
        [Raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nno")],
    ],
)
async def test_the_headers_decide_the_outcome(client: Client, receiver: FakeReceiver, body: Script) -> None:
    """A late, truncated or broken body changes nothing, however it is split, and takes no longer than the budget."""
    receiver.plays("/events", body)
    began = time.monotonic()
    assert await post(client, receiver.url(), budget=0.5) == 200
    assert time.monotonic() - began < PATIENCE_SECONDS


async def test_an_endless_body_ends_the_call_soon(client: Client, receiver: FakeReceiver) -> None:
    receiver.plays("/events", [Head(200), *[b"x", 0.05] * 200])
    began = time.monotonic()
    assert await post(client, receiver.url()) == 200
    assert time.monotonic() - began < outbound.DRAIN_SECONDS + 2


async def test_connections_are_kept_and_one_that_was_closed_is_not_used(client: Client, receiver: FakeReceiver) -> None:
    assert outbound.KEEP_ALIVE_SECONDS < 5, "Node, uvicorn and Apache close them then, and a POST would be lost"
    for _ in range(5):
        await post(client, receiver.url())
    assert receiver.connections == 1
    receiver.exchanges[-1].writer.close()
    await asyncio.sleep(0.05)
    assert await post(client, receiver.url()) == 204
    assert receiver.connections == 2
    assert len(receiver.exchanges) == 6


async def test_no_call_is_sent_twice(client: Client, receiver: FakeReceiver) -> None:
    """aiohttp repeats idempotent requests whose connection breaks."""
    await post(client, receiver.url())
    receiver.plays("/events", CLOSE)
    with pytest.raises(CallFailed) as failed:
        await client.send("GET", receiver.url(), tenant="acc", budget=5)
    assert failed.value.reason == "connect"
    assert len(receiver.exchanges) == 2


# Names


async def test_a_look_up_that_hangs_is_in_the_budget() -> None:
    async def hang(*_: object, **__: object) -> list[str]:
        await asyncio.Event().wait()
        return []

    began = time.monotonic()
    async with Client(allow_private=True, resolve=partial(resolve, look_up=hang)) as client:
        assert await failure(client, "http://slow.example.com/s3cret", budget=0.3) == "timeout"
    assert time.monotonic() - began < PATIENCE_SECONDS


async def test_only_names_under_the_operators_domain_are_the_operators() -> None:
    """Customers' names must not take the lookup slots of hosted apps."""
    asked: dict[str, tuple[object, object]] = {}

    async def look_up(name: str, _port: int, *, tenant: str, own: bool) -> list[str]:
        asked[name] = (tenant, own)
        return []

    find = partial(resolve, look_up=look_up)
    async with Client(allow_private=True, own_domain="apps.example.com", resolve=find) as client:
        for name in ("shop.apps.example.com", "apps.example.com.evil.com", "evilapps.example.com", "example.com"):
            with pytest.raises(CallFailed):
                await client.fetch("GET", f"http://{name}/", tenant="acc_1", budget=1, max_bytes=9)
    assert asked.pop("shop.apps.example.com") == ("acc_1", True)
    assert set(asked.values()) == {("acc_1", False)}
    assert len(asked) == 3


@pytest.mark.parametrize(("found", "own"), [("127.0.0.1", False), ("::1", False), ("127.0.0.1", True)])
async def test_the_last_check_is_at_the_socket(monkeypatch: pytest.MonkeyPatch, found: str, own: bool) -> None:
    """It holds whatever the resolver said, and for a public address of this machine, which its firewall protects."""

    async def find(*_: object, **__: object) -> list[tuple[str, int]]:
        return [(found, 8443)]

    if own:
        monkeypatch.setattr(outbound, "is_public", lambda _: True)
    async with Client(allow_private=False, resolve=find) as client:
        assert await failure(client, "https://receiver.example.com:8443/s3cret") == "blocked"


async def test_the_beginning_of_the_body_is_kept(client: Client, receiver: FakeReceiver) -> None:
    """Also if the body is late, truncated or too long."""
    late: Script = [Head(200), b"abc", b"def", HANG]
    for script, keep, expected in (
        (answer(200, b"abcdef"), 4, b"abcd"),
        (answer(200, b"abcdef"), 0, b""),
        ([Head(200, {"Content-Length": "100"}), b"abcdef", CLOSE], 100, b"abcdef"),
        (late, 100, b"abcdef"),
        (HUGE_ANSWER, 100, bytes(100)),
    ):
        receiver.plays("/events", script)
        got = await client.send("GET", receiver.url(), tenant="acc", budget=1, drain_bytes=65536, keep_bytes=keep)
        assert (got.status, got.body) == (200, expected)

"""The activator: requests for apps that sleep are held until their pods run, and each connection is for one of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

from gateway.deploys.states import DeployError
from tests.support.polling import wait_until
from workers.hosting.sleep_limits import SleepLimits
from workers.kubernetes.activator import Activator, close_afterwards, find_host
from workers.kubernetes.sleep import Sleep

SLEEP_SECONDS, LEFT_SECONDS = 900.0, 0.3


class Apps:
    """Apps that sleep until `awake` is set, and then answer with the request itself."""

    def __init__(self) -> None:
        self.awake, self.error = asyncio.Event(), ""
        self.waking = set[tuple[str, str]]()
        self.changed, self.running = set[tuple[str, str]](), False
        self.checks: list[float] = []  # their times
        self.server: asyncio.Server | None = None

    def take_changed(self) -> set[tuple[str, str]]:
        changed, self.changed = self.changed, set()
        return changed

    def may_sleep(self, _: tuple[str, str]) -> bool:
        return self.running

    async def let_sleep(self, _: tuple[str, str], seconds: float) -> float:
        assert seconds == SLEEP_SECONDS
        self.checks.append(time.monotonic())
        return LEFT_SECONDS

    def find_address(self, name: str) -> tuple[str, str] | None:
        return (name.partition(".")[0], "live") if name.endswith(".example.com") else None

    def is_asleep(self, app_id: str, address: str) -> bool:
        return not self.awake.is_set()

    def is_suspended(self, address: tuple[str, str]) -> bool:
        return address[0] == "suspended"

    def account_of(self, address: tuple[str, str]) -> str:
        return address[0].partition("-")[0]

    def wake_soon(self, key: tuple[str, str]) -> None:
        self.waking.add(key)

    async def wake(self, key: tuple[str, str]) -> tuple[str, int]:
        await self.awake.wait()
        if self.error:
            raise DeployError(self.error)
        assert self.server is not None
        host, port = self.server.sockets[0].getsockname()
        return host, port


class Limits:
    def __init__(self) -> None:
        self.known = set[str]()

    async def read(self, *app_ids: str) -> None:
        self.known |= {*app_ids}

    def find_known(self, app_id: str, *, is_preview: bool) -> float | None:
        return SLEEP_SECONDS if app_id in self.known and not is_preview else None


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + head)
        await writer.drain()


@pytest.fixture
async def apps(request: pytest.FixtureRequest, unused_tcp_port: int) -> AsyncIterator[tuple[Apps, int]]:
    """With the limits of the activator that the test names."""
    apps, limits = Apps(), {"look_seconds": 0.02, **getattr(request, "param", {})}
    apps.server = await asyncio.start_server(echo, "127.0.0.1", 0)
    activator = Activator(cast("Sleep", apps), cast("SleepLimits", Limits()), port=unused_tcp_port, **limits)
    running = asyncio.create_task(activator.run())
    try:
        yield apps, unused_tcp_port
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        apps.server.close()


async def ask(port: int, host: str = "notes.example.com", *, more: bytes = b"", body: bytes = b"") -> bytes:
    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        with contextlib.suppress(OSError):
            return await asyncio.open_connection("127.0.0.1", port)
        return None

    connection = await wait_until(connect)
    assert connection is not None
    reader, writer = connection
    writer.write(b"GET /page HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (host.encode(), more))
    writer.write(body)
    with contextlib.closing(writer):
        async with asyncio.timeout(20):
            return await reader.read()


async def test_requests_wait_until_the_app_is_awake(apps: tuple[Apps, int]) -> None:
    own, port = apps
    asking = [
        asyncio.create_task(ask(port, "Notes.example.com:80", more=b"Connection: keep-alive\r\n")) for _ in range(20)
    ]
    await asyncio.sleep(0.3)
    assert not any(each.done() for each in asking)
    own.awake.set()
    for answer in await asyncio.gather(*asking):
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"GET /page HTTP/1.1\r\nHost: Notes.example.com:80\r\nConnection: close\r\n" in answer


@pytest.mark.parametrize("host", ["notes.example.com", "suspended.example.com", "other.example.org"])
async def test_an_answer_before_the_whole_upload_reaches_the_visitor(apps: tuple[Apps, int], host: str) -> None:
    """From the app, and from the activator itself."""
    own, port = apps
    own.awake.set()
    for _ in range(10):
        answer = await ask(port, host, more=b"Content-Length: 5000000\r\n", body=b"x" * 5_000_000)
        assert answer.startswith(b"HTTP/1.1 "), answer


@pytest.mark.parametrize("apps", [{"held_of_app": 2}], indirect=True)
async def test_what_cannot_be_answered_is_refused_at_once(apps: tuple[Apps, int]) -> None:
    own, port = apps
    probed = await ask(port, more=b"User-Agent: capsule-uptime\r\n")
    assert probed == b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n", "a probe wakes no app"
    assert (await ask(port, "other.example.org")).startswith(b"HTTP/1.1 404 ")
    suspended = await ask(port, "suspended.example.com")
    assert suspended.startswith(b"HTTP/1.1 503 ")
    assert suspended.endswith(b"This app is suspended.\n")
    assert (await ask(port, more=b"Host: two.example.com\r\n")).startswith(b"HTTP/1.1 404 ")
    held = [asyncio.create_task(ask(port)) for _ in range(2)]
    await asyncio.sleep(0.3)
    refused = await ask(port)
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1" in refused
    other = asyncio.create_task(ask(port, "other.example.com"))
    own.error = "no node has room"
    own.awake.set()
    for answer in await asyncio.gather(*held, other):
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"no node" not in answer


@pytest.mark.parametrize("apps", [{"held": 8}], indirect=True)
async def test_no_account_takes_all_places(apps: tuple[Apps, int]) -> None:
    own, port = apps
    flooding = [asyncio.create_task(ask(port, f"flood-{number}.example.com")) for number in range(12)]
    # It has all places while nobody else wants one.
    await wait_until(lambda: sum(each.done() for each in flooding) == 4)
    await asyncio.sleep(0.3)
    assert sum(each.done() for each in flooding) == 4
    assert len(own.waking) == 4, "an app is woken although its visitor is refused"
    others = [asyncio.create_task(ask(port, f"other-{number}.example.com")) for number in range(4)]
    await asyncio.sleep(0.3)
    assert not any(each.done() for each in others)
    own.awake.set()
    for answer in await asyncio.gather(*others):
        assert answer.startswith(b"HTTP/1.1 200 OK")
    await asyncio.gather(*flooding)


@pytest.mark.parametrize("apps", [{"hold_seconds": 0.2}], indirect=True)
async def test_a_request_is_not_held_for_ever(apps: tuple[Apps, int]) -> None:
    assert (await ask(apps[1])).startswith(b"HTTP/1.1 503 ")


def test_a_websocket_may_stay_open() -> None:
    head = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert close_afterwards(head) == (
        b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n"
    )
    assert find_host(head) == "a"


async def test_an_app_is_checked_when_it_has_changed_and_again_when_it_may_sleep(apps: tuple[Apps, int]) -> None:
    own, _ = apps
    own.changed, own.running = {("notes", "live"), ("notes", "preview")}, True
    await wait_until(lambda: len(own.checks) == 2)
    assert own.checks[1] - own.checks[0] >= LEFT_SECONDS
    own.running = False  # it sleeps, or is deployed
    await asyncio.sleep(2 * LEFT_SECONDS)
    own.running, before = True, len(own.checks)
    await asyncio.sleep(2 * LEFT_SECONDS)
    assert len(own.checks) == before, "it is not looked at while nothing changes"
    own.changed = {("notes", "live")}
    await wait_until(lambda: len(own.checks) > before)

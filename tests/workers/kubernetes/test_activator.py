"""The activator: requests for apps that sleep are held until their pods run, and each connection is for one of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

from gateway.deploys.states import DeployError
from tests.support.background import in_background
from tests.support.polling import wait_until
from tests.support.raw_http import Reply, send
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

    async def listens() -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
            writer.close()
            return True
        return False

    async with apps.server, in_background(activator.run()):
        await wait_until(listens)
        yield apps, unused_tcp_port


async def ask(port: int, host: str = "notes.example.com", *headers: str, body: bytes = b"") -> Reply:
    head = "\r\n".join(["GET /page HTTP/1.1", f"Host: {host}", *headers, "", ""])
    reply = await send(port, head.encode() + body, timeout=20)
    assert reply is not None
    return reply


async def test_requests_wait_until_the_app_is_awake(apps: tuple[Apps, int]) -> None:
    own, port = apps
    asking = [asyncio.create_task(ask(port, "Notes.example.com:80", "Connection: keep-alive")) for _ in range(20)]
    await asyncio.sleep(0.3)
    assert not any(each.done() for each in asking)
    own.awake.set()
    for answer in await asyncio.gather(*asking):
        assert answer.status == 200
        assert answer.body.startswith(b"GET /page HTTP/1.1\r\nHost: Notes.example.com:80\r\nConnection: close\r\n")


@pytest.mark.parametrize("host", ["notes.example.com", "suspended.example.com", "other.example.org"])
async def test_an_answer_before_the_whole_upload_reaches_the_visitor(apps: tuple[Apps, int], host: str) -> None:
    """From the app, and from the activator itself."""
    own, port = apps
    own.awake.set()
    for _ in range(10):
        await ask(port, host, "Content-Length: 5000000", body=b"x" * 5_000_000)


@pytest.mark.parametrize("apps", [{"held_of_app": 2}], indirect=True)
async def test_what_cannot_be_answered_is_refused_at_once(apps: tuple[Apps, int]) -> None:
    own, port = apps
    probed = await ask(port, "notes.example.com", "User-Agent: capsule-uptime")
    assert probed == Reply(204, {"connection": "close"}, b""), "a probe wakes no app"
    assert (await ask(port, "other.example.org")).status == 404
    suspended = await ask(port, "suspended.example.com")
    assert (suspended.status, suspended.body) == (503, b"This app is suspended.\n")
    assert (await ask(port, "notes.example.com", "Host: two.example.com")).status == 404
    held = [asyncio.create_task(ask(port)) for _ in range(2)]
    await asyncio.sleep(0.3)
    refused = await ask(port)
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    other = asyncio.create_task(ask(port, "other.example.com"))
    own.error = "no node has room"
    own.awake.set()
    for answer in await asyncio.gather(*held, other):
        assert answer.status == 503
        assert b"no node" not in answer.body


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
    assert (await ask(port, "other-4.example.com")).status == 503, "half of the places are its share"
    own.awake.set()
    assert {answer.status for answer in await asyncio.gather(*others)} == {200}
    await asyncio.gather(*flooding)


@pytest.mark.parametrize("apps", [{"hold_seconds": 0.2}], indirect=True)
async def test_a_request_is_not_held_for_ever(apps: tuple[Apps, int]) -> None:
    assert (await ask(apps[1])).status == 503


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

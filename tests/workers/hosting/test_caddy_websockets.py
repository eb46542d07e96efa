"""Floods WebSockets of one app while another account's page is requested."""

import asyncio
import contextlib
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.fakes import websocket_flood
from tests.support.folders import passable_folder
from tests.support.hosted_apps import DOMAIN, HOST, Hosting
from tests.support.polling import wait_until
from workers.hosting import splice
from workers.hosting.web import AppState, state_path

PAGE = f"page.{DOMAIN}"


@contextlib.asynccontextmanager
async def run(*args: str | int) -> AsyncIterator[Process]:
    command = [sys.executable, websocket_flood.__file__, *map(str, args)]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL, limit=1_000_000)
    try:
        assert process.stdout
        assert await process.stdout.readline()
        yield process
    finally:
        process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Hosting]:
    """An app that floods, and a page of another app."""
    with passable_folder() as folder:
        hosting = Hosting(folder)
        site = hosting.build(hosting.deploy("dep_1"), {"index.html": "not to be served"}, start="any")
        site.swap("dep_1")
        hosting.releases.serve_as(HOST, site)
        hosting.publish("dep_2", {"index.html": "a page"}, host=PAGE, app_id="page")
        path = str(folder / "app.sock")
        state_path(hosting.folder, "dep_1").write_bytes(msgspec.json.encode(AppState(path)))
        async with hosting.served("embedded"), run("app", path):
            yield hosting


async def slowest(hosting: Hosting) -> float:
    """Of twenty requests for the page, one after the other."""
    worst = 0.0
    for _ in range(20):
        began = time.monotonic()
        assert (await hosting.ask("/", host=PAGE)).body == b"a page"
        worst = max(worst, time.monotonic() - began)
    return worst


@pytest.mark.parametrize("sockets", [1, 20])
async def test_a_flood_of_frames_delays_nobody_else(sockets: int) -> None:
    """Relayed frame by frame, one socket left the page no turn for as long as the app sent."""
    async with served() as hosting:
        control = await slowest(hosting)
        async with run("visitors", hosting.port, HOST, sockets):
            during = await slowest(hosting)
            print(f"control {control * 1_000:.1f} ms, during {during * 1_000:.1f} ms")
            assert during < control + 1


async def test_who_takes_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "SLOW_SECONDS", 0.3)
    async with served() as hosting:
        visitor = socket.socket()
        visitor.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        visitor.connect(("127.0.0.1", hosting.port))
        lines = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: x"]
        visitor.sendall("\r\n".join(["GET / HTTP/1.1", f"Host: {HOST}", *lines, "", ""]).encode())
        visitor.settimeout(0)

        def ended() -> bool:
            try:
                visitor.send(b"\x8a\x80abcd")
            except OSError:
                return True
            return False

        await wait_until(ended, 10)
        visitor.close()

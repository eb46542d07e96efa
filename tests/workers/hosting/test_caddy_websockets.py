"""Floods WebSockets of one app while another account's page is requested."""

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator

from tests.fakes import websocket_flood
from tests.support.hosted_apps import DOMAIN, HOST, Hosting, hosted

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
    with hosted() as hosting:
        hosting.publish("dep_2", {"index.html": "a page"}, host=PAGE, app_id="page")
        path = hosting.releases.running / "dep_1.sock"
        async with hosting.served(), run("app", str(path)):
            path.chmod(0o666)
            yield hosting


async def slowest(hosting: Hosting) -> float:
    """Of twenty requests for the page, one after the other."""
    worst = 0.0
    for _ in range(20):
        began = time.monotonic()
        assert (await hosting.ask("/", host=PAGE)).body == b"a page"
        worst = max(worst, time.monotonic() - began)
    return worst


async def test_a_flood_of_frames_delays_nobody_else() -> None:
    async with served() as hosting:
        control = await slowest(hosting)
        async with run("visitors", hosting.port, HOST, 20):
            during = await slowest(hosting)
            print(f"control {control * 1_000:.1f} ms, during {during * 1_000:.1f} ms")
            assert during < control + 1

"""Apps that other hosts may run instead: they run only while this host holds its lease."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.hosted_apps import Hosting
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.watched_apps import Watch, watching
from workers.hosting.watchdog import AppState
from workers.sandbox import lease
from workers.sandbox.lease import Lease


@pytest_asyncio.fixture(params=[False, True], ids=["sandbox", "trusted"])
async def watch(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Watch]:
    async with watching(hosting, monkeypatch) as watch:
        watch.shares_apps, watch.trusted = True, request.param
        yield watch


def renew(watch: Watch, seconds: float) -> Path:
    """Renews the lease of the host. Returns its file."""
    path = watch.hosting.folder / "web" / "lease"
    lease.write_lease(path, Lease("session", lease.now() + seconds))
    return path


def allow(watch: Watch) -> Path:
    link = watch.hosting.releases.live_site("shop").folder / "lease"
    link.symlink_to("../../../web/lease")
    return link


def find_processes(watch: Watch) -> list[int]:
    """Returns the processes of the app, without its keeper."""
    keeper = watch.state("dep_1").keeper
    found, pending = [], [keeper]
    while pending:
        pid = pending.pop()
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            pending += map(int, children.read_text().split())
        found.append(pid)
    return found[1:]


async def until_ended(pids: list[int]) -> float:
    """Waits until the processes have ended. Returns the seconds."""
    began = time.monotonic()
    await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)
    return time.monotonic() - began


async def test_an_app_starts_only_with_the_lease_and_ends_with_it(watch: Watch) -> None:
    watch.publish("dep_1")
    watch.publish("dep_2", kind="preview")
    watch.start()
    assert await watch.ask("dep_2") == "release dep_2", "a preview runs on each host"
    assert watch.state("dep_1") == AppState()
    renew(watch, 60)
    await asyncio.sleep(0.3)
    assert watch.state("dep_1") == AppState(), "the lease is there, but not for this app"
    allow(watch)
    assert await watch.ask("dep_1") == "release dep_1"
    keeper, processes = watch.state("dep_1").keeper, find_processes(watch)
    assert processes
    # The worker is dead, so nobody renews the lease.
    await watch.stop()
    renew(watch, 1.0)
    assert 0.7 < await until_ended(processes) < PATIENCE_SECONDS
    await until_ended([keeper])
    watch.start()
    await asyncio.sleep(0.5)
    assert watch.crashes == []
    assert watch.state("dep_1").keeper == keeper, "it is not started without the lease"
    renew(watch, 60)
    assert await watch.ask("dep_1") == "release dep_1"
    assert watch.state("dep_1").exits == 0


async def test_an_app_is_killed_at_once_when_its_claim_is_lost(watch: Watch) -> None:
    watch.publish("dep_1", server="process.on('SIGTERM', () => {}); setInterval(() => {}, 1000)")
    renew(watch, 60)
    link = allow(watch)
    watch.start()
    await wait_until(lambda: watch.state("dep_1").keeper and len(find_processes(watch)) > 1, 20)
    await asyncio.sleep(0.3)
    processes = find_processes(watch)
    link.unlink()
    assert await until_ended(processes) < PATIENCE_SECONDS
    assert watch.crashes == []


async def test_a_keeper_that_stood_still_kills_the_app_as_soon_as_it_goes_on(watch: Watch) -> None:
    watch.publish("dep_1")
    renew(watch, 60)
    allow(watch)
    watch.start()
    await watch.ask("dep_1")
    keeper, processes = watch.state("dep_1").keeper, find_processes(watch)
    renew(watch, 1.0)
    os.kill(keeper, signal.SIGSTOP)
    await asyncio.sleep(1.5)
    os.kill(keeper, signal.SIGCONT)
    assert await until_ended(processes) < PATIENCE_SECONDS


async def test_a_lease_that_cannot_be_read_is_none(watch: Watch) -> None:
    watch.publish("dep_1")
    path = renew(watch, 60)
    allow(watch)
    watch.start()
    await watch.ask("dep_1")
    processes = find_processes(watch)
    path.write_text("[]")
    await until_ended(processes)

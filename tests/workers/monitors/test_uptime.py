"""Uptime monitoring of a real server that fails and recovers, and inspections that outlast a broken record."""

import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from gateway.accounts.records import Build, Suspension
from gateway.deploys.release import Release
from gateway.deploys.serving import Records, Wanted
from gateway.ids import now_iso
from gateway.keys import (
    app_key,
    health_key,
    partition_tag,
    probes_key,
    unhealthy_key,
)
from gateway.monitors import history
from gateway.operations.needs_attention import list_unhealthy_apps
from gateway.outbound.client import Client
from gateway.settings import Settings
from tests.fakes.receiver import FakeReceiver, certificate, drip
from tests.fakes.server import CLOSE, HANG, Head, Script, answer
from tests.support.background import in_background
from tests.support.logs import captured
from tests.support.monitored_apps import Fleet, Watched, fleet
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.stores import change_plan
from workers.monitors import uptime
from workers.monitors.inspection_loop import InspectedApp, Inspection, InspectionLoop
from workers.monitors.uptime import Uptime, probe
from workers.sandbox.relay import MONITOR

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A fleet with one worker. Its tests use different apps."""
    async with fleet(tmp_path_factory.mktemp("fleet")) as running:
        worker = await running.worker()
        yield running
        assert await worker.stop() == 0


@contextlib.asynccontextmanager
async def probing(own: Fleet, **settings: Any) -> AsyncIterator[None]:
    """Probes in this process."""
    defaults = {"allow_private_addresses": True, "probe_interval": 0.1, "probe_timeout": 1}
    chosen = Settings(redis_url=own.queue.url, probe_url=own.site.url("/{app}"), **{**defaults, **settings})
    async with in_background(Uptime(chosen, own.registry).run()):
        yield


# Incidents


async def test_an_incident(shared: Fleet) -> None:
    app = await shared.app()
    await app.until("healthy")
    began = time.time()
    app.fails()
    await app.receives("app.unhealthy")
    await app.probed(3)
    assert app.app.id in [each.id for each, _ in await list_unhealthy_apps(shared.registry, 100)]
    app.heals()
    await app.receives("app.unhealthy", "app.recovered")
    await app.probed(3)
    unhealthy = unhealthy_key(partition_tag(app.account.id))
    assert await shared.queue.store.client.zscore(unhealthy, app.app.id) is None
    down, up = (envelope["data"] for envelope in app.envelopes())
    same = {"appId": app.app.id, "appName": app.app.name, "url": shared.site.url(app.path)}
    assert down == {**same, "failures": 3, "reason": "status"}
    assert up == {**same, "downSince": up["downSince"], "downMs": up["downMs"]}
    assert now_iso(began) <= up["downSince"] <= now_iso()
    assert 200 < up["downMs"] < (time.time() - began) * 1000
    days = await history.read_history(shared.queue.store, app.account.id, app.app.id)
    assert [day.downMs for day in days[:-2]] == [None] * 88
    assert sum(day.downMs or 0 for day in days) == up["downMs"]
    assert max(day.outages for day in days) == 1


@pytest.mark.parametrize(("setting", "health", "asked"), [("/up", "/up", "/up"), ("/up", "", ""), (None, "/up", "")])
async def test_the_release_that_visitors_get_has_the_health_check(
    shared: Fleet, setting: str | None, health: str, asked: str
) -> None:
    """Not the one that the app's record names for the next deploy."""
    app = await shared.app(build=Build(start="node .", health=setting))
    release = Release("", 1, runs=True, health=health)
    wanted = Wanted(app.account.id, app.app.id, "live", "live", "dep_1", releases={"dep_1": release})
    await Records(shared.queue.store).write("", wanted, "")
    app.fails(answer(404))
    shared.site.plays(f"{app.path}{asked}", answer(404))
    if asked:
        await app.receives("app.unhealthy")
        shared.site.plays(f"{app.path}{asked}", answer(302))
    await app.until("healthy")


async def test_app_recovered_waits_for_the_outcome_of_app_unhealthy(own: Fleet) -> None:
    """The incident ends before the outcome of its first event is known. A later worker continues with the failures."""
    app = await own.app()
    app.fails()
    async with probing(own):
        await wait_until(app.health, 10, holds=lambda health: health.failures >= 2)
    async with probing(own):
        await app.until("unhealthy")
        app.heals()
        await app.until("healthy")
        await app.probed(2)
        assert len((await app.health()).pending) == 1
        await own.worker("webhooks")
        await app.receives("app.unhealthy", "app.recovered")
        assert app.envelopes()[0]["data"]["failures"] == 3
        await app.probed(2)
        assert (await app.health()).pending == ()


# Probed apps, and their workers


async def test_only_live_apps_from_the_starter_plan_on(shared: Fleet) -> None:
    free, waiting, paying = await shared.app("free"), await shared.app(live=False), await shared.app()
    await paying.probed(5)
    assert (free.probes, waiting.probes) == (0, 0)
    await change_plan(shared.registry, free.account.id, "starter")
    await waiting.goes_live()
    await free.probed()
    await waiting.probed()
    # The state of an app that is no longer probed is forgotten.
    await free.until("healthy")
    await change_plan(shared.registry, free.account.id, "free")
    await free.until("unknown")


async def test_a_reported_outage_outlasts_a_suspension(shared: Fleet) -> None:
    app = await shared.app()
    app.fails()
    await app.receives("app.unhealthy")
    reported = await wait_until(app.health, 10, holds=lambda health: health.delivered)
    suspended = Suspension("test", now_iso())
    for suspension, health in ((suspended, "unknown"), (None, "unhealthy"), (suspended, "unknown"), (None, "healthy")):
        if health == "healthy":
            app.heals()
        change = partial(replace, suspension=suspension)
        await shared.registry.change_account(app.account.id, change)
        await app.until(health)
    await app.receives("app.unhealthy", "app.recovered")
    assert app.envelopes()[1]["data"]["downSince"] == now_iso(reported.failing_since / 1000)


async def test_apps_that_change(shared: Fleet) -> None:
    """An app gets another name, moves to another account, and is deleted."""
    app = await shared.app()
    await app.until("healthy")
    named = Watched(shared, app.account, replace(app.app, name=f"{app.app.name}-2"))
    await shared.registry.put_app(named.app, app.app)
    await named.probed()
    other = await shared.app()
    moved = Watched(shared, other.account, replace(named.app, account=other.account.id))
    await moved.goes_live()
    await shared.registry.put_app(moved.app, named.app)
    await moved.probed()
    if partition_tag(app.account.id) != partition_tag(other.account.id):
        assert await app.keys() == []
    await shared.registry.delete_app(moved.app)
    assert await moved.keys() == []
    before = moved.probes
    await other.probed(5)
    assert moved.probes <= before + 1
    assert await moved.keys() == []


# A worker without a network


async def test_a_worker_without_a_network_counts_no_failures(own: Fleet) -> None:
    app = await own.app()
    async with FakeReceiver() as check:
        check.plays("/", CLOSE)
        app.fails()
        with captured(uptime) as log:
            async with probing(own, probe_check_url=check.url("/")):
                await app.probed(5)
                assert (await app.health()).failures == 0
                assert "probe.void" in str(log)
                check.plays("/", answer(404))
                await app.until("unhealthy")
                asked = len(check.got("/"))
                app.heals()
                await app.until("healthy")
                await app.probed(3)
                assert len(check.got("/")) <= asked + 1, "it checks the network only after failures"


async def test_a_blocked_address_does_not_count_as_a_failure(own: Fleet) -> None:
    app = await own.app()
    with captured(uptime) as log:
        async with probing(own, allow_private_addresses=False):
            await wait_until(lambda: str(log).count("BlockedAddress") >= 4, 10)
    assert {line["event"] for line in log} == {"probe.void"}
    assert app.probes == 0
    assert (await app.health()).status == "unknown"


# Probes


@pytest_asyncio.fixture(loop_scope="session")
async def http() -> AsyncIterator[Client]:
    async with Client(allow_private=True, keep_alive=False, own=True) as client:
        yield client


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        (answer(302, headers={"Location": "http://127.0.0.1:1/"}), ""),
        (answer(499), ""),
        (answer(500), "status"),
        ([CLOSE], "connect"),
        (drip(pause=0.1), "timeout"),
        ([Head(503, {"Content-Length": "1000000000"}), bytes(65536), HANG], "status"),
    ],
)
async def test_what_counts_as_an_answer(http: Client, script: Script, seen: str) -> None:
    async with FakeReceiver() as site:
        site.default = script
        began = time.monotonic()
        # Only a probe that shall time out has little time. A busy machine may take long for the others.
        assert await probe(http, site.url(), 0.5 if seen == "timeout" else 10) == seen
        assert time.monotonic() - began < 8, "the budget covers the whole probe, and no body is read"


async def test_the_reasons_why_a_probe_fails_and_each_has_a_new_connection(http: Client, tmp_path: Path) -> None:
    assert await probe(http, f"http://127.0.0.1:{free_port()}/", 1) == "connect"
    assert await probe(http, "http://no-such-host.invalid/", 5) == "dns"
    context, file = certificate(tmp_path, "shop.example", address="127.0.0.1")
    async with FakeReceiver(context) as site, Client(allow_private=True, keep_alive=False, ca_file=file) as trusting:
        assert await probe(http, site.url(), 1) == "tls"
        assert [await probe(trusting, site.url(), 1) for _ in range(2)] == ["", ""]
        assert len({exchange.connection for exchange in site.got()}) == 2
        assert {exchange.header("user-agent") for exchange in site.got()} == {MONITOR}


BROKEN = ["not JSON", '{"id": 1}', '{"id": "x", "unknown": []}']


async def beside(watched: Watched) -> Watched:
    """Creates another app of the account."""
    name = f"app-{secrets.token_hex(4)}"
    other = Watched(watched.fleet, watched.account, replace(watched.app, id=name, name=name))
    await other.goes_live()
    await watched.fleet.registry.put_app(other.app, None)
    return other


async def test_broken_records_stop_no_inspection_of_other_apps(own: Fleet) -> None:
    same = await own.app()
    tag, client = partition_tag(same.account.id), own.queue.store.client
    poisoned = [await beside(same) for _ in BROKEN]
    whole = [await client.get(app_key(app.app.name)) for app in poisoned]
    for app, broken in zip(poisoned, BROKEN, strict=True):
        await client.set(app_key(app.app.name), broken)
    suspended = await own.app()
    while partition_tag(suspended.account.id) != tag:
        suspended = await own.app(live=False)
    await suspended.goes_live()
    change = partial(replace, suspension=Suspension("test", now_iso()))
    await own.registry.change_account(suspended.account.id, change)
    await client.hset(health_key(tag, suspended.app.id), "state", "not JSON")
    worker = await own.worker()
    await same.probed(3, 20)
    assert worker.code is None
    lines = [line for line in worker.log.splitlines() if "inspection.unreadable" in line]
    for app in (*poisoned, suspended):
        assert any(app.app.id in line for line in lines), "the log names each"
        assert app.probes == 0
        assert await client.zscore(probes_key(tag), app.app.id) is not None, "it stays scheduled"
    for app, record in zip(poisoned, whole, strict=True):
        await client.set(app_key(app.app.name), record)
        await client.zadd(probes_key(tag), {app.app.id: 0})  # as when it is due again
    for app in poisoned:
        await wait_until(lambda app=app: app.probes, 10)
    assert await worker.stop() == 0


async def test_an_inspection_that_crashes_is_repeated_after_the_interval(own: Fleet) -> None:
    """The others go on meanwhile."""
    app = await own.app()
    other, others = await beside(app), list[str]()

    async def crash(inspected: InspectedApp) -> Inspection:
        if inspected.app.id == app.app.id:
            raise RuntimeError
        others.append(inspected.app.id)
        return Inspection({}, [], 0.01)

    client, key = own.queue.store.client, probes_key(partition_tag(app.account.id))
    loop = InspectionLoop(
        own.registry, probes_key, health_key, lambda *_: True, crash, interval=3_600, budget=1, at_a_time=1
    )
    async with in_background(loop.run()):
        soonest = (time.time() + 3_000) * 1000
        await wait_until(lambda: client.zscore(key, app.app.id), 10, holds=lambda due: due > soonest)
        count = len(others)
        await wait_until(lambda: others[count:][:3] == [other.app.id] * 3)

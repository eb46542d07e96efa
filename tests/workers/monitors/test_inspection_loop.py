"""A broken record, or an inspection that crashes, does not affect other apps that are due."""

import secrets
import time
from functools import partial

import pytest
from msgspec.structs import replace

from gateway.accounts.records import Suspension
from gateway.ids import now_iso
from gateway.keys import app_key, health_key, partition_tag, probes_key
from tests.support.background import in_background
from tests.support.monitored_apps import Fleet, Watched
from tests.support.polling import wait_until
from workers.monitors.inspection_loop import InspectedApp, Inspection, InspectionLoop

pytestmark = pytest.mark.asyncio(loop_scope="session")


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

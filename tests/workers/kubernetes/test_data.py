"""The data of apps in the cluster: what is of their volumes and pods alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from gateway.cancellation import RunningTasks
from gateway.keys import app_key
from gateway.redis.client import Store
from tests.support.data_rooms import ClusterRoom, data_room
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from workers.engine.app_data import GONE_SECONDS
from workers.engine.names import follow_changes
from workers.engine.replacements import Replacements
from workers.kubernetes.data import ClusterData
from workers.kubernetes.objects import claim_name, describe_gone, gone_name


@pytest_asyncio.fixture
async def room(store: Store, without_tools: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterRoom]:
    with passable_folder() as folder:
        async with data_room("pod", folder, store, monkeypatch) as room:
            assert isinstance(room, ClusterRoom)
            yield room


async def test_a_new_volume_begins_with_the_newest_snapshot(room: ClusterRoom) -> None:
    """As does one of an app that comes from another engine. Until then no app runs on it."""
    app = await room.create_app()
    room.write(app, note="one")
    name = claim_name(app.id, app.account)
    await room.cluster.delete(("Deployment", f"{name}-live"))
    await room.snapshot(app)
    await wait_until(lambda: not room.cluster.select("Pod"))
    assert not room.cluster.select("Deployment"), "a pod was started for the app that does not run"
    await room.stop()
    await room.cluster.delete(("PersistentVolumeClaim", name))
    await room.cluster.claim(app.id, app.account)
    assert (room.data(app).is_held, room.read(app)) == (True, {})
    room.start()
    await wait_until(lambda: not room.data(app).is_held, 20)
    assert room.read(app) == {"note": "one"}
    assert Replacements(room.data(app)).changes == []


async def test_an_app_that_is_deleted_during_a_round_keeps_a_last_snapshot(
    room: ClusterRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, read_apps, begun = await room.create_app(), room.registry.read_intact_apps, asyncio.Event()
    room.write(app, note="one")
    await room.snapshot(app)

    async def read_later(app_ids: Sequence[str]) -> Any:
        """Finds the app deleted, after the round has begun."""
        if not begun.is_set():
            begun.set()
            await room.commands.forget_app(app, room.records)
            await room.registry.delete_app(app)
        return await read_apps(app_ids)

    monkeypatch.setattr(room.registry, "read_intact_apps", read_later)
    last, *_ = await wait_until(lambda: room.list_deleted(app), 20, holds=lambda found: len(found) == 2)
    assert await room.unpack("shop", last) == {"note": b"one"}
    await wait_until(lambda: not room.cluster.select("PersistentVolumeClaim"), 20)


async def test_a_volume_is_removed_as_soon_as_its_app_is_deleted(room: ClusterRoom) -> None:
    """Where it has data, their command removes it, after the last snapshot."""
    app = await room.create_app()
    data = room.make_driver()
    assert isinstance(data, ClusterData)
    await data.follow_app(app.id)
    assert room.cluster.select("PersistentVolumeClaim"), "the app is there"
    following = asyncio.create_task(follow_changes(room.registry.store, data.follow_app))
    await asyncio.sleep(0.2)
    await room.stop()
    await room.registry.delete_app(app)
    await wait_until(lambda: not room.cluster.select("PersistentVolumeClaim"), 5)
    assert not room.cluster.select("Secret")
    following.cancel()
    await asyncio.wait([following])


async def test_a_volume_stays_for_a_week_when_the_records_of_its_app_are_lost(room: ClusterRoom) -> None:
    app = await room.create_app()
    room.write(app, note="one")
    name = claim_name(app.id, app.account)
    record = await room.registry.store.client.get(app_key(app.name))
    await room.registry.store.client.delete(app_key(app.name))
    room.registry.cache.forget(app_key(app.name))
    mark = ("Secret", gone_name(name))
    await wait_until(lambda: mark in room.cluster.present, 20)
    await asyncio.sleep(0.5)
    assert room.read(app) == {"note": "one"}
    await room.registry.store.client.set(app_key(app.name), record)
    room.registry.cache.forget(app_key(app.name))
    await wait_until(lambda: mark not in room.cluster.present, 20)
    await room.registry.store.client.delete(app_key(app.name))
    room.registry.cache.forget(app_key(app.name))
    claim = room.cluster.present["PersistentVolumeClaim", name]
    await room.cluster.apply(describe_gone(claim, time.time() - GONE_SECONDS - 1))
    await wait_until(lambda: not room.cluster.select("PersistentVolumeClaim"), 20)


# -- many apps -----------------------------------------------------------------------------------------------


async def test_a_round_asks_a_part_of_the_apps(room: ClusterRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a new volume does not wait behind thousands of them."""
    monkeypatch.setattr("workers.kubernetes.data.REPORTED", 2)
    await room.stop()
    apps = [await room.create_app(name) for name in ("shop", "notes", "wiki")]
    driver = room.make_driver()
    first, second = await driver.find_changes(), await driver.find_changes()
    assert (len(first), len(second)) == (2, 1)
    assert first.keys() | second.keys() == {(app.account, app.id) for app in apps}
    assert await driver.find_changes() == {}
    # Apps that sleep take nobody's place in a round: a larger plan reaches the pods of the others as soon as before.
    read_apps, asked = room.registry.read_intact_apps, list[str]()

    async def read(app_ids: Sequence[str]) -> Any:
        asked.extend(app_ids)
        return await read_apps(app_ids)

    for app in apps[:2]:
        await room.cluster.delete(("Deployment", f"{claim_name(app.id, app.account)}-live"))
    monkeypatch.setattr(room.cluster, "is_asleep", lambda *_: True)
    monkeypatch.setattr("workers.kubernetes.data.REPORTED", 1)
    monkeypatch.setattr(room.registry, "read_intact_apps", read)
    driver = room.make_driver()
    for _ in range(5):
        await driver.find_changes()
    assert {*asked[:3]} == {"shop", "notes", "wiki"}
    assert asked[3:] == ["wiki", "wiki"]


async def test_a_volume_without_a_pod_is_looked_at_again_when_it_has_one(
    room: ClusterRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await room.create_app()
    await room.stop()
    name, select, looks = claim_name(app.id, app.account), room.cluster.select, list[str]()
    labels = room.cluster.present["Deployment", f"{name}-live"].metadata.labels
    await room.cluster.delete(("Deployment", f"{name}-live"))  # the app sleeps

    def count(kind: str, **labels: str) -> list[Any]:
        looks.append(kind)
        return select(kind, **labels)

    running, driver = RunningTasks(), room.make_driver()
    [(_, begin)] = driver.list_rounds(running)
    monkeypatch.setattr(room.cluster, "select", count)
    for _ in range(3):
        await begin()
    assert (looks, running) == (["Pod"], {})
    await room.cluster.start_pod(f"{name}-live", labels)
    await begin()
    assert looks == ["Pod", "Pod"]
    await asyncio.gather(*running.values())
    await begin()
    assert looks == ["Pod", "Pod"], "the app may run on it"

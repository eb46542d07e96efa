"""The data of apps in the cluster: what is of their volumes and pods alone."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.accounts.records import App
from gateway.redis.client import Store
from tests.support.data_rooms import ClusterRoom, data_room
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from workers.engine.replacements import Replacements
from workers.kubernetes.objects import claim_name


@pytest_asyncio.fixture
async def room(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterRoom]:
    with passable_folder() as folder:
        async with data_room("pod", folder, store, monkeypatch) as room:
            assert isinstance(room, ClusterRoom)
            yield room


async def test_a_new_volume_begins_with_the_newest_snapshot(room: ClusterRoom) -> None:
    """As does one of an app that comes from another engine. Until then no app runs on it."""
    app = await room.create_app()
    room.write(app, note="one")
    await room.snapshot(app)
    await room.stop()
    name = claim_name(app.id, app.account)
    await room.cluster.delete(("Deployment", f"{name}-live"), ("PersistentVolumeClaim", name))
    await room.cluster.claim(app.id, app.account)
    assert (room.data(app).is_held, room.read(app)) == (True, {})
    room.start()
    await wait_until(lambda: not room.data(app).is_held, 20)
    assert room.read(app) == {"note": "one"}
    assert Replacements(room.data(app)).changes == []


async def test_a_pod_is_started_for_an_app_that_does_not_run(room: ClusterRoom) -> None:
    app, name = await room.create_app(), ""
    room.write(app, note="one")
    name = claim_name(app.id, app.account)
    await room.cluster.delete(("Deployment", f"{name}-live"))
    await room.snapshot(app)
    await wait_until(lambda: not room.cluster.select("Pod"))
    assert not room.cluster.select("Deployment")


async def test_an_app_that_never_had_data_leaves_no_volume(room: ClusterRoom) -> None:
    app = await room.create_app()
    await room.registry.delete_app(app)
    await wait_until(lambda: not room.cluster.select("PersistentVolumeClaim"), 20)


async def test_an_app_that_is_deleted_during_a_round_keeps_a_last_snapshot(
    room: ClusterRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, find_app, begun = await room.create_app(), room.registry.find_app, asyncio.Event()
    room.write(app, note="one")
    await room.snapshot(app)

    async def find_later(app_id: str) -> App | None:
        """Finds the app deleted, after the round has begun."""
        if not begun.is_set():
            begun.set()
            await room.commands.forget_app(app, room.records)
            await room.registry.delete_app(app)
        return await find_app(app_id)

    monkeypatch.setattr(room.registry, "find_app", find_later)
    last, *_ = await wait_until(lambda: room.list_deleted(app), 20, holds=lambda found: len(found) == 2)
    assert await room.unpack("shop", last) == {"note": b"one"}
    await wait_until(lambda: not room.cluster.select("PersistentVolumeClaim"), 20)

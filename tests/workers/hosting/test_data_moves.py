"""The data of apps that move from host to host, with a real sandbox, a storage that hosts share, and Redis."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.data.records import Snapshot
from gateway.errors import StorageUnavailable
from gateway.redis.client import Store
from tests.support.data_rooms import HostRoom
from tests.support.folders import passable_folder
from workers.engine.app_data import AppData, DataHeld
from workers.hosting.data import HostData


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """The URL of a storage that hosts share."""
    (tmp_path / "storage").mkdir()
    return f"file://{tmp_path / 'storage'}"


@contextlib.contextmanager
def host_with(store: Store, storage: str) -> Iterator[HostRoom]:
    with passable_folder() as folder:
        yield HostRoom(folder, store, storage)


async def serve(room: HostRoom) -> HostData:
    """Returns the data of a worker that has just started, before any app runs."""
    data = room.make_driver()
    await data.catch_up()
    return data


async def test_the_data_follow_their_app_from_host_to_host(store: Store, shared: str) -> None:
    with host_with(store, shared) as one, host_with(store, shared) as two:
        app = await one.create_app()
        first = await serve(one)
        await first.bring(app.account, app.id)
        data = one.write(app, note="first")
        await first.leave()
        [stop] = await one.list_snapshots(app)
        assert stop.reason == "stop"
        await first.leave()
        assert await one.list_snapshots(app) == [stop], "nothing has changed"
        second = await serve(two)
        await second.bring(app.account, app.id)
        assert two.read(app) == {"note": "first"}
        two.write(app, note="second")
        await second.leave()
        # The first host has files of its own, and a newer snapshot than those that it knows.
        first = await serve(one)
        assert data.is_held, "the app does not run on them"
        with pytest.raises(DataHeld), data.running(app.account, 1):
            pass
        await first.bring(app.account, app.id)
        assert not data.is_held
        assert one.read(app) == {"note": "second"}
        first = await serve(one)
        await first.bring(app.account, app.id)
        assert one.read(app) == {"note": "second"}
        # What is cleared stays cleared on the next host.
        one.start()
        await one.run(app, "clear", reason="clear")
        await one.stop()
        await first.leave()
        await (await serve(two)).bring(app.account, app.id)
        assert two.read(app) == {}


async def test_what_a_host_has_written_since_its_last_snapshot_stays(store: Store, shared: str) -> None:
    """Also if it was killed, and its files are those of a version that has kept no list of snapshots."""
    with host_with(store, shared) as room:
        app = await room.create_app()
        agent = await serve(room)
        data = room.write(app, note="old")
        await agent.leave()
        room.write(app, note="new")
        (data.folder / "snapshot-ids").unlink()
        for _ in range(2):
            await (await serve(room)).bring(app.account, app.id)
            assert room.read(app) == {"note": "new"}


async def test_an_app_does_not_run_on_old_files_while_the_newest_are_out_of_reach(store: Store, shared: str) -> None:
    with host_with(store, shared) as one, host_with(store, shared) as two:
        app = await one.create_app()
        one.write(app, note="old")
        await (await serve(one)).leave()
        second = await serve(two)
        await second.bring(app.account, app.id)
        two.write(app, note="new")
        await second.leave()
        first, data = await serve(one), AppData(one.folder, app.id)
        folder = Path(shared.removeprefix("file://"))
        folder.rename(folder.with_name("away"))
        with pytest.raises(StorageUnavailable):
            await first.bring(app.account, app.id)
        assert data.is_held
        folder.with_name("away").rename(folder)
        await (await serve(one)).bring(app.account, app.id)
        assert one.read(app) == {"note": "new"}


async def test_a_host_without_shared_storage_keeps_its_files_and_makes_no_last_snapshot(store: Store) -> None:
    with host_with(store, "") as room:
        app = await room.create_app()
        room.write(app, note="mine")
        agent = await serve(room)
        await agent.leave()
        assert await room.list_snapshots(app) == []
        await room.records.add_snapshot(
            app.account, app.id, Snapshot("snp_zz", "2026-07-02T10:00:00.000Z", 1, "manual")
        )
        await (await serve(room)).bring(app.account, app.id)
        assert room.read(app) == {"note": "mine"}

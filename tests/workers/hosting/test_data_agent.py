"""The agent that takes care of apps' data, with a real sandbox, storage and Redis."""

import asyncio
import contextlib
import io
import os
import sqlite3
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.data import records
from gateway.data.commands import DataAnswer, DataCommand, DataCommands
from gateway.data.records import DataRecords, DataStatus, Snapshot, snapshot_key
from gateway.errors import StorageUnavailable
from gateway.ids import new_id
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.storage import open_storage
from tests.support.background import cancel
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.sandbox import ROOT, checked_sandbox
from tests.support.stores import change_plan
from workers.hosting import data_agent
from workers.hosting.data import AppData, DataHeld
from workers.hosting.data_agent import DataAgent
from workers.hosting.data_packer import DataPacker
from workers.hosting.releases import Releases
from workers.sandbox.sandbox import Command

USERS = range(61_192, 61_196)
# Counts in a database in the present folder until it is killed.
COUNT = """
import sqlite3
database = sqlite3.connect("app.db", isolation_level=None)
database.execute("PRAGMA journal_mode=WAL")
database.execute("CREATE TABLE counts (n INTEGER PRIMARY KEY, filling BLOB)")
n = 0
while True:
    n += 1
    database.execute("INSERT INTO counts VALUES (?, zeroblob(2000))", (n,))
"""
COUNTED = "SELECT count(*), max(n) FROM counts"


class Room:
    """An agent, and an account with the app `shop`."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store = folder, store
        Releases(folder).create_folders()
        self.settings = Settings(data_dir=str(folder), app_data={"free": 1, "starter": 2, "maker": 4, "max": 8})
        self.registry = Registry(store, Vault(""))
        self.records, self.commands = DataRecords(store), DataCommands(store)
        self.storage = open_storage(self.settings)
        self.sandbox = checked_sandbox(USERS, folder)
        self.account = ""
        self._task: asyncio.Task[None] | None = None

    async def create_app(self, app_id: str = "shop", plan: Any = "max") -> App:
        account, _ = await self.registry.create_account("A", plan)
        app = App(id=app_id, name=app_id, account=account.id, createdAt="")
        await self.registry.put_app(app, None)
        return app

    def data(self, app: App) -> AppData:
        data = AppData(self.folder, app.id)
        with data.running(app.account, 8 << 20), data.user(self.sandbox):
            return data

    def write(self, app: App, **files: str) -> AppData:
        """Writes files as the app."""
        data = self.data(app)
        for name, text in files.items():
            (data.files / name).write_text(text)
            os.chown(data.files / name, data.files.stat().st_uid, -1)
        return data

    def start(self) -> None:
        packer = DataPacker(self.settings, self.registry, self.sandbox)
        self._task = asyncio.create_task(DataAgent(self.settings, self.registry, packer).run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def run(self, app: App, action: Any, **more: str) -> DataAnswer:
        return await self.commands.run(app.account, app.id, action, 30, **more)  # type: ignore[arg-type]

    async def snapshot(self, app: App, **more: str) -> Snapshot:
        answer = await self.run(app, "snapshot", **more)
        assert answer.snapshot is not None, answer
        return answer.snapshot

    async def read(self, app_id: str, snapshot: Snapshot) -> dict[str, bytes]:
        """Returns the files of a snapshot."""
        found = await self.storage.open(snapshot_key(app_id, snapshot.id))
        assert found is not None
        content = b"".join([chunk async for chunk in found.chunks])
        assert len(content) == snapshot.bytes == found.size
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            return {each.name: tar.extractfile(each).read() for each in tar if each.isfile()}  # type: ignore[union-attr]

    async def stored(self, app_id: str) -> set[str]:
        return {name.partition(".")[0] for name in await self.storage.list_names(f"data/{app_id}/snapshots/")}

    async def status(self, app: App) -> DataStatus:
        return await self.records.read_status(app)


@pytest.fixture
def folder() -> Iterator[Path]:
    with passable_folder() as folder:
        yield folder


@pytest_asyncio.fixture
async def room(folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Room]:
    for name, seconds in (("POLL", 0.05), ("REPORT", 0.05), ("PLANS", 0.1), ("TIDY", 0.1)):
        monkeypatch.setattr(data_agent, f"{name}_SECONDS", seconds)
    room = Room(folder, store)
    room.start()
    yield room
    await room.stop()


async def test_a_snapshot_under_write_load_is_one_state_of_the_database(room: Room) -> None:
    app = await room.create_app()
    data = room.data(app)
    command = Command(program=COUNT, folder=data.files, environment=room.sandbox.environment, write=[data.files])
    with data.user(room.sandbox) as uid:
        async with room.sandbox.start(command, uid, print) as writing:
            wal = data.files / "app.db-wal"
            await wait_until(lambda: wal.exists() and wal.stat().st_size > 100_000, 20)  # it has the table
            for _ in range(3):
                before, _ = _query(data.files / "app.db", COUNTED)
                files = await room.read("shop", await room.snapshot(app))
                assert list(files) == ["app.db"]
                (room.folder / "copy.db").write_bytes(files["app.db"])
                assert _query(room.folder / "copy.db", "PRAGMA integrity_check") == ("ok",)
                count, last = _query(room.folder / "copy.db", COUNTED)
                assert count == last >= before
            assert not writing.done(), "the writer was not disturbed"


def _query(path: Path, query: str) -> Any:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=10)) as database:
        return database.execute(query).fetchone()


async def test_as_many_snapshots_are_kept_as_promised(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEPT", {**records.KEPT, "manual": 2})
    app = await room.create_app()
    room.write(app, note="one")
    made = [await room.snapshot(app) for _ in range(4)]
    of_deploy = await room.snapshot(app, reason="deploy", deploy="dep_1")
    assert (of_deploy.reason, of_deploy.deployId) == ("deploy", "dep_1")
    kept = await room.records.list_snapshots(app.account, app.id)
    assert kept == [of_deploy, made[3], made[2]]
    assert await room.stored("shop") == {snapshot.id for snapshot in kept}


async def test_without_files_there_is_no_snapshot(room: Room) -> None:
    app = await room.create_app()
    assert await room.run(app, "snapshot") == DataAnswer()
    room.data(app)
    assert await room.run(app, "snapshot") == DataAnswer()
    assert await room.run(app, "clear") == DataAnswer()


async def test_a_restore_keeps_what_was_there_and_can_be_undone(room: Room) -> None:
    app = await room.create_app()
    data = room.write(app, note="one")
    first = await room.snapshot(app)
    room.write(app, note="two", more="x")
    key = snapshot_key("shop", first.id)
    answer = await room.run(app, "restore", reason="restore", deploy="dep_1", source=key)
    assert answer.snapshot is not None
    assert (answer.snapshot.reason, answer.snapshot.deployId) == ("restore", "dep_1")
    assert await room.read("shop", answer.snapshot) == {"note": b"two", "more": b"x"}
    assert {path.name: path.read_text() for path in data.files.iterdir()} == {"note": "one"}
    if ROOT:
        assert {path.stat().st_uid for path in (data.files, data.files / "note")} <= set(USERS)
    await room.run(app, "undo", deploy="dep_1")
    assert (data.files / "note").read_text() == "two"
    await room.run(app, "restore", reason="restore", deploy="dep_2", source=key)
    await room.run(app, "confirm", deploy="dep_2")
    await room.run(app, "undo", deploy="dep_2")
    assert (data.files / "note").read_text() == "one"
    assert sorted(path.name for path in data.folder.iterdir() if path.is_dir()) == ["files", "snapshots"]


async def test_nothing_is_lost_when_the_plan_has_become_much_smaller(room: Room) -> None:
    app = await room.create_app()
    data = room.write(app, big="x" * 3_000_000)
    await change_plan(room.registry, app.account, "free")
    await wait_until(lambda: data.limit == 1 << 20)
    answer = await room.run(app, "clear", reason="clear")
    assert answer.snapshot is not None
    assert len((await room.read("shop", answer.snapshot))["big"]) == 3_000_000
    room.write(app, big="x" * 3_000_000)
    await room.commands.forget_app(app, room.records)

    async def read_deleted() -> list[Snapshot]:
        return [snapshot for each in await room.records.list_deleted(app.account) for snapshot in each.snapshots]

    last, _ = await wait_until(read_deleted, 20, holds=lambda found: len(found) == 2)
    assert len((await room.read("shop", last))["big"]) == 3_000_000


async def test_a_snapshot_beyond_the_plan_is_not_restored(room: Room) -> None:
    app = await room.create_app()
    data = room.write(app, big="x" * 3_000_000)
    snapshot = await room.snapshot(app)
    await change_plan(room.registry, app.account, "starter")
    room.write(app, big="small")
    answer = await room.run(app, "restore", deploy="dep_1", source=snapshot_key("shop", snapshot.id))
    assert answer.error == "the snapshot can't be restored: the archive has more than 2 MiB"
    assert (data.files / "big").read_text() == "small"
    answer = await room.run(app, "restore", deploy="dep_1", source=snapshot_key("shop", "snp_other"))
    assert answer.error == "the snapshot is no longer kept"


async def test_an_archive_that_leaves_the_folder_is_not_restored(room: Room) -> None:
    app = await room.create_app()
    data = room.write(app, note="one")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../limit"))
    await room.storage.put(snapshot_key("shop", "snp_bad"), packed.getvalue())
    answer = await room.run(app, "restore", deploy="dep_1", source=snapshot_key("shop", "snp_bad"))
    assert "leaves its folder" in answer.error
    assert (data.files / "note").read_text() == "one"


async def test_clearing_keeps_a_snapshot(room: Room) -> None:
    app = await room.create_app()
    data = room.write(app, note="one")
    owner = data.files.stat().st_uid
    answer = await room.run(app, "clear", reason="clear")
    assert answer.snapshot is not None
    assert await room.read("shop", answer.snapshot) == {"note": b"one"}
    assert os.listdir(data.files) == []
    assert (data.files.stat().st_uid, data.files.stat().st_mode & 0o777) == (owner, 0o700)


async def test_links_lead_no_snapshot_out_of_the_folder(room: Room) -> None:
    app, other = await room.create_app(), await room.create_app("other")
    room.write(other, secret="another's")
    (room.folder / "key").write_text("the host's")
    data = room.write(app, note="one")
    for name, target in (("a", room.folder / "key"), ("b", room.folder / "data" / "other" / "files"), ("c", "/etc")):
        (data.files / name).symlink_to(target)
    answer = await room.run(app, "snapshot")
    assert answer.snapshot is not None
    assert len(answer.notes) == 3
    assert await room.read("shop", answer.snapshot) == {"note": b"one"}


async def test_the_data_of_a_deleted_app_are_kept_for_its_account_alone(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await room.create_app()
    room.write(app, note="one").measure()
    await wait_until(lambda: room.status(app), holds=lambda status: status.usedBytes > 0)
    first = await room.snapshot(app)
    await room.commands.forget_app(app, room.records)
    await room.registry.delete_app(app)

    async def listed() -> list[records.DeletedData]:
        return await room.records.list_deleted(app.account)

    [deleted] = await wait_until(listed, holds=lambda found: bool(found) and len(found[0].snapshots) == 2)
    assert (deleted.app, deleted.appId) == ("shop", "shop")
    assert [snapshot.reason for snapshot in deleted.snapshots] == ["clear", "manual"]
    assert await room.read("shop", deleted.snapshots[0]) == {"note": b"one"}
    await wait_until(lambda: not AppData(room.folder, "shop").exists)
    again = await room.create_app()
    assert os.listdir(room.data(again).files) == []
    assert await room.records.list_snapshots(again.account, again.id) == []
    assert await room.records.find_snapshot(again, first.id) is None
    own = App(id="mine", name="mine", account=app.account, createdAt="")
    assert await room.records.find_snapshot(own, first.id) == snapshot_key("shop", first.id)
    monkeypatch.setattr(records, "DELETED_SECONDS", 0)
    await wait_until(lambda: room.stored("shop"), holds=lambda names: not names)
    assert await listed() == []


async def test_a_snapshot_is_made_daily_when_something_has_changed(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    app = await room.create_app()
    data = room.write(app, note="one")

    async def made() -> list[Snapshot]:
        return await room.records.list_snapshots(app.account, app.id)

    await wait_until((data.folder / "daily").exists)
    assert await made() == []
    monkeypatch.setattr("workers.hosting.data.DAILY_SECONDS", 0.3)
    [daily] = await wait_until(made, 20)
    assert daily.reason == "daily"
    await asyncio.sleep(1)
    assert len(await made()) == 1, "nothing has changed"
    room.write(app, note="two")
    await wait_until(made, 20, holds=lambda found: len(found) == 2)


async def test_damaged_records_of_one_app_do_not_affect_the_others(room: Room) -> None:
    damaged, app = await room.create_app("damaged"), await room.create_app()
    await room.stop()
    (room.write(damaged, note="one").folder / "daily").write_text("yesterday")
    daily = room.write(app, note="one").folder / "daily"
    room.start()
    await wait_until(daily.exists, 20)


async def test_the_plan_limits_the_data_and_what_they_take_is_reported(room: Room) -> None:
    app = await room.create_app(plan="free")
    data = room.write(app, big="x" * 2_000_000)
    data.measure()
    await wait_until(lambda: data.limit == 1 << 20)
    assert data.is_full
    await wait_until(lambda: room.status(app), holds=lambda status: status.usedBytes > 2_000_000)
    await change_plan(room.registry, app.account, "max")
    await wait_until(lambda: data.limit == 8 << 20)


async def test_new_data_get_the_plan_s_limit_at_their_first_report(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    await room.stop()
    monkeypatch.setattr(data_agent, "PLANS_SECONDS", 1_000)
    room.start()
    await asyncio.sleep(0.3)  # the first round
    app = await room.create_app(plan="starter")
    data = room.data(app)
    await wait_until(lambda: data.limit == 2 << 20)


async def test_slow_snapshots_of_an_account_do_not_hold_up_others(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = DataPacker._pack
    slow = [await room.create_app("slow-0")]
    slow += [
        App(id=f"slow-{number}", name=f"slow-{number}", account=slow[0].account, createdAt="") for number in (1, 2, 3)
    ]
    other = await room.create_app()

    async def pack_slowly(packer: DataPacker, data: AppData, files: Path, packed: Path) -> list[str]:
        if data.app_id != other.id:
            await asyncio.Event().wait()
        return await pack(packer, data, files, packed)

    monkeypatch.setattr(DataPacker, "_pack", pack_slowly)
    for app in (*slow, other):
        room.write(app, note="one")
    waiting = [asyncio.create_task(room.run(app, "snapshot")) for app in slow]
    await asyncio.sleep(0.5)
    async with asyncio.timeout(10):
        await room.snapshot(other)
    await cancel(*waiting)


async def test_a_hole_is_not_written_to_the_disk(room: Room) -> None:
    app = await room.create_app()
    data = room.write(app, note="one", hole="")
    os.truncate(data.files / "hole", 1 << 30)
    data.measure()
    assert data.used > 1 << 30
    assert await room.read(app.id, await room.snapshot(app)) == {"note": b"one"}


async def test_a_command_survives_the_agent(room: Room) -> None:
    app = await room.create_app()
    room.write(app, note="one")
    await room.stop()
    waiting = asyncio.create_task(room.run(app, "snapshot"))
    late = DataCommand(new_id("dat"), app.account, app.id, "clear", time.time() - 1)
    await room.commands.send(late)
    await asyncio.sleep(0.3)
    assert not waiting.done()
    room.start()
    assert (await waiting).snapshot is not None
    await wait_until(room.commands.list_commands, holds=lambda commands: not commands)
    assert (AppData(room.folder, "shop").files / "note").exists(), "nobody waits for the late command"


# -- from host to host -------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """The URL of a storage that hosts share."""
    (tmp_path / "storage").mkdir()
    return f"file://{tmp_path / 'storage'}"


@contextlib.contextmanager
def host_with(store: Store, storage: str) -> Iterator[Room]:
    with passable_folder() as folder:
        room = Room(folder, store)
        room.settings = msgspec.structs.replace(room.settings, storage_url=storage)
        room.storage = open_storage(room.settings)
        yield room


async def serve(room: Room) -> DataAgent:
    """Returns the agent of a worker that has just started, before any app runs."""
    agent = DataAgent(room.settings, room.registry, DataPacker(room.settings, room.registry, room.sandbox))
    await agent.catch_up()
    return agent


def read(room: Room, app: App) -> dict[str, str]:
    return {path.name: path.read_text() for path in AppData(room.folder, app.id).files.iterdir()}


async def test_the_data_follow_their_app_from_host_to_host(store: Store, shared: str) -> None:
    with host_with(store, shared) as one, host_with(store, shared) as two:
        app = await one.create_app()
        first = await serve(one)
        await first.bring(app.account, app.id)
        data = one.write(app, note="first")
        await first.leave()
        [stop] = await one.records.list_snapshots(app.account, app.id)
        assert stop.reason == "stop"
        await first.leave()
        assert await one.records.list_snapshots(app.account, app.id) == [stop], "nothing has changed"
        second = await serve(two)
        await second.bring(app.account, app.id)
        assert read(two, app) == {"note": "first"}
        two.write(app, note="second")
        await second.leave()
        # The first host has files of its own, and a newer snapshot than those that it knows.
        first = await serve(one)
        assert data.is_held, "the app does not run on them"
        with pytest.raises(DataHeld), data.running(app.account, 1):
            pass
        await first.bring(app.account, app.id)
        assert not data.is_held
        assert read(one, app) == {"note": "second"}
        await (await serve(one)).bring(app.account, app.id)
        assert read(one, app) == {"note": "second"}


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
            assert read(room, app) == {"note": "new"}


async def test_cleared_data_stay_cleared_on_the_next_host(store: Store, shared: str) -> None:
    with host_with(store, shared) as one, host_with(store, shared) as two:
        app = await one.create_app()
        agent = await serve(one)
        one.write(app, note="secret")
        one.start()
        await one.run(app, "clear", reason="clear")
        await one.stop()
        await agent.leave()
        await (await serve(two)).bring(app.account, app.id)
        assert read(two, app) == {}


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
        assert read(one, app) == {"note": "new"}


async def test_a_host_without_shared_storage_keeps_its_files_and_makes_no_last_snapshot(store: Store) -> None:
    with host_with(store, "") as room:
        app = await room.create_app()
        room.write(app, note="mine")
        agent = await serve(room)
        await agent.leave()
        assert await room.records.list_snapshots(app.account, app.id) == []
        await room.records.add_snapshot(
            app.account, app.id, Snapshot("snp_zz", "2026-07-02T10:00:00.000Z", 1, "manual")
        )
        await (await serve(room)).bring(app.account, app.id)
        assert read(room, app) == {"note": "mine"}

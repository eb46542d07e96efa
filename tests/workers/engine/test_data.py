"""The contract of apps' data, on a host and in a cluster: what each command does, and what is left when it fails."""

import asyncio
import contextlib
import errno
import io
import os
import sqlite3
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio

from gateway.accounts.records import App
from gateway.data import records
from gateway.data.commands import DataAnswer, DataCommand, DataCommands
from gateway.data.records import DataRecords, snapshot_key
from gateway.errors import StorageFull, StorageUnavailable
from gateway.ids import new_id
from gateway.redis.client import Store
from tests.support.background import cancel, in_background
from tests.support.data_rooms import USERS, DataRoom, data_room
from tests.support.folders import passable_folder
from tests.support.logs import captured
from tests.support.polling import wait_until
from tests.support.sandbox import ROOT
from tests.support.stores import change_plan
from workers.engine import data as engine_data
from workers.engine import packing
from workers.engine.app_data import AppData
from workers.engine.data import DataDriver
from workers.engine.packing import DataError, SandboxPacker
from workers.engine.replacements import Replacements
from workers.sandbox.sandbox import Command

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


@pytest_asyncio.fixture(params=["host", "pod"])
async def room(
    store: Store, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[DataRoom]:
    with passable_folder() as folder:
        async with data_room(request.param, folder, store, monkeypatch) as room:
            yield room


# -- snapshots ---------------------------------------------------------------------------------------------------


async def test_a_snapshot_under_write_load_is_one_state_of_the_database(room: DataRoom) -> None:
    app = await room.create_app()
    data = room.data(app)
    command = Command(program=COUNT, folder=data.files, environment=room.sandbox.environment, write=[data.files])
    with data.user(room.sandbox) as uid:
        async with room.sandbox.start(command, uid, print) as writing:
            wal = data.files / "app.db-wal"
            await wait_until(lambda: wal.exists() and wal.stat().st_size > 100_000, 20)  # it has the table
            for _ in range(3):
                before, _ = _query(data.files / "app.db", COUNTED)
                files = await room.unpack("shop", await room.snapshot(app))
                assert list(files) == ["app.db"]
                (room.folder / "copy.db").write_bytes(files["app.db"])
                assert _query(room.folder / "copy.db", "PRAGMA integrity_check") == ("ok",)
                count, last = _query(room.folder / "copy.db", COUNTED)
                assert count == last >= before
            assert not writing.done(), "the writer was not disturbed"


def _query(path: Path, query: str) -> Any:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=10)) as database:
        return database.execute(query).fetchone()


async def test_as_many_snapshots_are_kept_as_promised(room: DataRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEPT", {**records.KEPT, "manual": 2})
    app = await room.create_app()
    room.write(app, note="one")
    made = [await room.snapshot(app) for _ in range(4)]
    of_deploy = await room.snapshot(app, reason="deploy", deploy="dep_1")
    assert (of_deploy.reason, of_deploy.deployId) == ("deploy", "dep_1")
    kept = await room.list_snapshots(app)
    assert kept == [of_deploy, made[3], made[2]]
    assert await room.list_stored("shop") == {snapshot.id for snapshot in kept}


async def test_without_files_there_is_no_snapshot(room: DataRoom) -> None:
    app = await room.create_app()
    for action in ("snapshot", "clear"):
        assert await room.run(app, action) == DataAnswer()
        assert await room.run(App(id="none", name="none", account=app.account, createdAt=""), action) == DataAnswer()


async def test_a_snapshot_has_no_links_and_no_holes(room: DataRoom) -> None:
    app, other = await room.create_app(), await room.create_app("other")
    secret = room.write(other, secret="another's").files
    (room.folder / "key").write_text("the host's")
    data = room.write(app, note="one", hole="")
    os.truncate(data.files / "hole", 1 << 30)
    for name, target in (("a", room.folder / "key"), ("b", secret), ("c", "/etc"), ("d", "../../key")):
        (data.files / name).symlink_to(target)
    answer = await room.run(app, "snapshot")
    assert len(answer.notes) == 5
    assert await room.unpack("shop", answer.snapshot) == {"note": b"one"}


async def test_a_snapshot_is_made_daily_when_something_has_changed(
    room: DataRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, app = await room.create_app("damaged"), await room.create_app()
    (room.write(damaged, note="one").folder / "daily").write_text("yesterday")
    data = room.write(app, note="one")
    await wait_until((data.folder / "daily").exists, 20)
    assert await room.list_snapshots(app) == []
    monkeypatch.setattr("workers.engine.daily.DAILY_SECONDS", 0.3)
    [daily] = await wait_until(lambda: room.list_snapshots(app), 20)
    assert daily.reason == "daily"
    await asyncio.sleep(1)
    assert len(await room.list_snapshots(app)) == 1, "nothing has changed"
    room.write(app, note="two")
    await wait_until(lambda: room.list_snapshots(app), 20, holds=lambda found: len(found) == 2)


async def test_slow_snapshots_of_an_account_do_not_hold_up_others(
    room: DataRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = SandboxPacker._pack
    slow, other = [await room.create_app("slow-0")], await room.create_app()
    slow += [await room.create_app(f"slow-{number}", account=slow[0].account) for number in (1, 2, 3)]

    async def pack_slowly(packer: SandboxPacker, data: AppData, files: Path, packed: Path) -> list[str]:
        if data.app_id != other.id:
            await asyncio.Event().wait()
        return await pack(packer, data, files, packed)

    monkeypatch.setattr(SandboxPacker, "_pack", pack_slowly)
    for app in (*slow, other):
        room.write(app, note="one")
    waiting = [asyncio.create_task(room.run(app, "snapshot")) for app in slow]
    await asyncio.sleep(0.5)
    async with asyncio.timeout(10):
        await room.snapshot(other)
    await cancel(*waiting)


# -- what replaces files -----------------------------------------------------------------------------------------


async def test_a_restore_keeps_what_was_there_and_can_be_undone(room: DataRoom) -> None:
    app = await room.create_app()
    data = room.write(app, note="one")
    first = await room.snapshot(app)
    room.write(app, note="two", more="x")
    restore = {"reason": "restore", "source": snapshot_key("shop", first.id)}
    answer = await room.run(app, "restore", deploy="dep_1", **restore)
    assert answer.snapshot is not None
    assert (answer.snapshot.reason, answer.snapshot.deployId) == ("restore", "dep_1")
    assert await room.unpack("shop", answer.snapshot) == {"note": b"two", "more": b"x"}
    assert room.read(app) == {"note": "one"}
    if ROOT and not room.trusted:
        assert {path.stat().st_uid for path in (data.files, data.files / "note")} <= set(USERS)
    for _ in range(2):  # what is repeated changes nothing
        await room.run(app, "undo", deploy="dep_1")
        assert room.read(app) == {"note": "two", "more": "x"}
    await room.run(app, "restore", deploy="dep_2", **restore)
    await room.run(app, "confirm", deploy="dep_2")
    await room.run(app, "undo", deploy="dep_2")
    assert room.read(app) == {"note": "one"}
    assert {path.name for path in data.folder.iterdir() if path.is_dir()} - {"snapshots"} == {"files"}


@pytest.mark.parametrize("name", [None, "../limit"], ids=["damaged", "leaves its folder"])
async def test_what_cannot_be_restored_changes_nothing(room: DataRoom, name: str | None) -> None:
    app = await room.create_app()
    room.write(app, note="one")
    packed = io.BytesIO(b"no archive")
    if name is not None:
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.addfile(tarfile.TarInfo(name))
    await room.storage.put(snapshot_key("shop", "snp_bad"), packed.getvalue())
    answer = await room.run(app, "restore", deploy="dep_1", source=snapshot_key("shop", "snp_bad"))
    assert "can't be restored" in answer.error
    assert room.read(app) == {"note": "one"}
    answer = await room.run(app, "restore", deploy="dep_1", source=snapshot_key("shop", "snp_other"))
    assert answer.error == "the snapshot is no longer kept"


@pytest.mark.parametrize("action", ["restore", "clear"])
@pytest.mark.parametrize("fails", ["packing", "storing"])
async def test_files_without_a_snapshot_are_not_replaced(
    room: DataRoom, monkeypatch: pytest.MonkeyPatch, action: str, fails: str
) -> None:
    app = await room.create_app()
    data = room.write(app, note="one")
    first = await room.snapshot(app)
    room.write(app, note="two")

    async def fail(*_: object) -> Any:
        assert data.is_held, "the app has stopped, so that nothing is written meanwhile"
        raise DataError("No snapshot was made.") if fails == "packing" else StorageUnavailable

    monkeypatch.setattr(*((SandboxPacker, "_pack", fail) if fails == "packing" else (DataDriver, "store", fail)))
    answer = await room.run(app, action, deploy="dep_1", source=snapshot_key("shop", first.id))
    assert answer.error
    assert room.read(app) == {"note": "two"}
    await wait_until(lambda: not data.is_held)
    await room.run(app, "undo", deploy="dep_1")
    assert room.read(app) == {"note": "two"}


async def test_a_full_disk_is_said_to_be_full(room: DataRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the storage, and in the sandbox of a program."""
    app = await room.create_app()
    room.write(app, note="one")
    kept = await room.snapshot(app)
    storing = AsyncMock(side_effect=StorageFull())
    program = f"import os; os._exit({errno.ENOSPC})"
    for action, where, name, fault in (
        ("clear", DataDriver, "store", storing),
        ("restore", packing, "ARCHIVES", program),
        ("snapshot", packing, "PACK", program),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fault)
            answer = await room.run(app, action, source=snapshot_key("shop", kept.id))
        assert (answer.is_full, answer.service_fault) == (True, True), action
        assert answer.error.partition(";")[0] == "The disk of the service is full", action
        assert room.read(app) == {"note": "one"}, action


@pytest.mark.parametrize("action", ["restore", "clear"])
@pytest.mark.parametrize(
    "after",
    [(DataDriver, "store"), (DataRecords, "add_snapshot"), (Replacements, "replace"), (DataCommands, "answer")],
    ids=["stored", "recorded", "replaced", "answered"],
)
async def test_a_command_goes_on_where_its_worker_was_killed(
    room: DataRoom, monkeypatch: pytest.MonkeyPatch, action: str, after: tuple[type, str]
) -> None:
    """Meanwhile the app writes, and what it writes stays."""
    app = await room.create_app()
    room.write(app, note="one")
    first = await room.snapshot(app)
    room.write(app, note="two")
    reached, end = asyncio.Event(), getattr(*after)

    if asyncio.iscoroutinefunction(end):

        async def hang(*arguments: Any) -> Any:
            if after[1] != "answer":
                await end(*arguments)
            reached.set()
            await asyncio.Event().wait()
    else:

        def hang(*arguments: Any) -> Any:
            end(*arguments)
            loop.call_soon_threadsafe(reached.set)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(*after, hang)
    more = {"deploy": "dep_1", "source": snapshot_key("shop", first.id)} if action == "restore" else {}
    async with in_background(room.run(app, action, **more)) as running:
        await asyncio.wait_for(reached.wait(), 20)
        await room.stop()
        monkeypatch.setattr(*after, end)
        was_replaced = room.read(app) != {"note": "two"}
        assert was_replaced is (after[1] in ("replace", "answer"))
        room.write(app, later="three")
        room.start()
        answer = await running
    assert answer.snapshot is not None
    former = {"note": b"two"} if was_replaced else {"note": b"two", "later": b"three"}
    assert await room.unpack("shop", answer.snapshot) == former
    assert [each.id for each in await room.list_snapshots(app)] == [answer.snapshot.id, first.id]
    restored = {"note": "one"} if action == "restore" else {}
    assert room.read(app) == restored | ({"later": "three"} if was_replaced else {})
    if action == "restore":
        await room.run(app, "undo", deploy="dep_1")
        assert {name: text.encode() for name, text in room.read(app).items()} == former


# -- limits ------------------------------------------------------------------------------------------------------


async def test_nothing_is_lost_when_the_plan_has_become_much_smaller(room: DataRoom) -> None:
    app = await room.create_app()
    data = room.write(app, big="x" * 3_000_000)
    first = await room.snapshot(app)
    await change_plan(room.registry, app.account, "free")
    await wait_until(lambda: data.limit == 1 << 20)
    answer = await room.run(app, "clear", reason="clear")
    assert len((await room.unpack("shop", answer.snapshot))["big"]) == 3_000_000
    answer = await room.run(app, "restore", deploy="dep_1", source=snapshot_key("shop", first.id))
    assert answer.error == "the snapshot can't be restored: the archive has more than 1 MiB"
    room.write(app, big="x" * 3_000_000)
    await room.commands.forget_app(app, room.records)
    last, *_ = await wait_until(lambda: room.list_deleted(app), 20, holds=lambda found: len(found) == 3)
    assert len((await room.unpack("shop", last))["big"]) == 3_000_000


async def test_the_plan_limits_the_data_and_what_they_take_is_reported(room: DataRoom) -> None:
    app = await room.create_app(plan="free")
    data = room.write(app, big="x" * 2_000_000)
    data.measure()
    await wait_until(lambda: data.limit == 1 << 20)
    assert data.is_full
    await wait_until(lambda: room.status(app), holds=lambda status: status.usedBytes > 2_000_000)
    await change_plan(room.registry, app.account, "max")
    await wait_until(lambda: data.limit == 8 << 20)


# -- the end -----------------------------------------------------------------------------------------------------


async def test_the_data_of_a_deleted_app_are_kept_for_its_account_alone(
    room: DataRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await room.create_app()
    data = room.write(app, note="one")
    data.measure()
    await wait_until(lambda: room.status(app), holds=lambda status: status.usedBytes > 0)
    first = await room.snapshot(app)
    await room.commands.forget_app(app, room.records)
    await room.registry.delete_app(app)
    await wait_until(lambda: room.list_deleted(app), 20, holds=lambda found: len(found) == 2)
    [deleted] = await room.records.list_deleted(app.account)
    assert (deleted.app, deleted.appId) == ("shop", "shop")
    assert [snapshot.reason for snapshot in deleted.snapshots] == ["clear", "manual"]
    assert await room.unpack("shop", deleted.snapshots[0]) == {"note": b"one"}
    await wait_until(lambda: not data.exists)
    again = await room.create_app()
    assert room.read(again) == {}
    assert await room.list_snapshots(again) == []
    assert await room.records.find_snapshot(again, first.id) is None
    own = App(id="mine", name="mine", account=app.account, createdAt="")
    assert await room.records.find_snapshot(own, first.id) == snapshot_key("shop", first.id)
    monkeypatch.setattr(records, "DELETED_SECONDS", 0)
    await wait_until(lambda: room.list_stored("shop"), holds=lambda names: not names)
    assert await room.list_deleted(app) == []


async def test_a_deletion_is_repeated_until_the_data_are_kept(room: DataRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    app = await room.create_app()
    data = room.write(app, note="one")
    await room.snapshot(app)
    room.write(app, note="two")
    faults: list[Exception] = [DataError("The app's pod did not answer."), StorageUnavailable()]
    store = DataDriver.store

    async def fail(*arguments: Any) -> Any:
        if faults:
            raise faults.pop()
        return await store(*arguments)

    monkeypatch.setattr(DataDriver, "store", fail)
    monkeypatch.setattr(engine_data, "REPEAT_SECONDS", 0.1)
    with captured(engine_data) as lines:
        await room.commands.forget_app(app, room.records)
        await room.registry.delete_app(app)
        last, *_ = await wait_until(lambda: room.list_deleted(app), 20, holds=lambda found: len(found) == 2)
    assert await room.unpack("shop", last) == {"note": b"two"}
    await wait_until(lambda: not data.exists)
    repeated = [line for line in lines if line["event"].startswith("data.command")]
    assert [line["event"] for line in repeated] == ["data.command_repeated"] * 2
    assert all(line["log_level"] == "warning" and "exc_info" not in line for line in repeated)


async def test_no_late_command_reaches_the_files_of_the_next_account(room: DataRoom) -> None:
    """While the worker is away, an app is deleted in the middle of a restore, and another account makes its like.

    Nor does a command whose end is over, for which nobody waits.
    """
    app = await room.create_app()
    room.write(app, note="one")
    first = await room.snapshot(app)
    room.write(app, note="two")
    source = snapshot_key("shop", first.id)
    await room.run(app, "restore", deploy="dep_1", source=source)
    await room.stop()
    await room.commands.forget_app(app, room.records)
    await room.registry.delete_app(app)
    undo = DataCommand(new_id("dat"), app.account, app.id, "undo", time.time() + 60, deploy="dep_1")
    await room.commands.send(undo)
    other = await room.create_app()
    data = room.write(other, note="another's")
    await room.commands.send(DataCommand(new_id("dat"), other.account, other.id, "clear", time.time() - 1))
    room.start()
    await wait_until(room.commands.list_commands, 20, holds=lambda commands: not commands)
    for action in ("snapshot", "restore", "clear"):
        await room.run(app, action, deploy="dep_2", source=source)
    assert room.read(other) == {"note": "another's"}
    assert await room.list_snapshots(other) == []
    last, *_ = await room.list_deleted(app)
    assert await room.unpack("shop", last) == {"note": b"one"}
    assert {path.name for path in data.folder.iterdir() if path.is_dir()} - {"snapshots"} == {"files"}

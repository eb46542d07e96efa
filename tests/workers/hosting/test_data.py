"""The data of apps in the real sandbox: who sees and who can read them, and how large they may be. They also move from
host to host, with a storage that hosts share, and Redis.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.data.records import Snapshot
from gateway.deploys.line_times import split_stamp
from gateway.errors import StorageUnavailable
from gateway.redis.client import Store
from tests.support.data_rooms import HostRoom
from tests.support.folders import passable_folder
from tests.support.hosted_apps import HOST, Hosting
from tests.support.polling import wait_until
from tests.support.sandbox import ROOT, repeat_without_root
from tests.support.watched_apps import Watch, watching
from workers.engine.app_data import AppData, DataHeld
from workers.engine.replacements import Replacements
from workers.hosting import watchdog
from workers.hosting.data import HostData
from workers.hosting.watchdog import is_running, output_path, read_state, state_path
from workers.sandbox.sandbox import MIB, Sandbox

# Prints what a shell command says, and then runs until it is stopped.
RUN = "{} 2>&1; echo done; exec sleep 1000"


class Apps(Watch):
    """Apps that are shell commands."""

    users = range(61_200 - 4, 61_200)  # few, so that they are used again
    first_data_limit = 4 * MIB

    async def run(self, deploy_id: str, command: str, **which: str) -> list[str]:
        """Runs a release with the command. Returns its output once the command has ended."""
        self.publish(deploy_id, RUN.format(command), **which)
        return await self.output(deploy_id)

    async def output(self, deploy_id: str) -> list[str]:
        path = output_path(self.hosting.folder, deploy_id)

        def lines() -> list[str]:
            return [split_stamp(line)[1] for line in path.read_text().split("\n")] if path.exists() else []

        await wait_until(lambda: "done" in lines(), 20)
        return lines()[:-2]

    async def remove(self, deploy_id: str) -> None:
        self.hosting.releases.stop(deploy_id)
        await wait_until(lambda: not [*self.hosting.releases.running.glob(f"{deploy_id}*")], 20)

    def data(self, app_id: str = "shop") -> AppData:
        return AppData(self.hosting.folder, app_id)


@pytest_asyncio.fixture
async def apps(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Apps]:
    apps = Apps(hosting)
    apps.trusted = getattr(request, "param", False)
    async with watching(apps, monkeypatch):
        apps.start()
        yield apps


each_kind = pytest.mark.parametrize("apps", [False, True], indirect=True, ids=["sandboxed", "trusted"])


@contextlib.contextmanager
def reserved_user(sandbox: Sandbox, wanted: int) -> Iterator[None]:
    """Reserves one user, as the only one."""
    with contextlib.ExitStack() as others:
        while True:
            reservation = sandbox.reserve_user()
            if reservation.__enter__() == wanted:
                break
            others.push(reservation.__exit__)
    yield
    reservation.__exit__(None, None, None)


@pytest.mark.timeout(360)
def test_everything_again_without_root() -> None:
    """Apps cannot reach each other's data either if all have the same user."""
    repeat_without_root(__file__)


@each_kind
async def test_data_outlive_the_command_its_release_and_the_watchdog(apps: Apps) -> None:
    assert await apps.run("dep_1", "ls $DATA_DIR; echo one > $DATA_DIR/note") == []
    await apps.stop()
    apps.start()
    assert await apps.run("dep_2", "cat $DATA_DIR/note; echo two >> $DATA_DIR/note") == ["one"], "both run"
    await apps.remove("dep_1")
    await apps.remove("dep_2")
    assert await apps.run("dep_3", "cat $DATA_DIR/note") == ["one", "two"]
    assert apps.crashes == []


@each_kind
async def test_a_preview_has_an_empty_folder_of_its_own(apps: Apps) -> None:
    await apps.run("dep_1", "echo mine > $DATA_DIR/note")
    assert await apps.run("dep_2", "ls $DATA_DIR; echo > $DATA_DIR/x", kind="preview") == []
    assert os.listdir(apps.data().files) == ["note"]
    await apps.remove("dep_2")
    assert await apps.run("dep_3", "ls $DATA_DIR", kind="preview") == []


async def test_no_other_app_can_reach_the_files(apps: Apps) -> None:
    await apps.run("dep_1", "echo mine > $DATA_DIR/note; chmod 777 $DATA_DIR $DATA_DIR/note")
    files = apps.data().files
    attack = f"ls {files}; cat {files}/note; echo x >> {files}/note"
    refused = await apps.run("dep_2", attack, app_id="other")
    assert ["No such file" in line or "nonexistent" in line for line in refused] == [True] * 3
    assert (files / "note").read_text() == "mine\n"
    attack = "test -e $DATA_DIR/../limit || echo none; echo x > $DATA_DIR/../limit"
    beside = await apps.run("dep_3", attack, app_id="third")
    assert beside[0] == "none"
    assert apps.data("third").limit == 4 * MIB


@pytest.mark.skipif(not ROOT, reason="only root can change users")
async def test_the_processes_of_an_app_share_a_user_that_no_other_app_has(apps: Apps) -> None:
    uids = [
        await apps.run(deploy_id, "id -u; umask 077; touch $DATA_DIR/$$", app_id=app_id)
        for deploy_id, app_id in (("dep_1", "shop"), ("dep_2", "shop"), ("dep_3", "other"))
    ]
    assert uids[0] == uids[1] != uids[2]
    assert all(int(uid) in Apps.users for [uid] in uids)
    files = apps.data().files
    assert files.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_uid for path in (files, *files.iterdir())} == {int(uids[0][0])}
    await apps.remove("dep_1")
    await apps.remove("dep_2")
    assert await apps.run("dep_4", "id -u") == uids[0], "also after it was stopped"


@pytest.mark.skipif(not ROOT, reason="only root can change users")
async def test_files_change_their_owner_when_another_app_has_the_user(apps: Apps, hosting: Hosting) -> None:
    target = hosting.folder / "target"
    target.write_text("the host's")
    files = f"mkdir inner; echo kept > inner/note; ln -s {target} inner/link"
    [first] = await apps.run("dep_1", f"id -u; umask 077; cd $DATA_DIR; {files}")
    await apps.remove("dep_1")
    with reserved_user(apps.sandbox, int(first)):
        second, note = await apps.run("dep_2", "id -u; cat $DATA_DIR/inner/note")
    assert (second != first, note) == (True, "kept")
    assert target.stat().st_uid == 0, "the link is not followed"


async def test_an_app_beyond_its_limit_is_stopped_until_it_fits(
    apps: Apps, hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "FIRST_PAUSE_SECONDS", 60)  # as after many crashes
    site = hosting.site(hosting.deploy("dep_1"))
    hosting.releases.serve_as(HOST, site)
    mark, began = site.folder / "stopped", asyncio.get_running_loop().time()
    apps.publish("dep_1", RUN.format("[ -e $DATA_DIR/big ] || head -c 6000000 /dev/zero > $DATA_DIR/big"))
    await wait_until(lambda: apps.crashes, 20)
    assert asyncio.get_running_loop().time() - began < 10
    assert apps.crashes == [("shop", "exit", 137)]
    data = apps.data()
    assert data.is_full
    assert data.used > 6_000_000
    assert "larger than its plan allows" in read_state(hosting.folder, "dep_1").last
    async with hosting.served():
        await wait_until(mark.exists, 10)
        said = await hosting.ask("/")
        assert (said.status, said.headers["retry-after"]) == (503, "5")
    await apps.stop()
    state_path(hosting.folder, "dep_1").unlink()
    apps.start()
    await asyncio.sleep(0.5)
    assert read_state(hosting.folder, "dep_1").keeper == 0, "a new watchdog does not start it either"
    data.limit = 8 * MIB
    await wait_until(lambda: read_state(hosting.folder, "dep_1").keeper, 20)
    assert len(apps.crashes) == 1
    assert (data.files / "big").stat().st_size == 6_000_000


@pytest.mark.parametrize(
    "fill",
    [
        "truncate -s 1T $DATA_DIR/hole",
        "cd $DATA_DIR; i=0; while [ $i -lt 6000 ]; do : > $i; i=$((i+1)); done",
        "cd $DATA_DIR; head -c 900000 /dev/zero > a; for n in b c d e f g; do ln a $n; done",
        "cd $DATA_DIR; mkdir in; head -c 6000000 /dev/zero > in/big; chmod 0 in",
        "cd $DATA_DIR; mkdir in; head -c 6000000 /dev/zero > in/big; chmod 400 in",
        "cd $DATA_DIR; for i in $(seq 30); do mkdir -p $(printf '%0200d' 0) && cd -P $(printf '%0200d' 0); done",
    ],
    ids=["a hole", "many files", "hard links", "a closed folder", "a folder without entry", "a deep folder"],
)
async def test_everything_that_a_copy_has_to_hold_counts(apps: Apps, fill: str) -> None:
    apps.publish("dep_1", RUN.format(fill))
    await wait_until(lambda: apps.crashes, 20)
    assert apps.data().is_full


async def test_while_the_files_are_held_no_process_runs(apps: Apps, hosting: Hosting) -> None:
    await apps.run("dep_1", "trap 'echo > $DATA_DIR/ended; exit' TERM; :")
    data = apps.data()
    held = contextlib.ExitStack()
    await asyncio.to_thread(held.enter_context, data.stopped())
    state = read_state(hosting.folder, "dep_1")
    assert not is_running(state.keeper, state.began)
    with pytest.raises(DataHeld), data.running("acc_1", MIB):
        pass
    await asyncio.sleep(0.5)
    Replacements(data).clear("dat_1")
    held.close()
    output_path(hosting.folder, "dep_1").write_text("")
    await apps.output("dep_1")
    assert os.listdir(data.files) == []
    assert apps.crashes == []


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
        await (await serve(room)).leave()
        assert await room.list_snapshots(app) == []
        elsewhere = Snapshot("snp_zz", "2026-07-02T10:00:00.000Z", 1, "manual")
        await room.records.add_snapshot(app.account, app.id, elsewhere)
        await (await serve(room)).bring(app.account, app.id)
        assert room.read(app) == {"note": "mine"}

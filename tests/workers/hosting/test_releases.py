"""Releases on disk: links, tidying, removal and the space of an account; swaps, undos and their marks in any order, by
workers that may die in them.
"""

import asyncio
import contextlib
import itertools
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from tests.support.folders import nest, passable_folder
from tests.support.hosted_apps import Hosting
from tests.support.selection import with_more_in_test_all
from workers.engine.app_data import GONE_SECONDS
from workers.hosting import disk, releases
from workers.hosting.disk import make_room
from workers.hosting.releases import (
    KEPT_RELEASES,
    PREVIOUS_SECONDS,
    Site,
    exclusive_lock,
    replace_link,
)
from workers.sandbox.removal import remove_folder


def test_addresses_follow_the_apps(hosting: Hosting) -> None:
    site = hosting.publish("dep_1", {"index.html": "1"}, "old.apps.test")
    hosting.releases.serve_as("new.apps.test", site)
    hosting.releases.serve_as("new.apps.test", site)
    assert hosting.releases.list_names() == {site.folder: {"old.apps.test", "new.apps.test"}}
    hosting.releases.serve_no_more(hosting.site(hosting.deploy("dep_1", "other")), ["new.apps.test"])
    hosting.releases.serve_no_more(site, ["old.apps.test", "other.apps.test"])
    assert [path.name for path in (hosting.folder / "addresses").iterdir()] == ["new.apps.test"]
    assert (hosting.folder / "addresses" / "new.apps.test").resolve() == site.folder


def test_tidying(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(deploy_id: str, app_id: str, *, swap: bool) -> Site:
        site = hosting.build(hosting.deploy(deploy_id, app_id), {"a": "1"}, start="node a")
        hosting.releases.run(site.release(deploy_id))
        if swap:
            site.swap(deploy_id)
        return site

    started("dep_1", "here", swap=True)
    started("dep_2", "here", swap=False)
    started("dep_3", "here", swap=False)
    gone = started("dep_4", "gone", swap=True)
    running = hosting.releases.running
    (running / "dep_5").symlink_to("../releases/none/live/dep_5")
    (running / ".dep_2.new").symlink_to(gone.release("dep_4"))  # what is in progress, or the watchdog's
    (running / "dep_1.scratch").mkdir()
    assert hosting.releases.releases_to_run().keys() == {f"dep_{number}" for number in range(1, 5)}
    folders = (hosting.releases.builds, hosting.releases.built)
    for build in ("dep_3", "dep_6"):
        for folder in folders:
            (folder / build / "source").mkdir(parents=True)
    hosting.releases.tidy_builds({"dep_3"})
    hosting.releases.tidy({"gone"}, {"dep_3"})
    assert {path.name for path in running.iterdir()} == {"dep_1", "dep_3", ".dep_2.new", "dep_1.scratch"}
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [["dep_3"], ["dep_3"]]
    assert gone.release("dep_4").is_dir(), "its record may have been lost"
    marker = gone.folder.parent / "gone"
    since = marker.stat().st_mtime
    hosting.releases.tidy({"gone"}, set())
    assert marker.stat().st_mtime == since
    hosting.releases.tidy(set(), set())
    assert not marker.exists(), "it is back"
    hosting.releases.tidy({"gone"}, set())
    os.utime(marker, (since - GONE_SECONDS - 1,) * 2)
    hosting.releases.tidy({"gone"}, set())
    assert not gone.folder.parent.exists()


@pytest.mark.parametrize("in_progress", [{"dep_2"}, set()], ids=["of its deploy", "of another worker"])
@pytest.mark.parametrize("moment", range(8))
def test_an_undo_keeps_the_release_that_it_serves_again(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch, moment: int, in_progress: set[str]
) -> None:
    """It comes after any of the reads of the tidying."""
    for deploy_id in ("dep_1", "dep_2"):
        site = hosting.build(hosting.deploy(deploy_id), {"a": "1"}, start="node a")
        hosting.releases.run(site.release(deploy_id))
        site.swap(deploy_id, canary=deploy_id == "dep_2")
    read_link, reads = Site.read_link, itertools.count()

    def read_then_undo(self: Site, name: str) -> str | None:
        found = read_link(self, name)
        if next(reads) == moment:
            monkeypatch.setattr(Site, "read_link", read_link)
            site.undo("dep_2")
        return found

    monkeypatch.setattr(Site, "read_link", read_then_undo)
    hosting.releases.tidy(set(), in_progress)
    assert "dep_1" in hosting.releases.releases_to_run()


def test_other_users_can_enter_folders_but_not_list_them(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        hosting = Hosting(tmp_path / "data")
        site = hosting.publish("dep_1", {"index.html": "1"})
    finally:
        os.umask(before)
    for folder in (hosting.folder / "addresses", hosting.releases.running, site.folder, site.folder.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o711
    assert stat.S_IMODE((site.release("dep_1") / "files" / "index.html").stat().st_mode) == 0o644
    if os.geteuid() == 0:
        assert stat.S_IMODE((hosting.folder / "sources").stat().st_mode) == 0o700


def test_tidying_continues_after_a_failed_step(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    nest(hosting.releases.builds / "dep_1", 1_200)
    hosting.publish("dep_4", {"index.html": "1"}, app_id="broken")
    (hosting.folder / "releases" / "broken" / "gone").mkdir()  # can't be unlinked
    gone = hosting.publish("dep_5", {"index.html": "1"}, app_id="gone")
    link = hosting.releases.running / "dep_9"
    link.symlink_to(link)  # a circle: can't be resolved
    (hosting.releases.running / "dep_8").symlink_to("../releases/none/live/dep_8")
    hosting.releases.tidy_builds(set())
    hosting.releases.tidy({"gone"}, set())
    assert list(hosting.releases.builds.iterdir()) == []
    assert (gone.folder.parent / "gone").exists()
    assert not (hosting.releases.running / "dep_8").is_symlink()


async def test_the_lock_admits_one_at_a_time(tmp_path: Path) -> None:
    taken = asyncio.Event()

    async def take() -> None:
        async with exclusive_lock(tmp_path / "lock"):
            taken.set()

    async with exclusive_lock(tmp_path / "lock"):
        waiting = asyncio.create_task(take())
        await asyncio.sleep(0.7)
        assert not taken.is_set()
    await asyncio.wait_for(waiting, 5)


NUMBERS = st.integers(0, 3) | st.integers(4, 7)  # of a release, counted from the newest


class Killed(Exception):
    """The worker was killed."""


@contextlib.contextmanager
def killed_in_link(number: int) -> Iterator[None]:
    """Kills the worker in the change of a link, if it makes so many. It leaves a link that is not in its place yet."""
    left = iter(range(number, -1, -1))

    def replace(path: Path, target: str) -> None:
        if next(left):
            return replace_link(path, target)
        path.with_name(f".{path.name}.new").symlink_to(target)
        raise Killed

    with mock.patch.object(releases, "replace_link", replace), contextlib.suppress(Killed):
        yield


class Releases(RuleBasedStateMachine):
    """Knows the four links of a site, the deploys with releases there, and those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.hosting = Hosting(self.stack.enter_context(passable_folder()))
        self.ids = map("dep_{:03}".format, itertools.count())
        self.site = self.hosting.site(self.hosting.deploy("dep"))
        self.current: str | None = None
        self.previous: str | None = None
        self.canary: str | None = None
        self.held: str | None = None
        self.kept: list[str] = []  # newest first
        self.running: set[str] = set()

    @initialize(times=st.sampled_from([2, KEPT_RELEASES + 2]))
    def deploy(self, times: int) -> None:
        for _ in range(times):
            self.build()
            self.swap(0, False, None)

    def teardown(self) -> None:
        self.stack.close()

    def pick(self, number: int) -> str:
        return self.kept[number % len(self.kept)]

    @rule()
    def build(self) -> None:
        deploy = next(self.ids)
        self.hosting.build(self.hosting.deploy(deploy), {"a": "1"}, start="node a")
        self.kept.insert(0, deploy)
        self.start(0)

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS, canary=st.booleans(), killed_in=st.none() | st.integers(0, 3))
    def swap(self, number: int, canary: bool, killed_in: int | None) -> None:
        deploy, before = self.pick(number), self.current
        if killed_in is not None:
            with killed_in_link(killed_in):
                self.site.swap(deploy, canary=canary)
            assert self.site.current in (before, deploy)
            assert before == deploy or self.site.current == before or not canary or self.site.unverified == deploy
        self.site.swap(deploy, canary=canary)  # again, as the next worker does
        if before != deploy:
            self.current, self.previous = deploy, before or self.previous
            self.canary = deploy if canary else self.canary

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS, killed=st.booleans())
    def undo(self, number: int, killed: bool) -> None:
        deploy = self.pick(number)
        if killed and self.replaced is not None:
            with killed_in_link(0):
                self.site.undo(deploy)
        assert self.site.undo(deploy) == (deploy == self.current)
        if deploy == self.current:
            self.current = self.replaced
            self.lift_marks(deploy)

    @property
    def replaced(self) -> str | None:
        return self.previous if self.previous != self.current and self.previous in self.kept else None

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS)
    def confirm(self, number: int) -> None:
        self.site.confirm(self.pick(number))
        self.lift_marks(self.pick(number))

    def lift_marks(self, deploy: str) -> None:
        self.held, self.canary = None, None if self.canary == deploy else self.canary

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS)
    def hold_requests(self, number: int) -> None:
        self.held = self.pick(number)
        self.site.hold_requests(self.held)

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS, before=st.booleans())
    def remove(self, number: int, before: bool) -> None:
        deploy = self.replaced if before and self.replaced is not None else self.pick(number)
        if deploy != self.current:
            self.running.discard(deploy)
            self.hosting.releases.stop(deploy)
            remove_folder(self.site.release(deploy))
            self.kept.remove(deploy)

    @rule()
    def prune(self) -> None:
        """The served release and the one that it replaced stay at any age."""
        self.site.prune()
        self.kept = [*self.kept[:KEPT_RELEASES], *({self.current, self.previous} & {*self.kept[KEPT_RELEASES:]})]
        self.kept.sort(reverse=True)
        self.running &= {*self.kept}

    @precondition(lambda self: self.kept)
    @rule(number=NUMBERS)
    def start(self, number: int) -> None:
        self.hosting.releases.run(self.site.release(self.pick(number)))
        self.running.add(self.pick(number))

    @rule(numbers=st.sets(NUMBERS, max_size=2))
    def tidy(self, numbers: set[int]) -> None:
        """What is served again if the canary or its deploy fails keeps running."""
        in_progress = {self.pick(number) for number in numbers} if self.kept else set()
        self.hosting.releases.tidy(set(), in_progress)
        unverified = self.current is not None and self.current in (self.canary, *in_progress)
        self.running &= in_progress | {self.current, self.previous if unverified else None}

    @invariant()
    def everything_is_as_expected(self) -> None:
        site = self.site
        assert site.current == self.current
        assert [path.name for path in site.releases()] == self.kept
        assert self.hosting.releases.releases_to_run() == {each: site.release(each) for each in self.running}
        unverified = self.current if self.canary == self.current else None
        assert site.unverified == unverified
        for deploy in self.kept:
            replaced = self.replaced if deploy == self.current else None
            assert site.find_replaced(deploy) == (replaced and site.release(replaced))
            stopped = self.current if self.held == deploy != self.current else None
            assert site.find_stopped(deploy) == (stopped and site.release(stopped))


@with_more_in_test_all("examples", 25, 100)
def test_each_order_of_changes(examples: int) -> None:
    run(Releases, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))


MIB = 1 << 20


def release(hosting: Hosting, deploy_id: str, app_id: str, branch: str | None = None, *, swap: bool = True) -> Site:
    deploy = hosting.deploy(deploy_id, app_id, "preview" if branch else "live", branch)
    site = hosting.build(deploy, {"index.html": b"x" * MIB})
    if swap:
        site.swap(deploy_id)
    return site


def kept(hosting: Hosting) -> set[str]:
    return {path.name for site in hosting.releases.sites() for path in site.releases()}


def test_old_releases_make_room_for_a_new_one(hosting: Hosting) -> None:
    small = hosting.build(hosting.deploy("dep_1", "small"), {f"{number}": b"x" for number in range(50)})
    assert disk.read_size(small.release("dep_1")) >= 50 * 4_096, "small files take a block each"
    remove_folder(small.folder.parent)
    deleted = release(hosting, "dep_09", "deleted")
    (deleted.folder.parent / "gone").touch()
    for number in range(1, 5):
        release(hosting, f"dep_0{number}", "shop")
    release(hosting, "dep_05", "shop", swap=False)  # still being checked
    for number in (6, 7):
        release(hosting, f"dep_0{number}", "shop", f"branch-{number}")
    other = hosting.build(hosting.deploy("dep_11", "other"), {"index.html": b"x" * 5 * MIB})
    (other.folder.parent / "account").write_text("acc_2")
    fresh = release(hosting, "dep_12", "new", swap=False).release("dep_12")
    expected = {f"dep_0{number}" for number in range(1, 8)} | {"dep_09", "dep_11", "dep_12"}
    for limit, removed in [
        (99, ""),
        (8.5, "dep_09"),
        (7.5, "dep_01"),
        (6.5, "dep_02"),
        (5.5, "dep_06"),
        (4.5, "dep_07"),
    ]:
        assert make_room(hosting.releases, "acc_1", fresh, int(limit * MIB))
        expected -= {removed}
        assert kept(hosting) == expected, limit
    assert not make_room(hosting.releases, "acc_1", fresh, int(3.5 * MIB))
    assert kept(hosting) == {"dep_03", "dep_04", "dep_05", "dep_11", "dep_12"}, (
        "live, replaced, checked, another's, new"
    )


def test_a_release_replaced_long_ago_is_removed_unless_its_successor_is_unverified(hosting: Hosting) -> None:
    release(hosting, "dep_1", "shop")
    site = release(hosting, "dep_2", "shop", swap=False)
    site.swap("dep_2", canary=True)
    long_ago = time.time() - PREVIOUS_SECONDS - 1
    os.utime(site.folder / "current", (long_ago, long_ago), follow_symlinks=False)
    assert not make_room(hosting.releases, "acc_1", site.release("dep_2"), MIB * 3 // 2)
    assert kept(hosting) == {"dep_1", "dep_2"}
    site.confirm("dep_2")
    assert make_room(hosting.releases, "acc_1", site.release("dep_2"), MIB * 3 // 2)
    assert kept(hosting) == {"dep_2"}

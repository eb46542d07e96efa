"""Releases on disk: links, tidying and removal. What a swap and its undoing change is in `test_releases_machine.py`."""

import asyncio
import itertools
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.support.folders import nest
from tests.support.hosted_apps import Hosting
from workers.engine.app_data import GONE_SECONDS
from workers.hosting.releases import (
    Site,
    exclusive_lock,
    link_folder,
    replace_link,
)
from workers.sandbox.removal import remove_folder


def test_a_link_is_never_missing(hosting: Hosting) -> None:
    """Another process reads the link all the time."""
    replace_link(hosting.folder / "current", "a")
    reader = (
        "import os, sys\nseen = set()\n"
        "while len(seen) < 2: seen.add(os.readlink('current'))\n"
        "for _ in range(50_000): seen.add(os.readlink('current'))\nprint(*sorted(seen))"
    )
    process = subprocess.Popen([sys.executable, "-c", reader], cwd=hosting.folder, stdout=subprocess.PIPE)
    for target in itertools.cycle("ab"):
        replace_link(hosting.folder / "current", target)
        if process.poll() is not None:
            break
    assert process.communicate()[0] == b"a b\n"


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


def test_what_another_worker_removes_meanwhile_is_no_error(hosting: Hosting) -> None:
    def remove() -> None:
        for _ in range(20):
            for app in (hosting.folder / "releases").iterdir():
                remove_folder(app)

    names = [f"app-{number}" for number in range(300)]
    for number, name in enumerate(names):
        hosting.publish(f"dep_{number}", {"index.html": "1"}, app_id=name)
    other = threading.Thread(target=remove)
    with capture_logs() as logs:
        other.start()
        for _ in range(20):
            hosting.releases.tidy({*names[1::2]}, set())
        other.join()
    assert [each for each in logs if each["event"] == "folder.not_tidied"] == []


async def test_of_a_release_that_could_not_be_linked_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next attempt, with an equal release, would link that one into the first."""
    (tmp_path / "cp").write_text('#!/bin/sh\n/bin/cp "$@"\nexit 1\n')  # one of the files vanished meanwhile
    (tmp_path / "cp").chmod(0o755)
    (tmp_path / "release" / "files").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert not await link_folder(tmp_path / "release", tmp_path / "linked")
    assert not (tmp_path / "linked").exists()
    assert await link_folder(tmp_path / "release", tmp_path / "linked")
    assert os.listdir(tmp_path / "linked") == ["files"]


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

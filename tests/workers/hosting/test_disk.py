"""The disk space of one account."""

import os
import threading
import time

import pytest

from tests.support.hosted_apps import Hosting
from workers.hosting.disk import make_room, read_size
from workers.hosting.releases import PREVIOUS_SECONDS, Site, replace_link
from workers.sandbox.removal import remove_folder

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


def test_the_size_of_a_release(hosting: Hosting) -> None:
    site = hosting.build(hosting.deploy("dep_1"), {f"{n}/{n}": b"x" for n in range(50)})
    measured = read_size(site.release("dep_1"))
    assert measured >= 50 * 4_096, "small files take a block each"
    (site.release("dep_1") / "size").write_text("damaged")
    assert read_size(site.release("dep_1")) >= measured


def test_a_release_that_another_build_found_unfinished_counts_whole(hosting: Hosting) -> None:
    unfinished = release(hosting, "dep_1", "shop", swap=False).release("dep_1")
    (unfinished / "files").rename(hosting.folder / "files")
    fresh = release(hosting, "dep_2", "blog", swap=False).release("dep_2")
    assert make_room(hosting.releases, "acc_1", fresh, MIB * 3 // 2)
    (hosting.folder / "files").rename(unfinished / "files")
    assert not make_room(hosting.releases, "acc_1", unfinished, MIB * 3 // 2)


def test_a_deploy_may_be_undone_meanwhile(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    site, measure = release(hosting, "dep_1", "shop"), Site.seconds_since_swap.fget
    fresh = release(hosting, "dep_2", "blog", swap=False).release("dep_2")
    assert measure is not None

    def undo_first(site: Site) -> float:
        site.undo("dep_1")
        return float(measure(site))

    monkeypatch.setattr(Site, "seconds_since_swap", property(undo_first))
    assert not make_room(hosting.releases, "acc_1", fresh, 0)
    assert site.current is None


def test_other_releases_may_change_and_vanish_meanwhile(hosting: Hosting) -> None:
    """Other builds of the account, and the removal of its old previews, run at the same time."""
    unfinished, over = release(hosting, "dep_1", "shop", swap=False).release("dep_1"), threading.Event()
    fresh = release(hosting, "dep_2", "blog", swap=False).release("dep_2")

    def change() -> None:
        while not over.is_set():
            replace_link(unfinished / "sock", "nowhere")
            remove_folder(release(hosting, "dep_3", "shop", "branch", swap=False).folder)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(300):
            assert make_room(hosting.releases, "acc_1", fresh, 9 * MIB)
    finally:
        over.set()
        changing.join()

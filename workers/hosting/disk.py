"""Bounds the disk space that the releases of an account use.

To make room for a new release, this module removes releases of deleted apps, then old releases of the account's sites,
then previews, oldest first. It keeps the releases that are served live, those that were replaced a short time ago, and
those that are still being checked.
"""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

from gateway.deploys.states import DeployError
from workers.hosting.releases import PREVIOUS_SECONDS, Releases, Site
from workers.sandbox.folders import walk
from workers.sandbox.keeper import read_number, write_number
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import MIB

_one_at_a_time = threading.Lock()  # two builds that end together must count each other's release


def require_room(releases: Releases, account: str, release: Path, mib: int) -> None:
    """Makes room for the new release. Removes it, and raises DeployError, if the account then uses more than `mib`."""
    if not make_room(releases, account, release, mib * MIB):
        remove_folder(release)
        raise DeployError(f"the account's apps use more than {mib} MiB of disk space; make them smaller")


def make_room(releases: Releases, account: str, release: Path, limit: int) -> bool:
    """Removes releases of the account until all take at most `limit` bytes. Returns False if this is not possible.

    `release`: the new release, which is complete.
    """
    with _one_at_a_time:
        write_number(release / "size", read_size(release))  # releases never change, so each is measured once
        sites = [site for site in releases.sites() if site.account == account]
        others = (path for site in sites for path in site.releases() if path != release)
        total = read_size(release) + sum(map(read_size, others))
        for path in _find_removable(sites, release):
            if total <= limit:
                break
            total -= read_size(path)
            remove_folder(path)
        return total <= limit


def _find_removable(sites: list[Site], release: Path) -> Iterator[Path]:
    deleted = [site for site in sites if (site.folder.parent / "gone").exists()]
    kept = [site for site in sites if site not in deleted]
    yield from sorted((path for site in deleted for path in site.releases()), key=_age)
    yield from sorted((path for site in kept for path in _find_replaced(site)), key=_age)
    for site in sorted(kept, key=lambda site: site.current or ""):
        newest = next(iter(site.releases()), None)
        if site.is_preview and site.folder != release.parent and newest is not None and newest.name == site.current:
            yield newest


def _find_replaced(site: Site) -> Iterator[Path]:
    """Yields the releases that are older than the served one. Newer releases are still being checked."""
    current = site.current
    if current is None:
        return
    try:
        recent = site.unverified is not None or site.seconds_since_swap < PREVIOUS_SECONDS
    except FileNotFoundError:  # the deploy was undone meanwhile
        return
    needed = site.read_link("previous") if recent else None
    yield from (path for path in site.releases() if path.name < current and path.name != needed)


def _age(path: Path) -> str:
    return path.name  # a deploy's id begins with the time


def read_size(release: Path) -> int:
    """Returns the bytes that a release takes on disk."""
    recorded = read_number(release / "size")
    return _measure(release) if recorded is None else recorded  # without a record, it is being made or removed


def _measure(folder: Path) -> int:
    statuses = (entry.status for entry in walk(folder, [errno.ENAMETOOLONG]))  # files could hide below such a path
    return sum(max(status.st_size, status.st_blocks * 512) for status in statuses)

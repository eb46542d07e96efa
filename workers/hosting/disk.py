"""How much disk the releases of an account take.

A new release makes room for itself: first among the releases of deleted apps, then among old ones of the account's
sites, then among previews, oldest first. What is served live, what it replaced a short time ago, and what is still
being checked stay.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from workers.hosting.releases import PREVIOUS_SECONDS, Releases, Site, remove_folder

_one_at_a_time = threading.Lock()  # of two builds that end together, each must count the other's release


def make_room(releases: Releases, account: str, release: Path, limit: int) -> bool:
    """Removes releases of the account until all take at most `limit` bytes. Returns False when this is not possible."""
    with _one_at_a_time:
        sites = [site for site in releases.sites() if site.account == account]
        total = sum(size(path) for site in sites for path in site.releases())
        for path in _removable(sites, release):
            if total <= limit:
                break
            total -= size(path)
            remove_folder(path)
        return total <= limit


def _removable(sites: list[Site], release: Path) -> Iterator[Path]:
    deleted = [site for site in sites if (site.folder.parent / "gone").exists()]
    kept = [site for site in sites if site not in deleted]
    yield from sorted((path for site in deleted for path in site.releases()), key=_age)
    yield from sorted((path for site in kept for path in _replaced(site)), key=_age)
    for site in sorted(kept, key=lambda site: site.current or ""):
        newest = next(iter(site.releases()), None)
        if site.is_preview and site.folder != release.parent and newest is not None and newest.name == site.current:
            yield newest


def _replaced(site: Site) -> Iterator[Path]:
    """Releases that are older than the one that is served. Newer ones are still being checked."""
    if site.current is None:
        return
    recent = site.unverified is not None or site.seconds_since_swap < PREVIOUS_SECONDS
    needed = site.read_link("previous") if recent else None
    yield from (path for path in site.releases() if path.name < site.current and path.name != needed)


def _age(path: Path) -> str:
    return path.name  # an id begins with the time


def size(release: Path) -> int:
    """Bytes on disk. Releases never change, so the size is measured once."""
    record = release / "size"
    try:
        return int(record.read_text())
    except (OSError, ValueError):
        measured = _measure(release)
        fresh = release / ".size.new"
        fresh.write_text(str(measured))
        fresh.replace(record)
        return measured


def _measure(folder: Path) -> int:
    total, pending = 0, [os.fspath(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                total += max(status.st_size, status.st_blocks * 512)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return total

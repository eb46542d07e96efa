"""The caches of builds on this machine, by app: what package managers have downloaded, and folders of the source.

    caches/<app id>/origin     the account, and the last clearing of the cache
    caches/<app id>/files/     the folders in `PARTS`, which a build of the app finds in its own folder
    caches/.<deploy id>/       the cache as a build left it, until its deploy is live

A build gets a copy. Only a live deploy that has passed its canary replaces the cache, so neither a build that fails nor
a preview changes it. The files are a customer's: nobody but the worker may enter the folder, and no link is followed.
A copy is made while no process of the build is running.
"""

import os
import time
from collections.abc import Set
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from gateway.cancellation import run_in_thread, run_process
from workers.sandbox.folders import walk
from workers.sandbox.keeper import measure_disk
from workers.sandbox.removal import remove_folder

logger = structlog.get_logger()

# Of a build's folder. `run.sh` decides whether the build keeps more of `node_modules` than `.cache`.
MODULES = "source/node_modules"
PARTS = ("home/.cache", MODULES, "source/.next/cache", "source/.astro")
COPY_SECONDS = 60.0
UNUSED_SECONDS = 14 * 86_400.0  # after which a cache is removed


class BuildCaches:
    def __init__(self, data: Path, limit: int) -> None:
        """`limit`: the most bytes of one app; 0: no caches. `data` is the data folder."""
        self._folder, self._limit = data / "caches", limit

    async def copy(self, app_id: str, origin: str, build: Path, uid: int | None) -> bool:
        """Copies the app's cache to the folder of a build, for the build's user. Returns False if there is none.

        `origin` identifies the account and the last clearing: a cache of another origin is not used. What the source
        has already stays as it is.
        """
        cache, copy = self._folder / app_id, build / "cache"
        if not self._limit or _read_origin(cache) != origin:
            return False
        try:
            if not await _copy(cache / "files", copy):
                return False
            await run_in_thread(_place, copy, build, uid)
        finally:
            await run_in_thread(remove_folder, copy)
        os.utime(cache / "origin")
        return True

    async def set_aside(self, deploy_id: str, origin: str, build: Path) -> None:
        """Keeps the cache that a build has left, if it is small enough, until `adopt` or `drop`."""
        if not self._limit:
            return
        aside = self._folder / f".{deploy_id}"
        await run_in_thread(remove_folder, aside)
        for part in filter(partial(_is_folder, build), PARTS):
            target = aside / "files" / part
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            await _copy(build / part, target, "--link")  # a release may need the files too
        if aside.exists():
            await run_in_thread(self._bound, aside, origin)

    def _bound(self, aside: Path, origin: str) -> None:
        files = aside / "files"
        if measure_disk(files) > self._limit and (modules := files / MODULES).is_dir():
            for each in modules.iterdir():
                if each.name != ".cache":
                    remove_folder(each) if _is_folder(modules, each.name) else each.unlink()
        if measure_disk(files) > self._limit:
            logger.info("builds.cache_too_large", deploy=aside.name.removeprefix("."))
            remove_folder(aside)
        else:
            (aside / "origin").write_text(origin)

    async def adopt(self, deploy_id: str, app_id: str) -> None:
        """Makes what the deploy's build has left the app's cache."""
        aside, cache = self._folder / f".{deploy_id}", self._folder / app_id
        if aside.is_dir():
            await run_in_thread(remove_folder, cache)
            with suppress(OSError):  # the next deploy makes another one
                aside.rename(cache)

    async def drop(self, deploy_id: str) -> None:
        await run_in_thread(remove_folder, self._folder / f".{deploy_id}")

    def tidy(self, in_progress: Set[str]) -> None:
        """Removes what no deploy in progress and no app needs. `in_progress` changes while this runs."""
        for cache in [*self._folder.iterdir()] if self._folder.is_dir() else []:
            if cache.name.startswith("."):
                unneeded = cache.name.removeprefix(".") not in in_progress
            else:
                unneeded = time.time() - _read_time(cache) > UNUSED_SECONDS
            if unneeded:
                remove_folder(cache)


def _read_origin(cache: Path) -> str | None:
    with suppress(OSError):
        return (cache / "origin").read_text()
    return None


def _read_time(cache: Path) -> float:
    """Returns when a build last used the cache."""
    with suppress(OSError):
        return (cache / "origin").stat().st_mtime
    return 0.0


async def _copy(source: Path, target: Path, *options: str) -> bool:
    """Copies the folder. Returns False, and leaves nothing, if that fails or takes too long."""
    status = -1
    with suppress(TimeoutError):
        status, _ = await run_process("cp", "-a", *options, "--", source, target, seconds=COPY_SECONDS)
    if status:
        await run_in_thread(remove_folder, target)
    return status == 0


def _is_folder(top: Path, path: str) -> bool:
    """Returns whether the path is a folder, without a link below `top`."""
    parts = [top.joinpath(*path.split("/")[: depth + 1]) for depth in range(path.count("/") + 1)]
    return all(part.is_dir() and not part.is_symlink() for part in parts)


def _place(copy: Path, build: Path, uid: int | None) -> None:
    """Moves the parts of the copied cache to the folder of the build."""
    _give(copy, uid)
    for part in filter(partial(_is_folder, copy), PARTS):
        parent, _, name = part.rpartition("/")
        if not os.path.lexists(build / parent):
            (build / parent).mkdir(mode=0o700)
            if uid is not None:
                os.chown(build / parent, uid, uid)
        if _is_folder(build, parent) and not os.path.lexists(build / parent / name):
            (copy / part).rename(build / part)


def _give(folder: Path, uid: int | None) -> None:
    if uid is not None:
        os.chown(folder, uid, uid)
        for entry in walk(folder):
            os.chown(entry.name, uid, uid, dir_fd=entry.folder, follow_symlinks=False)

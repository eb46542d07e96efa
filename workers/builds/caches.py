"""The caches of builds on this machine: what package managers have downloaded, by app.

    caches/<app id>/origin     the account, and the last clearing of the cache
    caches/<app id>/files/     what a build of the app finds in `~/.cache`
    caches/.<deploy id>/       the cache as a build left it, until its deploy is live

A build gets a copy. Only a live deploy that has passed its canary replaces the cache, so neither a build that fails nor
a preview changes it. The files are a customer's: nobody but the worker may enter the folder, and no link is followed.
"""

import asyncio
import os
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import structlog

from gateway.cancellation import finish_despite_cancellation, run_in_thread
from workers.hosting.releases import remove_folder
from workers.sandbox.folders import walk
from workers.sandbox.keeper import measure_disk

logger = structlog.get_logger()

COPY_SECONDS = 60.0
UNUSED_SECONDS = 14 * 86_400.0  # after which a cache is removed


class BuildCaches:
    def __init__(self, data: Path, limit: int) -> None:
        """`limit`: the most bytes of one app; 0: no caches. `data` is the data folder."""
        self._folder, self._limit = data / "caches", limit

    async def copy(self, app_id: str, origin: str, target: Path, uid: int | None) -> bool:
        """Copies the app's cache to the folder `target` for a build's user. Returns False if there is none.

        `origin` identifies the account and the last clearing: a cache of another origin is not used.
        """
        cache = self._folder / app_id
        if not self._limit or _read_origin(cache) != origin:
            return False
        copying = await asyncio.create_subprocess_exec("cp", "-a", "--", str(cache / "files"), str(target))
        try:
            copied = await asyncio.wait_for(copying.wait(), COPY_SECONDS) == 0
        except BaseException as error:
            with suppress(ProcessLookupError):  # it has just ended
                copying.kill()
            await finish_despite_cancellation(copying.wait())
            if not isinstance(error, TimeoutError):
                raise
            copied = False
        if not copied:
            await run_in_thread(remove_folder, target)
            return False
        await run_in_thread(_give, target, uid)
        os.utime(cache / "origin")
        return True

    async def set_aside(self, deploy_id: str, origin: str, files: Path) -> None:
        """Keeps the cache that a build has left, if it is small enough, until `adopt` or `drop`."""
        if self._limit:
            await run_in_thread(self._set_aside, deploy_id, origin, files)

    def _set_aside(self, deploy_id: str, origin: str, files: Path) -> None:
        if files.is_symlink() or not files.is_dir():
            return
        if measure_disk(files) > self._limit:
            logger.info("builds.cache_too_large", deploy=deploy_id)
            return
        aside = self._folder / f".{deploy_id}"
        remove_folder(aside)
        aside.mkdir(mode=0o700, parents=True)
        self._folder.chmod(0o700)
        files.rename(aside / "files")
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


def _give(folder: Path, uid: int | None) -> None:
    if uid is not None:
        os.chown(folder, uid, uid)
        for entry in walk(folder):
            os.chown(entry.name, uid, uid, dir_fd=entry.folder, follow_symlinks=False)

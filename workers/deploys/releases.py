"""What is built, on disk, and which of it is served. The file system is the record: each step is one rename.

    releases/<app id>/<variant>/<deploy id>/     one release: `files` to serve, or `app` to run; never changed after
    releases/<app id>/<variant>/current          link to the one that is served
    releases/<app id>/<variant>/previous         link to the one that `current` replaced
    addresses/<host>                             link to releases/<app id>/<variant>
    running/<deploy id>                          link to a release whose start command shall run

A variant is `live`, `preview` or `p-<slug>`. The web server reads `addresses` at every request, so that a swap is the
rename of `current`, and a rollback the same the other way round.

Addresses follow from the apps' records: they are made so at each deploy and every now and then, because apps are
renamed and deleted elsewhere. An app that is gone is served no more at once, but its files stay for a week: the
records may have been lost rather than deleted.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Set
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from gateway.deploys.states import Deploy, slug

logger = structlog.get_logger()

KEPT = 5  # releases of a site
PREVIEWS = 20  # sites of an app beside the live one
GONE_SECONDS = 7 * 86_400


class Site:
    """One address of an app, and the releases that it had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app_id, self.variant = folder.parent.name, folder.name

    @property
    def account(self) -> str:
        """Whose it is: an app's name may become another account's."""
        try:
            return (self.folder.parent / "account").read_text()
        except OSError:
            return ""

    def release(self, deploy_id: str) -> Path:
        return self.folder / deploy_id

    def linked(self, name: str) -> str | None:
        """The deploy that `current` or `previous` leads to."""
        try:
            return os.readlink(self.folder / name)
        except OSError:
            return None

    @property
    def current(self) -> str | None:
        return self.linked("current")

    def swap(self, deploy_id: str) -> None:
        before = self.current
        if before == deploy_id:
            return
        if before is not None:
            link(self.folder / "previous", before)
        link(self.folder / "current", deploy_id)

    def undo(self, deploy_id: str) -> bool:
        """Back to what this deploy replaced; False when it is not what is served."""
        if self.current != deploy_id:
            return False
        previous = self.linked("previous")
        if previous is not None and previous != deploy_id and self.release(previous).is_dir():
            link(self.folder / "current", previous)
        else:
            (self.folder / "current").unlink()
        return True

    def releases(self) -> list[Path]:
        """Newest first: an id begins with the time."""
        return sorted(_folders(self.folder), key=lambda path: path.name, reverse=True)

    def prune(self) -> None:
        kept = {self.current, self.linked("previous")}
        for path in self.releases()[KEPT:]:
            if path.name not in kept:
                remove(path)


class Releases:
    def __init__(self, folder: Path) -> None:
        self.folder = folder = folder.resolve()
        self.builds, self.running = folder / "builds", folder / "running"
        self._sites, self._addresses = folder / "releases", folder / "addresses"

    def open(self) -> None:
        """What is ours alone is closed; the rest can be passed, but not listed, by builds' users and by nginx."""
        os.umask(0o022)  # a tighter one would close what they are to read
        for folder in (self.folder, self.builds, self.running, self._sites, self._addresses, self.folder / "sources"):
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        if os.geteuid() == 0:
            self.folder.chmod(0o711)
            owner, sources = self.folder.stat(), self.folder / "sources"
            os.chown(sources, owner.st_uid, owner.st_gid)  # the gateway writes there, as a user of its own perhaps
            sources.chmod(0o700)

    def id(self) -> str:
        """The folder's own, made once."""
        path = self.folder / "id"
        if not path.exists():
            path.write_text(secrets.token_hex(8))
        return path.read_text()

    def site(self, deploy: Deploy) -> Site:
        variant = deploy.kind if deploy.branch is None else f"p-{slug(deploy.branch)}"
        folder = self._sites / deploy.appId / (variant if deploy.kind == "preview" else "live")
        for made in (folder.parent, folder):
            made.mkdir(mode=0o711, exist_ok=True)
        site = Site(folder)
        if not site.account:
            (folder.parent / "account").write_text(deploy.account)
        return site

    def claim(self, deploy: Deploy) -> None:
        """What another account left of an app of this name goes."""
        folder = self._sites / deploy.appId
        if Site(folder / "live").account not in ("", deploy.account):
            remove(folder)

    def sites(self) -> Iterator[Site]:
        for app in _folders(self._sites):
            for folder in _folders(app):
                yield Site(folder)

    # -- addresses -------------------------------------------------------------------------------------------

    def serve_as(self, host: str, site: Site) -> None:
        target = os.path.relpath(site.folder, self._addresses)
        if _read(self._addresses / host) != target:
            link(self._addresses / host, target)

    def serve_no_others(self, hosts: Iterable[str]) -> None:
        for address in {path.name for path in self._addresses.iterdir()} - set(hosts):
            (self._addresses / address).unlink(missing_ok=True)

    # -- apps that run ---------------------------------------------------------------------------------------

    def run(self, release: Path) -> None:
        link(self.running / release.name, os.path.relpath(release, self.running))

    def stop(self, deploy_id: str) -> None:
        (self.running / deploy_id).unlink(missing_ok=True)

    def shall_run(self) -> dict[str, Path]:
        """By deploy id. What else is in the folder is the watchdog's."""
        return {path.name: path.resolve() for path in self._links() if path.is_dir()}

    def _links(self) -> list[Path]:
        return [path for path in self.running.iterdir() if path.is_symlink() and not path.name.startswith(".")]

    # -- tidying ---------------------------------------------------------------------------------------------

    def tidy(self, apps: Collection[str], under_way: Set[str]) -> None:
        """What is of no more use. `apps`: the ids of those that there are; `under_way`: of deploys, as it changes."""
        for build in _folders(self.builds):
            if build.name not in under_way:
                remove(build)
        for app in _folders(self._sites):
            gone = app / "gone"
            if app.name in apps:
                gone.unlink(missing_ok=True)
                self._tidy_previews(app)
            elif not gone.exists():
                gone.touch()
            elif time.time() - gone.stat().st_mtime > GONE_SECONDS:
                remove(app)
        for path in self._links():
            if path.name in under_way:
                continue
            site = Site(path.resolve().parent)  # what it serves is final: this deploy is over
            served = {site.current}
            if site.current in under_way:
                served.add(site.linked("previous"))  # which comes back when the canary fails
            if site.app_id not in apps or path.name not in served:
                self.stop(path.name)

    @staticmethod
    def _tidy_previews(app: Path) -> None:
        previews = [folder for folder in _folders(app) if folder.name != "live"]
        previews.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in previews[PREVIEWS:]:
            remove(folder)


@asynccontextmanager
async def alone(lock: Path) -> AsyncIterator[None]:
    """One process of this folder at a time; another waits, and goes on when this one ends, however it does."""
    with lock.open("a") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    logger.info("worker.standing_by", lock=lock.name)
                waiting = True
                await asyncio.sleep(0.5)
        yield


def link(path: Path, target: str) -> None:
    """In one step, over whatever it led to before."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # of a worker that was killed
    fresh.symlink_to(target)
    fresh.replace(path)


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():  # folders that the build closed to their owner, who is also us
        os.chmod(path, 0o700)
        for folder, names, _ in os.walk(path):
            for name in names:
                if not os.path.islink(inner := os.path.join(folder, name)):
                    os.chmod(inner, 0o700)
        shutil.rmtree(path, ignore_errors=True)


def _read(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _folders(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()] if folder.is_dir() else []

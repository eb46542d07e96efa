"""The releases on disk. Links in the file system record which release is served, and each change is one rename.

    built/<deploy id>/                           the release of a deploy in progress that was built on this machine
    releases/<app id>/<variant>/<deploy id>/     a release: `files` to serve, or `app` to run; it never changes
    releases/<app id>/<variant>/current          link to the release that is served
    releases/<app id>/<variant>/previous         link to the release that `current` replaced
    releases/<app id>/<variant>/recent           the same, for ten minutes: pages opened before the swap load its files
    addresses/<host>                             link to releases/<app id>/<variant>
    redirects/<host>                             the URL to which visitors of this host are redirected
    releases/<app id>/<variant>/canary           link to a release that is served but has not passed its canary
    releases/<app id>/<variant>/held             link to a release, while its deploy stops one app and starts another
    releases/<app id>/<variant>/stopped          the app does not run for now: its data are full, or are being replaced
    releases/<app id>/<variant>/suspended        the app is suspended: it does not run, and Caddy answers 503
    releases/<app id>/<variant>/unpublished      the app has this address, even without `current`: Caddy says so
    releases/<app id>/<variant>/noindex          in previews: Caddy asks search engines not to list the pages
    running/<deploy id>                          link to a release whose start command the watchdog runs
    running/<deploy id>.sock                     where that app is reached; `sock` in its release links here
    running/<deploy id>.asleep                   while that app sleeps; `asleep` in its release links here
    running/<deploy id>.stop-soon                while requests wait for the end of that app

A variant is `live`, `preview` or `p-<slug>`. Caddy reads `addresses` on every request (`Caddyfile`). A swap renames
`current`, and undoing it renames it back.

Addresses are derived from the apps' records, at each deploy and regularly, because other processes rename and delete
apps. After its deletion an app is not served any more. Its files stay for a week, because its record may have been lost
by accident.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Set
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import structlog

from gateway.cancellation import run_process
from gateway.loops import until
from workers.engine.app_data import is_long_gone, try_to_lock
from workers.sandbox.keeper import STOP_SOON_SUFFIX
from workers.sandbox.removal import remove_folder

logger = structlog.get_logger()

KEPT_RELEASES = 5  # per site
PREVIOUS_SECONDS = 600.0  # after a swap, in which files of the previous release are served
LINK_SECONDS = 60.0  # in which the files of a release must be linked
LOCK_RETRY_SECONDS = 0.5  # between attempts


class Site:
    """A variant of an app, with its releases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app_id, self.variant = folder.parent.name, folder.name

    @property
    def is_preview(self) -> bool:
        return self.variant != "live"

    @property
    def account(self) -> str:
        """The account that deployed these releases. The app may belong to another account by now."""
        try:
            return (self.folder.parent / "account").read_text()
        except OSError:
            return ""

    def release(self, deploy_id: str) -> Path:
        return self.folder / deploy_id

    def read_link(self, name: str) -> str | None:
        """Returns the id of the deploy that a link such as `current` points to."""
        return _read_link(self.folder / name)

    @property
    def current(self) -> str | None:
        return self.read_link("current")

    @property
    def swapped_at(self) -> float:
        """The Unix time of the last swap. Raises OSError if nothing is served."""
        return (self.folder / "current").lstat().st_mtime

    @property
    def seconds_since_swap(self) -> float:
        """Raises OSError if nothing is served."""
        return time.time() - self.swapped_at

    @property
    def unverified(self) -> str | None:
        """The id of the deploy that is served but has not passed its canary yet."""
        in_canary = self.read_link("canary")
        return in_canary if in_canary == self.current else None

    def hold_requests(self, deploy_id: str) -> None:
        """Lets requests wait for up to ten seconds (`Caddyfile`), while one release stops before another one starts."""
        replace_link(self.folder / "held", deploy_id)

    def release_requests(self) -> None:
        (self.folder / "held").unlink(missing_ok=True)

    def confirm(self, deploy_id: str) -> None:
        """Records that the deploy has passed its canary."""
        self.release_requests()
        if self.read_link("canary") == deploy_id:
            (self.folder / "canary").unlink()

    def swap(self, deploy_id: str, *, canary: bool = False) -> None:
        before = self.current
        if before == deploy_id:
            return
        if canary:
            replace_link(self.folder / "canary", deploy_id)
        if before is not None:
            replace_link(self.folder / "previous", before)
            replace_link(self.folder / "recent", before)
        replace_link(self.folder / "current", deploy_id)

    def undo(self, deploy_id: str) -> bool:
        """Serves the release that this deploy replaced. Returns False if this deploy is not served."""
        if self.current != deploy_id:
            return False
        if (previous := self.find_replaced(deploy_id)) is not None:
            replace_link(self.folder / "current", previous.name)
        else:
            (self.folder / "current").unlink()
        self.confirm(deploy_id)
        return True

    def find_replaced(self, deploy_id: str) -> Path | None:
        """Returns the release that is served after this deploy is undone."""
        previous = self.read_link("previous")
        if self.current == deploy_id and previous not in (None, deploy_id) and self.release(previous).is_dir():
            return self.release(previous)
        return None

    def find_stopped(self, deploy_id: str) -> Path | None:
        """Returns the current release, if this deploy has stopped it and is not served yet."""
        current = self.current
        return (
            self.release(current) if self.read_link("held") == deploy_id and current not in (None, deploy_id) else None
        )

    def mark_unpublished(self) -> None:
        """Answers requests with a page that says so, while there is no release to serve."""
        (self.folder / "unpublished").touch()

    def mark_stopped(self) -> None:
        """Answers the app's requests with 503."""
        (self.folder / "stopped").touch()

    def unmark_stopped(self) -> None:
        (self.folder / "stopped").unlink(missing_ok=True)

    @property
    def is_suspended(self) -> bool:
        return os.path.exists(self.folder / "suspended")

    def set_suspended(self, *, suspended: bool) -> None:
        """Answers the app's requests with 503, and stops its start commands (`watchdog.py`), or ends that."""
        if suspended and not self.is_suspended:
            (self.folder / "suspended").touch()
        elif not suspended:
            (self.folder / "suspended").unlink(missing_ok=True)

    def forget_recent(self) -> None:
        """Stops serving files of the previous release, some time after the swap."""
        with suppress(OSError):
            if self.seconds_since_swap > PREVIOUS_SECONDS:
                (self.folder / "recent").unlink()

    def releases(self) -> list[Path]:
        """Returns the releases, newest first. A deploy's id begins with the time."""
        return sorted(_subfolders(self.folder), key=lambda path: path.name, reverse=True)

    def prune(self) -> None:
        kept = {self.current, self.read_link("previous")}
        for path in self.releases()[KEPT_RELEASES:]:
            if path.name not in kept:
                remove_folder(path)


class Releases:
    def __init__(self, folder: Path) -> None:
        self.folder = folder = folder.resolve()
        self.builds, self.built, self.running = folder / "builds", folder / "built", folder / "running"
        self._sites, self._addresses = folder / "releases", folder / "addresses"
        self._redirects = folder / "redirects"

    def create_folders(self) -> None:
        """Creates the folders. Users of builds and Caddy may enter them, but not list them. `sources` is private."""
        os.umask(0o022)  # with a stricter mask, they could not read the files they need
        inner = (self.builds, self.built, self.running, self._sites, self._addresses, self._redirects)
        for folder in (self.folder, *inner, self.folder / "web", self.folder / "sources"):
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        if os.geteuid() == 0:
            self.folder.chmod(0o711)
            owner, sources = self.folder.stat(), self.folder / "sources"
            os.chown(sources, owner.st_uid, owner.st_gid)  # the gateway writes there, and may be another user
            sources.chmod(0o700)

    def folder_id(self) -> str:
        """Returns the id of this data folder. Creates the id at the first call."""
        if not self.find_id():
            (self.folder / "id").write_text(secrets.token_hex(8))
        return self.find_id()

    def find_id(self) -> str:
        """Returns the id of this data folder; '' if it has none yet."""
        path = self.folder / "id"
        return path.read_text() if path.exists() else ""

    def site(self, account: str, app_id: str, address: str = "live") -> Site:
        """Returns the site of an address. Creates its folder if there is none."""
        folder = self._sites / app_id / address
        for missing in (folder.parent, folder):
            missing.mkdir(mode=0o711, exist_ok=True)
        site = Site(folder)
        if not site.account:
            (folder.parent / "account").write_text(account)
        return site

    def find_site(self, app_id: str, address: str = "live") -> Site:
        """Returns the site of an address. Its folder may not exist."""
        return Site(self._sites / app_id / address)

    def list_releases(self, app_id: str) -> list[Path]:
        """Lists the releases of the app, at all its addresses."""
        return [path for site in self.sites_of(app_id) for path in site.releases()]

    def empty_foreign_folder(self, account: str, app_id: str) -> None:
        """Removes the releases of another account to which the app belonged before."""
        folder = self._sites / app_id
        if Site(folder / "live").account not in ("", account):
            remove_folder(folder)

    def sites(self) -> Iterator[Site]:
        for app in _subfolders(self._sites):
            yield from self.sites_of(app.name)

    def list_apps(self) -> dict[str, int]:
        """Lists the folders of apps, with the times (ns) at which their sites last changed."""
        with os.scandir(self._sites) as entries:
            return {each.name: each.stat().st_mtime_ns for each in entries if each.is_dir(follow_symlinks=False)}

    def sites_of(self, app_id: str) -> list[Site]:
        return [Site(folder) for folder in _subfolders(self._sites / app_id)]

    # -- addresses -------------------------------------------------------------------------------------------

    def serve_as(self, host: str, site: Site) -> None:
        if site.is_preview and not (site.folder / "noindex").exists():
            (site.folder / "noindex").touch()
        target = os.path.relpath(site.folder, self._addresses)
        if _read_link(self._addresses / host) != target:
            replace_link(self._addresses / host, target)

    def site_at(self, host: str) -> Site | None:
        """Returns the site that is served at a host name."""
        target = _read_link(self._addresses / host)
        return Site(Path(os.path.normpath(self._addresses / target))) if target is not None else None

    def list_names(self) -> dict[Path, set[str]]:
        """Returns the host names, by the folder of the site that they lead to."""
        found: dict[Path, set[str]] = {}
        for name in os.listdir(self._addresses):
            if not name.startswith(".") and (site := self.site_at(name)) is not None:
                found.setdefault(site.folder, set()).add(name)
        return found

    def redirect(self, host: str, url: str) -> None:
        """Redirects visitors of a host name to a URL, or no more if that is ''."""
        path = self._redirects / host
        if not url:
            path.unlink(missing_ok=True)
        elif self.read_redirect(host) != url:
            fresh = path.with_name(f".{host}.new")
            fresh.write_text(url)
            fresh.replace(path)

    def read_redirect(self, host: str) -> str:
        """Returns the URL to which visitors of a host name are redirected, or ''."""
        try:
            return (self._redirects / host).read_text()
        except FileNotFoundError:
            return ""

    def serve_no_more(self, site: Site, hosts: Iterable[str]) -> None:
        """Removes host names that lead to the site."""
        for name in hosts:
            found = self.site_at(name)
            if found is not None and found.folder == site.folder:
                self.redirect(name, "")
                (self._addresses / name).unlink(missing_ok=True)

    def remove_site(self, site: Site) -> None:
        """Serves the site no more, stops its apps, and removes its releases."""
        self.serve_no_more(site, self.list_names().get(site.folder, ()))
        for release in site.releases():
            self.stop(release.name)
        remove_folder(site.folder)

    # -- apps that run ---------------------------------------------------------------------------------------

    def run(self, release: Path) -> None:
        for name in ("sock", "asleep"):
            replace_link(release / name, os.path.relpath(self.running / f"{release.name}.{name}", release))
        (self.running / f"{release.name}{STOP_SOON_SUFFIX}").unlink(missing_ok=True)
        replace_link(self.running / release.name, os.path.relpath(release, self.running))

    def stop(self, deploy_id: str) -> None:
        (self.running / deploy_id).unlink(missing_ok=True)

    def stop_soon(self, deploy_id: str) -> None:
        """Stops the app within seconds. Requests reach it no more, and those in progress get two seconds to end."""
        (self.running / f"{deploy_id}{STOP_SOON_SUFFIX}").touch()
        (self.running / f"{deploy_id}.sock").unlink(missing_ok=True)
        self.stop(deploy_id)

    def is_stopping(self, deploy_id: str) -> bool:
        """Returns whether the watchdog has not removed the app yet that was to stop soon."""
        return (self.running / f"{deploy_id}{STOP_SOON_SUFFIX}").exists()

    def confirm_stops(self, running: Collection[str]) -> None:
        """Forgets the stops of apps that do not run. The other stops end when the watchdog removes the app's files."""
        for path in self.running.glob(f"*{STOP_SOON_SUFFIX}"):
            if path.name.removesuffix(STOP_SOON_SUFFIX) not in running:
                path.unlink(missing_ok=True)

    def releases_to_run(self) -> dict[str, Path]:
        """Returns the releases to run, by deploy id. In `running`, everything except links belongs to the watchdog."""
        return {path.name: path.resolve() for path in self._links() if path.is_dir()}

    def _links(self) -> list[Path]:
        with os.scandir(self.running) as entries:
            return [Path(each.path) for each in entries if each.is_symlink() and not each.name.startswith(".")]

    # -- tidying ---------------------------------------------------------------------------------------------

    def tidy_builds(self, in_progress: Set[str]) -> None:
        """Removes the folders of builds that a worker left behind. `in_progress` changes while this runs."""
        for build in (*_subfolders(self.builds), *_subfolders(self.built)):
            if build.name not in in_progress:
                with _isolated(build):
                    remove_folder(build)

    def tidy(self, gone: Set[str], in_progress: Set[str]) -> None:
        """Removes what is no longer needed, except builds.

        `gone`: the ids of the deleted apps. `in_progress`: ids of deploys. The sets change while this runs.
        """
        for app in _subfolders(self._sites):
            with _isolated(app):
                self._tidy_app(app, exists=app.name not in gone)
        for link in self._links():
            with _isolated(link):
                if link.name not in in_progress and not self._is_needed(link, gone, in_progress):
                    self.stop(link.name)

    def _tidy_app(self, app: Path, *, exists: bool) -> None:
        if is_long_gone(app / "gone", is_deleted=not exists):
            return remove_folder(app)
        for folder in _subfolders(app) if exists else ():
            Site(folder).forget_recent()

    @staticmethod
    def _is_needed(link: Path, gone: Set[str], in_progress: Set[str]) -> bool:
        """Returns whether a release with a start command must keep running, after its deploy has ended."""
        site = Site(link.resolve().parent)
        in_canary, current = site.read_link("canary"), site.current  # in this order, because an undo ends a canary last
        needed = {current}
        if current is not None and (current in in_progress or current == in_canary):
            needed.add(site.read_link("previous"))  # served again if the canary fails or its builder was killed
        return site.app_id not in gone and link.name in needed


@contextmanager
def _isolated(path: Path) -> Iterator[None]:
    """Logs a failed step of tidying, so that one tenant's files do not stop the steps for the others."""
    try:
        yield
    except FileNotFoundError:
        pass  # another worker is removing it, or a part of it; the next round tidies what is left
    except Exception as error:
        logger.error("folder.not_tidied", folder=str(path), exc_info=error)


@asynccontextmanager
async def exclusive_lock(path: Path) -> AsyncIterator[None]:
    """Waits for the lock file, and holds it. The kernel frees it when the process ends, even if it is killed."""
    with path.open("a") as file:

        async def lock() -> bool:
            return try_to_lock(file.fileno())

        if not await lock():
            logger.info("worker.standing_by", lock=path.name)
            await until(lock, LOCK_RETRY_SECONDS)
        yield


async def link_folder(source: Path, target: Path) -> bool:
    """Links the files of a release into a new one. Files of releases never change, so both can share them.

    A separate process does this. It handles folders of any depth, and leaves the event loop free. If it fails, nothing
    of the new release is left.
    """
    status, _ = await run_process("cp", "-al", "--", source, target, seconds=LINK_SECONDS)
    if status:
        await asyncio.to_thread(remove_folder, target)
    return status == 0


def replace_link(path: Path, target: str) -> None:
    """Points the link to the target in one step, so that readers never find it missing."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # left by a worker that was killed
    fresh.symlink_to(target)
    fresh.replace(path)


def _read_link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _subfolders(folder: Path) -> list[Path]:
    """Lists the folders in it. Other processes and threads add and remove some at the same time."""
    try:
        entries = [*folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    # First whether it is a link: a new link is renamed a moment later (`replace_link`).
    return [path for path in entries if not path.is_symlink() and path.is_dir()]

"""Keeps this host's data folder at what `records.py` wants, where several hosts serve from one storage.

Each address of each app has a task here for the newest step of its record. A release is fetched from the storage, and
unpacked only if its digest is the record's. The host then serves it by the same renames as a host that is alone
(`serving.py`), so it goes on without Redis and the storage.

A host counts while it sends heartbeats. If it was paused, the others may have gone on without it: it then answers no
visitor until it has caught up, unless Redis is away.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import structlog

from gateway import storage
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.cancellation import end_if_canceled, finish_despite_cancellation
from gateway.deploys.states import Deploy
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.events.catalog import Kind
from gateway.redis.client import Store, until_redis_answers
from gateway.settings import Settings
from gateway.storage import open_storage, until_storage_answers
from workers.hosting import archives, disk
from workers.hosting.archives import ARCHIVE_BYTES, Archive, BadArchive
from workers.hosting.environment import FILE as ENVIRONMENT
from workers.hosting.records import Answer, Records, Wanted
from workers.hosting.releases import Releases, Site, link_folder, remove_folder
from workers.hosting.serving import DeployError, Job, Serving, find_app, run_in_thread
from workers.hosting.web import read_address
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

POLL_INTERVAL = 0.2  # seconds between two looks at what has changed
HEARTBEAT_INTERVAL = 3.0  # seconds
RESYNC_INTERVAL = 60.0  # seconds between two readings of everything, which also tries again what has failed
TIDY_INTERVAL = 15.0  # seconds
PAUSED_SECONDS = 10.0  # without a look, after which this host may have been left out; less than a heartbeat lives
CATCH_UP_SECONDS = 30.0  # and one more for each app, within which a host catches up before it serves what it has
FAILURES = 3  # of Redis, after which a host that was paused serves what it has
START_SECONDS = 15.0  # within which the web server starts
FETCHES = 4  # at once


class Agent:
    def __init__(self, settings: Settings) -> None:
        self._settings, self._store = settings, Store(settings.redis_url, ca_file=settings.ca_file)
        self._registry = Registry(self._store, Vault(settings.encryption_key))
        self._records = Records(self._store)
        self._storage = open_storage(settings)
        self._releases = Releases(Path(settings.data_dir))
        self._serving = Serving(settings, self._find_app, builds=False)
        self._host = self._releases.folder_id()
        self._fetched = self._releases.folder / "fetched"
        self._fetching = asyncio.Semaphore(FETCHES)
        self._wanted: dict[tuple[str, str], Wanted] = {}  # by app and address
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._failed: set[str] = set()  # tokens of steps to try again
        self._seen: dict[str, float] = {}
        self._checked = self._attended = time.monotonic()
        self._behind, self._synced, self._pauses = True, False, 0
        self._storage_failed = asyncio.Event()

    def is_current(self) -> bool:
        """False if this host may serve what others have replaced."""
        return not self._behind and time.monotonic() - self._checked < PAUSED_SECONDS

    async def catch_up(self) -> None:
        """Fetches what should be served. Returns early when Redis or the storage is away."""
        await run_in_thread(remove_folder, self._fetched)
        self._fetched.mkdir(mode=0o700)
        with suppress(BackboneUnavailable):
            await self._sync()
            await self._until_applied()
        self._checked, self._behind = time.monotonic(), False

    async def run(self) -> None:
        """Runs until it is canceled."""
        resync, beat, failures = time.monotonic() + RESYNC_INTERVAL, 0.0, 0
        tidying = asyncio.create_task(self._tidy_regularly())
        try:
            while True:
                end_if_canceled()
                self._detect_pause()
                now, pauses = self._checked, self._pauses
                try:
                    if now >= resync:
                        resync, self._seen = now + RESYNC_INTERVAL, {}
                    await self._sync()
                    if self._behind or now - self._attended > PAUSED_SECONDS:  # the others may have gone on
                        await self._until_applied()
                    if now >= beat and pauses == self._pauses:
                        await self._records.attend(self._host)
                        self._attended, beat = time.monotonic(), now + HEARTBEAT_INTERVAL
                    failures = 0
                except BackboneUnavailable:
                    failures, beat = failures + 1, 0.0
                self._detect_pause()
                # After a pause, what was under way fails once although Redis is there.
                if pauses == self._pauses and (failures == 0 or failures >= FAILURES):
                    self._behind = False
                await asyncio.sleep(POLL_INTERVAL)
        finally:
            tidying.cancel()
            await asyncio.gather(tidying, return_exceptions=True)

    def _detect_pause(self) -> None:
        now = time.monotonic()
        if now - self._checked > PAUSED_SECONDS:
            logger.warning("sites.was_paused", seconds=round(now - self._checked))
            self._pauses, self._behind = self._pauses + 1, True
        self._checked = now

    async def aclose(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        with suppress(BackboneUnavailable):
            await self._records.leave(self._host)
        await self._store.close()

    async def _find_app(self, app: str) -> App | None:
        return await find_app(self._registry, app)

    async def _tidy_regularly(self) -> None:
        while True:
            await asyncio.sleep(TIDY_INTERVAL)
            if not self._synced:  # nothing is known yet of what should be served
                continue
            try:
                await self._serving.tidy({wanted.deploy for wanted in self._wanted.values()})
            except Exception as error:  # what one tenant made must not stop the others
                logger.error("sites.not_tidied", exc_info=error)

    # -- following the records -------------------------------------------------------------------------------

    async def _sync(self) -> None:
        """Starts a task for each record that is new. Raises BackboneUnavailable."""
        async for changed in self._records.changes(self._seen):
            for wanted in changed:
                key = (wanted.app, wanted.address)
                known = self._wanted.get(key)
                if known is None or known.token != wanted.token or wanted.token in self._failed:
                    self._failed -= {wanted.token, known.token if known else ""}
                    self._wanted[key] = wanted
                    self._tasks[key] = asyncio.create_task(self._follow(wanted, self._tasks.get(key)))
        self._synced = True

    async def _until_applied(self) -> None:
        """Waits for what every host must do before it serves: not for canaries, which go on."""
        ends = time.monotonic() + CATCH_UP_SECONDS + len(self._wanted)
        away = asyncio.create_task(self._storage_failed.wait())
        try:
            while time.monotonic() < ends and not away.done():
                if all(task.done() or self._is_in_canary(key) for key, task in self._tasks.items()):
                    return
                await asyncio.wait([away], timeout=POLL_INTERVAL / 2)
                self._detect_pause()
        finally:
            away.cancel()

    def _is_in_canary(self, key: tuple[str, str]) -> bool:
        wanted = self._wanted[key]
        return wanted.step == "canary" and self._releases.site(_deploy(wanted, "")).current == wanted.deploy

    async def _follow(self, wanted: Wanted, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            former.cancel()
            await finish_despite_cancellation(asyncio.wait([former]))
        output: list[str] = []
        try:
            app = await self._find_app(wanted.app)
            if app is None or app.account != wanted.account:
                raise DeployError("the app was deleted, or now belongs to another account")
            await self._apply(wanted, app, output)
        except (DeployError, BadArchive) as error:
            logger.warning("sites.step_failed", app=wanted.app, deploy=wanted.deploy, step=wanted.step, why=str(error))
            self._failed.add(wanted.token)
            await self._answer(wanted, Answer(wanted.token, False, str(error), output=output))
        except Exception as error:  # a fault of ours, or a full disk
            logger.error("sites.step_failed", app=wanted.app, deploy=wanted.deploy, step=wanted.step, exc_info=error)
            self._failed.add(wanted.token)
            reason = "an internal error of a host that serves the apps; deploy again"
            await self._answer(wanted, Answer(wanted.token, False, reason))

    async def _answer(self, wanted: Wanted, answer: Answer) -> None:
        await until_redis_answers(lambda: self._records.answer(wanted, self._host, answer))

    # -- one step --------------------------------------------------------------------------------------------

    async def _apply(self, wanted: Wanted, app: App, output: list[str]) -> None:
        """Raises DeployError or BadArchive."""
        job = _job(wanted, app, wanted.deploy, output)
        await run_in_thread(self._releases.claim_folder, job.deploy)
        site = self._releases.site(job.deploy)
        if wanted.step == "undo":
            await self._serving.undo(job.deploy)
        if wanted.serves and site.current != wanted.serves:
            try:
                await self._serve(wanted, app, site, output)
            except (DeployError, BadArchive) as error:
                if wanted.step != "check":
                    raise
                # What is served must not keep a new release from replacing it.
                logger.warning("sites.step_failed", app=wanted.app, deploy=wanted.serves, step="serve", why=str(error))
        elif not wanted.serves and wanted.step == "undo" and site.current is not None:
            site.undo(site.current)
        if wanted.step == "check":
            await self._fetch(wanted, wanted.deploy)
            await self._serving.check_health(job)
        if wanted.step == "live":
            site.confirm(wanted.deploy)
        await self._answer(wanted, Answer(wanted.token, True, output=output))
        if wanted.step == "live":
            await self._serving.finish(job)
        elif wanted.step == "canary":
            await self._watch_canary(wanted, job)

    async def _serve(self, wanted: Wanted, app: App, site: Site, output: list[str]) -> None:
        """Serves what visitors should get. A start command must answer first, unless it is what nobody checks now."""
        job = _job(wanted, app, wanted.serves, output)
        release = await self._fetch(wanted, wanted.serves)
        if (release / "start").exists():
            try:
                await self._serving.check_health(job)
            except DeployError:
                if wanted.step == "canary":
                    raise
        await self._serving.swap(job)
        if wanted.step != "canary":
            site.confirm(wanted.serves)

    async def _watch_canary(self, wanted: Wanted, job: Job) -> None:
        answers = 0
        await self._until_serving()
        while True:
            await self._serving.probe(job)
            answers += 1
            await self._answer(wanted, Answer(wanted.token, True, answers=answers))
            await asyncio.sleep(self._serving.canary_pause)

    async def _until_serving(self) -> None:
        """Waits for this host's web server, which starts after this host has caught up."""
        for _ in range(round(START_SECONDS / POLL_INTERVAL)):
            host, _, port = read_address(self._releases.folder).rpartition(":")
            with suppress(OSError, ValueError):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                return
            await asyncio.sleep(POLL_INTERVAL)

    # -- fetching --------------------------------------------------------------------------------------------

    async def _fetch(self, wanted: Wanted, deploy_id: str) -> Path:
        """The release, which is fetched unless it is here. Raises DeployError or BadArchive."""
        site, expected = self._releases.site(_deploy(wanted, "")), wanted.releases.get(deploy_id)
        release = site.release(deploy_id)
        if expected is None:
            raise DeployError(f"the release of {deploy_id} is no longer kept; deploy its source again")
        archive = Archive(expected.digest, expected.size)
        if archives.read_record(release) != archive:
            async with self._fetching:
                began = time.monotonic()
                await run_in_thread(remove_folder, release)  # made by a worker that was stopped
                fresh = await self._make(wanted.app, deploy_id, archive)
                archives.write_record(fresh, archive)
                fresh.rename(release)
                logger.info("sites.fetched", deploy=deploy_id, bytes=archive.size, seconds=time.monotonic() - began)
        (release / ENVIRONMENT).unlink(missing_ok=True)
        if expected.environment:
            (release / ENVIRONMENT).touch(mode=0o600)
            (release / ENVIRONMENT).write_text(expected.environment)
        limit = self._settings.account_disk
        if not await run_in_thread(disk.make_room, self._releases, wanted.account, release, limit * MIB):
            await run_in_thread(remove_folder, release)
            raise DeployError(f"the account's apps take more than {limit} MiB of disk; make them smaller")
        return release

    async def _make(self, app_id: str, deploy_id: str, archive: Archive) -> Path:
        """A folder with the files of the archive. Raises BadArchive or DeployError."""
        fresh, packed = self._fetched / deploy_id, self._fetched / f"{deploy_id}.tar.gz"
        await run_in_thread(remove_folder, fresh)
        for same in await run_in_thread(self._releases.all_of, app_id):
            if archives.read_record(same) == archive and await link_folder(same, fresh):
                return fresh
        try:
            if not await until_storage_answers(lambda: self._try_to_fetch(app_id, deploy_id, packed)):
                raise DeployError(f"the release of {deploy_id} is no longer kept; deploy its source again")
            fresh.mkdir(mode=0o755)
            await archives.unpack(packed, archive, fresh)
        except StorageUnavailable:
            raise DeployError("the storage does not answer; deploy again later") from None
        finally:
            packed.unlink(missing_ok=True)
        return fresh

    async def _try_to_fetch(self, app_id: str, deploy_id: str, path: Path) -> bool:
        try:
            found = await storage.fetch(self._storage, archives.archive_key(app_id, deploy_id), path, ARCHIVE_BYTES)
        except StorageUnavailable:
            self._storage_failed.set()
            raise
        self._storage_failed.clear()
        return found


def _deploy(wanted: Wanted, deploy_id: str, app: str = "") -> Deploy:
    """What serving needs of a deploy's record, which may have expired."""
    kind: Kind = "live" if wanted.address == "live" else "preview"
    branch = wanted.address.removeprefix("p-") if wanted.address.startswith("p-") else None
    return Deploy(
        id=deploy_id,
        account=wanted.account,
        app=app,
        appId=wanted.app,
        kind=kind,
        branch=branch,
        state="live",
        trigger="operator",
        createdAt="",
    )


def _job(wanted: Wanted, app: App, deploy_id: str, output: list[str]) -> Job:
    async def record(_: object) -> None:
        """A builder has recorded commit and archive."""

    return Job(_deploy(wanted, deploy_id, app.name), app, output.append, record, record)

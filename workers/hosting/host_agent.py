"""Applies the serving records (`records.py`) to this host's data folder, where several hosts serve from one storage.

For each address of each app, a task applies the newest step of its record. It fetches the release from the storage, and
unpacks it only if its digest matches the record. The host then serves the release by the same renames as a single host
(`serving.py`), so it keeps serving without Redis and the storage.

The start command of a live address runs on one host only (`ownership.py`). That host checks it, and the others just
fetch the release.

A host counts while it sends heartbeats. After a pause, other hosts may have continued without it. Caddy then answers
503 until the host has caught up, unless Redis is unavailable. Caddy itself keeps serving while this worker is stopped:
only the next worker learns whether its host was left out.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path

import structlog

from gateway import storage
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.cancellation import end_if_canceled, finish_despite_cancellation
from gateway.deploys.states import Deploy, Deploys
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.events.catalog import Kind
from gateway.redis.client import Store, until_redis_answers
from gateway.settings import Settings
from gateway.storage import open_storage, until_storage_answers
from workers.hosting import archives, caddy, disk
from workers.hosting.archives import ARCHIVE_BYTES, BadArchive, ReleaseArchive
from workers.hosting.ownership import Ownership
from workers.hosting.packing import DataPacker
from workers.hosting.records import HostAnswer, Records, Wanted
from workers.hosting.release_files import ENVIRONMENT_FILE as ENVIRONMENT
from workers.hosting.releases import Releases, Site, link_folder, remove_folder
from workers.hosting.serving import DeployError, Job, Serving, find_app, run_in_thread
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

POLL_SECONDS = 0.2  # between reads of the changed records
RENEWAL_SECONDS = 3.0  # between heartbeats
RESYNC_SECONDS = 60.0  # between reads of all records, which also repeat failed steps
TIDY_SECONDS = 15.0  # between rounds of tidying
PAUSED_SECONDS = 10.0  # without a check, after which this host may not count; less than the lifetime of a heartbeat
CATCH_UP_SECONDS = 30.0  # plus one per app, after which a host serves its present releases
REDIS_FAILURES = 3  # in a row, after which a host that was paused serves its present releases
FETCHES = 4  # at once


class State(Enum):
    CATCHING_UP = auto()  # applies the steps that it may have missed
    CURRENT = auto()  # serves the apps
    PAUSED = auto()  # stood still while it worked; the next round catches up


class HostAgent:
    def __init__(
        self,
        settings: Settings,
        packer: DataPacker | None = None,
        mark_suspended: Callable[[Site], None] = lambda _: None,
    ) -> None:
        """Without a `packer`, this host cannot run apps. `mark_suspended` marks a site whose app is suspended."""
        self._mark_suspended = mark_suspended
        self._settings, self._store = settings, Store(settings.redis_url, ca_file=settings.ca_file)
        self._registry = Registry(self._store, Vault(settings.encryption_key))
        self._records = Records(self._store)
        self._storage = open_storage(settings)
        self._releases = Releases(Path(settings.data_dir))
        self._serving = Serving(settings, self._find_app, builds=False, runs_here=self._runs_here)
        self.ownership = Ownership(
            settings,
            self._store,
            self._storage,
            self._releases,
            Deploys(settings, self._registry),
            packer,
            self._registry.find_app,
            self._repeat_step,
            lambda: self._synced and self.is_current(),
        )
        self._host = self._releases.folder_id()
        self._fetched = self._releases.folder / "fetched"
        self._fetching = asyncio.Semaphore(FETCHES)
        self._wanted: dict[tuple[str, str], Wanted] = {}  # by app and address
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._failed: set[str] = set()  # tokens of steps to repeat
        self._seen: dict[str, float] = {}  # the version of each partition
        self._checked = self._renewed = time.monotonic()  # of the last check for a pause, of the last heartbeat
        self._state: State | None = None  # not known yet
        self._synced = False  # whether all records have been read once
        self._storage_failed = asyncio.Event()

    def is_current(self) -> bool:
        """Returns False if other hosts may already have replaced the releases that this host serves."""
        return self._state is State.CURRENT and time.monotonic() - self._checked < PAUSED_SECONDS

    async def catch_up(self) -> None:
        """Fetches the releases to serve. Returns early if Redis or the storage is unavailable."""
        await run_in_thread(remove_folder, self._fetched)
        self._fetched.mkdir(mode=0o700)
        with suppress(BackboneUnavailable):
            if self._host not in await self._records.list_hosts():
                self._enter(State.CATCHING_UP)
            await self._sync()
            await self._until_applied()
        self._checked = time.monotonic()
        self._enter(State.CURRENT)

    async def run(self) -> None:
        """Runs until canceled."""
        resync, renewal, failures = time.monotonic() + RESYNC_SECONDS, 0.0, 0
        following = asyncio.create_task(self._serving.follow_changes(self._store))
        tidying = asyncio.create_task(self._tidy_regularly())
        try:
            while True:
                end_if_canceled()
                self._detect_pause()
                now = self._checked
                if self._state is State.PAUSED:
                    self._enter(State.CATCHING_UP)
                try:
                    if now >= resync:
                        resync, self._seen = now + RESYNC_SECONDS, {}
                    await self._sync()
                    if now - self._renewed > PAUSED_SECONDS:  # the others may have continued without this host
                        self._enter(State.CATCHING_UP)
                    if self._state is not State.CURRENT:
                        await self._until_applied()
                    if now >= renewal and not self._was_paused():
                        await self._records.send_heartbeat(self._host)
                        self._renewed, renewal = time.monotonic(), now + RENEWAL_SECONDS
                    failures = 0
                except BackboneUnavailable:
                    failures, renewal = failures + 1, 0.0
                self._detect_pause()
                # After a pause, pending requests fail once even if Redis is available.
                if not self._was_paused() and (failures == 0 or failures >= REDIS_FAILURES):
                    self._enter(State.CURRENT)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in (tidying, following):
                task.cancel()
            await asyncio.gather(tidying, following, return_exceptions=True)

    def _detect_pause(self) -> None:
        now = time.monotonic()
        if now - self._checked > PAUSED_SECONDS:
            logger.warning("sites.was_paused", seconds=round(now - self._checked))
            self._enter(State.PAUSED)
        self._checked = now

    def _enter(self, state: State) -> None:
        if state is self._state:
            return
        self._state = state
        catching_up = caddy.catching_up_file(self._releases.folder)
        if state is State.CURRENT:
            catching_up.unlink(missing_ok=True)
        else:
            catching_up.touch()

    def _was_paused(self) -> bool:
        """Returns whether a pause was detected since this round began."""
        return self._state is State.PAUSED

    def _runs_here(self, site: Site) -> bool:
        """Returns whether this host runs the site's start commands, if there are any."""
        return site.is_preview or self.ownership.runs(site.app_id)

    async def aclose(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._store.close()

    async def _find_app(self, app: str) -> App | None:
        return await find_app(self._registry, app)

    async def _tidy_regularly(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            if not self._synced:  # the releases to keep are not known yet
                continue
            try:
                await self._serving.tidy({wanted.deploy for wanted in self._wanted.values()})
            except Exception as error:  # one tenant's files must not affect the others
                logger.error("sites.not_tidied", exc_info=error)

    # -- following the records -------------------------------------------------------------------------------

    async def _sync(self) -> None:
        """Starts a task for each new record. Raises BackboneUnavailable."""
        async for changed in self._records.read_changes(self._seen):
            for wanted in changed:
                key = (wanted.app, wanted.address)
                known = self._wanted.get(key)
                if known is None or known.token != wanted.token or wanted.token in self._failed:
                    self._failed -= {wanted.token, known.token if known else ""}
                    self._wanted[key] = wanted
                    if wanted.address == "live":
                        self.ownership.set_need(wanted.app, wanted.account, needed=wanted.runs)
                    self._tasks[key] = asyncio.create_task(self._follow(wanted, self._tasks.get(key)))
        self._synced = True

    def _repeat_step(self, app_id: str) -> None:
        key = (app_id, "live")
        if key in self._wanted:
            self._tasks[key] = asyncio.create_task(self._follow(self._wanted[key], self._tasks.get(key)))

    async def _until_applied(self) -> None:
        """Waits until all steps are applied, except canaries, which continue."""
        ends = time.monotonic() + CATCH_UP_SECONDS + len(self._wanted)
        away = asyncio.create_task(self._storage_failed.wait())
        try:
            while time.monotonic() < ends and not away.done():
                if all(task.done() or self._is_in_canary(key) for key, task in self._tasks.items()):
                    return
                await asyncio.wait([away], timeout=POLL_SECONDS / 2)
                self._detect_pause()
        finally:
            away.cancel()

    def _is_in_canary(self, key: tuple[str, str]) -> bool:
        wanted = self._wanted[key]
        return wanted.step == "canary" and self._releases.site(_make_deploy(wanted, "")).current == wanted.deploy

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
            await self._write_answer(wanted, HostAnswer(wanted.token, False, str(error), output=output))
        except Exception as error:  # a bug, or a full disk
            logger.error("sites.step_failed", app=wanted.app, deploy=wanted.deploy, step=wanted.step, exc_info=error)
            self._failed.add(wanted.token)
            reason = "an internal error occurred on a host that serves apps; deploy again"
            await self._write_answer(wanted, HostAnswer(wanted.token, False, reason))

    async def _write_answer(self, wanted: Wanted, answer: HostAnswer) -> None:
        await until_redis_answers(lambda: self._records.write_answer(wanted, self._host, answer))

    # -- one step --------------------------------------------------------------------------------------------

    async def _apply(self, wanted: Wanted, app: App, output: list[str]) -> None:
        """Applies the step and answers it. Raises DeployError or BadArchive."""
        job = _make_job(wanted, app, wanted.deploy, output)
        await run_in_thread(self._releases.claim_folder, job.deploy)
        site = self._releases.site(job.deploy)
        self._mark_suspended(site)
        here = self._runs_here(site)
        if wanted.runs and here:
            self.ownership.allow(wanted.app)
        elif wanted.runs:
            self.ownership.pass_on(wanted.app)
        if wanted.step == "undo":
            await self._serving.undo(job.deploy)
        if wanted.serves and site.current != wanted.serves:
            try:
                await self._serve(wanted, app, site, output)
            except (DeployError, BadArchive) as error:
                if wanted.step != "check":
                    raise
                # A problem with the served release must not prevent a new release from replacing it.
                logger.warning("sites.step_failed", app=wanted.app, deploy=wanted.serves, step="serve", why=str(error))
        elif not wanted.serves and wanted.step == "undo" and site.current is not None:
            site.undo(site.current)
        elif wanted.runs and here and site.current is not None:
            self._serving.start(_make_job(wanted, app, site.current, output))
        if wanted.step == "check":
            await self._fetch_release(wanted, wanted.deploy)
            await self._serving.check_health(job)
        if wanted.step == "live":
            site.confirm(wanted.deploy)
        await self._write_answer(wanted, HostAnswer(wanted.token, True, output=output, runs=here))
        if wanted.step == "live":
            await self._serving.remove_replaced(job)
        elif wanted.step == "canary":
            await self._watch_canary(wanted, job)

    async def _serve(self, wanted: Wanted, app: App, site: Site, output: list[str]) -> None:
        """Serves the release that visitors should get.

        If it has a start command that does not answer, a canary fails, and other steps serve the release anyway.
        """
        job = _make_job(wanted, app, wanted.serves, output)
        release = await self._fetch_release(wanted, wanted.serves)
        if (release / "start").exists() and site.is_suspended and wanted.step != "canary":
            if self._runs_here(site):
                self._serving.start(job)  # the watchdog runs it once the suspension is lifted
        elif (release / "start").exists():
            try:
                await self._serving.check_health(job)
            except DeployError:
                if wanted.step == "canary":
                    raise
        await self._serving.swap(job)
        if wanted.step != "canary":
            site.confirm(wanted.serves)

    async def _watch_canary(self, wanted: Wanted, job: Job) -> None:
        good_probes = 0
        await self._serving.wait_for_server()
        here = self._runs_here(self._releases.site(job.deploy))
        if wanted.address == "live" and wanted.releases[wanted.deploy].runs and not here:  # another host probes the app
            return await self._write_answer(wanted, HostAnswer(wanted.token, True, good_probes=1))
        while True:
            if self.is_current():  # otherwise this host answers with 503 until it has caught up
                await self._serving.probe(job)
                good_probes += 1
                answer = HostAnswer(wanted.token, True, good_probes=good_probes, runs=here)
                await self._write_answer(wanted, answer)
            await asyncio.sleep(self._serving.canary_pause)

    # -- fetching --------------------------------------------------------------------------------------------

    async def _fetch_release(self, wanted: Wanted, deploy_id: str) -> Path:
        """Returns the folder of the release. Fetches it if necessary. Raises DeployError or BadArchive."""
        site, expected = self._releases.site(_make_deploy(wanted, "")), wanted.releases.get(deploy_id)
        release = site.release(deploy_id)
        if expected is None:
            raise DeployError(f"the release of {deploy_id} is no longer kept; deploy its source again")
        archive = ReleaseArchive(expected.digest, expected.size)
        if archives.read_record(release) != archive:
            async with self._fetching:
                began = time.monotonic()
                await run_in_thread(remove_folder, release)  # left by a worker that was stopped
                fresh = await self._make_folder(wanted.app, deploy_id, archive)
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
            raise DeployError(f"the account's apps use more than {limit} MiB of disk space; make them smaller")
        return release

    async def _make_folder(self, app_id: str, deploy_id: str, archive: ReleaseArchive) -> Path:
        """Makes a folder with the files of the archive. Raises BadArchive or DeployError."""
        fresh, packed = self._fetched / deploy_id, self._fetched / f"{deploy_id}.tar.gz"
        await run_in_thread(remove_folder, fresh)
        for same in await run_in_thread(self._releases.list_releases, app_id):
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
            found = await storage.fetch_object(
                self._storage, archives.archive_key(app_id, deploy_id), path, ARCHIVE_BYTES
            )
        except StorageUnavailable:
            self._storage_failed.set()
            raise
        self._storage_failed.clear()
        return found


def _make_deploy(wanted: Wanted, deploy_id: str, app: str = "") -> Deploy:
    """Makes the fields of a deploy's record that serving needs. The record itself may have expired."""
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


def _make_job(wanted: Wanted, app: App, deploy_id: str, output: list[str]) -> Job:
    async def record(_: object) -> None:
        """Does nothing, because a builder has recorded commit and archive."""

    return Job(_make_deploy(wanted, deploy_id, app.name), app, output.append, record, record)

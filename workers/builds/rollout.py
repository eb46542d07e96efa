"""The steps of a deploy. The worker (`builder.py`) manages its states.

A rollout makes the release on this machine (`compiler.py`). For each further step it writes a record, which what
serves the apps follows and answers (`workers/engine/reconciler.py`).

It writes a step only while its deploy is in the state of the step. So a builder that was paused writes no steps
after another builder has taken over. An external engine uses the operators' API instead.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import structlog

from gateway.accounts.records import App
from gateway.cancellation import run_in_thread
from gateway.deploys.addresses import address
from gateway.deploys.manifest import Manifest
from gateway.deploys.records import Deploy
from gateway.deploys.release import Release
from gateway.deploys.serving import ELSEWHERE, Records, Step, StepAnswer, Wanted
from gateway.deploys.states import DeployError, StaleDeploy, StorageFailed
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.events.catalog import Kind
from gateway.loops import until
from gateway.redis.client import Store, patient
from gateway.settings import Settings
from gateway.storage import open_storage, read_object, until_storage_answers
from workers.builds.compiler import Compiler, Job
from workers.engine.app_data import GONE_SECONDS
from workers.engine.driver import ReleaseMissing
from workers.hosting import archives
from workers.hosting.releases import KEPT_RELEASES, Releases, exclusive_lock
from workers.sandbox.removal import remove_folder

logger = structlog.get_logger()

POLL_SECONDS, QUICK_POLL_SECONDS = 0.2, 0.05  # between reads of the answer; at first
QUICK_SECONDS = 5.0  # in which most steps are answered
OUTAGE_SECONDS = 2.0  # that a read takes at most, unless Redis is unavailable
STEP_SECONDS = 900.0  # in which a release must be fetched and checked; includes outages of the storage
RECORD_SECONDS = 2.0  # between reads of the record whose answer a builder waits for
NO_HOST_SECONDS = 15.0  # for which nothing may serve the apps, or a deploy fails; a canary adds its own time
UNDO_SECONDS = 60.0  # that an `undo` waits for its answer; a host that returns later undoes it before it serves
JOIN_SECONDS = 1.0  # between attempts to find the apps in this data folder
PRUNE_SECONDS = 3_600.0  # between searches for archives that are no longer needed
TIME_BYTES = 64  # at most, in the object that holds the time of an app's deletion
GONE = "gone"  # the name of this object


class Rollout:
    """The steps are `build`, `check_health` before visitors see the release, `swap`, and `watch_canary` while they do.

    Every step may raise DeployError, and every step may be canceled. The last three arguments are those of `Compiler`.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        find_app: Callable[[str], Awaitable[App | None]],
        find_ai_url: Callable[[App], Awaitable[str | None]],
        find_variables: Callable[[App, Kind], Awaitable[dict[str, str]]],
        find_clearing: Callable[[App], Awaitable[str]],
    ) -> None:
        self._settings, self._store, self._find_app = settings, store, find_app
        self._releases, self._storage = Releases(Path(settings.data_dir)), open_storage(settings)
        found = (find_ai_url, find_variables, find_clearing)
        self._compiler = Compiler(settings, self._releases, self._storage, *found)
        # A step is written without repetitions: `_write_step` must know that an answer was lost.
        self._writer = Records(store)
        self._records = patient(self._writer)
        self._made: dict[str, Release] = {}  # by deploy, until the deploy ends
        self._next_pruning = 0.0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Waits until this worker may build with its data folder. Yields the folder's id."""
        self._releases.create_folders()
        await self._compiler.check_tools()
        async with exclusive_lock(self._releases.folder / "deploys.lock"):
            folder = self._releases.folder_id()
            self._records = patient(Records(self._store, "" if self._settings.storage_url else folder))
            await self._until_apps_are_here()
            yield folder

    async def _until_apps_are_here(self) -> None:
        async def are_here() -> bool:
            return not await self._records.is_elsewhere()

        if not await are_here():
            logger.warning("deploys.elsewhere", action=ELSEWHERE)
            await until(are_here, JOIN_SECONDS)

    # -- build -----------------------------------------------------------------------------------------------

    async def build(self, job: Job) -> Manifest | None:
        """Makes the deploy's release, from its source or from an earlier release. Returns the release's manifest."""
        try:
            if job.deploy.release is None:
                release = await self._compiler.compile(job)
            else:
                release = await self._reuse(job, job.deploy.release)
        except StorageUnavailable as error:
            raise StorageFailed(error) from None
        self._made[job.deploy.id] = release
        return msgspec.json.decode(release.manifest, type=Manifest) if release.manifest else None

    async def _reuse(self, job: Job, former: str) -> Release:
        records = await self._read_records(job.deploy)
        found = next((known.releases[former] for _, known in records.values() if former in known.releases), None)
        own = archives.archive_key(job.app.id, job.deploy.id)
        of_former = archives.archive_key(job.app.id, former)
        if found is None or not await until_storage_answers(lambda: self._storage.copy(of_former, own)):
            raise ReleaseMissing(former)
        job.write_line(f"Using the release of {former}; no build is needed")
        variables = await self._compiler.open_variables(job) if found.runs else {}
        await job.record_archive(found)
        return msgspec.structs.replace(found, environment=self._compiler.seal_variables(variables))

    # -- check, swap, canary ---------------------------------------------------------------------------------

    async def check_health(self, job: Job) -> None:
        wanted = await self._write_step(job.deploy, "check", state="checking")
        await self._until_answered(wanted, job, STEP_SECONDS)

    async def swap(self, job: Job) -> Wanted:
        """Returns the record of the step, for `watch_canary`."""
        step: Step = "canary" if job.deploy.kind == "live" else "live"
        wanted = await self._write_step(job.deploy, step, state="checking")
        await self._until_answered(wanted, job, STEP_SECONDS)
        return wanted

    async def watch_canary(self, job: Job, wanted: Wanted) -> None:
        canary = self._settings.canary
        async for seconds, answer in self._follow_answer(wanted, canary + STEP_SECONDS, canary + NO_HOST_SECONDS):
            if answer is not None:
                _require_success(answer, job)
                if seconds >= canary and answer.good_probes:
                    break
        else:
            raise DeployError("no request of the canary has been answered", service_fault=True)
        await self._write_step(job.deploy, "live", state="canary")

    async def _read_records(self, deploy: Deploy) -> dict[str, tuple[str, Wanted]]:
        return await self._records.read(deploy.account, deploy.appId)

    async def _write_step(self, deploy: Deploy, step: Step, *, state: str) -> Wanted:
        """Writes the step to the record of the deploy's address. Raises StaleDeploy."""
        name = address(deploy.kind, deploy.branch)
        before, former = (await self._read_records(deploy)).get(name, ("", None))
        served, releases = "", dict[str, Release]()
        if former is not None and former.account == deploy.account:
            served, releases = former.served if former.deploy == deploy.id else former.serves, dict(former.releases)
        if step == "undo":
            releases.pop(deploy.id, None)
        elif deploy.id in self._made:
            releases[deploy.id] = self._made[deploy.id]
        kept = {*sorted(releases, reverse=True)[:KEPT_RELEASES], deploy.id, served}
        releases = {name: release for name, release in releases.items() if name in kept}
        wanted = Wanted(deploy.account, deploy.appId, name, step, deploy.id, served, releases)
        while True:
            try:
                await self._writer.write(before, wanted, state)
            except BackboneUnavailable:  # the record may have been written, perhaps on a server that was superseded
                await self._records.confirm(deploy.account)
                now = (await self._read_records(deploy)).get(name)
                if now is None or now[1].token != wanted.token:
                    continue
            return wanted

    async def _follow_answer(
        self, wanted: Wanted, limit: float, absence: float = NO_HOST_SECONDS
    ) -> AsyncIterator[tuple[float, StepAnswer | None]]:
        """Yields the answer to the step regularly, until `limit`. Before it is the time since the step was written.

        Times are in seconds. Outages of Redis do not count, because nothing can answer in them. Raises DeployError if
        nothing serves the apps for longer than `absence`, or if the step's record was replaced or removed.
        """
        seconds = seen = read = 0.0  # `seen`: when something served the apps; `read`: when the record was read
        read_at = time.monotonic()
        while seconds <= limit:
            serves = await self._records.has_engine()
            answer = await self._records.read_answer(wanted)
            now = time.monotonic()
            seconds, read_at = seconds + min(now - read_at, OUTAGE_SECONDS), now
            seen = seconds if serves else seen
            yield seconds, answer
            if seconds - seen > absence:
                raise DeployError("no host serves apps; is a `sites` worker running?", service_fault=True)
            if answer is None and seconds - read > RECORD_SECONDS:
                read = seconds
                await self._require_record(wanted)
            await asyncio.sleep(QUICK_POLL_SECONDS if seconds < QUICK_SECONDS else POLL_SECONDS)

    async def _until_answered(self, wanted: Wanted, job: Job, limit: float) -> None:
        """Waits until the step is answered. Raises DeployError."""
        async for _, answer in self._follow_answer(wanted, limit):
            if answer is not None:
                if not answer.served:  # otherwise it is the canary that has failed
                    _require_success(answer, job)
                for line in answer.output:
                    job.write_line(line)
                return
        raise DeployError("the release was not fetched and checked in time", service_fault=True)

    async def _require_record(self, wanted: Wanted) -> None:
        """Raises DeployError if the step's record was replaced or removed: then nothing answers the step."""
        if not await self._has_record(wanted):
            await self._records.confirm(wanted.account)  # a server that was superseded may not have had it
            if not await self._has_record(wanted):
                reason = "what was to be served was replaced or removed meanwhile; deploy again"
                raise DeployError(reason, service_fault=True)

    async def _has_record(self, wanted: Wanted) -> bool:
        _, known = (await self._records.read(wanted.account, wanted.app)).get(wanted.address, ("", None))
        return known is not None and known.token == wanted.token

    # -- afterwards ------------------------------------------------------------------------------------------

    async def finish(self, job: Job) -> None:
        """Keeps the build's cache, and forgets the releases that are no longer kept."""
        await self._compiler.caches.adopt(job.deploy.id, job.app.id)
        await self._forget(job.deploy.id)
        records = await self._read_records(job.deploy)
        kept = {deploy_id for _, known in records.values() for deploy_id in known.releases}
        with suppress(StorageUnavailable):  # the next deploy of the app removes them
            await self._keep_archives(job.app.id, kept)

    async def undo(self, deploy: Deploy) -> None:
        """Undoes the deploy, unless its state has changed: then another builder continues it."""
        await self._forget(deploy.id)
        if deploy.state == "queued":  # when this builder read it, so this builder has done nothing with it
            return
        _, known = (await self._read_records(deploy)).get(address(deploy.kind, deploy.branch), ("", None))
        if known is not None and known.deploy == deploy.id and known.account == deploy.account:
            try:
                wanted = known if known.step == "undo" else await self._write_step(deploy, "undo", state=deploy.state)
            except StaleDeploy:
                return
            with suppress(DeployError):
                async for _, answer in self._follow_answer(wanted, UNDO_SECONDS, absence=0):
                    if answer is not None:
                        break
        with suppress(StorageUnavailable):
            await self._storage.delete([archives.archive_key(deploy.appId, deploy.id)])

    async def _forget(self, deploy_id: str) -> None:
        self._made.pop(deploy_id, None)
        await self._compiler.caches.drop(deploy_id)
        for folder in (self._releases.builds, self._releases.built):
            await run_in_thread(remove_folder, folder / deploy_id)

    async def _keep_archives(self, app_id: str, kept: Set[str]) -> None:
        names = await self._storage.list_names(f"{archives.FOLDER}{app_id}/")
        ids = {name.removesuffix(archives.SUFFIX) for name in names if name.endswith(archives.SUFFIX)}
        await self._storage.delete([archives.archive_key(app_id, deploy_id) for deploy_id in sorted(ids - kept)])

    async def tidy(self, in_progress: Set[str]) -> None:
        """Removes files that are no longer needed. The worker calls this regularly.

        `in_progress`: the ids of deploys to ignore. The set changes while this runs.
        """
        await run_in_thread(self._releases.tidy_builds, in_progress)
        if time.monotonic() >= self._next_pruning:
            self._next_pruning = time.monotonic() + PRUNE_SECONDS
            await run_in_thread(self._compiler.caches.tidy, in_progress)
            with suppress(StorageUnavailable):
                for app_id in await self._storage.list_folders(archives.FOLDER):
                    await self._tidy_archives(app_id)

    async def _tidy_archives(self, app_id: str) -> None:
        """Removes the archives of an app a week after its deletion. Raises StorageUnavailable."""
        mark = f"{archives.FOLDER}{app_id}/{GONE}"
        since = await read_object(self._storage, mark, TIME_BYTES)
        if await self._find_app(app_id) is not None:
            if since is not None:
                await self._storage.delete([mark])
        elif since is None:
            await self._storage.put(mark, str(int(time.time())).encode())
        elif time.time() - int(since) > GONE_SECONDS:
            await self._storage.delete_folder(f"{archives.FOLDER}{app_id}")


def _require_success(answer: StepAnswer, job: Job) -> None:
    if not answer.ok:
        for line in answer.output:
            job.write_line(line)
        raise DeployError(answer.reason, service_fault=answer.service_fault)

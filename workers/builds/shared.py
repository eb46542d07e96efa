"""The engine for several hosts. It builds on this host. The hosts that serve apps fetch, check and swap the release
(`workers/hosting/host_agent.py`).

Each step is a record that all hosts follow. The step is over when every live host has answered it. A host without a
heartbeat for 15 seconds does not count. A builder writes a step only while its deploy is in the state of the step, so a
builder that was paused writes no steps after another builder has taken over.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from gateway.accounts.records import App
from gateway.deploys.addresses import address
from gateway.deploys.manifest import Manifest
from gateway.deploys.states import Deploy, StaleDeploy
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.redis.client import Store, until_redis_answers
from gateway.settings import Settings
from gateway.storage import read_object, until_storage_answers
from workers.builds.engine import PRUNE_SECONDS, LocalEngine
from workers.hosting import archives
from workers.hosting.records import HostAnswer, Records, Release, Step, Wanted
from workers.hosting.release_files import ENVIRONMENT_FILE as ENVIRONMENT
from workers.hosting.release_files import MANIFEST_FILE as MANIFEST
from workers.hosting.releases import KEPT_AFTER_DELETION_SECONDS, KEPT_PREVIEWS, KEPT_RELEASES, remove_folder
from workers.hosting.serving import DeployError, Job, run_in_thread

logger = structlog.get_logger()

POLL_SECONDS = 0.2  # between reads of the hosts' answers
STEP_SECONDS = 900.0  # in which all hosts must fetch and check a release; includes outages of the storage
OWNER_SECONDS = 105.0  # in which a host must have taken an app with a start command, or taken it over
NO_HOST_SECONDS = 15.0  # without any host, or without a host's first good probe, after which a deploy fails
UNDO_SECONDS = 60.0  # that an `undo` waits for the hosts; a host that returns later undoes it before it serves
TIME_BYTES = 64  # at most, in the object that holds the time of an app's deletion
GONE = "gone"  # the name of this object


class MultiHostEngine(LocalEngine):
    def __init__(
        self,
        settings: Settings,
        store: Store,
        find_app: Callable[[str], Awaitable[App | None]],
        find_ai_url: Callable[[App], Awaitable[str | None]],
        find_variables: Callable[[App], Awaitable[dict[str, str]]],
    ) -> None:
        super().__init__(settings, find_app, find_ai_url, find_variables)
        self._records = Records(store)
        self._built: dict[str, Release] = {}  # by deploy, until the deploy ends
        self._canaries: dict[str, Wanted] = {}  # by deploy

    # -- build -----------------------------------------------------------------------------------------------

    async def build(self, job: Job) -> Manifest | None:
        manifest = await super().build(job)
        if self._releases.folder_id() not in await until_redis_answers(self._records.list_hosts):
            release = self._releases.site(job.deploy).release(job.deploy.id)
            await run_in_thread(remove_folder, release)  # no host serves from this folder
        return manifest

    async def _archive(self, job: Job, release: Path, packed: Path) -> None:
        await super()._archive(job, release, packed)
        archive, sealed = archives.read_record(release), release / ENVIRONMENT
        assert archive is not None
        environment = sealed.read_text() if sealed.exists() else ""
        runs = (release / "start").exists()
        manifest = (release / MANIFEST).read_text() if (release / MANIFEST).exists() else ""
        self._built[job.deploy.id] = Release(archive.digest, archive.size, runs, environment, manifest)

    async def _reuse(self, job: Job, former: str) -> Manifest | None:
        records = await self._read_records(job.deploy)
        found = next((known.releases[former] for _, known in records.values() if former in known.releases), None)
        own = archives.archive_key(job.app.id, job.deploy.id)
        of_former = archives.archive_key(job.app.id, former)
        if found is None or not await until_storage_answers(lambda: self._storage.copy(of_former, own)):
            raise DeployError(f"the release of {former} is no longer kept; deploy its source again")
        job.write_line(f"Using the release of {former}; no build is needed")
        variables = await self._open_variables(job.app) if found.runs else {}
        environment = self._vault.seal(msgspec.json.encode(variables).decode()) if variables else ""
        self._built[job.deploy.id] = Release(found.digest, found.size, found.runs, environment, found.manifest)
        await job.record_archive(found)
        return msgspec.json.decode(found.manifest, type=Manifest) if found.manifest else None

    # -- check, swap, canary ---------------------------------------------------------------------------------

    async def check_health(self, job: Job) -> None:
        wanted = await self._write_step(job.deploy, "check", state="checking")
        await self._until_answered(wanted, job, STEP_SECONDS)

    async def swap(self, job: Job) -> None:
        step: Step = "canary" if job.deploy.kind == "live" else "live"
        wanted = await self._write_step(job.deploy, step, state="checking")
        self._canaries[job.deploy.id] = wanted
        answers = await self._until_answered(wanted, job, STEP_SECONDS)
        job.write_line(f"Served by {len(answers)} host{'' if len(answers) == 1 else 's'}")

    async def watch_canary(self, job: Job) -> None:
        wanted, ends = self._canaries[job.deploy.id], time.monotonic() + self._settings.canary
        while True:
            hosts, answers = await self._read_answers(wanted)
            _require_success(hosts, answers, job)
            counts = [answers[host].good_probes for host in hosts if host in answers]
            complete = len(counts) == len(hosts) and all(counts) and _is_checked(wanted, answers, hosts)
            if time.monotonic() >= ends and hosts and complete:
                break
            if time.monotonic() > ends + (OWNER_SECONDS if wanted.runs else NO_HOST_SECONDS):
                raise DeployError("not every host that serves apps has passed the canary")
            await asyncio.sleep(POLL_SECONDS)
        job.write_line(f"{sum(counts)} successful probes on {len(counts)} host{'' if len(counts) == 1 else 's'}")
        await self._write_step(job.deploy, "live", state="canary")

    async def _read_records(self, deploy: Deploy) -> dict[str, tuple[str, Wanted]]:
        return await until_redis_answers(lambda: self._records.read(deploy.account, deploy.appId))

    async def _write_step(self, deploy: Deploy, step: Step, *, state: str) -> Wanted:
        """Writes the step to the record of the deploy's address. Raises StaleDeploy."""
        name = address(deploy.kind, deploy.branch)
        before, former = (await self._read_records(deploy)).get(name, ("", None))
        if former is not None and former.account != deploy.account:
            former = None
        served, releases = "", dict(former.releases) if former else {}
        if former is not None:
            served = former.served if former.deploy == deploy.id else former.serves
        if step == "undo":
            releases.pop(deploy.id, None)
        elif deploy.id in self._built:
            releases[deploy.id] = self._built[deploy.id]
        kept = {*sorted(releases, reverse=True)[:KEPT_RELEASES], deploy.id, served}
        releases = {name: release for name, release in releases.items() if name in kept}
        wanted = Wanted(deploy.account, deploy.appId, name, step, deploy.id, served, releases)
        while True:
            try:
                await self._records.write(deploy, before, wanted, state)
            except BackboneUnavailable:  # the record may have been written, perhaps on a server that was superseded
                await until_redis_answers(lambda: self._records.confirm(deploy.account))
                now = (await self._read_records(deploy)).get(name)
                if now is None or now[1].token != wanted.token:
                    continue
            return wanted

    async def _read_answers(self, wanted: Wanted) -> tuple[list[str], dict[str, HostAnswer]]:
        """Returns the live hosts, and the answers to the step by host."""
        hosts = await until_redis_answers(self._records.list_hosts)
        return hosts, await until_redis_answers(lambda: self._records.read_answers(wanted))

    async def _until_answered(self, wanted: Wanted, job: Job | None, seconds: float) -> dict[str, HostAnswer]:
        """Waits until all live hosts have answered the step. Raises DeployError."""
        began = seen = incomplete = time.monotonic()
        while True:
            hosts, answers = await self._read_answers(wanted)
            seen = time.monotonic() if hosts else seen
            _require_success(hosts, answers, job)
            if not hosts or {*hosts} - answers.keys():
                incomplete = time.monotonic()
            elif _is_checked(wanted, answers, hosts):
                if job is not None:
                    for line in max((answers[host] for host in hosts), key=lambda answer: answer.runs).output:
                        job.write_line(line)
                return {host: answers[host] for host in hosts}
            if time.monotonic() - incomplete > OWNER_SECONDS:
                raise DeployError("no host that serves apps could run the app; is a `sites` worker running?")
            if time.monotonic() - seen > NO_HOST_SECONDS:
                raise DeployError("no host serves apps; is a `sites` worker running?")
            if time.monotonic() - began > seconds:
                raise DeployError("not every host that serves apps fetched and checked the release in time")
            await asyncio.sleep(POLL_SECONDS)

    # -- afterwards ------------------------------------------------------------------------------------------

    async def remove_replaced(self, job: Job) -> None:
        self._forget(job.deploy.id)
        records = await self._read_records(job.deploy)
        previews = sorted((known.deploy, name) for name, (_, known) in records.items() if name != "live")
        for _, name in previews[:-KEPT_PREVIEWS]:
            await until_redis_answers(partial(self._records.remove_address, job.deploy, name))
            del records[name]
        kept = {deploy_id for _, known in records.values() for deploy_id in known.releases}
        with suppress(StorageUnavailable):  # the next deploy of the app removes them
            await self._keep_archives(job.app.id, kept)

    async def undo(self, deploy: Deploy) -> None:
        """Undoes the deploy on all hosts, unless its state has changed: then another builder continues it."""
        self._forget(deploy.id)
        await run_in_thread(remove_folder, self._releases.builds / deploy.id)
        if deploy.state == "queued":  # when this builder read it, so this builder has done nothing with it
            return
        _, known = (await self._read_records(deploy)).get(address(deploy.kind, deploy.branch), ("", None))
        if known is not None and known.deploy == deploy.id and known.account == deploy.account:
            try:
                wanted = known if known.step == "undo" else await self._write_step(deploy, "undo", state=deploy.state)
            except StaleDeploy:
                return
            with suppress(DeployError):
                await self._until_answered(wanted, None, UNDO_SECONDS)
        else:
            await run_in_thread(remove_folder, self._releases.site(deploy).release(deploy.id))
        with suppress(StorageUnavailable):
            await self._storage.delete([archives.archive_key(deploy.appId, deploy.id)])

    def _forget(self, deploy_id: str) -> None:
        self._built.pop(deploy_id, None)
        self._canaries.pop(deploy_id, None)

    async def tidy(self, in_progress: Set[str]) -> None:
        await run_in_thread(self._releases.tidy_builds, in_progress)
        if time.monotonic() >= self._next_pruning:
            self._next_pruning = time.monotonic() + PRUNE_SECONDS
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
        elif time.time() - int(since) > KEPT_AFTER_DELETION_SECONDS:
            await self._storage.delete_folder(f"{archives.FOLDER}{app_id}")


def _is_checked(wanted: Wanted, answers: dict[str, HostAnswer], hosts: list[str]) -> bool:
    """Returns whether the host that runs the start command has answered, if there is one to be checked."""
    checks = wanted.step in ("check", "canary") and wanted.runs
    return not checks or any(answers[host].runs for host in hosts if host in answers)


def _require_success(hosts: list[str], answers: dict[str, HostAnswer], job: Job | None) -> None:
    for host in hosts:
        if host in answers and not answers[host].ok:
            if job is not None:
                for line in answers[host].output:
                    job.write_line(line)
            raise DeployError(answers[host].reason)

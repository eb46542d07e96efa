"""The data of the apps in the cluster, in volumes.

The container `data` of an app's pod has the volume and does the work (`data_pod.py`). While an app does not run, a pod
is started for that.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import structlog

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.cancellation import RunningTasks
from gateway.data.commands import DataCommands
from gateway.data.records import DataState, DataStatus
from gateway.deploys.pod_log import APP_CONTAINER, DEPLOY_LABEL
from gateway.deploys.release import ReleaseArchive
from gateway.deploys.states import DeployError
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.loops import until
from gateway.settings import Settings
from workers.engine.app_data import GONE_SECONDS
from workers.engine.data import DataDriver, describe_status
from workers.engine.data_keeper import Keeper, Packed
from workers.engine.packing import DataError
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.data_client import NO_ANSWER, DataClient
from workers.kubernetes.driver import ClusterDriver
from workers.kubernetes.objects import (
    ACCOUNT_LABEL,
    APP_LABEL,
    DATA_CONTAINER,
    DATA_LABEL,
    GONE_LABEL,
    claim_name,
    describe_data_deployment,
    describe_gone,
    gone_name,
)
from workers.kubernetes.pod import PodRelease
from workers.kubernetes.pod_status import serves, statuses_of
from workers.kubernetes.startup import PLACE_SECONDS
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

BEGIN_SECONDS = 0.5  # between looks for new volumes
REPORT_SECONDS = 15.0  # between reports of how large the data are
REPORTS = 50  # pods that are asked at once
REPORTED = 150  # apps of a round, so that thousands of apps cost no more than these
REPORT_ALL_SECONDS = 3_600.0  # between reports of everything, because reports expire
LISTEN_SECONDS, LISTEN_POLL_SECONDS = 30.0, 0.5  # in which a container that has started must answer


class ClusterData(DataDriver):
    def __init__(self, settings: Settings, registry: Registry, cluster: Cluster, driver: ClusterDriver) -> None:
        super().__init__(settings, registry)
        self.report_seconds = REPORT_SECONDS
        self._cluster, self._driver, self._commands = cluster, driver, DataCommands(registry.store)
        self._missed: set[str] = set()  # the claims whose apps a round did not find
        self._room, self._tidying = asyncio.Semaphore(REPORTS), asyncio.Lock()
        self._begun: set[str] = set()  # the uids of claims on whose volumes apps may run
        # The names of claims that may not have begun, and that are new or have a pod that has changed.
        self._new = {each.metadata.name for each in self._list_claims()}
        cluster.followers["PersistentVolumeClaim"].append(self._note_claim)
        cluster.followers["Pod"].append(self._note_pod)
        self._unreported: list[tuple[str, str]] = []  # the apps that are still to be asked in this turn
        self._seen: dict[tuple[str, str], tuple[float, DataStatus]] = {}  # the last reports, by account and app
        self._daily: set[tuple[str, str]] = set()  # the apps, with their accounts, whose daily snapshot may be due
        self._folder.mkdir(parents=True, exist_ok=True)

    # -- pods ------------------------------------------------------------------------------------------------

    def _find_pod(self, app_id: str, account: str, *, without_app: bool = False) -> DataClient | None:
        """Returns the newest ready pod with the data of an app. `without_app`: in which the app does not run."""
        pods = [
            pod
            for pod in self._cluster.select("Pod", data=claim_name(app_id, account))
            if not pod.metadata.deletionTimestamp
            and serves(pod, DATA_CONTAINER)
            and not (without_app and DEPLOY_LABEL in pod.metadata.labels)
        ]
        if not pods:
            return None
        newest = max(pods, key=lambda pod: str(pod.metadata.creationTimestamp))
        archive = self._folder / f"packed-{app_id}.tar.gz"
        return DataClient(newest.status.podIP, self._driver.data_token(app_id, account), archive)

    def _has_claim(self, app_id: str, account: str) -> bool:
        return ("PersistentVolumeClaim", claim_name(app_id, account)) in self._cluster.present

    @asynccontextmanager
    async def reach(self, app_id: str, account: str, *, create: bool = False) -> AsyncIterator[Keeper | None]:
        if self._has_claim(app_id, account):
            async with self._running_pod(app_id, account) as pod:
                await self.bring_newest(pod, app_id, account)
                yield pod
        elif create:
            raise DataError("The app has no volume for data yet; deploy it first.")
        else:
            yield None

    @asynccontextmanager
    async def _running_pod(self, app_id: str, account: str, *, without_app: bool = False) -> AsyncIterator[DataClient]:
        """Yields a pod with the data of an app, and starts one if necessary."""
        async with AsyncExitStack() as stack:
            pod = self._find_pod(app_id, account, without_app=without_app)
            if pod is None:
                stack.push_async_callback(self._cluster.delete, ("Deployment", claim_name(app_id, account)))
                pod = await self._start_pod(app_id, account, without_app=without_app)
            await _until_it_answers(pod)
            yield pod

    async def _start_pod(self, app_id: str, account: str, *, without_app: bool) -> DataClient:
        release = PodRelease(account, app_id, "live", "", ReleaseArchive("", 0), "", runs=True)
        limit = await self.find_limit(account)
        try:
            await self._driver.apply_claim(release, limit)
            await self._cluster.apply(describe_data_deployment(release, self._settings))
        except DeployError as error:
            raise DataError(str(error), service_fault=error.service_fault) from None
        find = partial(self._find_pod, app_id, account, without_app=without_app)
        if (pod := await self._cluster.until(find, PLACE_SECONDS)) is None:
            reason = "The cluster has no room for a pod with the app's data; try again later."
            raise DataError(reason, service_fault=True)
        return pod

    def find_due(self, app_id: str, account: str) -> Keeper | None:
        # Without a pod, nothing changes.
        return self._find_pod(app_id, account) if (app_id, account) in self._daily else None

    async def has_started(self, app_id: str, account: str) -> bool:
        """Returns whether the start command runs in all pods that have one."""
        pods = self._cluster.select("Pod", data=claim_name(app_id, account))
        statuses = [status for pod in pods for status in statuses_of(pod, APP_CONTAINER)]
        return all(each.state and each.state.running for each in statuses)

    # -- new volumes -----------------------------------------------------------------------------------------

    def list_rounds(self, running: RunningTasks) -> Sequence[tuple[float, Callable[[], Awaitable[None]]]]:
        return ((BEGIN_SECONDS, partial(self._begin_volumes, running)),)

    def _note_claim(self, claim: Any) -> None:
        if _has_owner(claim):
            self._new.add(claim.metadata.name)

    def _note_pod(self, pod: Any) -> None:
        if DATA_LABEL in pod.metadata.labels:
            self._new.add(pod.metadata.labels[DATA_LABEL])

    async def _begin_volumes(self, running: RunningTasks) -> None:
        """Lets apps begin on their new volumes, with the newest snapshot if they have one.

        They come from another engine, or their volume was lost.
        """
        for name in [*self._new]:
            claim = self._cluster.present.get(("PersistentVolumeClaim", name))
            if claim is None or not _has_owner(claim) or claim.metadata.uid in self._begun:
                self._new.discard(name)
            elif (uid := claim.metadata.uid) not in running:
                owner = claim.metadata.labels[APP_LABEL], claim.metadata.labels[ACCOUNT_LABEL]
                if (pod := self._find_pod(*owner)) is not None:
                    running.start(self._begin(pod, uid, *owner), uid)
                else:
                    self._new.discard(name)

    async def _begin(self, pod: DataClient, uid: str, app_id: str, account: str) -> None:
        try:
            async with self._room:
                report = await pod.report()
            # At once, because an app has data to be kept as soon as they are reported.
            status = describe_status(report.used, await self.find_limit(account), "running")
            await self.records.write_statuses([(account, app_id, status)])
            if report.stale:
                async with self.exclusive(app_id, account):
                    await self.bring_newest(pod, app_id, account)
        except (DataError, StorageUnavailable, BackboneUnavailable) as error:
            logger.warning("data.not_begun", app=app_id, reason=str(error), action="it is tried again")
            await asyncio.sleep(1.0)
        else:
            self._begun.add(uid)

    # -- limits and reports ----------------------------------------------------------------------------------

    async def find_changes(self) -> dict[tuple[str, str], DataStatus]:
        due = time.monotonic() // REPORT_ALL_SECONDS
        if not self._unreported:
            self._unreported = [each for each in await self.list_apps() if not self._still_sleeps(*each, due)]
        some = self._unreported[:REPORTED]
        found, _ = await self._registry.read_intact_apps([app_id for app_id, _ in some])
        del self._unreported[:REPORTED]

        async def ask(app: App, limit: int) -> DataStatus | None:
            if (pod := self._find_pod(app.id, app.account)) is None:
                return await self._describe_sleep(app)
            async with self._room:
                try:
                    report = await pod.report(limit)
                except DataError:
                    return None
            (self._daily.add if report.daily else self._daily.discard)((app.id, app.account))
            state: DataState = "restoring" if report.held else "full" if report.full else "running"
            return describe_status(report.used, limit, state)

        asked = [
            (app, self._settings.app_data[account.plan] * MIB)
            for app, account in found.values()
            if (app.id, app.account) in some
        ]
        statuses = await asyncio.gather(*(ask(app, limit) for app, limit in asked))
        found_now = zip(asked, statuses, strict=True)
        seen = {(app.account, app.id): (due, status) for (app, _), status in found_now if status is not None}
        changed = {key: status for key, (_, status) in seen.items() if self._seen.get(key) != seen[key]}
        self._seen |= seen
        return changed

    def _still_sleeps(self, app_id: str, account: str, due: float) -> bool:
        """Returns whether an app that was asleep at its last report is still asleep, and has nothing new to say."""
        reported, status = self._seen.get((account, app_id), (None, None))
        was_asleep = status is not None and status.state == "asleep" and reported == due
        return was_asleep and self._find_pod(app_id, account) is None

    async def _describe_sleep(self, app: App) -> DataStatus | None:
        if not self._driver.places.is_asleep(app.id, "live"):
            return None
        _, status = self._seen.get((app.account, app.id)) or (0.0, await self.records.read_status(app))
        return msgspec.structs.replace(status, state="asleep")

    # -- what is no longer needed ----------------------------------------------------------------------------

    def _list_claims(self) -> list[Any]:
        return [claim for claim in self._cluster.select("PersistentVolumeClaim") if _has_owner(claim)]

    async def list_apps(self) -> list[tuple[str, str]]:
        return [(each.metadata.labels[APP_LABEL], each.metadata.labels[ACCOUNT_LABEL]) for each in self._list_claims()]

    @asynccontextmanager
    async def forget(self, app_id: str, account: str) -> AsyncIterator[Packed | None]:
        """Hands over the data, and removes their volume."""
        deployments = self._cluster.select("Deployment", app=app_id, account=account)
        names = [each.metadata.name for each in deployments if DEPLOY_LABEL in each.metadata.labels]
        await self._cluster.delete(*[("Deployment", name) for name in names])
        if not self._has_claim(app_id, account):
            yield None
            return
        async with self._running_pod(app_id, account, without_app=True) as pod, pod.snapshot() as packed:
            yield packed
        await self._remove(app_id, account)

    async def _remove(self, app_id: str, account: str) -> None:
        name = claim_name(app_id, account)
        secrets = ("Secret", name), ("Secret", gone_name(name))
        await self._cluster.delete(("Deployment", name), ("PersistentVolumeClaim", name), *secrets)
        self._seen.pop((account, app_id), None)
        self._daily.discard((app_id, account))
        self._missed.discard(name)

    async def tidy(self, app_id: str, account: str, *, is_deleted: bool) -> None:
        """Removes the pod that a worker which was killed has left, and the volume of an app that is gone for a week.

        A deletion removes the volume at once (`follow_app`). If the records of Redis were lost, apps may come back.
        """
        name = claim_name(app_id, account)
        left, gone = ("Deployment", name), ("Secret", gone_name(name))
        if not is_deleted and not {left, gone} & self._cluster.present.keys():
            return
        async with self._tidying:
            if await self._has_command(app_id, account):
                return
            claim, mark = self._cluster.present.get(("PersistentVolumeClaim", name)), self._cluster.present.get(gone)
            if not is_deleted:
                self._missed.discard(name)
                await self._cluster.delete(left, gone)
            elif mark is not None and time.time() - float(mark.metadata.labels[GONE_LABEL]) > GONE_SECONDS:
                await self._remove(app_id, account)
            elif mark is None and claim is not None and claim.metadata.deletionTimestamp is None:
                if name in self._missed:  # otherwise its command may have removed it just now
                    await self._cluster.apply(describe_gone(claim, time.time()))
                self._missed.add(name)

    async def follow_app(self, app_id: str) -> None:
        """Removes the volume of an app that was just deleted.

        A deletion of data writes its command before the app is gone, and then the command removes the volume.
        """
        for claim in filter(_has_owner, self._cluster.select("PersistentVolumeClaim", app=app_id)):
            account = claim.metadata.labels[ACCOUNT_LABEL]
            async with self._tidying:
                if await self._registry.find_app(app_id) is None and not await self._has_command(app_id, account):
                    await self._remove(app_id, account)

    async def _has_command(self, app_id: str, account: str) -> bool:
        commands = await self._commands.list_commands()
        return any((each.app, each.account) == (app_id, account) for each in commands)


def _has_owner(claim: Any) -> bool:
    """Returns whether a claim is of an app's data. Others may have made it, with only some of the labels."""
    return {APP_LABEL, ACCOUNT_LABEL} <= {*claim.metadata.labels}


async def _until_it_answers(pod: DataClient) -> None:
    """Waits for a pod that has just started. Raises DataError."""

    async def look() -> bool:
        with suppress(DataError):
            await pod.report()
            return True
        return False

    if not await until(look, LISTEN_POLL_SECONDS, LISTEN_SECONDS):
        raise DataError(NO_ANSWER, service_fault=True)

"""Takes care of the data of the apps in the cluster, as `workers/hosting/data_agent.py` does on one host.

The data are in volumes. The container `data` of an app's pod has the volume and does the work (`data_pod.py`). While an
app does not run, a pod is started for that.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import msgspec
import structlog

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.data.commands import DataAnswer, DataCommand
from gateway.data.records import DataState, DataStatus, snapshot_key
from gateway.deploys.pod_log import APP_CONTAINER, DEPLOY_LABEL
from gateway.deploys.release import ReleaseArchive
from gateway.deploys.states import DeployError
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.ids import new_id
from gateway.redis.client import until_redis_answers
from gateway.settings import Settings
from gateway.storage import fetch_object
from workers.hosting.data_commands import CommandAgent, describe_status, snapshot_id_of
from workers.hosting.data_packer import ARCHIVE_BYTES, Turns
from workers.hosting.packing import DataError
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.data_pod import NOTES, DataReport
from workers.kubernetes.driver import PLACE_SECONDS, ClusterDriver
from workers.kubernetes.objects import (
    ACCOUNT_LABEL,
    APP_LABEL,
    DATA_CONTAINER,
    claim_name,
    describe_data_deployment,
)
from workers.kubernetes.pod import DATA_PORT, PodRelease
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

Report = tuple[str, str, DataStatus]  # account, app and status

POLL_SECONDS = 0.5  # between looks for commands
REPORT_SECONDS = 15.0  # between reports of how large the data are
REPORTS, REPORT_TIMEOUT_SECONDS = 50, 5.0  # pods that are asked at once
REPORTS_PER_SECOND = 50  # so that of thousands of apps, each reports less often
FIRST = "first"  # in place of a deploy, when a new volume gets a snapshot
WRITE_SECONDS = 3_600.0  # between two writes of a report that has not changed, because reports expire
TIDY_SECONDS = 600.0  # between looks for daily snapshots, and for what is no longer needed
WORK_SECONDS = 1_800.0  # in which a pod must answer
LISTEN_SECONDS = 30.0  # in which a container that has started must answer
START_SECONDS, START_POLL_SECONDS = 5.0, 0.1  # in which an app whose data were cleared usually starts


class DataPod:
    """A pod that has the data of an app, and what it answers."""

    def __init__(self, address: str, token: str, folder: Path) -> None:
        host = f"[{address}]" if ":" in address else address
        self._url, self._headers = f"http://{host}:{DATA_PORT}", {"Authorization": f"Bearer {token}"}
        self._folder = folder

    async def report(self, limit: int | None = None) -> DataReport:
        """Sets the limit, if one is given. Raises DataError."""
        parameters = {} if limit is None else {"limit": str(limit)}
        async with self._ask("POST", "/report", parameters, REPORT_TIMEOUT_SECONDS) as answer:
            return msgspec.json.decode(await answer.read(), type=DataReport)

    async def do(self, path: str, **parameters: str) -> None:
        """Raises DataError."""
        async with self._ask("POST", path, parameters):
            pass

    @asynccontextmanager
    async def fetch(
        self, path: str, archive: Path | None = None, **parameters: str
    ) -> AsyncIterator[tuple[Path, list[str]] | None]:
        """Sends the archive, if there is one. Yields the archive in the answer and what it lacks, if there is one.

        Raises DataError.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            found, packed = None, Path(scratch) / "packed.tar.gz"
            method = "POST" if archive is None else "PUT"
            with nullcontext() if archive is None else archive.open("rb") as body:
                async with self._ask(method, path, parameters, data=body) as answer:
                    if answer.status == 200:
                        await _save(answer, packed)
                        found = packed, msgspec.json.decode(answer.headers.get(NOTES, "[]"), type=list[str])
            yield found

    @asynccontextmanager
    async def _ask(
        self, method: str, path: str, parameters: dict[str, str], seconds: float = WORK_SECONDS, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=seconds, connect=REPORT_TIMEOUT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as client,
                client.request(method, self._url + path, params=parameters, **more) as answer,
            ):
                if answer.status == 409:
                    raise DataError(await answer.text())
                answer.raise_for_status()
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("data.pod_failed", path=path, reason=str(error) or type(error).__name__)
            raise DataError("The app's pod did not answer; try again shortly.") from None


async def _save(answer: aiohttp.ClientResponse, path: Path) -> None:
    size = 0
    with path.open("wb") as file:
        async for chunk in answer.content.iter_any():
            size += len(chunk)
            if size > ARCHIVE_BYTES:
                raise DataError("The snapshot would be too large.")
            await asyncio.to_thread(file.write, chunk)


class ClusterDataAgent(CommandAgent):
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        cluster: Cluster,
        applier: ClusterDriver,
        find_limit: Callable[[str], Awaitable[int]],
    ) -> None:
        """`find_limit` returns the bytes that the data of an account's app may take."""
        super().__init__(settings, registry, Turns())
        self._cluster, self._applier, self._find_limit = cluster, applier, find_limit
        self._folder = Path(settings.data_dir)
        self._begun: set[str] = set()  # the uids of claims on whose volumes apps may run
        self._written: dict[str, tuple[DataStatus, float]] = {}  # by app: the last report, and when it was written

    async def run(self) -> NoReturn:
        """Runs until canceled."""
        self._folder.mkdir(parents=True, exist_ok=True)
        await self._run_rounds(
            (POLL_SECONDS, self._take_commands),
            (POLL_SECONDS, self._begin_volumes),
            (REPORT_SECONDS, self._report),
            (TIDY_SECONDS, self._tidy),
        )

    # -- pods ------------------------------------------------------------------------------------------------

    def _find_pod(self, app_id: str, account: str, *, beside: bool = False) -> DataPod | None:
        """Returns the newest pod with the data of an app that is ready. `beside`: not one in which the app runs."""
        pods = [
            pod
            for pod in self._cluster.select("Pod", data=claim_name(app_id, account))
            if not pod.metadata.deletionTimestamp
            and _is_ready(pod)
            and not (beside and DEPLOY_LABEL in pod.metadata.labels)
        ]
        if not pods:
            return None
        newest = max(pods, key=lambda pod: str(pod.metadata.creationTimestamp))
        return DataPod(newest.status.podIP, self._applier.data_token(app_id, account), self._folder)

    @asynccontextmanager
    async def _reach(self, app_id: str, account: str, *, beside: bool = False) -> AsyncIterator[DataPod | None]:
        """Yields a pod with the data of an app, and starts one if necessary. Yields None if the app has no data.

        `beside`: not one in which the app runs.

        Raises DataError.
        """
        claim = claim_name(app_id, account)
        if ("PersistentVolumeClaim", claim) not in self._cluster.present:
            yield None
            return
        async with AsyncExitStack() as stack:
            pod = self._find_pod(app_id, account, beside=beside)
            if pod is None:
                stack.push_async_callback(self._cluster.delete, ("Deployment", claim))
                pod = await self._start_pod(app_id, account, beside=beside)
            await _until_it_answers(pod)
            yield pod

    async def _start_pod(self, app_id: str, account: str, *, beside: bool) -> DataPod:
        release = PodRelease(account, app_id, "live", "", ReleaseArchive("", 0), "", runs=True)
        limit = await self._find_limit(account)
        try:
            await self._applier.apply_claim(release, limit)
            await self._cluster.apply(describe_data_deployment(release, self._settings))
        except DeployError as error:
            raise DataError(str(error)) from None
        ends = time.monotonic() + PLACE_SECONDS
        while (pod := self._find_pod(app_id, account, beside=beside)) is None:
            if time.monotonic() > ends:
                raise DataError("The cluster has no room for a pod with the app's data; try again later.")
            await self._cluster.next_change(1.0)
        return pod

    # -- new volumes -----------------------------------------------------------------------------------------

    async def _begin_volumes(self) -> None:
        """Lets apps begin on their new volumes, with the newest snapshot if they have one."""
        for claim in self._list_claims():
            uid, labels = claim.metadata.uid, claim.metadata.labels
            if uid not in self._begun and uid not in self._running:
                self._start(uid, self._begin(uid, labels[APP_LABEL], labels[ACCOUNT_LABEL]))

    async def _begin(self, claim: str, app_id: str, account: str) -> None:
        if (pod := self._find_pod(app_id, account)) is None:
            return
        try:
            if (await pod.report()).new:
                async with self._turns.exclusive(app_id, account):
                    await self._fill(pod, app_id, account)
                    await pod.do("/begin")
        except (DataError, StorageUnavailable, BackboneUnavailable) as error:
            logger.warning("data.not_begun", app=app_id, reason=str(error), action="it is tried again")
            await asyncio.sleep(1.0)
        else:
            self._begun.add(claim)

    async def _fill(self, pod: DataPod, app_id: str, account: str) -> None:
        """Brings the newest snapshot: of an app that comes from another engine, or whose volume was lost."""
        snapshots = await self._records.list_snapshots(account, app_id)
        if not snapshots:
            return
        logger.info("data.filling", app=app_id, snapshot=snapshots[0].id)
        async with self._fetched(snapshot_key(app_id, snapshots[0].id)) as archive:
            limit = await self._find_limit(account)
            async with pod.fetch("/restore", archive, deploy=FIRST, limit=str(limit)):
                await pod.do("/confirm", deploy=FIRST)

    # -- limits and reports ----------------------------------------------------------------------------------

    async def _report(self) -> None:
        """Sets the limits by the accounts' plans, and writes how large the data are."""
        claims = {each.metadata.labels[APP_LABEL]: each.metadata.labels[ACCOUNT_LABEL] for each in self._list_claims()}
        found = await self._registry.read_apps([*claims])
        room = asyncio.Semaphore(REPORTS)

        async def ask(app: App, limit: int) -> Report | None:
            if (pod := self._find_pod(app.id, app.account)) is None:
                return await self._describe_sleep(app)
            async with room:
                try:
                    report = await pod.report(limit)
                except DataError:
                    return None
                finally:
                    if len(found) > REPORTS:
                        await asyncio.sleep(REPORTS / REPORTS_PER_SECOND)
            state: DataState = "restoring" if report.held else "full" if report.full else "running"
            return app.account, app.id, describe_status(report.used, limit, state)

        asked = [
            ask(app, self._settings.app_data[account.plan] * MIB)
            for app_id, (app, account) in found.items()
            if app.account == claims[app_id]
        ]
        now = time.monotonic()
        reports = [each for each in await asyncio.gather(*asked) if each is not None and self._is_news(each, now)]
        await self._records.write_statuses(reports)
        self._written |= {app_id: (status, now) for _, app_id, status in reports}

    async def _describe_sleep(self, app: App) -> Report | None:
        if not self._applier.places.is_asleep(app.id, "live"):
            return None
        status = self._written[app.id][0] if app.id in self._written else await self._records.read_status(app)
        return app.account, app.id, msgspec.structs.replace(status, state="asleep")

    def _is_news(self, report: Report, now: float) -> bool:
        status, at = self._written.get(report[1], (None, now))
        return status != report[2] or now - at > WRITE_SECONDS

    def _list_claims(self) -> list[Any]:
        return [each for each in self._cluster.select("PersistentVolumeClaim") if APP_LABEL in each.metadata.labels]

    # -- commands --------------------------------------------------------------------------------------------

    async def _act(self, command: DataCommand) -> DataAnswer:
        if forgets := command.action == "forget":
            await self._end_app(command)
        async with self._reach(command.app, command.account, beside=forgets) as pod:
            if pod is None:
                if command.action == "restore":
                    raise DataError("The app has no volume for data yet; deploy it first.")
                return DataAnswer()
            match command.action:
                case "snapshot":
                    return await self._keep_answer(pod, command, "/snapshot")
                case "restore":
                    return await self._restore(pod, command)
                case "undo" | "confirm":
                    await pod.do(f"/{command.action}", deploy=command.deploy)
                    return DataAnswer()
                case "clear":
                    return await self._clear(pod, command)
                case "forget":
                    return await self._forget(pod, command)

    async def _keep_answer(
        self, pod: DataPod, command: DataCommand, path: str, archive: Path | None = None, **parameters: str
    ) -> DataAnswer:
        """Keeps the archive in the pod's answer as the command's snapshot."""
        async with pod.fetch(path, archive, **parameters) as found:
            if found is None:
                return DataAnswer()
            packed, notes = found
            snapshot = await self._store(command.app, packed, command.reason, command.deploy, snapshot_id_of(command))
            await self._keep(command.account, command.app, snapshot)
            return DataAnswer(snapshot, notes=notes)

    async def _restore(self, pod: DataPod, command: DataCommand) -> DataAnswer:
        if (made := await self._find_made(command)) is not None:
            return DataAnswer(made)
        limit = await self._find_limit(command.account)
        async with self._fetched(command.source) as archive:
            parameters = {"deploy": command.deploy, "limit": str(limit)}
            return await self._keep_answer(pod, command, "/restore", archive, **parameters)

    @asynccontextmanager
    async def _fetched(self, key: str) -> AsyncIterator[Path]:
        """Yields an object of the storage as a file. Raises DataError."""
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            archive = Path(scratch) / "snapshot.tar.gz"
            if not await fetch_object(self._storage, key, archive, ARCHIVE_BYTES):
                raise DataError("the snapshot is no longer kept")
            yield archive

    async def _clear(self, pod: DataPod, command: DataCommand) -> DataAnswer:
        answer = await self._keep_answer(pod, command, "/clear", deploy=command.id)
        await pod.do("/confirm", deploy=command.id)
        ends = time.monotonic() + START_SECONDS
        while not self._runs(command.app, command.account) and time.monotonic() < ends:
            await self._cluster.next_change(START_POLL_SECONDS)
        return answer

    def _runs(self, app_id: str, account: str) -> bool:
        """Returns whether the start command runs in all pods that have one."""
        pods = self._cluster.select("Pod", data=claim_name(app_id, account))
        statuses = [each for pod in pods for each in pod.status.containerStatuses or [] if each.name == APP_CONTAINER]
        return all(each.state and each.state.running for each in statuses)

    async def _end_app(self, command: DataCommand) -> None:
        labels = {"app": command.app, "account": command.account}
        found = [each for each in self._cluster.select("Deployment", **labels) if DEPLOY_LABEL in each.metadata.labels]
        await self._cluster.delete(*[("Deployment", each.metadata.name) for each in found])

    async def _forget(self, pod: DataPod, command: DataCommand) -> DataAnswer:
        """Keeps the data of a deleted app as a snapshot, and removes its volume."""
        answer, claim = DataAnswer(), claim_name(command.app, command.account)
        async with pod.fetch("/snapshot") as found:
            if found is not None:
                packed, notes = found
                snapshot = await self._store(command.app, packed, "clear", "", snapshot_id_of(command))
                add = self._records.add_last_snapshot
                await until_redis_answers(lambda: add(command.account, command.source, snapshot))
                answer = DataAnswer(snapshot, notes=notes)
        await self._cluster.delete(("PersistentVolumeClaim", claim), ("Secret", claim))
        self._written.pop(command.app, None)
        return answer

    # -- what is due -----------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        commands = await self._list_commanded()
        for claim in self._list_claims():
            app_id, account = claim.metadata.labels[APP_LABEL], claim.metadata.labels[ACCOUNT_LABEL]
            if (app_id, account) in commands:
                continue
            app = await self._registry.find_app(app_id)
            name = claim.metadata.name
            is_deleted = app is None or app.account != account  # it had no data when it was deleted
            if is_deleted or ("Deployment", name) in self._cluster.present:  # a worker that ended has left it
                # Again, because a deletion writes its command before the app is gone, and a round may take long.
                if (app_id, account) in await self._list_commanded():
                    continue
                await self._cluster.delete(("Deployment", name))
            if is_deleted:
                await self._cluster.delete(("PersistentVolumeClaim", name), ("Secret", name))
                continue
            try:
                await self._make_daily(app_id, account)
            except (DataError, StorageUnavailable) as error:
                logger.error("data.no_daily_snapshot", app=app_id, reason=str(error))
        await self._remove_expired()

    async def _list_commanded(self) -> set[tuple[str, str]]:
        """Returns app and account of the commands that are not carried out yet."""
        return {(each.app, each.account) for each in await self._commands.list_commands()}

    async def _make_daily(self, app_id: str, account: str) -> None:
        if (pod := self._find_pod(app_id, account)) is None:  # nothing changes meanwhile
            return
        async with self._turns.exclusive(app_id, account), pod.fetch("/daily") as found:
            if found is not None:
                snapshot = await self._store(app_id, found[0], "daily", "", new_id("snp"))
                await self._keep(account, app_id, snapshot)
                await pod.do("/daily/done")


async def _until_it_answers(pod: DataPod) -> None:
    """Waits for a pod that has just started. Raises DataError."""
    ends = time.monotonic() + LISTEN_SECONDS
    while True:
        try:
            await pod.report()
        except DataError:
            if time.monotonic() > ends:
                raise
        else:
            return
        await asyncio.sleep(POLL_SECONDS)


def _is_ready(pod: Any) -> bool:
    statuses = (pod.status.containerStatuses or []) if pod.status else []
    return bool(pod.status and pod.status.podIP) and any(
        status.name == DATA_CONTAINER and status.ready for status in statuses
    )

"""Serves releases from a cluster (`workers/hosting/applier.py`): each in a Deployment of its own, and each address by a
Service that leads to one of them.

A release is checked before the Service leads to it. A swap is one change of the Service, and so is its undoing. The
cluster keeps serving while this worker and the API server are away. The worker sends each new pod its release, which
waits for it (`pod.py`), so a pod needs no credentials.
"""

import asyncio
import hashlib
import hmac
import math
import time
from collections.abc import Awaitable, Callable, Collection, Set
from contextlib import aclosing, suppress
from typing import Any, Literal

import aiohttp
import msgspec
import structlog
from lightkube.utils.quantity import parse_quantity

from gateway.accounts.records import App
from gateway.accounts.suspended import SuspendedList
from gateway.accounts.vault import Vault
from gateway.cancellation import end_if_canceled
from gateway.deploys.addresses import host, hosts_of, url_of
from gateway.deploys.manifest import Manifest
from gateway.deploys.pod_log import APP_CONTAINER, DEPLOY_LABEL
from gateway.deploys.release import Release, ReleaseArchive
from gateway.deploys.serving import Wanted
from gateway.deploys.states import AppGone, DeployError
from gateway.errors import StorageUnavailable
from gateway.settings import Settings
from gateway.storage import open_storage, until_storage_answers
from workers.hosting.applier import ReleaseMissing, Target
from workers.hosting.archives import archive_key
from workers.hosting.releases import KEPT_PREVIEWS
from workers.hosting.serving import DRAIN_SECONDS, OUTPUT_LINES, START_SECONDS, request_root
from workers.hosting.watchdog import LIMITS
from workers.kubernetes.cluster import Cluster, Key, explain_refusal
from workers.kubernetes.objects import (
    ACCOUNT_LABEL,
    ADDRESS_LABEL,
    APP_LABEL,
    address_name,
    describe_claim,
    describe_deployment,
    describe_endpoints,
    describe_ingress,
    describe_secret,
    describe_service,
    object_name,
)
from workers.kubernetes.pod import IDLE_PORT, RECEIVE_PORT, WEB_PORT, PodRelease
from workers.sandbox.keeper import STOPPED_STATUS
from workers.sandbox.sandbox import MIB, Outcome

logger = structlog.get_logger()

PLACE_SECONDS = 120.0  # in which a pod must find a node, get its image and its release
RETURN_SECONDS = 30.0  # in which a release that is served again should be ready
SENDS = 8  # releases at once
SEND_SECONDS = 300.0  # in which a pod must have got its release
SEND_PAUSE_SECONDS = 1.0  # between attempts
PREVIOUS_ARCHIVE_BYTES = 64 * MIB  # of the previous release's archive: a larger one would hold up the deploy
STARTS = 3  # of the container that waits for the release, after which its pod is given up
TIDY_ROUNDS = 2  # in which the addresses of all apps are followed, whose changes are also announced
POLL_SECONDS = 0.2  # between requests to an app that starts
ACTIVATOR_PORT = 61083
ACTIVATOR_SECONDS = 3.0  # in which the cluster leads requests there, before the pod of an app that sleeps ends
ENDING_SECONDS = 20.0  # in which the cluster begins to end the pod of an app that sleeps
STOP_SECONDS = 45.0  # in which a release must end that the next one must not meet
IDLE_ANSWER_SECONDS = 5.0  # in which a pod must say how long it has been idle
NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
# How the cluster ends pods and containers itself: the app has not crashed.
POD_REASONS = (
    "Evicted",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
    "NodeLost",
    "Preempting",
    "UnexpectedAdmissionError",
)
CONTAINER_REASONS = ("ContainerStatusUnknown", "Unknown")  # its node was restarted

# App id, reason, exit code, the last lines of its output, the id of the event.
ReportCrash = Callable[[str, Literal["exit", "oom"], int | None, list[str], str], Awaitable[None]]


class KubernetesApplier:
    """Serves releases from the cluster's namespace. Implements `Applier`.

    `find_app` returns the record of an app by its id or name, and `find_data_limit` the bytes that the data of an
    account's app may take. `activator` is the address of this worker (`activator.py`).
    """

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        find_app: Callable[[str], Awaitable[App | None]],
        suspended: SuspendedList,
        report_crash: ReportCrash,
        find_data_limit: Callable[[str], Awaitable[int]],
        activator: str,
    ) -> None:
        self._settings, self._cluster, self._find_app = settings, cluster, find_app
        self._suspended, self._report_crash, self._find_data_limit = suspended, report_crash, find_data_limit
        self._domain = settings.apps_domain.partition(":")[0]
        self._storage, self._vault = open_storage(settings), Vault(settings.encryption_key)
        self._key = settings.encryption_key.partition(",")[0].strip().encode() or b"unknown"
        self._records: dict[tuple[str, str], Wanted] = {}  # by app and address
        self._addresses: dict[str, set[str]] = {}  # of these records, by app
        self._checked: set[str] = set()  # deploys whose releases have passed the check, and have not ended
        self._sends = asyncio.Semaphore(SENDS)
        self._sending: dict[str, asyncio.Task[None]] = {}  # by uid of the pod
        self._followed: list[str] = []  # the apps whose addresses are still to be followed in this turn
        self._slice = 0  # how many of them in a round
        self._reported: dict[str, str] = {}  # the event of the latest crash, by app
        self._marked: dict[tuple[str, str], bool] = {}  # by app and address: whether it was suspended at the last look
        self._addresses_lock, self._sleep_lock = asyncio.Lock(), asyncio.Lock()
        self._activator = activator
        self._held: set[tuple[str, str]] = set()  # whose requests wait until the next release runs, by app and address
        self._waking: dict[tuple[str, str], asyncio.Task[tuple[str, int]]] = {}  # by app and address
        self.outage = asyncio.Event()
        cluster.on_pod = self._follow_pod

    async def aclose(self) -> None:
        tasks = [*self._sending.values(), *self._waking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def lacks(self, wanted: Wanted) -> bool:
        return False  # a pod whose release is lost is not ready, which its cluster's own monitoring shows

    def note(self, wanted: Wanted) -> None:
        self._records[wanted.app, wanted.address] = wanted
        self._addresses.setdefault(wanted.app, set()).add(wanted.address)
        if wanted.step == "check" and _must_be_alone(wanted, wanted.deploy, wanted.served):
            self._held.add((wanted.app, wanted.address))

    async def prepare(self, target: Target) -> None:
        await self._cluster.until_synced()

    async def fetch(self, target: Target) -> None:
        if target.deploy not in target.wanted.releases:
            raise ReleaseMissing(target.deploy)
        try:
            found = await until_storage_answers(lambda: self._try_to_find(target.wanted.app, target.deploy))
        except StorageUnavailable:
            raise DeployError("the storage does not answer; deploy again later") from None
        if not found:
            raise ReleaseMissing(target.deploy)

    async def _try_to_find(self, app_id: str, deploy: str) -> bool:
        try:
            found = await self._storage.exists(archive_key(app_id, deploy))
        except StorageUnavailable:
            self.outage.set()
            raise
        self.outage.clear()
        return found

    # -- check, swap, canary ---------------------------------------------------------------------------------

    async def check(self, target: Target) -> None:
        await self._stop_first(target, self._find_served(target.wanted))
        await self._apply_release(target)
        try:
            pod = await self._until_ready(target.deploy, PLACE_SECONDS + START_SECONDS)
            await self._until_it_answers(target, pod)
        finally:
            await self._copy_output(target)
        self._checked.add(target.deploy)

    async def serve(self, target: Target) -> None:
        """If the release does not answer, a canary fails. Other steps serve it anyway."""
        if self._find_served(target.wanted) == target.deploy:
            if self._gives_way(target.deploy):
                return
            await self._apply_release(target)
        else:
            await self.fetch(target)
            try:
                if target.deploy not in self._checked:
                    await self.check(target)
                # An app may answer before the cluster counts its pod. The Service would lead nowhere meanwhile.
                await self._until_ready(target.deploy, START_SECONDS, whole=True)
            except DeployError:
                if target.is_new:
                    raise
        await self._lead_to(target)

    async def probe(self, target: Target) -> None:
        pod = await self._until_ready(target.deploy, START_SECONDS)
        if exits := sum(status.restartCount for status in _statuses(pod, APP_CONTAINER)):
            await self._copy_output(target)
            raise DeployError(f"the start command exited {exits} time{'' if exits == 1 else 's'}")
        await request_root(f"http://{_address_of(pod)}/", self._host(target))

    async def finish(self, target: Target) -> None:
        self._checked.discard(target.deploy)
        others = [deploy for deploy in self._list_deploys(target.wanted) if deploy != target.deploy]
        if others:
            await asyncio.sleep(DRAIN_SECONDS)
        await self._cluster.delete(*_keys_of(others))

    async def resume(self, target: Target) -> None:
        served, wanted = target.wanted.served, target.wanted
        self._checked.discard(target.deploy)
        if served and served in wanted.releases:
            again = Target(wanted, target.app, served, target.output)
            await self._stop_first(again, target.deploy)
            await self._apply_release(again)
            if not self._stays_asleep(again):
                with suppress(DeployError):
                    await self._until_ready(served, RETURN_SECONDS, whole=True)
            await self._lead_to(again)
        elif self._find_served(wanted) == target.deploy:
            name = address_name(wanted.app, wanted.address)
            await self._cluster.delete(("Ingress", name), ("Service", name))

    async def remove(self, target: Target) -> None:
        was_served = self._find_served(target.wanted) == target.deploy
        await self.resume(target)
        if was_served:
            await asyncio.sleep(DRAIN_SECONDS)
        await self._cluster.delete(*_keys_of([target.deploy]))

    async def _stop_first(self, target: Target, former: str) -> None:
        """Ends a release if the two must not run side by side. Requests wait at the activator. Raises DeployError."""
        key, release = (target.wanted.app, target.wanted.address), self._read_deployed(former)
        own = self._describe(target.wanted, target.app, target.deploy)
        if release is None or former == target.deploy or not own.excludes(release):
            return
        self._held.add(key)
        await self._lead_to_activator(release)
        await asyncio.sleep(ACTIVATOR_SECONDS)
        await self._cluster.apply(describe_deployment(release, self._settings, asleep=True))
        ends = time.monotonic() + STOP_SECONDS
        while any(map(may_run, self._cluster.select("Pod", deploy=former))):
            if time.monotonic() > ends:
                raise DeployError("the release that it replaces could not be stopped; deploy again")
            await self._cluster.next_change(1.0)

    async def _apply_release(self, target: Target) -> None:
        """Applies the release's pod. If the app sleeps, there is none."""
        release = self._describe(target.wanted, target.app, target.deploy)
        expected = target.wanted.releases[target.deploy]
        sealed = expected.environment
        variables = msgspec.json.decode(self._vault.open(sealed), type=dict[str, str]) if sealed else {}
        if release.keeps_data:
            await self.apply_claim(release, await self._find_data_limit(release.account))
        await self._cluster.apply(
            describe_secret(release, self._token(target.deploy), variables),
            describe_deployment(release, self._settings, asleep=self._stays_asleep(target)),
        )

    async def apply_claim(self, release: PodRelease, limit: int) -> None:
        """Makes the volume of an app's data, or a larger one. Raises DeployError.

        A cluster that cannot enlarge volumes keeps it as it is.
        """
        claim, secret = describe_claim(release, limit, self.data_token(release.app, release.account), self._settings)
        present = self._cluster.present.get(("PersistentVolumeClaim", claim["metadata"]["name"]))
        if present is not None:
            requests, size = claim["spec"]["resources"]["requests"], present.spec.resources.requests["storage"]
            claim["spec"]["storageClassName"] = present.spec.storageClassName  # which cannot change
            if present.status.phase == "Bound" and _count_bytes(size) < _count_bytes(requests["storage"]):
                with suppress(DeployError):
                    return await self._cluster.apply(claim, secret)
            requests["storage"] = size
        await self._cluster.apply(claim, secret)

    async def _lead_to(self, target: Target, *, asleep: bool | None = None) -> None:
        """Lets the address's Service lead to the release, or to the activator while the app sleeps. Raises DeployError.

        By default, an app that sleeps stays asleep.
        """
        async with self._addresses_lock:
            wanted = target.wanted
            # Another account may have taken the app's name since the deploy began.
            app = await self._find_app(wanted.app)
            if app is None or app.account != wanted.account:
                raise AppGone
            hosts = hosts_of(app, wanted.address, self._domain)
            for name in hosts:
                if await self._is_another_app_s(name, app, wanted.address):
                    raise DeployError(f"the address {name} belongs to another app; rename one of the two")
            release = self._describe(wanted, app, target.deploy)
            asleep = self._stays_asleep(target) if asleep is None else asleep
            activator = describe_endpoints(release, self._activator, ACTIVATOR_PORT)
            if not asleep:  # the cluster lists the pods there
                self._cluster.leave(("Endpoints", activator["metadata"]["name"]))
            objects = [describe_service(release, asleep=asleep), *([activator] if asleep else [])]
            await self._cluster.apply(*objects, describe_ingress(release, hosts, self._settings))
            if not asleep:
                self._held.discard((wanted.app, wanted.address))

    async def _lead_to_activator(self, release: PodRelease) -> None:
        """Lets the requests for a release that visitors get now wait at the activator. Raises DeployError."""
        async with self._addresses_lock:
            if self._find_served(release) == release.deploy and not self.is_asleep(release.app, release.address):
                endpoints = describe_endpoints(release, self._activator, ACTIVATOR_PORT)
                await self._cluster.apply(describe_service(release, asleep=True), endpoints)

    async def _is_another_app_s(self, name: str, app: App, address: str) -> bool:
        """Returns whether another app is served at the host name, or has it as its own name."""
        for ingress in self._cluster.select("Ingress", host=name):
            labels = ingress.metadata.labels
            if labels.get(APP_LABEL) != app.id:
                owner = await self._find_app(labels.get(APP_LABEL, ""))
                if owner is not None and owner.account == labels.get(ACCOUNT_LABEL):
                    return True
        namesake = await self._find_app(name.partition(".")[0]) if address != "live" else None
        return namesake is not None and namesake.id != app.id

    def _describe(self, wanted: Wanted, app: App, deploy: str) -> PodRelease:
        expected = wanted.releases[deploy]
        name = hosts_of(app, wanted.address, self._settings.apps_domain)[0]
        archive, suspended = ReleaseArchive(expected.digest, expected.size), (app.account, app.id) in self._suspended
        url = url_of(name, self._settings)
        alone = not _may_overlap(expected)
        return PodRelease(app.account, app.id, wanted.address, deploy, archive, url, expected.runs, suspended, alone)

    def _token(self, deploy: str) -> str:
        return hmac.digest(self._key, f"release {deploy}".encode(), "sha256").hex()

    def data_token(self, app_id: str, account: str) -> str:
        """Returns the token of those who may change an app's data."""
        return hmac.digest(self._key, f"data {account} {app_id}".encode(), "sha256").hex()

    def _host(self, target: Target) -> str:
        return hosts_of(target.app, target.wanted.address, self._domain)[0]

    def _find_served(self, wanted: Wanted | PodRelease) -> str:
        """Returns the deploy whose release visitors get; '' for none."""
        service = self._read_service(wanted.app, wanted.address)
        return service["metadata"].get("labels", {}).get(DEPLOY_LABEL, "") if service is not None else ""

    def _read_service(self, app_id: str, address: str) -> Any | None:
        """Returns the Service of an address as it shall be, or as it is after a restart of this worker."""
        key = ("Service", address_name(app_id, address))
        if key in self._cluster.wanted:
            return self._cluster.wanted[key]
        present = self._cluster.present.get(key)
        return present.to_dict() if present is not None else None

    def _find_hosts(self, wanted: Wanted) -> set[str]:
        """Returns the host names that lead to the address now."""
        ingress = self._cluster.present.get(("Ingress", address_name(wanted.app, wanted.address)))
        return set() if ingress is None else _hosts_in(ingress)

    def _list_deploys(self, wanted: Wanted) -> list[str]:
        found = self._cluster.select("Deployment", app=wanted.app, address=wanted.address)
        return [each.metadata.labels[DEPLOY_LABEL] for each in found]

    # -- sleep -----------------------------------------------------------------------------------------------

    def is_asleep(self, app_id: str, address: str) -> bool:
        service = self._read_service(app_id, address)
        return service is not None and not service["spec"].get("selector")

    def _stays_asleep(self, target: Target) -> bool:
        wanted, key = target.wanted, (target.wanted.app, target.wanted.address)
        return key not in self._held and self._find_served(wanted) == target.deploy and self.is_asleep(*key)

    def _gives_way(self, deploy: str) -> bool:
        """Returns whether a release may not run now, because another one runs on its data, which forbids that."""
        if (own := self._read_deployed(deploy)) is None:
            return False
        others = self._cluster.select("Deployment", app=own.app, address=own.address)
        running = [_read_release(each.spec.template) for each in others if each.spec.replicas]
        return any(each.deploy != deploy and each.excludes(own) for each in running if each is not None)

    def _read_deployed(self, deploy: str) -> PodRelease | None:
        """Reads a release whose Deployment is present. The record of an `undo` does not know its own any more."""
        present = self._cluster.present.get(("Deployment", object_name(deploy)))
        return None if present is None else _read_release(present.spec.template)

    def list_awake(self) -> list[tuple[str, str]]:
        """Returns app and address of the start commands that run and may sleep: no deploy is in progress."""
        return [
            key
            for key, wanted in self._records.items()
            if wanted.step in ("live", "undo")
            and (release := wanted.releases.get(wanted.serves)) is not None
            and release.runs
            and self._find_served(wanted) == wanted.serves
            and not self.is_asleep(*key)
        ]

    def find_address(self, name: str) -> tuple[str, str] | None:
        """Returns app and address that a host name leads to."""
        for ingress in self._cluster.select("Ingress", host=name):
            labels = ingress.metadata.labels
            key = (labels.get(APP_LABEL, ""), labels.get(ADDRESS_LABEL, ""))
            return key if key in self._records else None
        return None

    async def let_sleep(self, key: tuple[str, str], seconds: float) -> float:
        """Ends the pod of an app that nobody has asked for so many seconds. Requests come to the activator from now on.

        Returns the seconds that are left if somebody has asked.
        """
        left, wanted = await self._read_seconds_left(key, seconds), self._records[key]
        if left > 0:
            return left
        try:
            await self._change_sleep(key, asleep=True)
            await asyncio.sleep(ACTIVATOR_SECONDS)  # until nobody asks the pod any more
            async with self._sleep_lock:
                left = await self._read_seconds_left(key, seconds)
                sleeps = key not in self._waking and self._records.get(key) is wanted and self.is_asleep(*key)
                if left <= 0 and sleeps:
                    if (target := await self._find_target(key)) is not None:
                        await self._apply_release(target)
                        await self._until_ending(target.deploy)
                        logger.info("app.asleep", app=key[0], address=key[1])
                    return seconds
            await self.wake(key)
        except DeployError as error:
            logger.error("sites.sleep_failed", app=key[0], reason=str(error))
        return max(left, seconds)

    async def _until_ending(self, deploy: str) -> None:
        """Waits until the cluster ends the pods of a release, which must not count when the app is woken."""
        ends = time.monotonic() + ENDING_SECONDS
        while any(not pod.metadata.deletionTimestamp for pod in self._cluster.select("Pod", deploy=deploy)):
            if time.monotonic() > ends:
                return
            await self._cluster.next_change(1.0)

    async def _read_seconds_left(self, key: tuple[str, str], seconds: float) -> float:
        """Asks the pod how long it has been idle. If it does not answer, it is not."""
        found = self._cluster.select("Pod", deploy=self._find_served(self._records[key]))
        pods = [pod for pod in found if _is_ready(pod, whole=True) and not pod.metadata.deletionTimestamp]
        left = seconds
        for pod in pods[:1]:
            with suppress(OSError, ValueError):
                async with asyncio.timeout(IDLE_ANSWER_SECONDS):
                    reader, writer = await asyncio.open_connection(pod.status.podIP, IDLE_PORT)
                    left = seconds - float(await reader.readline())
                    writer.close()
        return left

    async def wake(self, key: tuple[str, str]) -> tuple[str, int]:
        """Starts an app that sleeps. Returns where its pod answers. Raises DeployError."""
        while key in self._held or self._gives_way(self._find_served(self._records[key])):
            await self._cluster.next_change(1.0)  # its next release starts it
        if (waking := self._waking.get(key)) is None:
            self._waking[key] = waking = asyncio.create_task(self._wake(key))
            waking.add_done_callback(lambda ended: (self._waking.pop(key), ended.cancelled() or ended.exception()))
        return await asyncio.shield(waking)

    async def _wake(self, key: tuple[str, str]) -> tuple[str, int]:
        began, wanted = time.monotonic(), self._records[key]
        served = self._find_served(wanted)
        async with self._sleep_lock:
            if (target := await self._find_target(key)) is None:
                raise AppGone
            release = self._describe(wanted, target.app, served)
            await self._cluster.apply(describe_deployment(release, self._settings))
        pod = await self._until_ready(served, PLACE_SECONDS + START_SECONDS, whole=True)
        await self._change_sleep(key, asleep=False)
        logger.info("app.awake", app=key[0], address=key[1], seconds=time.monotonic() - began)
        return pod.status.podIP, WEB_PORT

    async def _change_sleep(self, key: tuple[str, str], *, asleep: bool) -> None:
        if (target := await self._find_target(key)) is not None:
            await self._lead_to(target, asleep=asleep)

    async def _find_target(self, key: tuple[str, str]) -> Target | None:
        """Returns the release that is served; None if there is none, or the app belongs to another account now."""
        app, wanted = await self._find_app(key[0]), self._records.get(key)
        if app is None or wanted is None or app.account != wanted.account:
            return None
        served = self._find_served(wanted)
        return Target(wanted, app, served, []) if served in wanted.releases else None

    # -- pods ------------------------------------------------------------------------------------------------

    async def _until_ready(self, deploy: str, seconds: float, *, whole: bool = False) -> Any:
        """Waits until a pod of the release serves, and returns it. `whole`: until Services lead to it, too.

        Raises DeployError.
        """
        ends, why = time.monotonic() + seconds, "it has no pod"
        while time.monotonic() < ends:
            if fault := self._find_fault(deploy):
                raise DeployError(fault)
            pods = [pod for pod in self._cluster.select("Pod", deploy=deploy) if not pod.metadata.deletionTimestamp]
            for pod in sorted(pods, key=lambda pod: str(pod.metadata.creationTimestamp), reverse=True):
                if outcome := _find_end(pod):
                    raise DeployError(outcome.describe("the start command", LIMITS))
                if _is_ready(pod, whole=whole):
                    return pod
                why, is_final = explain_waiting(pod)
                if is_final:
                    raise DeployError(f"the cluster can't start the app: {why}; the operator must help")
            await self._cluster.next_change(1.0)
        raise DeployError(f"the cluster did not start the app within {seconds:.0f} seconds: {why}")

    def _find_fault(self, deploy: str) -> str:
        """Says why no pod can be made, such as a full quota; '' if one can."""
        deployment = self._cluster.present.get(("Deployment", object_name(deploy)))
        conditions = (deployment.status.conditions or []) if deployment is not None and deployment.status else []
        failures = [
            each.message or "" for each in conditions if each.type == "ReplicaFailure" and each.status == "True"
        ]
        if not failures:
            return ""
        logger.error("kubernetes.no_pod", deploy=deploy, reason=failures[0])
        return explain_refusal(failures[0], "start")

    async def _until_it_answers(self, target: Target, pod: Any) -> None:
        """Requests `/` until the start command answers. Raises DeployError."""
        ends, runs = time.monotonic() + START_SECONDS, bool(_statuses(pod, APP_CONTAINER))
        while True:
            try:
                return await request_root(f"http://{_address_of(pod)}/", self._host(target))
            except DeployError as error:
                if not runs:
                    raise
                if time.monotonic() > ends:
                    limit = f"{START_SECONDS:.0f} seconds"
                    raise DeployError(f"the start command did not answer within {limit}: {error}") from None
            now = self._cluster.present.get(("Pod", pod.metadata.name))
            if now is not None and (outcome := _find_end(now)):
                raise DeployError(outcome.describe("the start command", LIMITS))
            await asyncio.sleep(POLL_SECONDS)

    async def _copy_output(self, target: Target) -> None:
        """Copies the last output of the start command, for the deploy's log."""
        for pod in self._cluster.select("Pod", deploy=target.deploy):
            for status in _statuses(pod, APP_CONTAINER):
                ended = status.lastState.terminated if status.lastState else None
                lines = await self._cluster.read_log(pod.metadata.name, APP_CONTAINER, OUTPUT_LINES)
                text = ended.message.splitlines() if ended is not None and ended.message else []
                target.output.extend([*text, *lines][-OUTPUT_LINES:])

    def _follow_pod(self, pod: Any) -> None:
        """Sends the pod its release if it waits for it, and reports a crash."""
        release = _read_release(pod)
        if release is None or pod.metadata.deletionTimestamp:
            return
        uid = pod.metadata.uid
        if _is_waiting_for_release(pod) and uid not in self._sending:
            self._sending[uid] = task = asyncio.create_task(self._send_release(pod, release))
            task.add_done_callback(lambda _: self._sending.pop(uid, None))
        for status in _statuses(pod, APP_CONTAINER):
            ended, served = _find_termination(status), self._find_served(release)
            if ended and ended.finishedAt and release.address == "live" and served == release.deploy:
                self._note_crash(pod, release, ended)

    def _note_crash(self, pod: Any, release: PodRelease, ended: Any) -> None:
        digest = hashlib.sha256(f"{pod.metadata.uid} {ended.containerID}".encode()).hexdigest()
        crash = f"evt_{int(ended.finishedAt.timestamp() * 1000):011x}{digest[:10]}"
        if (
            crash == self._reported.get(release.app)
            or pod.status.reason in POD_REASONS
            or ended.reason in CONTAINER_REASONS
        ):
            return
        self._reported[release.app] = crash
        reason: Literal["exit", "oom"] = "oom" if ended.reason == "OOMKilled" else "exit"
        logger.warning("app.ended", app=release.app, deploy=release.deploy, code=ended.exitCode, why=ended.reason)
        lines = (ended.message or "").splitlines()
        report = self._report_crash(release.app, reason, ended.exitCode, lines, crash)
        self._sending[crash] = task = asyncio.ensure_future(report)
        task.add_done_callback(lambda _: self._sending.pop(crash, None))

    async def _send_release(self, pod: Any, release: PodRelease) -> None:
        """Sends the release to the pod, until the pod has it or is gone."""
        name, uid = pod.metadata.name, pod.metadata.uid
        began = time.monotonic()
        while (now := self._cluster.present.get(("Pod", name))) is not None and now.metadata.uid == uid:
            if not _is_waiting_for_release(now):
                return
            try:
                async with self._sends:
                    await self._send_previous(pod, release)
                    await self._try_to_send(pod, "/release", release, release.deploy, release.archive)
            except (aiohttp.ClientError, OSError, TimeoutError, StorageUnavailable) as error:
                logger.info("sites.not_sent", deploy=release.deploy, reason=str(error) or type(error).__name__)
            else:
                logger.info("sites.sent", deploy=release.deploy, seconds=time.monotonic() - began)
                return
            end_if_canceled()
            await asyncio.sleep(SEND_PAUSE_SECONDS)

    async def _send_previous(self, pod: Any, release: PodRelease) -> None:
        """Sends a pod whose release is new the one that visitors have now, if it is small."""
        served, wanted = self._find_served(release), self._records.get((release.app, release.address))
        previous = wanted.releases.get(served) if wanted is not None and served != release.deploy else None
        if previous is not None and previous.size <= PREVIOUS_ARCHIVE_BYTES:
            # Only pages that are open now need it.
            with suppress(aiohttp.ClientError, OSError, TimeoutError, StorageUnavailable):
                await self._try_to_send(pod, f"/previous/{served}?digest={previous.digest}", release, served, previous)

    async def _try_to_send(
        self, pod: Any, path: str, release: PodRelease, deploy: str, expected: ReleaseArchive
    ) -> None:
        """Raises OSError, or an error of the client or the storage, unless the pod has taken the archive."""
        archive = await self._storage.open(archive_key(release.app, deploy))
        if archive is None:
            raise StorageUnavailable("the archive is gone")
        headers = {"Authorization": f"Bearer {self._token(release.deploy)}", "Content-Length": str(expected.size)}
        timeout = aiohttp.ClientTimeout(total=SEND_SECONDS, connect=5)
        url = f"http://{_host_of(pod)}:{RECEIVE_PORT}{path}"
        async with (
            aclosing(archive.chunks) as chunks,
            aiohttp.ClientSession(timeout=timeout) as client,
            client.put(url, data=chunks, headers=headers) as answer,
        ):
            if answer.status != 204:
                raise OSError(f"the pod answered {answer.status}")

    # -- afterwards ------------------------------------------------------------------------------------------

    async def tidy(self, deploys: Set[str]) -> None:
        if not self._followed:
            labels = [each.metadata.labels or {} for key, each in self._cluster.present.items() if key[0] != "Pod"]
            self._followed = [*{each[APP_LABEL] for each in labels if ADDRESS_LABEL in each}]
            self._slice = math.ceil(len(self._followed) / TIDY_ROUNDS)
        for app_id in [self._followed.pop() for _ in range(min(self._slice, len(self._followed)))]:
            try:
                await self._follow_addresses(app_id)
            except msgspec.MsgspecError as error:  # one damaged record must not affect the others
                logger.error("app.unreadable", app=app_id, error=str(error))
            await asyncio.sleep(0)  # what is known of an app is in memory: many would hold up the deploys of others
        # A worker that ended between two deletions has left the Secret alone.
        releases = [*self._cluster.select("Deployment"), *self._cluster.select("Secret")]
        present = {each.metadata.labels.get(DEPLOY_LABEL) for each in releases}
        kept = deploys | {wanted.served for wanted in self._records.values()}
        await self._cluster.delete(*_keys_of(present - kept - {None}))
        for app_id in list(self._addresses):
            await self._tidy_previews(app_id)

    def _list_records(self, app_id: str) -> list[Wanted]:
        return [self._records[app_id, address] for address in self._addresses.get(app_id, ())]

    async def _tidy_previews(self, app_id: str) -> None:
        previews = [wanted for wanted in self._list_records(app_id) if wanted.address != "live"]
        previews.sort(key=lambda wanted: wanted.deploy)
        for wanted in previews[:-KEPT_PREVIEWS]:
            await self._delete_all(app_id, wanted.address)

    async def follow_app(self, name: str) -> None:
        """Serves the app with this name or id, and one that had the name before, at their present addresses."""
        app = await self._find_app(name)
        ids = {app.id} if app is not None else {name}
        former = host(name, "live", None, self._domain)
        for ingress in self._cluster.select("Ingress", host=former):
            ids.add(ingress.metadata.labels.get(APP_LABEL, ""))
        for app_id in ids:
            await self._follow_addresses(app_id)

    async def _follow_addresses(self, app_id: str) -> None:
        app = await self._find_app(app_id)
        services = self._cluster.select("Service", app=app_id)
        owned = [each for each in services if app is not None and each.metadata.labels[ACCOUNT_LABEL] == app.account]
        if app is None or len(owned) < len(services):
            await self._delete_all(app_id)
            return
        for wanted in self._list_records(app_id):
            served = self._find_served(wanted)
            if self._find_hosts(wanted) == {*hosts_of(app, wanted.address, self._domain)}:
                continue
            if served in wanted.releases and wanted.account == app.account:
                with suppress(DeployError):
                    await self._lead_to(Target(wanted, app, served, []))

    async def _delete_all(self, app_id: str, address: str = "") -> None:
        labels = {"app": app_id, **({"address": address} if address else {})}
        kinds = ("Ingress", "Service", "Deployment", "Secret")
        selected = [(kind, each) for kind in kinds for each in self._cluster.select(kind, **labels)]
        # What belongs to no address belongs to the data, which the agent keeps as a snapshot first.
        found = [(kind, each.metadata.name) for kind, each in selected if ADDRESS_LABEL in each.metadata.labels]
        await self._cluster.delete(*found)
        for gone in {address} if address else self._addresses.get(app_id, set()).copy():
            self._records.pop((app_id, gone), None)
            self._marked.pop((app_id, gone), None)
            self._addresses.get(app_id, set()).discard(gone)
        if not self._addresses.get(app_id):
            self._addresses.pop(app_id, None)

    async def follow_suspensions(self) -> None:
        """Serves the apps that were suspended since the last call with 503, and others as usual.

        Raises BackboneUnavailable.
        """
        await self._suspended.read_changes()
        for key, wanted in list(self._records.items()):
            suspended = (wanted.account, wanted.app) in self._suspended
            if self._marked.get(key, False) is not suspended:
                await self._mark(key)
                self._marked[key] = suspended

    async def _mark(self, key: tuple[str, str]) -> None:
        """Applies the release that visitors get, and the one that is being checked."""
        app, wanted = await self._find_app(key[0]), self._records.get(key)
        if app is None or wanted is None or app.account != wanted.account:
            return
        for deploy in (
            {self._find_served(wanted), wanted.deploy} & {*self._list_deploys(wanted)} & wanted.releases.keys()
        ):
            if self._gives_way(deploy):
                continue
            try:
                await self._apply_release(Target(wanted, app, deploy, []))
            except DeployError as error:
                logger.error("sites.suspensions_not_marked", app=key[0], reason=str(error))


def _must_be_alone(wanted: Wanted, *deploys: str) -> bool:
    """Returns whether the two releases work with the same data and one of them forbids that."""
    releases = [wanted.releases[deploy] for deploy in {*deploys} if deploy in wanted.releases]
    both_run = wanted.address == "live" and len(releases) > 1 and all(release.runs for release in releases)
    return both_run and not all(map(_may_overlap, releases))


def _may_overlap(release: Release) -> bool:
    return not release.manifest or msgspec.json.decode(release.manifest, type=Manifest).overlap


def _count_bytes(quantity: str) -> int:
    return int(parse_quantity(quantity) or 0)


def _keys_of(deploys: Collection[str]) -> list[Key]:
    return [(kind, object_name(deploy)) for deploy in deploys for kind in ("Deployment", "Secret")]


def _host_of(pod: Any) -> str:
    ip: str = pod.status.podIP
    return f"[{ip}]" if ":" in ip else ip


def _address_of(pod: Any) -> str:
    return f"{_host_of(pod)}:{WEB_PORT}"


def _statuses(pod: Any, container: str) -> list[Any]:
    """Returns the status of a container; an empty list if it has none."""
    statuses = (pod.status.containerStatuses or []) if pod.status else []
    return [status for status in statuses if status.name == container]


def _find_termination(status: Any) -> Any | None:
    """Returns how a container ended: now, or before it was started again. None if it never did, or was told to."""
    ended = (status.state and status.state.terminated) or (status.lastState and status.lastState.terminated)
    return None if ended is None or ended.exitCode == STOPPED_STATUS else ended


def _hosts_in(ingress: Any) -> set[str]:
    return {rule.host for rule in ingress.spec.rules or []}


def _is_ready(pod: Any, *, whole: bool) -> bool:
    conditions = (pod.status.conditions or []) if pod.status else []
    ready = any(each.type == "Ready" and each.status == "True" for each in conditions)
    return bool(pod.status and pod.status.podIP) and (
        ready if whole else any(status.ready for status in _statuses(pod, "web"))
    )


def _read_release(pod: Any) -> PodRelease | None:
    """Reads what a pod serves, or the template of one."""
    with suppress(msgspec.MsgspecError, AttributeError, IndexError, TypeError):
        values = {each.name: each.value for each in pod.spec.initContainers[0].env}
        return msgspec.json.decode(values.get("CAPSULE_POD", ""), type=PodRelease)
    return None


def may_run(pod: Any) -> bool:
    """Returns whether the start command of a pod may run. The pod itself may be listed for long after its end."""
    ended = [bool(status.state and status.state.terminated) for status in _statuses(pod, APP_CONTAINER)]
    is_over = bool(pod.status) and pod.status.phase in ("Failed", "Succeeded")
    return not (is_over or (pod.metadata.deletionTimestamp and ended and all(ended)))


def _is_waiting_for_release(pod: Any) -> bool:
    statuses = (pod.status.initContainerStatuses or []) if pod.status else []
    return bool(statuses and statuses[0].state and statuses[0].state.running and pod.status.podIP)


def _find_end(pod: Any) -> Outcome | None:
    """Returns how the start command ended, if it did."""
    for status in _statuses(pod, APP_CONTAINER):
        if ended := _find_termination(status):
            code = 128 - ended.exitCode if ended.exitCode > 128 else ended.exitCode
            return Outcome(code, "memory" if ended.reason == "OOMKilled" else "")
    return None


def explain_waiting(pod: Any) -> tuple[str, bool]:
    """Returns why a pod is not ready, and whether it will not be without help."""
    receivers = (pod.status.initContainerStatuses or []) if pod.status else []
    statuses = [*receivers, *(pod.status.containerStatuses or [])] if pod.status else []
    for status in statuses:
        if status.state and status.state.waiting and status.state.waiting.reason in NO_IMAGE:
            return f"its image can't be had ({status.state.waiting.reason})", True
    for status in receivers:
        ended = status.lastState and status.lastState.terminated
        if ended and status.state and status.state.waiting:
            why = f"the container that takes its release ends with status {ended.exitCode}"
            return why, status.restartCount >= STARTS
    conditions = (pod.status.conditions or []) if pod.status else []
    for each in conditions:
        if each.type == "PodScheduled" and each.status == "False":
            # The message names a PersistentVolumeClaim, or the "volume node affinity".
            what = "there is no volume for its data" if "olume" in (each.message or "") else "no node has room for it"
            return what, False
    states = [status.state for status in statuses if status.state]
    if not any(state.running or state.terminated for state in states):
        return "its node does not have its image or its volumes yet", False
    return "it waits for its release" if _is_waiting_for_release(pod) else "it is starting", False

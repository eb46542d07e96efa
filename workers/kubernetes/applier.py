"""Serves releases from a cluster (`workers/hosting/applier.py`): each in a Deployment of its own, and each address by a
Service that leads to one of them.

A release is checked before the Service leads to it. A swap is one change of the Service, and so is its undoing. The
cluster keeps serving while this worker and the API server are away. The worker sends each new pod its release, which
waits for it (`pod.py`), so a pod needs no credentials.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Collection, Set
from contextlib import suppress
from typing import Any, Literal

import aiohttp
import msgspec
import structlog

from gateway.accounts.records import App
from gateway.accounts.suspended import SuspendedList
from gateway.accounts.vault import Vault
from gateway.cancellation import end_if_canceled
from gateway.deploys.addresses import host, hosts_of, url_of
from gateway.deploys.pod_log import APP_CONTAINER, DEPLOY_LABEL
from gateway.deploys.serving import ReleaseArchive, Wanted
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
    APP_LABEL,
    address_name,
    describe_deployment,
    describe_ingress,
    describe_secret,
    describe_service,
    object_name,
)
from workers.kubernetes.pod import RECEIVE_PORT, WEB_PORT, PodRelease
from workers.sandbox.sandbox import Outcome

logger = structlog.get_logger()

PLACE_SECONDS = 120.0  # in which a pod must find a node, get its image and its release
RETURN_SECONDS = 30.0  # in which a release that is served again should be ready
SENDS = 8  # releases at once
SEND_SECONDS = 300.0  # in which a pod must have got its release
SEND_PAUSE_SECONDS = 1.0  # between attempts
POLL_SECONDS = 0.2  # between requests to an app that starts
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

    `find_app` returns the record of an app by its id or name.
    """

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        find_app: Callable[[str], Awaitable[App | None]],
        suspended: SuspendedList,
        report_crash: ReportCrash,
    ) -> None:
        self._settings, self._cluster, self._find_app = settings, cluster, find_app
        self._suspended, self._report_crash = suspended, report_crash
        self._domain = settings.apps_domain.partition(":")[0]
        self._storage, self._vault = open_storage(settings), Vault(settings.encryption_key)
        self._key = settings.encryption_key.partition(",")[0].strip().encode() or b"unknown"
        self._records: dict[tuple[str, str], Wanted] = {}  # by app and address
        self._checked: set[str] = set()  # deploys whose releases have passed the check, and have not ended
        self._sends = asyncio.Semaphore(SENDS)
        self._sending: dict[str, asyncio.Task[None]] = {}  # by uid of the pod
        self._reported: dict[str, str] = {}  # the event of the latest crash, by app
        self._marked: dict[tuple[str, str], bool] = {}  # by app and address: whether it was suspended at the last look
        self._addresses_lock = asyncio.Lock()
        self.outage = asyncio.Event()
        cluster.on_pod = self._follow_pod

    async def aclose(self) -> None:
        for task in self._sending.values():
            task.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)

    def set_current(self, current: bool) -> None:
        """Does nothing: the cluster serves by itself, and only one worker at a time changes what it serves."""

    def runs(self, wanted: Wanted) -> bool:
        return True

    def lacks(self, wanted: Wanted) -> bool:
        return False  # a pod whose release is lost is not ready, which its cluster's own monitoring shows

    def note(self, wanted: Wanted) -> None:
        self._records[wanted.app, wanted.address] = wanted

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
            await self._apply_release(again)
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

    async def _apply_release(self, target: Target) -> None:
        release = self._describe(target.wanted, target.app, target.deploy)
        expected = target.wanted.releases[target.deploy]
        sealed = expected.environment
        variables = msgspec.json.decode(self._vault.open(sealed), type=dict[str, str]) if sealed else {}
        await self._cluster.apply(
            describe_secret(release, self._token(target.deploy), variables),
            describe_deployment(release, self._settings),
        )

    async def _lead_to(self, target: Target) -> None:
        """Lets the address's Service lead to the release. Raises DeployError."""
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
            await self._cluster.apply(describe_service(release), describe_ingress(release, hosts, self._settings))

    async def _is_another_app_s(self, name: str, app: App, address: str) -> bool:
        """Returns whether another app is served at the host name, or has it as its own name."""
        for ingress in self._cluster.select("Ingress"):
            labels = ingress.metadata.labels
            if labels.get(APP_LABEL) != app.id and name in _hosts_in(ingress):
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
        return PodRelease(app.account, app.id, wanted.address, deploy, archive, url, expected.runs, suspended)

    def _token(self, deploy: str) -> str:
        return hmac.digest(self._key, f"release {deploy}".encode(), "sha256").hex()

    def _host(self, target: Target) -> str:
        return hosts_of(target.app, target.wanted.address, self._domain)[0]

    def _find_served(self, address: Wanted | PodRelease) -> str:
        """Returns the deploy to whose pod the address's Service leads; '' for none."""
        service = self._cluster.present.get(("Service", address_name(address.app, address.address)))
        return "" if service is None else (service.spec.selector or {}).get(DEPLOY_LABEL, "")

    def _find_hosts(self, wanted: Wanted) -> set[str]:
        """Returns the host names that lead to the address now."""
        ingress = self._cluster.present.get(("Ingress", address_name(wanted.app, wanted.address)))
        return set() if ingress is None else _hosts_in(ingress)

    def _list_deploys(self, wanted: Wanted) -> list[str]:
        found = self._cluster.select("Deployment", app=wanted.app, address=wanted.address)
        return [each.metadata.labels[DEPLOY_LABEL] for each in found]

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
                why = _explain_waiting(pod)
                if why.startswith("its image"):
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
        url = f"http://{pod.status.podIP}:{RECEIVE_PORT}/release"
        name, uid = pod.metadata.name, pod.metadata.uid
        began = time.monotonic()
        while (now := self._cluster.present.get(("Pod", name))) is not None and now.metadata.uid == uid:
            if not _is_waiting_for_release(now):
                return
            try:
                async with self._sends:
                    await self._try_to_send(url, release)
            except (aiohttp.ClientError, OSError, TimeoutError, StorageUnavailable) as error:
                logger.info("sites.not_sent", deploy=release.deploy, reason=str(error) or type(error).__name__)
            else:
                logger.info("sites.sent", deploy=release.deploy, seconds=time.monotonic() - began)
                return
            end_if_canceled()
            await asyncio.sleep(SEND_PAUSE_SECONDS)

    async def _try_to_send(self, url: str, release: PodRelease) -> None:
        """Raises OSError, or an error of the client or the storage, unless the pod has taken the release."""
        archive = await self._storage.open(archive_key(release.app, release.deploy))
        if archive is None:
            raise StorageUnavailable("the archive is gone")
        headers = {
            "Authorization": f"Bearer {self._token(release.deploy)}",
            "Content-Length": str(release.archive.size),
        }
        timeout = aiohttp.ClientTimeout(total=SEND_SECONDS, connect=5)
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.put(url, data=archive.chunks, headers=headers) as answer,
        ):
            if answer.status != 204:
                raise OSError(f"the pod answered {answer.status}")

    # -- afterwards ------------------------------------------------------------------------------------------

    async def tidy(self, deploys: Set[str]) -> None:
        kept = deploys | {wanted.served for wanted in self._records.values()}
        labels = [each.metadata.labels or {} for key, each in self._cluster.present.items() if key[0] != "Pod"]
        for app_id in {each[APP_LABEL] for each in labels if APP_LABEL in each}:
            try:
                await self._follow_addresses(app_id)
            except msgspec.MsgspecError as error:  # one damaged record must not affect the others
                logger.error("app.unreadable", app=app_id, error=str(error))
        # A worker that ended between two deletions has left the Secret alone.
        releases = [*self._cluster.select("Deployment"), *self._cluster.select("Secret")]
        present = {each.metadata.labels.get(DEPLOY_LABEL) for each in releases}
        await self._cluster.delete(*_keys_of(present - kept - {None}))
        for app_id in {app for app, _ in self._records}:
            await self._tidy_previews(app_id)

    async def _tidy_previews(self, app_id: str) -> None:
        previews = [wanted for (app, address), wanted in self._records.items() if app == app_id and address != "live"]
        previews.sort(key=lambda wanted: wanted.deploy)
        for wanted in previews[:-KEPT_PREVIEWS]:
            await self._delete_all(app_id, wanted.address)

    async def follow_app(self, name: str) -> None:
        """Serves the app with this name or id, and one that had the name before, at their present addresses."""
        app = await self._find_app(name)
        ids = {app.id} if app is not None else {name}
        former = host(name, "live", None, self._domain)
        for ingress in self._cluster.select("Ingress"):
            if former in _hosts_in(ingress):
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
        for wanted in [wanted for (known, _), wanted in self._records.items() if known == app_id]:
            served = self._find_served(wanted)
            if self._find_hosts(wanted) == {*hosts_of(app, wanted.address, self._domain)}:
                continue
            if served in wanted.releases and wanted.account == app.account:
                with suppress(DeployError):
                    await self._lead_to(Target(wanted, app, served, []))

    async def _delete_all(self, app_id: str, address: str = "") -> None:
        labels = {"app": app_id, **({"address": address} if address else {})}
        kinds = ("Ingress", "Service", "Deployment", "Secret")
        found = [(kind, each.metadata.name) for kind in kinds for each in self._cluster.select(kind, **labels)]
        await self._cluster.delete(*found)
        for key in [key for key in self._records if key[0] == app_id and address in ("", key[1])]:
            del self._records[key]
            self._marked.pop(key, None)

    async def follow_suspensions(self) -> None:
        """Serves the apps that were suspended since the last call with 503, and others as usual.

        Raises BackboneUnavailable.
        """
        await self._suspended.read_changes()
        for key, wanted in list(self._records.items()):
            suspended = (wanted.account, wanted.app) in self._suspended
            if self._marked.get(key, False) is not suspended:
                await self._mark(wanted)
                self._marked[key] = suspended

    async def _mark(self, wanted: Wanted) -> None:
        app, served = await self._find_app(wanted.app), self._find_served(wanted)
        if app is not None and served in wanted.releases:
            try:
                await self._apply_release(Target(wanted, app, served, []))
            except DeployError as error:
                logger.error("sites.suspensions_not_marked", app=wanted.app, reason=str(error))


def _keys_of(deploys: Collection[str]) -> list[Key]:
    return [(kind, object_name(deploy)) for deploy in deploys for kind in ("Deployment", "Secret")]


def _address_of(pod: Any) -> str:
    ip = pod.status.podIP
    return f"[{ip}]:{WEB_PORT}" if ":" in ip else f"{ip}:{WEB_PORT}"


def _statuses(pod: Any, container: str) -> list[Any]:
    """Returns the status of a container; an empty list if it has none."""
    statuses = (pod.status.containerStatuses or []) if pod.status else []
    return [status for status in statuses if status.name == container]


def _find_termination(status: Any) -> Any | None:
    """Returns how a container ended: now, or before it was started again. None if it never did."""
    return (status.state and status.state.terminated) or (status.lastState and status.lastState.terminated)


def _hosts_in(ingress: Any) -> set[str]:
    return {rule.host for rule in ingress.spec.rules or []}


def _is_ready(pod: Any, *, whole: bool) -> bool:
    conditions = (pod.status.conditions or []) if pod.status else []
    ready = any(each.type == "Ready" and each.status == "True" for each in conditions)
    return bool(pod.status and pod.status.podIP) and (
        ready if whole else any(status.ready for status in _statuses(pod, "web"))
    )


def _read_release(pod: Any) -> PodRelease | None:
    with suppress(msgspec.MsgspecError, AttributeError, IndexError, TypeError):
        values = {each.name: each.value for each in pod.spec.initContainers[0].env}
        return msgspec.json.decode(values.get("CAPSULE_POD", ""), type=PodRelease)
    return None


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


def _explain_waiting(pod: Any) -> str:
    statuses = [*(pod.status.initContainerStatuses or []), *(pod.status.containerStatuses or [])] if pod.status else []
    for status in statuses:
        if status.state and status.state.waiting and status.state.waiting.reason in NO_IMAGE:
            return f"its image can't be had ({status.state.waiting.reason})"
    conditions = (pod.status.conditions or []) if pod.status else []
    if any(each.type == "PodScheduled" and each.status == "False" for each in conditions):
        return "no node has room for it"
    return "it waits for its release" if _is_waiting_for_release(pod) else "it is starting"

"""Serves releases from a cluster (`workers/engine/driver.py`): each in a Deployment of its own, and each address by a
Service that leads to one of them.

A swap is one change of the Service, and so is its undoing. The cluster keeps serving while this worker and the API
server are away. The worker sends each new pod its release, which waits for it (`pod.py`), so a pod needs no
credentials.
"""

import asyncio
import contextlib
import enum
import hmac
import time
from collections.abc import Awaitable, Callable, Collection, Set
from functools import partial

import msgspec
import structlog

from gateway.accounts.domain_names import apps_host
from gateway.accounts.records import App
from gateway.accounts.suspended import SuspendedList
from gateway.accounts.vault import Vault
from gateway.deploys.addresses import host_of, url_of
from gateway.deploys.manifest import Manifest
from gateway.deploys.pod_log import APP_CONTAINER, DEPLOY_LABEL
from gateway.deploys.release import Release, ReleaseArchive
from gateway.deploys.serving import Wanted
from gateway.deploys.states import DeployError
from gateway.settings import Plan, Settings
from gateway.storage import open_storage
from workers.engine.driver import Hosts, NotStopped, Place, ReleaseMissing, Target, Visits, until_stored
from workers.hosting.archives import archive_key
from workers.hosting.driver import OUTPUT_LINES, START_SECONDS
from workers.kubernetes.cluster import Cluster, Key
from workers.kubernetes.objects import (
    ADDRESS_LABEL,
    APP_LABEL,
    address_name,
    describe_claim,
    describe_deployment,
    describe_secret,
    object_name,
)
from workers.kubernetes.places import ClusterPlaces
from workers.kubernetes.pod import PodRelease
from workers.kubernetes.pod_quota import Address, PodQuota
from workers.kubernetes.pod_status import has_ended, may_run, read_bytes, read_release, statuses_of
from workers.kubernetes.pods import Pods, ReportCrash
from workers.kubernetes.startup import PLACE_SECONDS, POLL_SECONDS, Startup
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

KINDS = "Deployment", "Secret"  # of the objects that each release has
MAX_TIDIED = 500  # objects of a round of tidying, so that those of thousands of apps cost no more than these
RETURN_SECONDS = 30.0  # in which a release that is served again should answer
ACTIVATOR_SECONDS = 3.0  # in which the cluster leads requests to the activator, before a pod ends
STOP_SECONDS = 45.0  # in which a release must end that the next one must not meet


class SleepState(enum.Enum):
    """Whether an address sleeps (`sleep.py`). Visitors get answers while it is awake, or else wait at the activator.

    After a restart of the worker, it is asleep if its Service leads to no pod, and otherwise awake.
    """

    AWAKE = enum.auto()
    ENDING = enum.auto()  # its pod ends
    ASLEEP = enum.auto()  # it has no pod
    WAKING = enum.auto()  # its pod starts
    HELD = enum.auto()  # its pod ends, because the next release must not run beside it
    SUSPENDED = enum.auto()  # it has no pod, and visitors get 503


class ClusterDriver:
    """Serves releases from the cluster's namespace. Implements `Driver`.

    `find_app` returns the record of an app by its id or name, and `find_plan` an account's plan. `activator` is the
    address and the port of this worker's activator (`activator.py`).
    """

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        find_app: Callable[[str], Awaitable[App | None]],
        suspended: SuspendedList,
        report_crash: ReportCrash,
        find_plan: Callable[[str], Awaitable[Plan]],
        activator: tuple[str, int],
        *,
        place_seconds: float = PLACE_SECONDS,
        start_seconds: float = START_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        activator_seconds: float = ACTIVATOR_SECONDS,
    ) -> None:
        self._settings, self._cluster, self._find_app = settings, cluster, find_app
        self._suspended, self._find_plan = suspended, find_plan
        self._pod_quota = PodQuota(cluster, self._find_pod_limit)
        self.places = ClusterPlaces(settings, cluster, activator)
        self._storage, self._vault = open_storage(settings), Vault(settings.encryption_key)
        self._key = settings.encryption_key.partition(",")[0].strip().encode()
        self.records: dict[Address, Wanted] = {}
        self._left: list[Key] = []  # the objects of releases that are still to be looked at in this turn of tidying
        self.changed: set[Address] = set()  # which have a new record, or lead elsewhere
        self.states: dict[Address, SleepState] = {}  # other than ASLEEP and AWAKE
        self._visits: Visits = {}  # of previews, since the last `read_visits`
        self._pods = Pods(cluster, self._storage, report_crash, self._token, self.routed, self._find_archive)
        self.outage = asyncio.Event()
        self.return_seconds, self.activator_seconds = RETURN_SECONDS, activator_seconds
        self.startup = Startup(cluster, apps_host(settings), place_seconds, start_seconds, poll_seconds)

    async def aclose(self) -> None:
        await self._pods.aclose()
        await self.places.aclose()

    def lacks(self, wanted: Wanted) -> bool:
        return False  # a pod whose release is lost is not ready, which its cluster's own monitoring shows

    def note(self, wanted: Wanted) -> None:
        self.records[wanted.app, wanted.address] = wanted
        self.changed.add((wanted.app, wanted.address))
        if wanted.step == "check" and _must_be_alone(wanted, wanted.deploy, wanted.served):
            self.states[wanted.app, wanted.address] = SleepState.HELD

    async def read_visits(self) -> Visits:
        found, self._visits = self._visits, {}
        return found

    def note_visit(self, address: Address, seconds: float) -> None:
        """Notes that somebody has visited an address so many seconds ago."""
        wanted = self.records.get(address)
        if wanted is not None and wanted.address != "live":
            self._visits[wanted.account, *address] = time.time() - seconds

    async def prepare(self, target: Target) -> None:
        await self._cluster.until_synced()

    # -- a release -------------------------------------------------------------------------------------------

    async def place(self, target: Target) -> None:
        """The worker sends it to its pod."""
        if target.deploy not in target.wanted.releases:
            raise ReleaseMissing(target.deploy)
        key = archive_key(target.wanted.app, target.deploy)
        await until_stored(self.outage, target.deploy, partial(self._storage.exists, key))

    def _find_archive(self, place: PodRelease, deploy: str) -> ReleaseArchive | None:
        wanted = self.records.get((place.app, place.address))
        return wanted.releases.get(deploy) if wanted is not None else None

    async def start(self, target: Target) -> None:
        release = self._describe(target.wanted, target.app, target.deploy)
        sealed = target.wanted.releases[target.deploy].environment
        variables = msgspec.json.decode(self._vault.open(sealed), type=dict[str, str]) if sealed else {}
        if release.keeps_data:
            await self.apply_claim(release, self._settings.app_data[await self._find_plan(release.account)] * MIB)
        asleep = self._sleeps(target)
        async with contextlib.nullcontext() if asleep else self._pod_quota.reserve(release, self._let_preview_sleep):
            await self._cluster.apply(
                describe_secret(release, self._token(target.deploy), variables),
                describe_deployment(release, self._settings, asleep=asleep),
            )

    async def _find_pod_limit(self, account: str) -> int:
        return self._settings.app_pods[await self._find_plan(account)]

    async def apply_claim(self, release: PodRelease, limit: int) -> None:
        """Makes the volume of an app's data, or a larger one. Raises DeployError.

        A cluster that cannot enlarge volumes keeps it as it is.
        """
        claim, secret = describe_claim(release, limit, self.data_token(release.app, release.account), self._settings)
        present = self._cluster.present.get(("PersistentVolumeClaim", claim["metadata"]["name"]))
        if present is not None:
            requests, size = claim["spec"]["resources"]["requests"], present.spec.resources.requests["storage"]
            claim["spec"]["storageClassName"] = present.spec.storageClassName  # which cannot change
            if present.status.phase == "Bound" and read_bytes(size) < read_bytes(requests["storage"]):
                with contextlib.suppress(DeployError):
                    return await self._cluster.apply(claim, secret)
            requests["storage"] = size
        await self._cluster.apply(claim, secret)

    async def until_answers(self, target: Target) -> None:
        if not self._sleeps(target):
            await self.startup.until_up(target)

    async def read_output(self, target: Target) -> list[str]:
        found: list[str] = []
        for pod in self._cluster.select("Pod", deploy=target.deploy):
            for status in statuses_of(pod, APP_CONTAINER):
                ended = status.lastState.terminated if status.lastState else None
                lines = await self._cluster.read_log(pod.metadata.name, APP_CONTAINER, OUTPUT_LINES)
                text = ended.message.splitlines() if ended is not None and ended.message else []
                found.extend([*text, *lines][-OUTPUT_LINES:])
        return found

    def excludes(self, target: Target, former: str) -> bool:
        release = self._read_deployed(former)
        return release is not None and self._describe(target.wanted, target.app, target.deploy).excludes(release)

    def gives_way(self, wanted: Wanted) -> bool:
        if (own := self._read_deployed(served := self.routed(wanted))) is None:
            return False
        others = self._cluster.select("Deployment", app=wanted.app, address=wanted.address)
        running = [read_release(each.spec.template) for each in others if each.spec.replicas]
        return any(each.deploy != served and each.excludes(own) for each in running if each is not None)

    def runs(self, deploy: str) -> bool:
        present = self._cluster.present.get(("Deployment", object_name(deploy)))
        return present is not None and bool(present.spec.replicas)

    def is_suspended(self, target: Target) -> bool:
        return (target.app.account, target.app.id) in self._suspended

    async def hold(self, target: Target, former: str) -> None:
        """Requests wait at the activator."""
        address = (target.wanted.app, target.wanted.address)
        self.states[address] = SleepState.HELD
        release = self._read_deployed(former)
        if release is not None and self.routed(target.wanted) == former and not self.places.is_asleep(*address):
            await self.places.lead(release, asleep=True)
        await asyncio.sleep(self.activator_seconds)

    async def stop(self, target: Target, former: str) -> None:
        if (release := self._read_deployed(former)) is not None:
            await self._cluster.apply(describe_deployment(release, self._settings, asleep=True))

        def has_stopped() -> bool:
            return not any(map(may_run, self._cluster.select("Pod", deploy=former)))

        if not await self._cluster.until(has_stopped, STOP_SECONDS):
            raise NotStopped

    def list_others(self, target: Target) -> list[str]:
        found = self._cluster.select("Deployment", app=target.wanted.app, address=target.wanted.address)
        return [
            name for each in found if (name := each.metadata.labels.get(DEPLOY_LABEL, target.deploy)) != target.deploy
        ]

    def find_former(self, target: Target) -> str:
        served = target.wanted.served
        return served if served in target.wanted.releases else ""

    async def retire(self, target: Target, others: Collection[str]) -> None:
        await self._cluster.delete(*_keys_of(others))

    async def remove(self, target: Target) -> None:
        await self._cluster.delete(*_keys_of([target.deploy]))

    async def end(self, target: Target) -> None:
        wanted = target.wanted
        await self.places.leave(Place(wanted.account, wanted.app, wanted.address))
        if self.records.get((wanted.app, wanted.address)) is wanted:
            del self.records[wanted.app, wanted.address]
        self.states.pop((wanted.app, wanted.address), None)
        self._visits.pop((wanted.account, wanted.app, wanted.address), None)

    def _describe(self, wanted: Wanted, app: App, deploy: str) -> PodRelease:
        expected = wanted.releases[deploy]
        name = host_of(app, wanted.address, self._settings.apps_domain)
        archive, url = ReleaseArchive(expected.digest, expected.size), url_of(name, self._settings)
        alone = not _may_overlap(expected)
        return PodRelease(app.account, app.id, wanted.address, deploy, archive, url, expected.runs, alone)

    def _token(self, deploy: str) -> str:
        return hmac.digest(self._key, f"release {deploy}".encode(), "sha256").hex()

    def data_token(self, app_id: str, account: str) -> str:
        """Returns the token of those who may change an app's data."""
        return hmac.digest(self._key, f"data {account} {app_id}".encode(), "sha256").hex()

    def _read_deployed(self, deploy: str) -> PodRelease | None:
        """Reads a release whose Deployment is present. The record of an `undo` does not know its own any more."""
        present = self._cluster.present.get(("Deployment", object_name(deploy)))
        return None if present is None else read_release(present.spec.template)

    # -- sleep -----------------------------------------------------------------------------------------------

    def state(self, address: Address) -> SleepState:
        wanted = self.records.get(address)
        if wanted is not None and (wanted.account, wanted.app) in self._suspended:
            return SleepState.SUSPENDED
        return self.states.get(address, SleepState.ASLEEP if self.places.is_asleep(*address) else SleepState.AWAKE)

    def end_state(self, address: Address, state: SleepState) -> None:
        if self.states.get(address) is state:
            del self.states[address]

    def _sleeps(self, target: Target) -> bool:
        """Returns whether a release gets no pod, because the app sleeps or is suspended."""
        state = self.state((target.wanted.app, target.wanted.address))
        sleeps = state in (SleepState.ENDING, SleepState.ASLEEP) and self.routed(target.wanted) == target.deploy
        return sleeps or state is SleepState.SUSPENDED

    async def _let_preview_sleep(self, address: Address) -> bool:
        """Ends the pods of a preview, whose next visitor wakes it. Returns False while a deploy works on it."""
        wanted, target = self.records.get(address), await self.find_target(address)
        if target is None or wanted is None or wanted.step != "live" or self.state(address) is not SleepState.AWAKE:
            return False
        await self.lead(target, asleep=True)
        await self._end_pods(address)
        logger.info("app.asleep", app=address[0], address=address[1], reason="an app needs the account's quota of pods")
        return True

    async def kill_pods(self, address: Address) -> None:
        """Ends all pods of an address at once, with the connections of their visitors. Raises DeployError."""
        await self._end_pods(address)
        pods = self._cluster.select("Pod", app=address[0], address=address[1])
        await self._cluster.delete(*[("Pod", each.metadata.name) for each in pods])

    async def _end_pods(self, address: Address) -> None:
        """Lets the pods of an address end when their visitors' connections have ended. Raises DeployError."""
        found = self._cluster.select("Deployment", app=address[0], address=address[1])
        releases = [read_release(each.spec.template) for each in found]
        ended = [describe_deployment(each, self._settings, asleep=True) for each in releases if each is not None]
        await self._cluster.apply(*ended)

    # -- visitors --------------------------------------------------------------------------------------------

    def routed(self, wanted: Wanted | PodRelease) -> str:
        return self.places.routed(wanted)

    async def route(self, target: Target, hosts: Hosts | None) -> None:
        asleep = self._sleeps(target)
        await self.lead(target, asleep=asleep)
        if hosts is not None:
            await self.places.name(self._describe(target.wanted, target.app, target.deploy), hosts)
        if not asleep:
            self.end_state((target.wanted.app, target.wanted.address), SleepState.HELD)

    async def lead(self, target: Target, *, asleep: bool) -> None:
        """Leads the address to a release, or to the activator. Raises DeployError."""
        await self.places.lead(self._describe(target.wanted, target.app, target.deploy), asleep=asleep)
        self.changed.add((target.wanted.app, target.wanted.address))

    async def unroute(self, target: Target) -> None:
        name = address_name(target.wanted.app, target.wanted.address)
        await self._cluster.delete(*[(kind, name) for kind in ("Ingress", "Service", "Secret")])

    async def visit(self, target: Target) -> None:
        await self.startup.request_health(target, await self.startup.until_pod(target.deploy))

    def count_exits(self, target: Target) -> int:
        pods = [pod for pod in self._cluster.select("Pod", deploy=target.deploy) if not has_ended(pod)]
        return sum(status.restartCount for pod in pods for status in statuses_of(pod, APP_CONTAINER))

    async def find_target(self, address: Address) -> Target | None:
        """Returns the release that visitors get; None if there is none, or the app belongs to another account now."""
        app, wanted = await self._find_app(address[0]), self.records.get(address)
        if app is None or wanted is None or app.account != wanted.account:
            return None
        served = self.routed(wanted)
        return Target(wanted, app, served, []) if served in wanted.releases else None

    # -- afterwards ------------------------------------------------------------------------------------------

    async def tidy(self, gone: Set[str], deploys: Set[str]) -> None:
        if not self._left:
            # A worker that ended between two deletions has left the Secret alone.
            self._left = [(kind, each.metadata.name) for kind in KINDS for each in self._cluster.select(kind)]
        some, self._left = self._left[:MAX_TIDIED], self._left[MAX_TIDIED:]
        await self._cluster.delete(*[key for key in some if not self._is_needed(key, deploys)])
        for address in [address for address in self.records if address[0] in gone]:
            del self.records[address]

    def _is_needed(self, key: Key, deploys: Set[str]) -> bool:
        """Returns whether an object is of a deploy to keep, or of none."""
        labels = self._cluster.present[key].metadata.labels if key in self._cluster.present else {}
        deploy = labels.get(DEPLOY_LABEL)
        if deploy is None or deploy in deploys:
            return True
        wanted = self.records.get((labels.get(APP_LABEL, ""), labels.get(ADDRESS_LABEL, "")))
        return wanted is not None and wanted.served == deploy


def _must_be_alone(wanted: Wanted, *deploys: str) -> bool:
    """Returns whether the two releases work with the same data and one of them forbids that."""
    releases = [wanted.releases[deploy] for deploy in {*deploys} if deploy in wanted.releases]
    both_run = wanted.address == "live" and len(releases) > 1 and all(release.runs for release in releases)
    return both_run and not all(map(_may_overlap, releases))


def _may_overlap(release: Release) -> bool:
    return not release.manifest or msgspec.json.decode(release.manifest, type=Manifest).overlap


def _keys_of(deploys: Collection[str]) -> list[Key]:
    return [(kind, object_name(deploy)) for deploy in deploys for kind in KINDS]

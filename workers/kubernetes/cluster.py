"""What the service wants of a cluster, and what is there: applies objects, watches them, and heals them.

Objects are applied on the server's side (https://kubernetes.io/docs/reference/using-api/server-side-apply/), with the
field manager `capsule`. What somebody changes or deletes is applied again at once, and what somebody adds to the `spec`
or `data` of an object that is ours alone is taken away. Everything is compared every half minute, a slice at a time.
While the API server is away, every call waits.

An event costs the same however many objects there are: an index finds objects by their labels, and a queue has the keys
of those to compare. An object is compared only if it or what is wanted of it has changed since.
"""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import structlog
from httpx2 import HTTPError
from lightkube import ApiError, AsyncClient
from lightkube.codecs import from_dict
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview
from lightkube.resources.core_v1 import Endpoints, PersistentVolumeClaim, Pod, Secret, Service
from lightkube.resources.networking_v1 import Ingress, NetworkPolicy

from gateway.cancellation import end_if_canceled
from gateway.deploys.states import DeployError
from gateway.loops import pauses, until_set
from gateway.operations.layout import CannotRun
from workers.kubernetes.objects import LABELS, MANAGED_BY, MANAGER, Object

logger = structlog.get_logger()

T = TypeVar("T")
Key = tuple[str, str]  # kind and name
Term = tuple[str, str, str]  # kind, and the name and value of a label; or of `host`, for the host names of an Ingress

APPLIED: dict[str, Any] = {
    each.__name__: each
    for each in (PersistentVolumeClaim, Secret, Deployment, Service, Endpoints, Ingress, NetworkPolicy)
}
# Made by the cluster's controllers: where a Service leads. The version is the stable one, or the one before 1.21.
SLICE = "EndpointSlice"
SLICES: list[Any] = [
    create_namespaced_resource("discovery.k8s.io", version, SLICE, "endpointslices") for version in ("v1", "v1beta1")
]
WATCHED: dict[str, Any] = {**APPLIED, "Pod": Pod, SLICE: SLICES[0]}
SERVICE_LABEL = "kubernetes.io/service-name"
# What the worker does, as in the Role in ops/kubernetes/apps: API group, resource, subresource, verbs.
WRITES = ("create", "list", "patch", "watch")
CHANGES = (*WRITES, "delete")
OWN = ("Secret", "Deployment", "Service", "Ingress", "NetworkPolicy")  # whose `spec` or `data` nobody else sets
RIGHTS = (
    ("", "persistentvolumeclaims", "", CHANGES),
    ("", "secrets", "", (*CHANGES, "update")),
    ("", "services", "", (*CHANGES, "update")),
    ("", "endpoints", "", WRITES),
    ("apps", "deployments", "", (*CHANGES, "update")),
    ("networking.k8s.io", "ingresses", "", (*CHANGES, "update")),
    ("networking.k8s.io", "networkpolicies", "", (*WRITES, "update")),
    ("", "pods", "", ("delete", "list", "watch")),
    ("", "pods", "log", ("get",)),
    ("discovery.k8s.io", "endpointslices", "", ("delete", "list", "watch")),
)

REQUESTS = 20  # that change objects, at once: the client gives up those that wait long for a connection
WATCH_SECONDS = 240  # after which the server ends a watch
SILENCE_SECONDS = 30.0  # after that, when the connection may be dead, and the next watch begins where this one ended
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0  # between attempts while the API server is away
ROLES_SECONDS = 10.0  # in which an API server that has just started may not know the accounts and Roles yet
HEAL_SECONDS, SLICE_SECONDS = 30.0, 1.0  # in which everything is compared, and between its slices
HEAL_PAUSE_SECONDS = 2.0  # between two healings of one object, so that two writers do not make an endless loop


class NoCluster(CannotRun):
    """There is no cluster, or it does not answer."""


class Cluster:
    """The objects of one namespace. `present` has those with the service's label, as the watches know them."""

    def __init__(
        self,
        namespace: str,
        *,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        longest_pause_seconds: float = LONGEST_PAUSE_SECONDS,
        roles_seconds: float = ROLES_SECONDS,
        heal_seconds: float = HEAL_SECONDS,
        slice_seconds: float = SLICE_SECONDS,
        heal_pause_seconds: float = HEAL_PAUSE_SECONDS,
        watch_seconds: int = WATCH_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self.namespace = namespace
        self._first_pause, self._longest_pause = first_pause_seconds, longest_pause_seconds
        self._roles_seconds, self._heal_pause = roles_seconds, heal_pause_seconds
        self._heal_seconds, self._slice_seconds = heal_seconds, slice_seconds
        self._watch_seconds, self._silence_seconds = watch_seconds, silence_seconds
        try:
            self._client = AsyncClient(namespace=namespace, field_manager=MANAGER, lazy=False)
        except Exception as error:  # a file that is no kubeconfig makes the client raise whatever it runs into
            reason = error if isinstance(error, ConfigError | OSError) else "the file of KUBECONFIG is no kubeconfig"
            remedy = "run this in a pod with a service account, or set KUBECONFIG"
            raise NoCluster(f"No cluster is known ({reason}); {remedy}.") from None
        self.own_namespace = _read_own_namespace()
        self.present: dict[Key, Any] = {}
        self.changes = Counter[str]()  # of the present objects, by kind
        self.wanted: dict[Key, Object] = {}
        self._index: dict[Term, dict[str, None]] = {}  # the names of the present objects
        self._terms: dict[Key, list[Term]] = {}  # under which each of them is found
        # By kind: are called with each object that has changed. Pods follow once all objects are known.
        self.followers = defaultdict[str, list[Callable[[Any], None]]](list)
        self._kinds = dict(WATCHED)
        self._synced: set[str] = set()  # the kinds whose objects are known
        self._versions: dict[str, str] = {}  # by kind, up to which its changes are known
        self._changed = asyncio.Event()
        self._healed_at: dict[Key, float] = {}
        self._room = asyncio.Semaphore(REQUESTS)
        self._queue: dict[Key, None] = {}  # to compare, in this order
        self._queued = asyncio.Event()
        self._matching: dict[Key, tuple[str, Object]] = {}  # the version that matched what was wanted

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    # -- reading ---------------------------------------------------------------------------------------------

    async def until_synced(self) -> None:
        """Waits until all objects are known."""
        while self._synced != WATCHED.keys():
            await self.next_change(self._first_pause)

    async def next_change(self, seconds: float) -> None:
        """Waits until a watched object changes, or for so many seconds."""
        await until_set(self._changed, seconds)
        end_if_canceled()

    async def until(self, look: Callable[[], T], seconds: float) -> T:
        """Looks after each change until a look finds something, or `seconds` are over. Returns what it found last."""
        ends = time.monotonic() + seconds
        while not (found := look()) and time.monotonic() < ends:
            await self.next_change(1.0)
        return found

    def select(self, kind: str, **labels: str) -> list[Any]:
        """Returns the present objects of a kind that have these labels; `app="…"` stands for `capsule/app`.

        `host="…"` stands for the host name of an Ingress, and `service="…"` for the Service of an EndpointSlice.
        """
        terms = [(kind, name, value) for name, value in labels.items()] or [(kind, "", "")]
        found = sorted((self._index.get(term, {}) for term in terms), key=len)
        return [self.present[kind, name] for name in found[0] if all(name in others for others in found[1:])]

    async def read_log(self, pod: str, container: str, lines: int) -> list[str]:
        """Returns the last lines of a container's log; none if there is no log."""
        try:
            found = self._client.log(pod, container=container, tail_lines=lines, newlines=False)
            return [line async for line in found]
        except HTTPError:
            return []

    async def find_missing_rights(self) -> list[str]:
        """Returns what this service account may not do, of all that the service does. Raises NoCluster."""
        missing = []
        for group, resource, subresource, verbs in RIGHTS:
            for verb in verbs:
                asked = {"namespace": self.namespace, "group": group, "resource": resource, "verb": verb}
                asked |= {"subresource": subresource} if subresource else {}
                review: Any = SelfSubjectAccessReview.from_dict({"spec": {"resourceAttributes": asked}})
                try:
                    answer = await self._client.create(review)
                except HTTPError as error:
                    raise NoCluster(f"the API server gives no answer: {error}") from None
                if not (answer.status and answer.status.allowed):
                    missing.append(f"{verb} {'/'.join(filter(None, (resource, subresource)))}")
        return missing

    # -- writing ---------------------------------------------------------------------------------------------

    async def apply(self, *objects: Object) -> None:
        """Applies the objects, and keeps them as they are from now on. Raises DeployError."""
        for each in objects:
            key = (each["kind"], each["metadata"]["name"])
            if self.wanted.get(key) != each:
                self.wanted[key] = each
            if not self._matches(key):
                self._healed_at[key] = time.monotonic()  # not by `_keep_healing` too
                await self._apply(key)

    async def delete(self, *keys: Key) -> None:
        """Deletes the objects that are there, and does not heal them any more. Raises DeployError.

        The cluster deletes the Endpoints of a Service. Pods are killed.
        """
        for key in [*keys, *[("Endpoints", name) for kind, name in keys if kind == "Service"]]:
            self.leave(key)
        for kind, name in keys:
            if (kind, name) in self.present:

                async def delete(kind: str = kind, name: str = name) -> None:
                    try:
                        await self._client.delete(self._kinds[kind], name, grace_period=0 if kind == "Pod" else None)
                    except ApiError as error:
                        if error.status.code != 404:
                            raise

                try:
                    await self._until_answered(delete)
                except ApiError as error:
                    raise self._refuse((kind, name), error) from None
                if kind != "PersistentVolumeClaim":  # which stays while a pod uses it
                    self._note((kind, name), None)  # the watch may say so later, and the next decision looks here

    def leave(self, key: Key) -> None:
        """Leaves an object to others, who change it from now on."""
        for each in (self.wanted, self._healed_at, self._matching):
            each.pop(key, None)

    async def _apply(self, key: Key) -> None:
        async def attempt() -> Any | None:
            if (wanted := self.wanted.get(key)) is None:  # it was deleted meanwhile
                return None
            present = self.present.get(key)
            if present is not None and _is_shared(key[0], present):
                fresh = _without_others(key[0], present, wanted)
                return await self._client.replace(from_dict(fresh), field_manager=MANAGER)
            return await self._client.apply(from_dict(wanted), field_manager=MANAGER, force=True)

        try:
            found = await self._until_answered(attempt)
        except ApiError as error:
            raise self._refuse(key, error) from None
        if found is None:
            return
        self._note(key, found)
        if key not in self.wanted:
            await self.delete(key)

    @staticmethod
    def _refuse(key: Key, error: ApiError) -> DeployError:
        logger.error("kubernetes.refused", kind=key[0], name=key[1], reason=error.status.message)
        return DeployError(explain_refusal(error.status.message or "", "serve"), service_fault=True)

    def _pauses(self) -> Iterator[float]:
        return pauses(self._first_pause, self._longest_pause)

    async def _until_answered(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeats the attempt while the API server is away, or has just started. Raises ApiError."""
        growing, refused_at = self._pauses(), float("inf")
        while True:
            try:
                async with self._room:
                    return await attempt()
            except HTTPError as error:
                if isinstance(error, ApiError) and _lacks_right(error):
                    refused_at = min(refused_at, time.monotonic())
                    if time.monotonic() - refused_at >= self._roles_seconds:
                        raise
                elif isinstance(error, ApiError) and error.status.code not in (409, 429, 500, 502, 503, 504):
                    raise
                logger.warning("kubernetes.no_answer", reason=str(error) or type(error).__name__)
            end_if_canceled()
            await asyncio.sleep(next(growing))

    # -- watching and healing --------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        """Watches and heals until canceled."""
        async with asyncio.TaskGroup() as tasks:
            for kind in WATCHED:
                tasks.create_task(self._keep_watching(kind))
            tasks.create_task(self._keep_healing())
        raise AssertionError

    async def _keep_watching(self, kind: str) -> None:
        growing = self._pauses()
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._watch_seconds + self._silence_seconds):
                    await self._watch(kind)
            except TimeoutError:
                growing = self._pauses()
            except HTTPError as error:
                self._versions.pop(kind, None)
                if kind == SLICE and isinstance(error, ApiError) and error.status.code == 404:
                    self._kinds[kind] = SLICES[1 - SLICES.index(self._kinds[kind])]
                if time.monotonic() - began > self._watch_seconds / 2:
                    growing = self._pauses()
                refused = isinstance(error, ApiError) and error.status.code in (401, 403, 404)
                log = logger.error if refused else logger.info
                log("kubernetes.watch_ended", kind=kind, reason=str(error) or type(error).__name__)
            except Exception as error:  # an object that cannot be read must not end the others' watches
                self._versions.pop(kind, None)
                logger.error("kubernetes.watch_failed", kind=kind, exc_info=error)
            end_if_canceled()
            await asyncio.sleep(next(growing))

    async def _watch(self, kind: str) -> None:
        """Follows the changes of the objects, from where the last watch ended. Raises HTTPError."""
        labels: Any = {MANAGED_BY: MANAGER}
        if kind not in self._versions:
            listed = self._client.list(self._kinds[kind], labels=labels, chunk_size=500)
            self._note_all(kind, {(kind, each.metadata.name): each async for each in listed})
            self._versions[kind] = listed.resourceVersion
        changes = self._client.watch(
            self._kinds[kind], labels=labels, resource_version=self._versions[kind], server_timeout=self._watch_seconds
        )
        async for operation, each in changes:
            self._note((kind, each.metadata.name), None if operation == "DELETED" else each)
            self._versions[kind] = _version_of(each)

    def _note_all(self, kind: str, found: dict[Key, Any]) -> None:
        """Notes all objects of a kind."""
        for name in [name for name in self._index.get((kind, "", ""), {}) if (kind, name) not in found]:
            self._note((kind, name), None)
        for key, each in found.items():
            self._note(key, each)
        if kind not in self._synced:
            self._synced.add(kind)
            if self._synced == WATCHED.keys():  # what a pod means depends on the other objects
                for pod in self.select("Pod"):
                    self._tell_followers("Pod", pod)

    def _note(self, key: Key, found: Any | None) -> None:
        known = self.present.get(key)
        if known is not None and found is not None and "" != _version_of(known) == _version_of(found):
            return
        self.changes[key[0]] += 1
        for term in self._terms.pop(key, []):
            names = self._index[term]
            del names[key[1]]
            if not names:
                del self._index[term]
        if found is None:
            self.present.pop(key, None)
        else:
            self.present[key], self._terms[key] = found, list(_list_terms(key[0], found))
            for term in self._terms[key]:
                self._index.setdefault(term, {})[key[1]] = None
            if key[0] != "Pod" or self._synced == WATCHED.keys():
                self._tell_followers(key[0], found)
        if key in self.wanted:
            self._compare_soon(key)
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell_followers(self, kind: str, found: Any) -> None:
        for follow in self.followers[kind]:
            follow(found)

    def _compare_soon(self, *keys: Key) -> None:
        self._queue |= dict.fromkeys(keys)
        self._queued.set()

    async def _keep_healing(self) -> None:
        await self.until_synced()
        rest: list[Key] = []  # of this round over everything
        slice_at, size = time.monotonic(), 0
        while True:
            await until_set(self._queued, max(0.0, slice_at - time.monotonic()))
            end_if_canceled()
            self._queued.clear()
            if time.monotonic() >= slice_at:
                if not rest:
                    rest = list(self.wanted)
                    size = math.ceil(len(rest) * self._slice_seconds / self._heal_seconds)
                self._queue |= {key: None for key in rest[:size] if key in self.wanted and not self._matches(key)}
                del rest[:size]
                slice_at = time.monotonic() + self._slice_seconds
            while self._queue:
                key = next(iter(self._queue))
                del self._queue[key]
                await self._heal(key)

    async def _heal(self, key: Key) -> None:
        """Applies an object again if it is not as it is wanted."""
        if key not in self.wanted or self._matches(key):
            return
        now = time.monotonic()
        pause = self._healed_at.get(key, -self._heal_pause) + self._heal_pause - now
        if pause > 0:
            asyncio.get_running_loop().call_later(pause, self._compare_soon, key)
            return
        self._healed_at[key] = now
        logger.info("kubernetes.healed", kind=key[0], name=key[1], missing=key not in self.present)
        with suppress(DeployError):
            await self._apply(key)

    def _matches(self, key: Key) -> bool:
        """Returns whether the object is as it is wanted."""
        present, wanted = self.present.get(key), self.wanted[key]
        if present is None:
            return False
        version, compared = self._matching.get(key, ("", None))
        if compared is wanted and "" != version == _version_of(present):
            return True
        if _is_shared(key[0], present) or not _covers(present.to_dict(), wanted):
            return False
        self._matching[key] = _version_of(present), wanted
        return True


def _read_own_namespace() -> str:
    """Returns the namespace of the pod in which this process runs; '' if it runs in none."""
    path = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return path.read_text().strip() if path.is_file() else ""


def _version_of(found: Any) -> str:
    return found.metadata.resourceVersion or ""


def _list_terms(kind: str, found: Any) -> Iterator[Term]:
    yield kind, "", ""
    for name, value in (found.metadata.labels or {}).items():
        if name.startswith(LABELS):
            yield kind, name.removeprefix(LABELS), value
    if kind == SLICE:
        yield kind, "service", (found.metadata.labels or {}).get(SERVICE_LABEL, "")
    elif kind == "Ingress":
        for host in {rule.host for rule in found.spec.rules or []}:
            yield kind, "host", host


def _lacks_right(error: ApiError) -> bool:
    """Returns whether the account is unknown or may not do this. Quotas and policies refuse with 403 as well."""
    return error.status.code == 401 or (error.status.code == 403 and " cannot " in (error.status.message or ""))


def explain_refusal(reason: str, what: str) -> str:
    """Says what an account holder can do. Operators find the reason in the log."""
    if "exceeded quota" in reason:
        return "the cluster's quota for apps is used up; stop an app, or try again later"
    return f"the cluster refused to {what} the app; the operator's log says why"


def _is_shared(kind: str, present: Any) -> bool:
    """Returns whether somebody else has set a part of an object that is ours alone."""
    return kind in OWN and any(map(_is_foreign, present.metadata.managedFields or []))


def _is_foreign(entry: Any) -> bool:
    is_own = (entry.manager, entry.operation) == (MANAGER, "Apply")
    return not is_own and not {"f:spec", "f:data"}.isdisjoint(entry.fieldsV1 or {})


def _without_others(kind: str, present: Any, wanted: Object) -> Object:
    """Describes what is wanted so that it replaces what is present. To apply it would leave what others have added."""
    entries = [each.to_dict() for each in present.metadata.managedFields if not _is_foreign(each)]
    kept = {"resourceVersion": present.metadata.resourceVersion, "managedFields": entries}
    replacement = {**wanted, "metadata": wanted["metadata"] | kept}
    if kind == "Service":  # what cannot change
        fixed = {name: getattr(present.spec, name) for name in ("clusterIP", "clusterIPs")}
        replacement["spec"] = wanted["spec"] | {name: value for name, value in fixed.items() if value}
    return replacement


def _covers(present: Any, wanted: Any) -> bool:
    """Returns whether everything that is wanted is present. The API adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(present, dict) and all(_covers(present.get(name), each) for name, each in wanted.items())
    if isinstance(wanted, list):
        same = isinstance(present, list) and len(present) == len(wanted)
        return same and all(map(_covers, present, wanted))
    return bool(present == wanted)

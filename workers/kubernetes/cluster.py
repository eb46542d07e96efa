"""What the service wants of a cluster, and what is there: applies objects, watches them, and heals them.

Objects are applied on the server's side (https://kubernetes.io/docs/reference/using-api/server-side-apply/), with the
field manager `capsule`. What somebody changes or deletes is applied again at once, and everything is compared every
half minute. While the API server is away, every call waits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn, Self, TypeVar

import structlog
from httpx2 import HTTPError
from lightkube import ApiError, AsyncClient
from lightkube.codecs import from_dict
from lightkube.core.exceptions import ConfigError
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview
from lightkube.resources.core_v1 import Endpoints, PersistentVolumeClaim, Pod, Secret, Service
from lightkube.resources.networking_v1 import Ingress, NetworkPolicy

from gateway.cancellation import end_if_canceled
from gateway.deploys.states import DeployError
from workers.kubernetes.objects import MANAGED_BY, MANAGER, Object

logger = structlog.get_logger()

T = TypeVar("T")
Key = tuple[str, str]  # kind and name

APPLIED: dict[str, Any] = {
    each.__name__: each
    for each in (PersistentVolumeClaim, Secret, Deployment, Service, Endpoints, Ingress, NetworkPolicy)
}
WATCHED: dict[str, Any] = {**APPLIED, "Pod": Pod}
# What the worker does, as in the Role in ops/kubernetes/apps: API group, resource, subresource, verbs.
WRITES = ("create", "list", "patch", "watch")
CHANGES = (*WRITES, "delete")
RIGHTS = (
    ("", "persistentvolumeclaims", "", CHANGES),
    ("", "secrets", "", CHANGES),
    ("", "services", "", CHANGES),
    ("", "endpoints", "", WRITES),
    ("apps", "deployments", "", CHANGES),
    ("networking.k8s.io", "ingresses", "", CHANGES),
    ("networking.k8s.io", "networkpolicies", "", WRITES),
    ("", "pods", "", ("list", "watch")),
    ("", "pods", "log", ("get",)),
)

WATCH_SECONDS = 240  # after which the server ends a watch, and the next one begins
SILENCE_SECONDS = 30.0  # after that, in which the watch must have ended
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0  # between attempts while the API server is away
ROLES_SECONDS = 10.0  # in which an API server that has just started may not know the accounts and Roles yet
HEAL_SECONDS = 30.0  # between comparisons of everything
HEAL_PAUSE_SECONDS = 2.0  # between two healings of one object, so that two writers do not make an endless loop


class NoCluster(Exception):
    """There is no cluster, or it does not answer. Operators see the message."""


class Cluster:
    """The objects of one namespace. `present` has those with the service's label, as the watches know them."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        try:
            self._client = AsyncClient(namespace=namespace, field_manager=MANAGER, lazy=False)
        except (ConfigError, OSError) as error:
            remedy = "run this in a pod with a service account, or set KUBECONFIG"
            raise NoCluster(f"no cluster is known ({error or type(error).__name__}); {remedy}") from None
        self.present: dict[Key, Any] = {}
        self.wanted: dict[Key, Object] = {}
        self.on_pod: Callable[[Any], None] = lambda _: None  # is called with each pod that has changed
        self._synced: set[str] = set()  # the kinds whose objects are known
        self._changed = asyncio.Event()
        self._healed_at: dict[Key, float] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    # -- reading ---------------------------------------------------------------------------------------------

    async def until_synced(self) -> None:
        """Waits until all objects are known."""
        while self._synced != WATCHED.keys():
            await self.next_change(FIRST_PAUSE_SECONDS)

    async def next_change(self, seconds: float) -> None:
        """Waits until a watched object changes, or for so many seconds."""
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await changed.wait()
        end_if_canceled()

    def select(self, kind: str, **labels: str) -> list[Any]:
        """Returns the present objects of a kind that have these labels; `app="…"` stands for `capsule/app`."""
        wanted = {f"capsule/{name}": value for name, value in labels.items()}
        found = [each for (its_kind, _), each in self.present.items() if its_kind == kind]
        return [each for each in found if wanted.items() <= (each.metadata.labels or {}).items()]

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
            self.wanted[key] = each
            self._healed_at[key] = time.monotonic()  # not by `_keep_healing` too
            if key not in self.present or not _covers(self.present[key].to_dict(), each):
                await self._apply(key)

    async def delete(self, *keys: Key) -> None:
        """Deletes the objects that are there, and does not heal them any more. Raises DeployError.

        The cluster deletes the Endpoints of a Service.
        """
        for key in [*keys, *[("Endpoints", name) for kind, name in keys if kind == "Service"]]:
            self.wanted.pop(key, None)
            self._healed_at.pop(key, None)
        for kind, name in keys:
            if (kind, name) in self.present:

                async def delete(kind: str = kind, name: str = name) -> None:
                    try:
                        await self._client.delete(APPLIED[kind], name)
                    except ApiError as error:
                        if error.status.code != 404:
                            raise

                try:
                    await self._until_answered(delete)
                except ApiError as error:
                    raise self._refuse((kind, name), error) from None

    def leave(self, key: Key) -> None:
        """Leaves an object to others, who change it from now on."""
        self.wanted.pop(key, None)

    async def _apply(self, key: Key) -> None:
        async def attempt() -> Any | None:
            if (wanted := self.wanted.get(key)) is None:  # it was deleted meanwhile
                return None
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
        return DeployError(explain_refusal(error.status.message or "", "serve"))

    async def _until_answered(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeats the attempt while the API server is away, or has just started. Raises ApiError."""
        pause, refused_at = FIRST_PAUSE_SECONDS, float("inf")
        while True:
            try:
                return await attempt()
            except HTTPError as error:
                if isinstance(error, ApiError) and _lacks_right(error):
                    refused_at = min(refused_at, time.monotonic())
                    if time.monotonic() - refused_at >= ROLES_SECONDS:
                        raise
                elif isinstance(error, ApiError) and error.status.code not in (409, 429, 500, 502, 503, 504):
                    raise
                logger.warning("kubernetes.no_answer", reason=str(error) or type(error).__name__)
            end_if_canceled()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    # -- watching and healing --------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        """Watches and heals until canceled."""
        async with asyncio.TaskGroup() as tasks:
            for kind in WATCHED:
                tasks.create_task(self._keep_watching(kind))
            tasks.create_task(self._keep_healing())
        raise AssertionError

    async def _keep_watching(self, kind: str) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(WATCH_SECONDS + SILENCE_SECONDS):
                    await self._watch(kind)
            except (HTTPError, TimeoutError) as error:
                if time.monotonic() - began > WATCH_SECONDS / 2:
                    pause = FIRST_PAUSE_SECONDS
                refused = isinstance(error, ApiError) and error.status.code in (401, 403, 404)
                log = logger.error if refused else logger.info
                log("kubernetes.watch_ended", kind=kind, reason=str(error) or type(error).__name__)
            except Exception as error:  # an object that cannot be read must not end the others' watches
                logger.error("kubernetes.watch_failed", kind=kind, exc_info=error)
            end_if_canceled()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _watch(self, kind: str) -> None:
        """Lists the objects, and follows their changes until the server ends that. Raises HTTPError."""
        labels: Any = {MANAGED_BY: MANAGER}
        listed = self._client.list(WATCHED[kind], labels=labels, chunk_size=500)
        found = {(kind, each.metadata.name): each async for each in listed}
        for key in [key for key in self.present if key[0] == kind and key not in found]:
            self._note(key, None)
        for key, each in found.items():
            self._note(key, each)
        if kind not in self._synced:
            self._synced.add(kind)
            if self._synced == WATCHED.keys():  # what a pod means depends on the other objects
                for pod in self.select("Pod"):
                    self.on_pod(pod)
        version = listed.resourceVersion
        changes = self._client.watch(
            WATCHED[kind], labels=labels, resource_version=version, server_timeout=WATCH_SECONDS
        )
        async for operation, each in changes:
            self._note((kind, each.metadata.name), None if operation == "DELETED" else each)

    def _note(self, key: Key, found: Any | None) -> None:
        if found is None:
            self.present.pop(key, None)
        else:
            self.present[key] = found
            if key[0] == "Pod" and self._synced == WATCHED.keys():
                self.on_pod(found)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_healing(self) -> None:
        await self.until_synced()
        while True:
            for key, wanted in list(self.wanted.items()):
                present = self.present.get(key)
                if present is not None and _covers(present.to_dict(), wanted):
                    continue
                now = time.monotonic()
                if now - self._healed_at.get(key, -HEAL_PAUSE_SECONDS) < HEAL_PAUSE_SECONDS:
                    continue
                self._healed_at[key] = now
                logger.info("kubernetes.healed", kind=key[0], name=key[1], missing=present is None)
                with suppress(DeployError):
                    await self._apply(key)
            waiting = any(time.monotonic() - at < HEAL_PAUSE_SECONDS for at in self._healed_at.values())
            await self.next_change(HEAL_PAUSE_SECONDS if waiting else HEAL_SECONDS)


def _lacks_right(error: ApiError) -> bool:
    """Returns whether the account is unknown or may not do this. Quotas and policies refuse with 403 as well."""
    return error.status.code == 401 or (error.status.code == 403 and " cannot " in (error.status.message or ""))


def explain_refusal(reason: str, what: str) -> str:
    """Says what an account holder can do. Operators find the reason in the log."""
    if "exceeded quota" in reason:
        return "the cluster's quota for apps is used up; stop an app, or try again later"
    return f"the cluster refused to {what} the app; the operator's log says why"


def _covers(present: Any, wanted: Any) -> bool:
    """Returns whether everything that is wanted is present. The API adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(present, dict) and all(_covers(present.get(name), each) for name, each in wanted.items())
    if isinstance(wanted, list):
        same = isinstance(present, list) and len(present) == len(wanted)
        return same and all(map(_covers, present, wanted))
    return bool(present == wanted)

"""A fake API server whose apps are live in the cluster, with their records: for what the worker costs."""

import asyncio
import hmac
import itertools
import json
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from gateway.accounts.records import Account, App, Build
from gateway.accounts.registry import enroll_app
from gateway.deploys.addresses import host_of, hosts_of
from gateway.deploys.release import Release, ReleaseArchive
from gateway.deploys.serving import Records, Wanted
from gateway.keys import account_apps_key, account_key, app_key
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.redis_servers import free_port
from workers.hosting.archives import archive_key
from workers.kubernetes.objects import (
    APP_LABEL,
    Object,
    describe_claim,
    describe_deployment,
    describe_ingress,
    describe_secret,
    describe_service,
)
from workers.kubernetes.pod import PodRelease
from workers.sandbox.sandbox import MIB

RELEASE = Release("0" * 64, 10, runs=True)
STARTED = "2026-11-28T09:00:00Z"
PLURALS = {
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Deployment": "deployments",
    "Secret": "secrets",
    "Service": "services",
    "Ingress": "ingresses",
    "Pod": "pods",
    "EndpointSlice": "endpointslices",
}


class FakeApi:
    """The API server, with controllers that make one ready pod of each Deployment at once."""

    def __init__(self, *, has_nodes: bool = True) -> None:
        """`has_nodes`: for pods."""
        self._has_nodes = has_nodes
        self.requests = Counter[str]()  # by their verb
        self.oldest = 0  # version from which a watch may begin
        self._objects: dict[str, dict[str, Object]] = {}  # by plural and name
        self._watches: dict[str, list[asyncio.Queue[bytes]]] = {}
        self._recent = deque[tuple[int, str, bytes]](maxlen=1_000)  # changes: version, plural and line
        self._versions = itertools.count(1)
        self._version = "0"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Yields the port."""
        port, application = free_port(), web.Application()
        application.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield port
        finally:
            await runner.cleanup()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        _, plural, name, *_ = [*request.path.partition("/namespaces/")[2].split("/"), "", ""]
        if request.method == "GET" and "watch" in request.query:
            return await self._watch(request, plural)
        self.requests["LIST" if request.method == "GET" else request.method] += 1
        if request.method == "GET":
            items = list(self._objects.get(plural, {}).values())
            return _json({"kind": "List", "metadata": {"resourceVersion": self._version}, "items": items})
        if request.method == "DELETE":
            self.delete(plural, name)
            return _json({"kind": "Status", "apiVersion": "v1"})
        return _json(self.put(plural, await request.json()))

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response, queue = web.StreamResponse(), asyncio.Queue[bytes]()
        if int(request.query["resourceVersion"]) < self.oldest:
            gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
            return web.Response(body=json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
        for version, kind, line in self._recent:
            if kind == plural and version > int(request.query["resourceVersion"]):
                queue.put_nowait(line)
        self._watches.setdefault(plural, []).append(queue)
        await response.prepare(request)
        try:
            with suppress(ConnectionError, TimeoutError):  # the worker or the watch has ended
                async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                    while True:
                        await response.write(await queue.get())
        finally:
            self._watches[plural].remove(queue)
        return response

    def put(self, plural: str, wanted: Object) -> Object:
        name = wanted["metadata"]["name"]
        before = self._objects.setdefault(plural, {}).get(name)
        self._version = str(next(self._versions))
        found = json.loads(json.dumps(wanted))
        found["metadata"] |= {"resourceVersion": self._version, "uid": name, "creationTimestamp": STARTED}
        self._objects[plural][name] = found
        self._tell(plural, "MODIFIED" if before else "ADDED", found)
        if plural == "persistentvolumeclaims":
            found["status"] = {"phase": "Bound"}
        if plural == "deployments" and self._has_nodes:
            self.put("pods", _make_pod(found)) if found["spec"]["replicas"] else self.delete("pods", name)
        return found

    def delete(self, plural: str, name: str) -> None:
        if (found := self._objects.get(plural, {}).pop(name, None)) is not None:
            self._version = found["metadata"]["resourceVersion"] = str(next(self._versions))
            self._tell(plural, "DELETED", found)
        if plural == "deployments":
            self.delete("pods", name)

    def touch(self, number: int) -> None:
        """Changes the status of a pod, as a kubelet does."""
        pods = list(self._objects["pods"].values())
        pod = pods[number % len(pods)]
        pod["status"]["message"] = str(number)
        self.put("pods", pod)

    def _tell(self, plural: str, operation: str, found: Object) -> None:
        line = json.dumps({"type": operation, "object": found}).encode() + b"\n"
        self._recent.append((int(self._version), plural, line))
        for queue in self._watches.get(plural, []):
            queue.put_nowait(line)


def _make_pod(deployment: Object) -> Object:
    template = deployment["spec"]["template"]
    names = [each["name"] for each in template["spec"]["containers"]]
    running = {"ready": True, "restartCount": 0, "image": "", "imageID": "", "state": {"running": {}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": deployment["metadata"]["name"]},
        "spec": template["spec"],
        "status": {
            "phase": "Running",
            "podIP": address_of(template["metadata"]["labels"][APP_LABEL]),
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": name, **running} for name in names],
        },
    }


def address_of(app_id: str) -> str:
    """Returns an address of this machine for each app, by which its pod is known."""
    number = int(app_id.removeprefix("app-")) + 1
    return f"127.1.{number >> 8}.{number & 255}"


def _json(found: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(found), content_type="application/json")


def fill(api: FakeApi, wanted: list[Wanted], settings: Settings) -> None:
    """Makes the objects of apps that are live, as the worker has made them."""
    key = settings.encryption_key.encode()
    for each in wanted:
        app = App(id=each.app, name=each.app, account=each.account, createdAt="")
        hosts = hosts_of(app, each.address, settings.apps_domain)
        archive = ReleaseArchive(RELEASE.digest, RELEASE.size)
        url = f"https://{host_of(app, each.address, settings.apps_domain)}"
        release = PodRelease(each.account, each.app, each.address, each.deploy, archive, url, RELEASE.runs)
        data, token = (
            hmac.digest(key, text.encode(), "sha256").hex()
            for text in (f"data {each.account} {each.app}", f"release {each.deploy}")
        )
        for described in (
            *describe_claim(release, settings.app_data["max"] * MIB, data, settings),
            describe_secret(release, token, {}),
            describe_deployment(release, settings),
            describe_service(release, asleep=False),
            describe_ingress(release, hosts, settings),
        ):
            api.put(PLURALS[described["kind"]], described)


async def register(store: Store, folder: Path, number: int) -> list[Wanted]:
    """Writes the records of accounts, of apps, and of what they serve."""
    found = []
    for name in (f"app-{each}" for each in range(number)):
        account = Account(id=f"acc_{name}", name=name, plan="max", createdAt="")
        app = App(id=name, name=name, account=account.id, build=Build(start="serve"), createdAt="")
        await store.client.set(account_key(account.id), msgspec.json.encode(account))
        await store.client.set(app_key(name), msgspec.json.encode(app))
        await store.client.sadd(account_apps_key(account.id), name)
        await enroll_app(store, app)
        wanted = Wanted(account.id, name, "live", "live", f"dep_{name}", releases={f"dep_{name}": RELEASE})
        await Records(store).write("", wanted, "")
        found.append(wanted)
        for deploy in (f"dep_{name}", f"dep_{name}_next"):
            archive = folder / archive_key(name, deploy)
            archive.parent.mkdir(parents=True, exist_ok=True)
            archive.write_bytes(b"x" * RELEASE.size)
    return found

"""Measures the worker that serves apps from Kubernetes: what it costs at rest, per event, and per deploy.

The worker runs alone on core 1, against a fake API server that lists, watches and applies. All apps are live and have a
start command; the pods answer from one server. With several numbers of apps, the columns show what grows with them. The
exit code is 1 if a deploy failed, but never because of a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent.parent))

from hosting import cpu_seconds, resident_mib
from rig import SCRATCH, free_port, redis_command

from gateway.accounts.records import Account, App, Build
from gateway.accounts.registry import enroll_app
from gateway.deploys.addresses import host_of, hosts_of
from gateway.deploys.release import Release, ReleaseArchive
from gateway.deploys.serving import Records, Step, Wanted
from gateway.keys import account_apps_key, account_key, app_key
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.kubeconfig import write_kubeconfig
from workers.engine.data_keeper import DataReport
from workers.hosting.archives import archive_key
from workers.kubernetes.data_pod import NONCE, PROOF, sign
from workers.kubernetes.objects import (
    APP_LABEL,
    Object,
    describe_claim,
    describe_deployment,
    describe_ingress,
    describe_secret,
    describe_service,
)
from workers.kubernetes.pod import DATA_PORT, WEB_PORT, PodRelease
from workers.sandbox.sandbox import MIB

APPS = (100, 1_000, 5_000)
SETTLE_SECONDS, REST_SECONDS = 20.0, 60.0
SETTLED_PER_SECOND = 40  # apps whose volumes the worker looks at after its start
EVENTS = 2_000
DEPLOYS = 10
DOMAIN = "apps.test"
KEY = "bench-encryption-key-of-no-value-0123456789"
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

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Object]] = {}  # by plural and name
        self._watches: dict[str, list[asyncio.Queue[bytes]]] = {}
        self._versions = itertools.count(1)
        self._version = "0"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        _, plural, name, *_ = [*request.path.partition("/namespaces/")[2].split("/"), "", ""]
        if request.method == "GET" and "watch" in request.query:
            return await self._watch(request, plural)
        if request.method == "GET":
            items = list(self._objects.get(plural, {}).values())
            return _json({"kind": "List", "metadata": {"resourceVersion": self._version}, "items": items})
        if request.method == "DELETE":
            self.delete(plural, name)
            return _json({"kind": "Status", "apiVersion": "v1"})
        return _json(self.put(plural, await request.json()))

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response, queue = web.StreamResponse(), asyncio.Queue[bytes]()
        await response.prepare(request)
        self._watches.setdefault(plural, []).append(queue)
        try:
            with suppress(ConnectionError):  # the worker has ended
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
        if plural == "deployments":
            self.put("pods", _make_pod(found)) if found["spec"]["replicas"] else self.delete("pods", name)
        return found

    def delete(self, plural: str, name: str) -> None:
        if (found := self._objects.get(plural, {}).pop(name, None)) is not None:
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
            "podIP": _address_of(template["metadata"]["labels"][APP_LABEL]),
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": name, **running} for name in names],
        },
    }


def _address_of(app_id: str) -> str:
    """Returns an address of this machine for each app, by which its pod is known."""
    number = int(app_id.removeprefix("app-")) + 1
    return f"127.1.{number >> 8}.{number & 255}"


def _json(found: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(found), content_type="application/json")


def fill(api: FakeApi, wanted: list[Wanted], settings: Settings) -> None:
    """Makes the objects of apps that are live."""
    for each in wanted:
        app = App(id=each.app, name=each.app, account=each.account, createdAt="")
        hosts = hosts_of(app, each.address, DOMAIN)
        archive = ReleaseArchive(RELEASE.digest, RELEASE.size)
        url = f"https://{host_of(app, each.address, DOMAIN)}"
        release = PodRelease(each.account, each.app, each.address, each.deploy, archive, url, RELEASE.runs)
        for described in (
            *describe_claim(release, settings.app_data["max"] * MIB, "token", settings),
            describe_secret(release, "token", {}),
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


async def visit(_: web.Request) -> web.Response:
    return web.Response(text="hello")


async def report_data(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    _, _, high, low = map(int, request.transport.get_extra_info("sockname")[0].split("."))
    name = f"app-{(high << 8 | low) - 1}"
    token = hmac.digest(KEY.encode(), f"data acc_{name} {name}".encode(), "sha256").hex()
    proof = sign(token, request.headers[NONCE], PROOF)
    if request.path == "/report":
        report = DataReport(used=MIB, full=False, held=False, stale=False, replacements=[])
        return web.Response(body=msgspec.json.encode(report), headers={PROOF: proof})
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    await socket.send_str(proof)
    for _ in range(2):  # no daily snapshot, because nothing has changed
        await socket.receive()
        await socket.send_json({})
    return socket


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int) -> AsyncIterator[None]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0" if port in (WEB_PORT, DATA_PORT) else "127.0.0.1", port).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def deploy(store: Store, wanted: Wanted) -> None:
    """Takes an app through the steps of a deploy, as a builder does. Raises RuntimeError."""
    records, next_deploy = Records(store), f"{wanted.deploy}_next"
    releases = {**wanted.releases, next_deploy: RELEASE}
    steps: tuple[Step, ...] = ("check", "canary", "live")
    for step in steps:
        text = (await records.read(wanted.account, wanted.app))["live"][0]
        now = Wanted(wanted.account, wanted.app, "live", step, next_deploy, wanted.deploy, releases)
        await records.write(text, now, "")
        ends = time.monotonic() + 60
        while (answer := await records.read_answer(now)) is None:
            if time.monotonic() > ends:
                raise RuntimeError(f"no answer to the step {step}")
            await asyncio.sleep(0.05)
        if not answer.ok:
            raise RuntimeError(f"{step}: {answer.reason}")


async def measure(folder: Path, number: int) -> None:
    redis_port, api_port = free_port(), free_port()
    redis = subprocess.Popen(redis_command(redis_port), cwd=folder, stdout=subprocess.DEVNULL)
    store = Store(f"redis://127.0.0.1:{redis_port}/0")
    settings = Settings(apps_domain=DOMAIN, kubernetes_image="capsule", data_dir=str(folder / "data"))
    api = FakeApi()
    try:
        while True:
            try:
                await store.client.ping()
                break
            except Exception:
                await asyncio.sleep(0.1)
        wanted = await register(store, folder / "storage", number)
        fill(api, wanted, settings)
        async with serving(api.answer, api_port), serving(visit, WEB_PORT), serving(report_data, DATA_PORT):
            environment = os.environ | {
                "KUBECONFIG": str(write_kubeconfig(folder, api_port)),
                "GATEWAY_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
                "GATEWAY_APPS_ENGINE": "kubernetes",
                "GATEWAY_APPS_DOMAIN": DOMAIN,
                "GATEWAY_KUBERNETES_IMAGE": "capsule",
                "GATEWAY_STORAGE_URL": (folder / "storage").as_uri(),
                "GATEWAY_DATA_DIR": settings.data_dir,
                "GATEWAY_ENCRYPTION_KEY": KEY,
                "GATEWAY_CANARY": "1",
                "GATEWAY_ALLOW_PRIVATE_ADDRESSES": "true",
            }
            log = (folder / "worker.log").open("w+")
            command = ["taskset", "-c", "1", sys.executable, "-m", "capsule_gateway", "worker", "sites"]
            worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                await report(store, api, wanted, worker.pid, folder / "worker.log")
            finally:
                worker.terminate()
                await asyncio.to_thread(worker.wait)
    finally:
        await store.close()
        redis.terminate()
        redis.wait()


async def report(store: Store, api: FakeApi, wanted: list[Wanted], pid: int, log: Path) -> None:
    began = time.monotonic()
    while '"sites.serving"' not in log.read_text():
        if time.monotonic() - began > 300:
            raise RuntimeError(f"the worker does not serve:\n{log.read_text()[-3_000:]}")
        await asyncio.sleep(0.2)
    start = cpu_seconds(pid)
    await asyncio.sleep(SETTLE_SECONDS + len(wanted) / SETTLED_PER_SECOND)
    used = cpu_seconds(pid)
    await asyncio.sleep(REST_SECONDS)
    rest = (cpu_seconds(pid) - used) / REST_SECONDS
    # Slowly, so that events are not read together.
    used = cpu_seconds(pid)
    for event in range(EVENTS):
        api.touch(event)
        await asyncio.sleep(0.005)
    await asyncio.sleep(1)
    event_ms = max(0.0, cpu_seconds(pid) - used - rest * (EVENTS * 0.006 + 1)) / EVENTS * 1_000
    used, began = cpu_seconds(pid), time.monotonic()
    for each in wanted[:DEPLOYS]:
        await deploy(store, each)
    waited = time.monotonic() - began
    deploy_ms = (cpu_seconds(pid) - used - rest * waited) / DEPLOYS * 1_000
    print(
        f"{len(wanted):>6,} apps: start {start:6.2f} s, at rest {rest * 100:5.2f} % of a core, "
        f"an event {event_ms:6.3f} ms, a deploy {deploy_ms:6.1f} ms ({waited / DEPLOYS:.1f} s), "
        f"{resident_mib(pid):,.0f} MiB",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", type=int, nargs="*", default=APPS, help="numbers of apps, by default 100 1000 5000")
    for number in parser.parse_args().apps:
        folder = SCRATCH / f"cluster-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "data").mkdir(parents=True)
        try:
            asyncio.run(measure(folder, number))
        except RuntimeError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

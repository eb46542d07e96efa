"""A Kubernetes inside the test: an API server over HTTP, and what controllers and nodes make of its objects.

| part | what it does |
| --- | --- |
| API server | `api_server.py` |
| controllers | make the pods of each Deployment, and replace them one by one when its template changes |
| nodes | run each pod at an address of its own: it takes its release, and then serves at the real ports |
| ingress | `visit` follows an Ingress to its Service, and that to the addresses of its EndpointSlices in turn |

While the API server is away, the controllers rest, and the ingress goes on.
"""

import asyncio
import base64
import contextlib
import copy
import hashlib
import ipaddress
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from gateway.deploys.pod_log import APP_CONTAINER
from tests.fakes.api_server import BORN, ApiServer
from tests.fakes.start_commands import END_SECONDS, Accept, StartCommands, ask, http_server
from tests.support.background import cancel
from workers.kubernetes.cluster import SERVICE_LABEL
from workers.kubernetes.objects import Object, object_name
from workers.kubernetes.places import CONTROLLER_LABEL, FROM_ENDPOINTS, FROM_PODS
from workers.kubernetes.pod import RECEIVE_PORT, RELAY_PORT, TOKEN, WEB_PORT, PodRelease

LOOK_SECONDS = 0.01  # between the rounds of the controllers
READY_SECONDS = 0.03  # after a pod answers, until Services lead to it
IDLE_SECONDS = 1_000.0  # that each pod has had no request, by its own word
# Every pod listens at the same ports, so the test runs of this machine must not have an address in common.
FIRST_ADDRESS = random.SystemRandom().randrange(1 << 16, 1 << 23)
ADDRESSES = (str(ipaddress.ip_address("127.0.0.0") + number) for number in itertools.count(FIRST_ADDRESS))


class FakeCluster(ApiServer):
    def __init__(self, commands: StartCommands) -> None:
        super().__init__()
        self.commands = commands
        self.deletion_seconds = 0.0  # that an object takes until it is gone
        self.pods: dict[str, FakePod] = {}
        self._visits = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Yields the port of the API server."""
        async with self.serving() as port:
            self.keep(self._control())
            try:
                yield port
            finally:
                self.away = True
                await cancel(*self._tasks, *(pod.task for pod in self.pods.values()))
                for pod in self.pods.values():
                    pod.close()

    def keep(self, work: Any) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _end(self, plural: str, name: str) -> None:
        if plural == "pods":
            self.pods[name].end()
        else:
            await asyncio.sleep(self.deletion_seconds)
            self.delete(plural, name)

    def delete(self, plural: str, name: str) -> None:
        super().delete(plural, name)
        if plural == "services":
            for others in ("endpoints", "endpointslices"):
                for _, other in [key for key in self.objects if key[0] == others and key[1].startswith(name)]:
                    self.delete(others, other)

    def clear(self) -> None:
        """Deletes everything."""
        for plural, name in [*self.objects]:
            if plural != "pods":  # whose end follows
                self.delete(plural, name)

    # -- controllers -----------------------------------------------------------------------------------------

    async def _control(self) -> None:
        while True:
            if not self.away:
                wanted = {name: each for (plural, name), each in self.objects.items() if plural == "deployments"}
                for name, deployment in wanted.items():
                    self._follow(name, deployment["spec"])
                for pod in self.pods.values():
                    if pod.owner not in wanted:
                        pod.end()
                for name in [name for plural, name in self.objects if plural == "services"]:
                    self._list_endpoints(name)
            await asyncio.sleep(LOOK_SECONDS)

    def _follow(self, name: str, spec: Object) -> None:
        pods = [pod for pod in self.pods.values() if pod.owner == name and not pod.is_ending]
        if not spec["replicas"]:
            for pod in pods:
                pod.end()
            return
        fresh = [pod for pod in pods if pod.template == spec["template"]]
        if not fresh:
            pod = FakePod(self, name, copy.deepcopy(spec["template"]))
            self.pods[pod.name] = pod
            self.note("pods", pod.describe(), "ADDED")
        elif fresh[0].is_ready:
            for pod in pods:
                if pod is not fresh[0]:
                    pod.end()

    def _list_endpoints(self, name: str) -> None:
        """Keeps the Endpoints and the EndpointSlice of a Service that has a selector, and copies those of one without.

        What they made stays when the Service has a selector no longer, or again, as in old clusters.
        """
        service = self.objects["services", name]
        if not (selector := service["spec"].get("selector")):
            subsets = self.objects.get(("endpoints", name), {}).get("subsets", [])
            return self._keep_slice(service, f"{name}-mirrored", FROM_ENDPOINTS, subsets)
        pods = [pod for pod in self.pods.values() if pod.is_ready and not pod.is_ending]
        addresses = [{"ip": pod.ip} for pod in pods if selector.items() <= pod.labels.items()]
        subsets = [{"addresses": addresses, "ports": [{"name": "http", "port": WEB_PORT}]}] if addresses else []
        found = self.objects.get(("endpoints", name))
        if found is None:
            head = {"name": name, "namespace": "apps", "uid": name, "labels": service["metadata"]["labels"]}
            self.note(
                "endpoints", {"apiVersion": "v1", "kind": "Endpoints", "metadata": head, "subsets": subsets}, "ADDED"
            )
        elif found["subsets"] != subsets:
            self.note("endpoints", {**found, "subsets": subsets})
        self._keep_slice(service, f"{name}-pods", FROM_PODS, subsets)

    def _keep_slice(self, service: Object, name: str, controller: str, subsets: list[Object]) -> None:
        ports = subsets[0]["ports"] if subsets else []
        endpoints = [{"addresses": [each["ip"]]} for part in subsets for each in part["addresses"]]
        labels = {SERVICE_LABEL: service["metadata"]["name"], CONTROLLER_LABEL: controller}
        head = {"name": name, "namespace": "apps", "uid": name, "labels": service["metadata"]["labels"] | labels}
        found = self.objects.get(("endpointslices", name))
        if found is None or (found["endpoints"], found["ports"]) != (endpoints, ports):
            fresh = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": head}
            fresh |= {"addressType": "IPv4", "endpoints": endpoints, "ports": ports}
            self.note("endpointslices", fresh, "MODIFIED" if found else "ADDED")

    def forget(self, pod: "FakePod") -> None:
        self.note("pods", self.objects.pop(("pods", pod.name)), "DELETED")
        del self.pods[pod.name]

    # -- ingress ---------------------------------------------------------------------------------------------

    async def visit(self, host: str) -> tuple[int, str]:
        for (plural, name), each in self.objects.items():
            if plural == "ingresses" and host in [rule["host"] for rule in each["spec"]["rules"]]:
                targets = self._find_targets(name)
                if not targets:
                    return 503, ""
                if url := self.objects.get(("secrets", name), {"data": {}})["data"].get(host):  # mounted into the pods
                    return 308, base64.b64decode(url).decode()
                self._visits += 1
                return await ask(await asyncio.open_connection(*targets[self._visits % len(targets)]), host)
        return 404, ""

    def _find_targets(self, name: str) -> list[tuple[str, int]]:
        return [
            (endpoint["addresses"][0], each["ports"][0]["port"])
            for (plural, _), each in self.objects.items()
            if plural == "endpointslices" and each["metadata"]["labels"][SERVICE_LABEL] == name
            for endpoint in each["endpoints"]
        ]


class FakePod:
    def __init__(self, cluster: FakeCluster, owner: str, template: Object) -> None:
        self._cluster, self.owner, self.template = cluster, owner, template
        self.ip, self.labels = next(ADDRESSES), template["metadata"]["labels"]
        self.name = f"{owner}-{self.ip.replace('.', '-')}"
        [variable] = template["spec"]["initContainers"][0]["env"]
        self.release = msgspec.json.decode(variable["value"], type=PodRelease)
        self.runs = any(each["name"] == APP_CONTAINER for each in template["spec"]["containers"])
        self.is_ready = self.is_ending = self._answers = self._has_ended = self._is_restarted = False
        self.task = asyncio.create_task(self._run())
        self._servers: list[asyncio.Server] = []

    def describe(self) -> Object:
        started: Object = {"running": {"startedAt": BORN}}
        common = {"image": "", "imageID": "", "restartCount": 0}
        received: Object = {"terminated": {"exitCode": 0}} if self._answers else started
        containers: list[Object] = []
        if self._answers:
            containers.append({"name": "web", "state": started, "ready": True, **common})
        if self._answers and self.runs:
            code = 3 if self._has_ended else 0
            over = self._has_ended or (self.is_ending and self.release.deploy not in self._cluster.commands.running)
            ended: Object = {"exitCode": code, "reason": "Error", "finishedAt": BORN, "containerID": self.name}
            state = {"terminated": ended} if over else started
            app = {"name": APP_CONTAINER, "state": state, "ready": not over, **common}
            containers.append(app | {"restartCount": int(self._has_ended or self._is_restarted)})
        head = {"name": self.name, "namespace": "apps", "uid": self.name, "creationTimestamp": BORN}
        metadata = {**self.template["metadata"], **head} | ({"deletionTimestamp": BORN} if self.is_ending else {})
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": self.template["spec"],
            "status": {
                "phase": "Running" if self._answers else "Pending",
                "podIP": self.ip,
                "conditions": [{"type": "Ready", "status": str(self.is_ready)}],
                "initContainerStatuses": [{"name": "release", "state": received, "ready": self._answers, **common}],
                "containerStatuses": containers,
            },
        }

    def _note(self) -> None:
        self._cluster.note("pods", self.describe())

    def end(self) -> None:
        if not self.is_ending:
            self.is_ending = True
            self._note()
            self.task.cancel()
            self._cluster.keep(self._stop())

    async def _stop(self) -> None:
        await asyncio.gather(self.task, return_exceptions=True)
        await asyncio.sleep(END_SECONDS)
        self.close()
        if self.runs:
            self._cluster.commands.end(self.release.deploy)
            self._note()
        self._cluster.forget(self)

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _listen(self, accept: Accept, port: int) -> None:
        server = await asyncio.start_server(accept, self.ip, port, start_serving=False)
        self._servers.append(server)  # before anything else is waited for, in which the pod may end
        await server.start_serving()

    async def _run(self) -> None:
        await self._receive()
        deploy, commands = self.release.deploy, self._cluster.commands
        if self.runs:
            commands.begin(deploy)
        await self._listen(http_server(self._serve), WEB_PORT)
        await self._listen(self._say_state, RELAY_PORT)
        self._answers = True
        self._note()
        await asyncio.sleep(READY_SECONDS)
        self.is_ready = True
        self._note()
        while not (self.runs and deploy in commands.ending):
            if deploy in commands.restarted and not self._is_restarted:
                self._is_restarted = True
                self._note()
            await asyncio.sleep(LOOK_SECONDS)
        commands.end(deploy)
        self._has_ended = True
        self._note()

    async def _serve(self, _: str, path: str) -> tuple[int, str]:
        deploy, commands = self.release.deploy, self._cluster.commands
        return (502, "") if self._has_ended or deploy in commands.elsewhere else commands.answer(deploy, path)

    async def _say_state(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            listening = self._cluster.commands.describe_listening(self.release.deploy)
            writer.write(b"%f\n%b\n" % (IDLE_SECONDS, listening))

    async def _receive(self) -> None:
        """Waits for the archive of the release, from who knows the token."""
        received = asyncio.Event()
        name = "secrets", object_name(self.release.deploy)
        while (secret := self._cluster.objects.get(name)) is None:  # as a kubelet waits for it
            await asyncio.sleep(LOOK_SECONDS)
        token = base64.b64decode(secret["data"][TOKEN]).decode()

        async def take(request: web.Request) -> web.Response:
            body, digest = await request.read(), request.query.get("digest", self.release.archive.digest)
            if request.headers["Authorization"] != f"Bearer {token}" or hashlib.sha256(body).hexdigest() != digest:
                return web.Response(status=409)
            if request.path == "/release":
                received.set()
            return web.Response(status=204)

        application = web.Application()
        application.router.add_put("/{path:.*}", take)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        assert runner.server is not None
        loop = asyncio.get_running_loop()
        server = await loop.create_server(runner.server, self.ip, RECEIVE_PORT, start_serving=False)
        try:  # before anything else is waited for, in which the pod may end
            await server.start_serving()
            await received.wait()
        finally:
            server.close()
            await runner.cleanup()

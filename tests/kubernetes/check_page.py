"""docs/kubernetes.md, followed from an empty cluster to an app, with the manifests as they are.

Only this is replaced:

- The images come from `image.py` instead of `docker build` and a registry, which this machine lacks. The node has them
  under the names that the page gives them.
- The domains are of this machine, because there is no DNS.
- `SIZE` fits the small node, and `OLDER` is what ops/kubernetes/README.md lists for a cluster as old as this one.
"""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.docs.pages import Run, Section, run, sections
from tests.kubernetes.addons import Ingress, Volumes, copy
from tests.kubernetes.cluster import OwnCluster
from tests.support.background import cancel, in_background
from tests.support.deployment import server
from tests.support.folders import passable_folder
from tests.support.redis_servers import RedisServer
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]

OPS = Path(__file__).parents[2] / "ops"
SECONDS = 600  # that a block may take
DOMAIN = "apps.localhost"
API_SERVICE = "10.96.0.1"
PASSWORD = "of-the-registry"
SIZE = """
  - target: { kind: Deployment }
    patch: "- { op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 10m }"
  - target: { kind: Deployment, name: webhooks|monitors }
    patch: "- { op: replace, path: /spec/replicas, value: 1 }"
  - target: { kind: HorizontalPodAutoscaler }
    patch: "- { op: replace, path: /spec/minReplicas, value: 1 }"
  - target: { kind: ConfigMap, name: capsule }
    patch: "- { op: replace, path: /data/GATEWAY_REDIS_WAIT, value: '0' }"
"""
OLDER = """
  - target: { kind: HorizontalPodAutoscaler }
    patch: "- { op: replace, path: /apiVersion, value: autoscaling/v2beta2 }"
  - target: { kind: PodDisruptionBudget }
    patch: |
      - { op: replace, path: /apiVersion, value: policy/v1beta1 }
      - { op: remove, path: /spec/unhealthyPodEvictionPolicy }
"""


class Reader:
    """Does what the page says, in a folder with a copy of ops/kubernetes."""

    def __init__(self, page: Section, cluster: OwnCluster, folder: Path) -> None:
        self.page, self.folder = page, folder
        path = os.pathsep.join(map(str, (cluster.binaries, Path(sys.executable).parent, os.environ["PATH"])))
        self._environment = {"PATH": path, "KUBECONFIG": str(cluster.kubeconfig)}
        shutil.copytree(OPS / "kubernetes", folder / "ops/kubernetes")

    async def follow(self, *known: str, given: str = "") -> str:
        """Runs the next block, with what the reader knows in place of each `…`. Returns its output."""
        block = self.page.take("sh")
        for text in known:
            block = block.replace("…", text, 1)
        assert "…" not in block
        done = await self.run(block, given=given)
        assert done.code == 0, f"{block}{done.out}{done.err}"
        return done.out

    async def run(self, script: str, seconds: float = SECONDS, given: str = "", **more: str) -> Run:
        environment = {**self._environment, **more}
        return await run("bash", "-euc", script, folder=self.folder, seconds=seconds, given=given, **environment)

    def change(self, file: str, changes: dict[str, str]) -> None:
        path = self.folder / "ops/kubernetes/mine" / file
        text = path.read_text()
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        path.write_text(text)


async def test_the_page_leads_from_an_empty_cluster_to_an_app(
    cluster: OwnCluster, kubectl: Path, ingress: Ingress, volumes: Volumes, tmp_path: Path
) -> None:
    api = f"http://localhost:{ingress.port}"
    page = sections("kubernetes.md", {"https://api.capsule.example": api})["From an empty cluster to an app"]
    reader = Reader(page, cluster, tmp_path)
    (tmp_path / "redis").mkdir()
    at_the_node = ("--bind", f"{cluster.address} 127.0.0.1", "--protected-mode", "no")
    with RedisServer("valkey", *at_the_node, folder=tmp_path / "redis") as redis:
        async with S3Server(tmp_path) as s3, ports_of_the_node(cluster, s3.port):
            try:
                await install(reader, cluster, redis, s3, api)
                async with building(reader, cluster):
                    await publish(reader, api)
                    await publish_server(reader, api)
                assert_pods_use_the_registry(cluster, "capsule-apps", "app.kubernetes.io/managed-by=capsule")
            finally:
                await reader.run("kubectl -n capsule logs --prefix -l app.kubernetes.io/part-of=capsule >pods.log")
                await reader.run("kubectl delete --ignore-not-found namespace capsule capsule-apps")
    assert not page.left


async def install(reader: Reader, cluster: OwnCluster, redis: RedisServer, s3: S3Server, api: str) -> None:
    build = r" *docker build --target \w+ --tag (\S+) --push \."
    for line in reader.page.take("sh").splitlines():
        [name] = re.fullmatch(build, line).groups()  # type: ignore[union-attr]
        cluster.name_image(name)
    await reader.follow()  # copies the example
    node = f"{cluster.address}/32"
    changes = {
        "https://api.capsule.example": api,
        "capsule-apps.example": f'{DOMAIN}\n  GATEWAY_APPS_URL: "{api.replace("localhost", "{host}")}"',
        "s3://capsule-production/apps": s3.environment["GATEWAY_STORAGE_URL"],
        "10.20.0.0/24": node,  # Redis
        "port: 6379": f"port: {redis.port}",
        "10.30.0.0/24": node,  # the API server
    }
    reader.change("addresses.yaml", changes)
    # The ingress controller of the tests is in the network of the node.
    reader.change("addresses.yaml", {"  GATEWAY_KUBERNETES_INGRESS_NAMESPACE: ingress-nginx": "#"})
    reader.change("ingress.yaml", {"api.capsule.example": "localhost"})
    reader.change(
        "kustomization.yaml",
        {"patches:": f"patches:{SIZE}{OLDER.rstrip()}", "  - ingress.yaml": "  - ingress.yaml\n  - storage.yaml"},
    )
    (reader.folder / "ops/kubernetes/mine/storage.yaml").write_text(yaml.safe_dump(allow(node, s3.port)))
    await reader.follow()
    await reader.follow("registry.capsule.example", "reader", PASSWORD)
    storage = {name: text for name, text in s3.environment.items() if name.startswith("AWS_")}
    storage["AWS_ENDPOINT_URL"] = f"http://{cluster.address}:{s3.port}"
    keys = {
        "redis-url": f"redis://{cluster.address}:{redis.port}",
        "encryption-key": "k" * 40,
        "operator-token": "t" * 40,
    }
    write_variables(reader.folder / "capsule.env", {**keys, "provider-key": "p" * 40})
    write_variables(reader.folder / "storage.env", storage)
    await reader.follow()
    assert_pods_use_the_registry(cluster, "capsule", "app.kubernetes.io/name in (gateway, sites)")
    checks = await reader.follow()
    assert re.search(r"\ncluster +ok +the worker sites has all rights", checks), checks


@contextlib.asynccontextmanager
async def building(reader: Reader, cluster: OwnCluster) -> AsyncIterator[None]:
    """Runs the builder, with the settings of the cluster."""
    settings = cluster.get("configmap", "capsule", "-n", "capsule")["data"]
    for line in (reader.folder / "storage.env").read_text().splitlines():
        name, _, settings[name] = line.partition("=")
    for line in (reader.folder / "capsule.env").read_text().splitlines():
        key, _, text = line.partition("=")
        if key in ("redis-url", "encryption-key"):
            settings[f"GATEWAY_{key.replace('-', '_').upper()}"] = text
    with passable_folder() as folder:
        command = f"exec {reader.page.take('sh').strip()} >builder.log 2>&1"
        async with in_background(
            reader.run(command, seconds=3_600, **settings, KUBECONFIG="", GATEWAY_DATA_DIR=str(folder))
        ):
            yield


def assert_pods_use_the_registry(cluster: OwnCluster, namespace: str, labels: str) -> None:
    pods = cluster.find("pods", namespace, labels)
    assert pods
    for pod in (each for each in pods if "deletionTimestamp" not in each["metadata"]):
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}], pod["metadata"]["name"]


async def publish(reader: Reader, api: str) -> None:
    created = await reader.follow()
    [key] = re.findall(r"csk_\S+", created)
    shown = await reader.follow(given=f"{key}\n")
    host = f"notes.{DOMAIN}"
    assert f"Live at {api.replace('localhost', host)} after" in shown
    async with httpx.AsyncClient(base_url=api, trust_env=False) as http:
        page = await http.get("/", headers={"Host": host})
        assert "<title>notes</title>" in page.text
        assert (await http.get("/platform/accounts")).status_code == 401
        for path in ("health", "ready", "metrics"):
            assert (await http.get(f"/{path}")).status_code == 502, "nothing is behind the Service"


async def publish_server(reader: Reader, api: str) -> None:
    """Also publishes an app with a start command: `sites` makes its volume, and reaches more ports of its pod."""
    (folder := reader.folder / "server").mkdir()
    files = {"capsule.toml": 'name = "server"\n[build]\nstart = "exec node server.js"\n', **server("from inside")}
    for name, text in files.items():
        (folder / name).write_text(text)
    done = await reader.run("capsule deploy server")
    assert done.code == 0, done.out + done.err
    async with httpx.AsyncClient(base_url=api, trust_env=False) as http:
        assert (await http.get("/", headers={"Host": f"server.{DOMAIN}"})).text == "from inside"


def write_variables(file: Path, variables: dict[str, str]) -> None:
    file.write_text("".join(f"{name}={text}\n" for name, text in variables.items()))


def allow(network: str, port: int) -> object:
    """Returns the policy that the storage needs, because its address is private."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "storage", "namespace": "capsule"},
        "spec": {
            "podSelector": {},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"ipBlock": {"cidr": network}}], "ports": [{"protocol": "TCP", "port": port}]}],
        },
    }


@contextlib.asynccontextmanager
async def ports_of_the_node(cluster: OwnCluster, storage: int) -> AsyncIterator[None]:
    """Lets pods reach the API server and the storage, which listen at 127.0.0.1."""
    async with (
        forwarded(cluster.address, 6443, cluster.ports["api"]),
        forwarded(cluster.address, storage, storage),
    ):
        with api_service(cluster.address, 6443):
            yield


@contextlib.asynccontextmanager
async def forwarded(address: str, port: int, target: int) -> AsyncIterator[None]:
    """Lets pods reach a port of 127.0.0.1 at an address of the node."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_target, to_target = await asyncio.open_connection("127.0.0.1", target)
        copying = [asyncio.create_task(copy(reader, to_target)), asyncio.create_task(copy(from_target, writer))]
        with contextlib.closing(writer), contextlib.closing(to_target):
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
            await cancel(*copying)

    async with await asyncio.start_server(forward, address, port):
        yield


@contextlib.contextmanager
def api_service(address: str, port: int) -> Iterator[None]:
    """Does for the Service of the API server what kube-proxy does."""
    rule = ["PREROUTING", "-d", API_SERVICE, "-p", "tcp", "--dport", "443", "-j", "DNAT"]
    rule += ["--to-destination", f"{address}:{port}"]
    subprocess.run(["iptables", "-t", "nat", "--wait", "--insert", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-t", "nat", "--wait", "--delete", *rule], check=True)

"""The service itself runs in the cluster, from ops/kubernetes/apps with other addresses and images, and serves apps."""

import asyncio
import base64
import contextlib
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.kubernetes.check_apps import START, find_sites, publish, server, serves
from tests.kubernetes.cluster import OwnCluster
from tests.kubernetes.conftest import ACCESS, MANIFESTS
from tests.kubernetes.image import NAME
from tests.kubernetes.ingress import copy
from tests.support.deployment import Host
from tests.support.kustomize import build, containers
from tests.support.polling import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

API_SERVICE = "10.96.0.1"
# What this old version of Kubernetes has instead. It also lacks some fields.
OLDER = {"autoscaling/v2": "autoscaling/v2beta2", "policy/v1": "policy/v1beta1"}


@contextlib.asynccontextmanager
async def forwarded(address: str, port: int, target: int) -> AsyncIterator[None]:
    """Lets pods reach a port of 127.0.0.1 at an address of the node."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_target, to_target = await asyncio.open_connection("127.0.0.1", target)
        with contextlib.closing(writer), contextlib.closing(to_target):
            await asyncio.wait(
                [asyncio.create_task(copy(reader, to_target)), asyncio.create_task(copy(from_target, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )

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


def overlay(settings: dict[str, str], address: str) -> list[Any]:
    """Returns the manifests with what an operator sets: images, addresses, settings and Secrets."""
    documents = [each for each in build(MANIFESTS) if each["kind"] not in ACCESS]
    for each in documents:
        each["apiVersion"] = OLDER.get(each["apiVersion"], each["apiVersion"])
        each.get("spec", {}).pop("unhealthyPodEvictionPolicy", None)
        for container in containers(each):
            container |= {"image": NAME, "imagePullPolicy": "IfNotPresent"}
            container["resources"]["requests"]["cpu"] = "10m"  # the node is small
        if each["kind"] == "ConfigMap":
            secret = ("GATEWAY_REDIS_URL", "GATEWAY_ENCRYPTION_KEY", "GATEWAY_DATA_DIR")
            each["data"] |= {name: text for name, text in settings.items() if name.startswith("GATEWAY_")}
            each["data"] = {name: text for name, text in each["data"].items() if name not in secret}
            each["data"]["GATEWAY_REDIS_WAIT"] = "0"  # the tests' Redis has no replica
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] in ("redis", "api-server"):
            each["spec"]["egress"][0]["to"] = [{"ipBlock": {"cidr": f"{address}/32"}}]
    storage = {name: text for name, text in settings.items() if name.startswith("AWS_")}
    secrets = {
        "capsule": {
            "redis-url": settings["GATEWAY_REDIS_URL"],
            "encryption-key": settings["GATEWAY_ENCRYPTION_KEY"],
            "operator-token": "t" * 40,
            "provider-key": "k" * 40,
        },
        "capsule-storage": storage,
    }
    for name, values in secrets.items():
        data = {key: base64.b64encode(text.encode()).decode() for key, text in values.items()}
        metadata = {"name": name, "namespace": "capsule"}
        documents.append({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    port = int(storage["AWS_ENDPOINT_URL"].rpartition(":")[2])
    egress = [{"to": [{"ipBlock": {"cidr": f"{address}/32"}}], "ports": [{"protocol": "TCP", "port": port}]}]
    spec = {"podSelector": {}, "policyTypes": ["Egress"], "egress": egress}
    metadata = {"name": "storage", "namespace": "capsule"}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
    return [*documents, policy]


async def test_the_service_runs_in_the_cluster_and_serves_apps(host: Host, running: Host, cluster: OwnCluster) -> None:
    own = find_sites(running)[0].environment
    local = [re.search(r"127\.0\.0\.1:(\d+)", own[name]) for name in ("GATEWAY_REDIS_URL", "AWS_ENDPOINT_URL")]
    redis, storage = (int(found[1]) for found in local if found)
    settings = {name: text.replace("127.0.0.1", cluster.address) for name, text in own.items()}
    settings["GATEWAY_REDIS_URL"] = settings["GATEWAY_REDIS_URL"].replace(f":{redis}", ":6379")

    def ready(name: str) -> int:
        found = cluster.get("deployment", name, "-n", "capsule")["status"]
        return int(found.get("readyReplicas", 0))

    for worker in find_sites(running):
        await worker.stop()
    async with (
        forwarded(cluster.address, 6379, redis),
        forwarded(cluster.address, 6443, cluster.ports["api"]),
        forwarded(cluster.address, storage, storage),
    ):
        with api_service(cluster.address, 6443):
            documents = overlay(settings, cluster.address)
            try:
                cluster.apply(documents)
                await wait_until(lambda: ready("sites"), 180)
                app = await host.app(build=START)
                await publish(host, app, server("from inside"))
                await serves(host, app, "from inside")
                for name in ("gateway", "webhooks", "monitors"):
                    await wait_until(lambda name=name: ready(name), 180)  # type: ignore[misc]
            finally:
                for each in documents:
                    if each["kind"] in ("Deployment", "NetworkPolicy"):
                        of = ("-n", each["metadata"]["namespace"], "--wait=false")
                        cluster.kubectl("delete", each["kind"], each["metadata"]["name"], "--ignore-not-found", *of)
                for worker in find_sites(running):
                    await worker.start()
    await serves(host, app, "from inside", 60)

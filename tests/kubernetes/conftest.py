"""A cluster with the roles of ops/kubernetes, an ingress, and a service whose apps run in it.

The gateway and the workers are processes of this machine, with the rights of their service accounts and no more.
KUBERNETES_CLUSTER names the kubeconfig of a cluster to use instead of an own one. Its nodes must have the image, and
this machine must reach its pods.
"""

import base64
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes import FakeProvider
from tests.fakes.receiver import FakeReceiver
from tests.kubernetes.addons import STORAGE_CLASS, Ingress, Policies, Volumes
from tests.kubernetes.cluster import Cluster, check_kubectl, find_binaries, running_cluster
from tests.kubernetes.image import NAME
from tests.support.deployment import Host, account_on, host_on
from tests.support.fixtures import folder_fixture
from tests.support.gateway_process import gateway_with_redis
from tests.support.kustomize import build
from tests.support.s3_server import S3Server

MANIFESTS = Path(__file__).parents[2] / "ops/kubernetes/apps"
NAMESPACE = "capsule-apps"
# Short intervals, so that no test waits long.
OFTEN = {
    "workers.builds.builder.TIDY_SECONDS": 0.3,
    "workers.engine.data.TIDY_SECONDS": 1.0,
    "workers.engine.reconciler.TIDY_SECONDS": 0.3,
    "workers.kubernetes.data.REPORT_SECONDS": 0.5,
}
ACCESS = {"Namespace", "ServiceAccount", "Role", "RoleBinding", "ResourceQuota"}

FROM_THIS_MACHINE = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "tests", "namespace": NAMESPACE},
    "spec": {
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"ipBlock": {"cidr": "172.16.0.0/12"}}]}],
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the page first, which begins with an empty cluster."""
    items.sort(key=lambda item: item.path.name != "check_page.py")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if given := os.environ.get("KUBERNETES_CLUSTER"):
        yield Cluster(Path(given))
    else:
        with running_cluster() as cluster:
            yield cluster


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """Returns a kubectl that can build the manifests."""
    found = Path("kubectl") if "KUBERNETES_CLUSTER" in os.environ else find_binaries() / "kubectl"
    check_kubectl(found)
    return found


@pytest.fixture(scope="session")
def admin(cluster: Cluster) -> str:
    """Returns the token of `tests`, which may do everything."""
    account = {"name": "tests", "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    binding = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "roleRef": role}
    documents: list[Any] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": dict(account)},
        {**binding, "metadata": {"name": "tests"}, "subjects": [{"kind": "ServiceAccount", **account}]},
        describe_token(account),
    ]
    if "KUBERNETES_CLUSTER" not in os.environ:
        documents.append(STORAGE_CLASS)
    cluster.apply(documents)
    return read_token(cluster, account)


@pytest.fixture(scope="session")
def tokens(cluster: Cluster) -> dict[str, str]:
    """Applies the manifests. Returns the token of each service account."""
    documents = [document for document in build(MANIFESTS) if document["kind"] in ACCESS]
    accounts = [each["metadata"] for each in documents if each["kind"] == "ServiceAccount"]
    documents += map(describe_token, accounts)
    if "KUBERNETES_CLUSTER" in os.environ:  # where this machine is none of the nodes, which reach all pods
        documents.append(FROM_THIS_MACHINE)
    cluster.apply(documents)
    return {account["name"]: read_token(cluster, account) for account in accounts}


def describe_token(account: dict[str, str]) -> dict[str, Any]:
    metadata = {**account, "annotations": {"kubernetes.io/service-account.name": account["name"]}}
    return {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token", "metadata": metadata}


def read_token(cluster: Cluster, account: dict[str, str]) -> str:
    """Waits until a controller has written the token."""
    deadline, of = time.monotonic() + 30, (account["name"], "-n", account["namespace"])
    while not (data := cluster.get("secret", *of).get("data", {})).get("token"):
        assert time.monotonic() < deadline, f"{account} has no token"
        time.sleep(0.1)
    return base64.b64decode(data["token"]).decode()


@folder_fixture
async def volumes(
    cluster: Cluster, admin: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Volumes | None]:
    """What provides the volumes of our own cluster."""
    if "KUBERNETES_CLUSTER" in os.environ:
        yield None
    else:
        async with Volumes(cluster.read_access()[0], admin, tmp_path_factory.mktemp("volumes")).running() as own:
            yield own


@folder_fixture
async def ingress(cluster: Cluster, admin: str) -> AsyncIterator[Ingress]:
    """The way to the pods, whose network policies hold."""
    server, _ = cluster.read_access()
    versions = cluster.kubectl("api-versions").split()
    slices = "v1" if "discovery.k8s.io/v1" in versions else "v1beta1"
    policies = Policies(server, admin, f"capsule-{os.getpid()}").running()
    if "KUBERNETES_CLUSTER" in os.environ:
        policies = contextlib.nullcontext()  # its network enforces them
    async with policies, Ingress(server, admin, slices=slices).running() as running:
        yield running


@folder_fixture
async def running(
    cluster: Cluster,
    tokens: dict[str, str],
    ingress: Ingress,
    volumes: Volumes | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Host]:
    """The service, with two `sites` workers, of which one is active. `apps_port` is the ingress's."""
    folder = tmp_path_factory.mktemp("service")
    storage = await S3Server(folder).start()
    for account, token in tokens.items():
        cluster.write_kubeconfig(folder / f"{account}.kubeconfig", token)
    settings = {
        **storage.environment,
        "GATEWAY_APPS_ENGINE": "kubernetes",
        "GATEWAY_KUBERNETES_NAMESPACE": NAMESPACE,
        "GATEWAY_KUBERNETES_IMAGE": NAME,
        "GATEWAY_CANARY": "0.5",
        "GATEWAY_APP_SLEEP": "free=4,starter=4",
        "GATEWAY_APP_PODS": "starter=2",
        "KUBECONFIG": str(folder / "gateway.kubeconfig"),
    }
    try:
        async with (
            FakeProvider() as provider,
            FakeReceiver() as receiver,
            gateway_with_redis(provider, folder, **settings) as gw,
            host_on(gw, receiver, ingress.port) as host,
        ):
            await host.worker("webhooks", "deploys", constants=OFTEN, KUBECONFIG="")
            for number in range(2):
                own = {
                    "KUBECONFIG": str(folder / "sites.kubeconfig"),
                    "GATEWAY_DATA_DIR": str(folder / f"sites-{number}"),
                }
                await host.worker("sites", joined=False, constants=OFTEN, **own)
            yield host
    finally:
        storage.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def host(running: Host) -> AsyncIterator[Host]:
    """A new account on the running service."""
    async with account_on(running) as host:
        yield host

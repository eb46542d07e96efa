"""A fake API server whose apps are live in the cluster, with their records: for what the worker costs."""

import hmac
from pathlib import Path

import msgspec

from gateway.accounts.records import Account, App, Build
from gateway.accounts.registry import enroll_app
from gateway.deploys.addresses import host_of, hosts_of
from gateway.deploys.release import Release, ReleaseArchive
from gateway.deploys.serving import Records, Wanted
from gateway.keys import account_apps_key, account_key, app_key
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.fakes.api_server import BORN, ApiServer
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
PLURALS = {
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Deployment": "deployments",
    "Secret": "secrets",
    "Service": "services",
    "Ingress": "ingresses",
    "Pod": "pods",
    "EndpointSlice": "endpointslices",
}


class FakeApi(ApiServer):
    """The API server, with controllers that make one ready pod of each Deployment at once."""

    def __init__(self, *, has_nodes: bool = True) -> None:
        """`has_nodes`: for pods."""
        super().__init__()
        self._has_nodes = has_nodes

    def note(self, plural: str, found: Object, kind: str = "MODIFIED") -> None:
        super().note(plural, found, kind)
        if plural == "deployments" and self._has_nodes:
            name = found["metadata"]["name"]
            if kind == "DELETED" or not found["spec"]["replicas"]:
                self.delete("pods", name)
            else:
                super().note("pods", _make_pod(found), "MODIFIED" if ("pods", name) in self.objects else "ADDED")

    def touch(self, number: int) -> None:
        """Changes the status of a pod, as a kubelet does."""
        pods = [each for (plural, _), each in self.objects.items() if plural == "pods"]
        pod = pods[number % len(pods)]
        pod["status"]["message"] = str(number)
        self.note("pods", pod)


def _make_pod(deployment: Object) -> Object:
    template, name = deployment["spec"]["template"], deployment["metadata"]["name"]
    names = [each["name"] for each in template["spec"]["containers"]]
    running = {"ready": True, "restartCount": 0, "image": "", "imageID": "", "state": {"running": {}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": name, "uid": name, "creationTimestamp": BORN},
        "spec": template["spec"],
        "status": {
            "phase": "Running",
            "podIP": address_of(template["metadata"]["labels"][APP_LABEL]),
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": each, **running} for each in names],
        },
    }


def address_of(app_id: str) -> str:
    """Returns an address of this machine for each app, by which its pod is known."""
    number = int(app_id.removeprefix("app-")) + 1
    return f"127.1.{number >> 8}.{number & 255}"


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

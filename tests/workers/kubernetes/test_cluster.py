"""The client of the cluster: what it tries again, and what it reports. The API server is a fake, over HTTP."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from lightkube.codecs import from_dict

from gateway.deploys.states import DeployError
from tests.support.background import in_background
from tests.support.kubeconfig import write_kubeconfig
from tests.support.live_apps import FakeApi as LiveApi
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from workers.kubernetes.cluster import WATCHED, Cluster

SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "app-1", "namespace": "apps"}, "spec": {}}
NO_RIGHT = 'services "app-1" is forbidden: User "system:serviceaccount:capsule:sites" cannot patch resource "services"'
QUOTA = 'services "app-1" is forbidden: exceeded quota: apps, requested: count/services=1'


class FakeApi:
    """Refuses each request with the next of the refusals, and then accepts all: `applied` has when, by name."""

    def __init__(self) -> None:
        self.refusals: list[tuple[int, str]] = []
        self.requests = 0
        self.applied: list[tuple[str, float]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.refusals:
            code, message = self.refusals.pop(0)
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
            return web.Response(body=json.dumps(status).encode(), status=code, content_type="application/json")
        if request.method != "PATCH":
            return web.json_response(SERVICE)
        applied = await request.json()
        self.applied.append((name := applied["metadata"]["name"], time.monotonic()))
        return web.json_response(applied | {"metadata": an_object("Service", name, 9_999)["metadata"]})

    @property
    def healed(self) -> list[str]:
        return [name for name, _ in self.applied]


@pytest_asyncio.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    api, port, application = FakeApi(), free_port(), web.Application()
    application.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    file = write_kubeconfig(tmp_path, port)
    monkeypatch.setenv("KUBECONFIG", str(file))
    yield api
    await runner.cleanup()


def client(**limits: float) -> Cluster:
    return Cluster("apps", first_pause_seconds=0.05, **limits)


async def test_an_api_server_that_has_just_started_knows_no_roles(api: FakeApi) -> None:
    api.refusals = [(503, "starting"), (401, "Unauthorized"), (403, NO_RIGHT), (403, NO_RIGHT)]
    async with client() as cluster:
        await cluster.apply(SERVICE)
        assert api.requests == 5
        api.refusals = [(403, NO_RIGHT)]
        await cluster.delete(("Service", "app-1"))
        assert api.requests == 7
        assert ("Service", "app-1") not in cluster.present, "before a watch says so"


async def test_a_full_quota_is_reported_at_once_and_a_right_that_is_missing_after_a_while(api: FakeApi) -> None:
    async with client(roles_seconds=0.3) as cluster:
        api.refusals = [(403, QUOTA)]
        with pytest.raises(DeployError, match="quota for apps is used up"):
            await cluster.apply(SERVICE)
        assert api.requests == 1
        api.refusals = [(403, NO_RIGHT)] * 100
        with pytest.raises(DeployError, match="refused to serve the app"):
            await cluster.apply(SERVICE)
    assert 3 <= api.requests <= 11


# -- what is known ---------------------------------------------------------------------------------------------


def an_object(kind: str, name: str, version: int, hosts: tuple[str, ...] = (), **labels: str) -> dict[str, Any]:
    groups = {**dict.fromkeys(("Ingress", "NetworkPolicy"), "networking.k8s.io/v1"), "Deployment": "apps/v1"}
    named = {"name": name, "namespace": "apps", "resourceVersion": str(version)}
    metadata = named | {"labels": {f"capsule/{key}": value for key, value in labels.items()}}
    spec = {"rules": [{"host": host} for host in hosts]} if kind == "Ingress" else {}
    return {"apiVersion": groups.get(kind, "v1"), "kind": kind, "metadata": metadata, "spec": spec}


# -- healing -----------------------------------------------------------------------------------------------------


def a_service(number: int, version: int, kind: str = "ClusterIP") -> Any:
    return from_dict(an_object("Service", f"app-{number}", version) | {"spec": {"type": kind}})


@pytest_asyncio.fixture
async def healing(api: FakeApi) -> AsyncIterator[Cluster]:
    """Keeps 300 Services, without watches."""
    async with client(heal_seconds=0.6, slice_seconds=0.1, heal_pause_seconds=0.3) as cluster:
        cluster._synced = set(WATCHED)
        for number in range(300):
            name = f"app-{number}"
            cluster._note(("Service", name), a_service(number, 1))
            await cluster.apply({**SERVICE, "metadata": {"name": name}, "spec": {"type": "ClusterIP"}})
        assert api.applied == []
        yield cluster


async def test_what_is_changed_or_deleted_is_healed(api: FakeApi, healing: Cluster) -> None:
    async with in_background(healing._keep_healing()):
        healing._note(("Service", "app-7"), a_service(7, 2, "NodePort"))
        healing._note(("Service", "app-8"), None)
        await wait_until(lambda: sorted(api.healed) == ["app-7", "app-8"])
        # Changed again at once by another writer: not at once, but not never.
        healing._note(("Service", "app-7"), a_service(7, 3, "NodePort"))
        await asyncio.sleep(0.1)
        assert len(api.applied) == 2
        await wait_until(lambda: sorted(api.healed) == ["app-7", "app-7", "app-8"])


def managed_by(manager: str, operation: str, *fields: str) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "fieldsV1": {f"f:{name}": {} for name in fields}}


PORTS = [{"name": "http", "port": 80}]


@pytest.mark.parametrize(
    ("kind", "part", "wanted", "fixed", "added"),
    [
        ("Service", "spec", {"ports": PORTS}, {"clusterIP": "10.0.0.7"}, {"externalIPs": ["203.0.113.9"]}),
        ("NetworkPolicy", "spec", {"podSelector": {"matchLabels": {"a": "b"}}}, {}, {"egress": [{}]}),
        ("Secret", "data", {"token": "eA=="}, {}, {"other.example": "eA=="}),
    ],
)
async def test_what_somebody_adds_is_taken_away(
    api: FakeApi, kind: str, part: str, wanted: Any, fixed: Any, added: Any
) -> None:
    own, status = managed_by("capsule", "Apply", part), managed_by("kube-controller-manager", "Update", "status")
    intruder = managed_by("kubectl-patch", "Update", part)
    found = an_object(kind, "app-1", 1) | {part: wanted | fixed}
    described = {**found, "metadata": {"name": "app-1"}, part: wanted}
    replaced: list[Any] = []

    async def replace(each: Any, **_: Any) -> Any:
        replaced.append(each.to_dict())
        return each

    async with client() as cluster:
        cluster._client.replace = replace  # type: ignore[method-assign,assignment]
        found["metadata"]["managedFields"] = [own, status]
        cluster._note((kind, "app-1"), from_dict(found))
        await cluster.apply(described)
        assert not replaced, "a controller may set the status"
        found["metadata"] |= {"managedFields": [own, status, intruder], "resourceVersion": "2"}
        found[part] |= added
        cluster._note((kind, "app-1"), from_dict(found))
        await cluster.apply(described)
    [present] = replaced
    assert present[part] == wanted | fixed
    assert present["metadata"]["resourceVersion"] == "2", "what has changed meanwhile is not overwritten"
    assert [each["manager"] for each in present["metadata"]["managedFields"]] == ["capsule", "kube-controller-manager"]


async def test_everything_is_compared_in_slices(api: FakeApi, healing: Cluster) -> None:
    """Finds what no event has told of."""
    for number in (0, 299):
        del healing.present["Service", f"app-{number}"]
    async with in_background(healing._keep_healing()):
        await wait_until(lambda: api.healed == ["app-0", "app-299"], 3)
    (_, first), (_, last) = api.applied
    assert last - first > 0.3


# -- watches ---------------------------------------------------------------------------------------------------


async def test_a_watch_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only when the API server does not remember that any more, the objects are listed again."""
    server = LiveApi()

    async def change(number: int) -> None:
        server.put("services", an_object("Service", "app-1", 0, app=str(number)))
        await wait_until(lambda: cluster.select("Service", app=str(number)))

    async with server.serving() as port:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, port)))
        async with client(watch_seconds=1, silence_seconds=0.1) as cluster, in_background(cluster.run()):
            await cluster.until_synced()
            for number in range(30):
                await change(number)
                await asyncio.sleep(0.05)
            assert server.requests == {"LIST": len(WATCHED)}
            server.oldest = 1_000_000
            await wait_until(lambda: server.requests["LIST"] > len(WATCHED))
            server.oldest = 0
            await change(30)

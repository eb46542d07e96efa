"""The client of the cluster: what it tries again, and what it reports. The API server is a fake, over HTTP."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from gateway.deploys.states import DeployError
from tests.support.redis_servers import free_port
from workers.kubernetes.cluster import Cluster

SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "app-1", "namespace": "apps"}, "spec": {}}
NO_RIGHT = 'services "app-1" is forbidden: User "system:serviceaccount:capsule:sites" cannot patch resource "services"'
QUOTA = 'services "app-1" is forbidden: exceeded quota: apps, requested: count/services=1'


class FakeApi:
    """Refuses each request with the next of the refusals, and then accepts all."""

    def __init__(self) -> None:
        self.refusals: list[tuple[int, str]] = []
        self.requests = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.refusals:
            code, message = self.refusals.pop(0)
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
            return web.Response(body=json.dumps(status).encode(), status=code, content_type="application/json")
        return web.Response(body=json.dumps(SERVICE).encode(), content_type="application/json")


@pytest_asyncio.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    api, port, application = FakeApi(), free_port(), web.Application()
    application.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    named: dict[str, Any] = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "x", **named}))
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.setattr("workers.kubernetes.cluster.FIRST_PAUSE_SECONDS", 0.05)
    yield api
    await runner.cleanup()


async def test_an_api_server_that_has_just_started_knows_no_roles(api: FakeApi) -> None:
    api.refusals = [(503, "starting"), (401, "Unauthorized"), (403, NO_RIGHT), (403, NO_RIGHT)]
    async with Cluster("apps") as cluster:
        await cluster.apply(SERVICE)
        assert api.requests == 5
        api.refusals = [(403, NO_RIGHT)]
        await cluster.delete(("Service", "app-1"))
        assert api.requests == 7


async def test_a_right_that_is_missing_is_reported(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.kubernetes.cluster.ROLES_SECONDS", 0.3)
    api.refusals = [(403, NO_RIGHT)] * 100
    async with Cluster("apps") as cluster:
        with pytest.raises(DeployError, match="refused to serve the app"):
            await cluster.apply(SERVICE)
    assert 2 <= api.requests <= 10


async def test_a_full_quota_is_reported_at_once(api: FakeApi) -> None:
    api.refusals = [(403, QUOTA)] * 2
    async with Cluster("apps") as cluster:
        with pytest.raises(DeployError, match="quota for apps is used up"):
            await cluster.apply(SERVICE)
    assert api.requests == 1

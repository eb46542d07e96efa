"""One worker of a cluster at a time follows the serving records, and asks the API server for nothing at rest."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.deploys.serving import Records
from gateway.keys import ENGINE_KEY, PODS_KEY
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.background import in_background
from tests.support.kubeconfig import write_kubeconfig
from tests.support.live_apps import FakeApi, fill, register
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, free_port
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy
from workers.engine.reconciler import Reconciler
from workers.kubernetes import run
from workers.kubernetes.activator import Activator
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.run import TakenOver

hold_engine = partial(run._hold_engine, namespace="apps", renewal_seconds=0.05)


async def test_a_worker_stands_by_until_no_other_is_the_engine(store: Store) -> None:
    async def follow(stopping: asyncio.Event) -> None:
        async with hold_engine(Records(store)) as lost:
            holders.append(stopping)
            await stopping.wait()
            assert not lost.done()

    holders: list[asyncio.Event] = []
    first, second = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(follow(first))
        await wait_until(lambda: holders == [first])
        group.create_task(follow(second))
        await asyncio.sleep(0.3)
        assert holders == [first]
        first.set()
        await wait_until(lambda: holders == [first, second])
        second.set()
    assert not await store.client.exists(ENGINE_KEY)
    async with hold_engine(Records(store)) as lost:
        await store.client.set(ENGINE_KEY, '{"id":"other","name":"another worker"}', px=5_000)
        with pytest.raises(TakenOver):
            await asyncio.wait_for(lost, 5)
    assert "another worker" in (await store.get(ENGINE_KEY) or ""), "one that was taken over takes nothing back"


async def test_an_outage_ends_no_engine(valkey: RedisServer, store: Store) -> None:
    """While Redis is away, nobody else can take it. Afterwards, it is renewed."""
    async with (
        Proxy(valkey.port) as proxy,
        opened(proxy.url) as own,
        hold_engine(Records(own)) as lost,
    ):
        proxy.go_down()
        await asyncio.sleep(0.3)
        await store.client.delete(ENGINE_KEY)
        proxy.down = False
        await wait_until(lambda: store.client.exists(ENGINE_KEY))
        assert not lost.done()
    assert not await store.client.exists(ENGINE_KEY)


# -- at rest ---------------------------------------------------------------------------------------------------

QUICK: dict[str, Any] = {
    "workers.engine.data.TIDY_SECONDS": 0.5,
    "workers.engine.data.TIDY_PAUSE_SECONDS": 0.0,
    "workers.kubernetes.data.REPORT_SECONDS": 0.5,
    "workers.kubernetes.run.Activator": partial(Activator, port=free_port(), look_seconds=0.2, check_seconds=0.5),
    "workers.kubernetes.run.Cluster": partial(Cluster, watch_seconds=1, silence_seconds=0.5),
    "workers.kubernetes.run.Reconciler": partial(Reconciler, tidy_seconds=0.2),
}


async def test_a_worker_follows_its_apps_and_asks_for_nothing_while_they_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch goes on where the last one ended."""
    for name, value in QUICK.items():
        monkeypatch.setattr(name, value)
    with RedisServer() as server:
        settings = Settings(
            apps_domain="apps.test",
            apps_engine="kubernetes",
            kubernetes_image="capsule",
            redis_url=server.url,
            data_dir=str(tmp_path / "data"),
            storage_url=(tmp_path / "storage").as_uri(),
            encryption_key="k" * 32,
        )
        async with opened(server.url) as store:
            fill(api := FakeApi(has_nodes=False), await register(store, tmp_path / "storage", 5), settings)
            async with api.serving() as port:
                monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, port)))
                async with in_background(run.run(settings)):
                    await wait_until(lambda: store.client.exists(PODS_KEY), 60)
                    await asyncio.sleep(1.0)
                    requests = api.requests.copy()
                    await asyncio.sleep(1.5)
                    assert api.requests == requests

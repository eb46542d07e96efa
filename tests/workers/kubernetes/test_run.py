"""One worker of a cluster at a time follows the serving records. At rest, many apps cost it no more than few."""

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.deploys.serving import Records
from gateway.keys import ENGINE_KEY, PODS_KEY
from gateway.redis.client import Store
from gateway.redis.errors import MappedClient, MappedPipeline
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

FEW, MANY = 5, 60
REST_SECONDS = 1.5
QUICK: dict[str, Any] = {
    "workers.engine.data.TIDY_SECONDS": 0.5,
    "workers.engine.data.TIDY_PAUSE_SECONDS": 0.0,
    "workers.kubernetes.data.REPORT_SECONDS": 0.5,
    "workers.kubernetes.run.Activator": partial(Activator, port=free_port(), look_seconds=0.2, check_seconds=0.5),
    "workers.kubernetes.run.Cluster": partial(Cluster, watch_seconds=1, silence_seconds=0.5),
    "workers.kubernetes.run.Reconciler": partial(Reconciler, tidy_seconds=0.2),
}


class Questions:
    """Counts what this process asks of Redis: commands and pipelines, each of which costs a round trip."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        for client, method in ((MappedClient, "execute_command"), (MappedPipeline, "execute")):
            monkeypatch.setattr(client, method, self._count(getattr(client, method)))

    def _count(self, ask: Any) -> Any:
        async def count(*args: Any, **options: Any) -> Any:
            self.number += 1
            return await ask(*args, **options)

        return count


async def rest(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Counter[str]]:
    """Returns how often a worker asks Redis and the API server while nothing happens to so many apps."""
    folder.mkdir()
    with RedisServer() as server:
        async with opened(server.url) as store:
            settings = Settings(
                apps_domain="apps.test",
                apps_engine="kubernetes",
                kubernetes_image="capsule",
                redis_url=server.url,
                data_dir=str(folder / "data"),
                storage_url=(folder / "storage").as_uri(),
                encryption_key="k" * 32,
            )
            fill(api := FakeApi(has_nodes=False), await register(store, folder / "storage", number), settings)
            async with api.serving() as port:
                monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(folder, port)))
                questions = Questions(monkeypatch)
                async with in_background(run.run(settings)):
                    await wait_until(lambda: store.client.exists(PODS_KEY), 60)
                    await asyncio.sleep(1.0)
                    asked, requests = questions.number, api.requests.copy()
                    await asyncio.sleep(REST_SECONDS)
                    return questions.number - asked, api.requests - requests


async def test_many_apps_at_rest_cost_no_more_questions_than_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in QUICK.items():
        monkeypatch.setattr(name, value)
    (few, of_few), (many, of_many) = [await rest(tmp_path / str(n), n, monkeypatch) for n in (FEW, MANY)]
    assert many < 2 * few
    assert of_few == of_many == Counter(), "a watch goes on where the last one ended"

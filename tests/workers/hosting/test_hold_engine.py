"""The engine that serves the apps: one host, which takes over from itself and from nobody else."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.deploys import serving
from gateway.deploys.serving import Holder, Records
from gateway.keys import APPS_FOLDER_KEY, ENGINE_KEY
from gateway.redis.client import Store
from tests.support.background import cancel, in_background
from tests.support.logs import captured
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.stores import opened
from workers.hosting import hold_engine
from workers.hosting.hold_engine import HostHold, ServedElsewhere

CLUSTER = Holder("worker", "a Kubernetes cluster (namespace apps)")


def hold_of(store: Store, host: str, *, shared: bool = True) -> HostHold:
    records = Records(store, "" if shared else host)
    return HostHold(records, Path("/data") / host, host, renewal_seconds=0.02, folder_poll_seconds=0.02)


async def test_one_host_serves_at_a_time(store: Store) -> None:
    first, again, other = (hold_of(store, host) for host in ("a", "a", "b"))
    await first.take()
    await again.take()  # the next worker on the same folder does not wait until the hold ends
    with pytest.raises(ServedElsewhere, match=r"served by the host \S+ \(data folder /data/a\).*docs/kubernetes.md"):
        await other.take()
    assert await Records(store).has_engine()
    await again.leave()
    assert not await Records(store).has_engine()
    await other.take()
    with pytest.raises(ServedElsewhere, match="/data/b"):
        await first.take()
    await first.leave()  # it is not its own
    assert await Records(store).has_engine()
    await other.leave()


async def test_a_host_is_told_when_a_cluster_has_taken_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HOLD_SECONDS", 0.2)
    hold = hold_of(store, "a")
    await hold.take()
    async with in_background(hold.keep()) as keeping:
        await asyncio.sleep(0.5)
        assert not keeping.done(), "it keeps the place"
        await store.client.set(ENGINE_KEY, msgspec.json.encode(CLUSTER), px=5_000)  # as if it had stood still
        await wait_until(keeping.done)
        with pytest.raises(ServedElsewhere, match="a Kubernetes cluster"):
            keeping.result()


async def test_without_redis_a_host_serves() -> None:
    async with opened(f"redis://127.0.0.1:{free_port()}/0") as store:
        hold = hold_of(store, "a")
        await hold.take()
        keeping = asyncio.create_task(hold.keep())
        await asyncio.sleep(0.1)
        assert not keeping.done()
        await hold.leave()
        await cancel(keeping)


async def test_a_host_without_the_apps_waits_until_they_are_gone(store: Store) -> None:
    had, empty = (hold_of(store, host, shared=False) for host in ("a", "b"))
    await had.take()
    with pytest.raises(ServedElsewhere):
        await empty.take()
    await had.leave()
    with captured(hold_engine) as lines:
        await empty.take()
        await empty.take()
    assert [line["event"] for line in lines] == ["sites.elsewhere"]
    assert empty.is_elsewhere
    assert await Records(store, "b").is_elsewhere()
    assert not await Records(store, "a").is_elsewhere()
    assert not await Records(store).has_engine()
    async with in_background(empty.keep()), in_background(empty.until_here()) as waiting:
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await store.client.delete(APPS_FOLDER_KEY)
        await wait_until(waiting.done)
    assert await Records(store).has_engine()
    await empty.leave()

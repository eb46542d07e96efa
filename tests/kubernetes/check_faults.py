"""Kills parts of the cluster and of the service during deploys: visitors notice nothing, and no event comes twice."""

import pytest

from tests.kubernetes.check_apps import app_id, find_sites, publish, server, serves, until_live, visitors
from tests.kubernetes.check_data import add, counter
from tests.kubernetes.cluster import OwnCluster
from tests.kubernetes.conftest import NAMESPACE
from tests.support.deployment import START, Host
from tests.support.polling import wait_until

LOST = "node.kubernetes.io/out-of-service"

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("part", ["api", "controllers", "scheduler", "kubelet"])
async def test_a_killed_part_of_the_cluster(host: Host, cluster: OwnCluster, part: str) -> None:
    app = await host.app(build=START)
    await publish(host, app, server("one"))
    # A kubelet that starts counts its pods as not ready until it has probed them.
    async with visitors(host, app, {"one", "two"}, may_miss=part == "kubelet") as seen:
        cluster.kill(part)
        coming = await host.publish(app, server("two"))
        await host.in_state(coming, "checking")
        before = seen["one"]
        await wait_until(lambda: seen["one"] > before + 300, 60)  # served meanwhile
        cluster.start(part)
        await until_live(host, coming, 180)
    await serves(host, app, "two")
    assert [event for event, _ in await host.events(coming)] == ["deploy.succeeded"]


async def test_data_stay_when_their_node_is_lost_for_a_while(host: Host, cluster: OwnCluster) -> None:
    """An operator gives the node up. A cluster with one node alone would wait for it for ever."""
    app = await host.app(build=START)
    await publish(host, app, counter("one"))
    await add(host, app, 3)
    own = await app_id(host, app)

    def evicted() -> bool:
        pods = cluster.find("pods", NAMESPACE, f"capsule/app={own}")
        return any("deletionTimestamp" in pod["metadata"] for pod in pods)

    cluster.kill("kubelet")
    cluster.kubectl("taint", "nodes", "--all", f"{LOST}=yes:NoExecute")
    try:
        await wait_until(evicted, 60)
    finally:
        cluster.start("kubelet")
        cluster.kubectl("taint", "nodes", "--all", f"{LOST}-")
    await serves(host, app, "one 3", 180)
    await add(host, app, 1)
    assert await host.call("GET", f"/account/apps/{app}/crashes") == []


@pytest.mark.parametrize("state", ["checking", "canary"])
async def test_the_other_worker_takes_over(host: Host, running: Host, state: str) -> None:
    app = await host.app(build=START)
    await publish(host, app, server("one"))
    async with visitors(host, app, {"one", "two"}):
        for worker in find_sites(running):
            coming = await host.publish(app, server("two"))
            await host.in_state(coming, state)
            worker.kill()  # each in turn, so one of them was active
            await until_live(host, coming)
            await worker.start()
            assert [event for event, _ in await host.events(coming)] == ["deploy.succeeded"]

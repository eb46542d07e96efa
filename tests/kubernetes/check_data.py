"""What stays of apps on a real cluster: their data, and they themselves while they sleep or a part of it is killed.

The contracts in `tests/workers/engine` say what each command does, and what a killed worker leaves.
"""

import asyncio
import io
import tarfile
from typing import Any

import pytest

from tests.kubernetes.addons import Volumes
from tests.kubernetes.check_apps import (
    app_id,
    delete,
    find,
    find_sites,
    get,
    publish,
    queue_preview,
    server,
    serves,
    until_live,
    visitors,
)
from tests.kubernetes.cluster import Cluster, OwnCluster
from tests.kubernetes.conftest import NAMESPACE
from tests.support.deployment import START, Host
from tests.support.polling import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

# Appends to a file, and says how often it has done so.
COUNTER = """
const fs = require('fs')
const file = process.env.DATA_DIR + '/visits'
require('http').createServer((request, answer) => {
  if (request.url === '/add') fs.appendFileSync(file, 'x')
  answer.end('TEXT ' + (fs.existsSync(file) ? fs.readFileSync(file).length : 0))
}).listen(process.env.PORT)
"""


def counter(text: str) -> dict[str, str]:
    return {"server.js": COUNTER.replace("TEXT", text)}


async def add(host: Host, app: str, times: int) -> None:
    for _ in range(times):
        assert (await get(host, app, "/add")).status_code == 200


async def show(host: Host, app: str) -> Any:
    return await host.call("GET", f"/account/apps/{app}/data")


async def test_data_stay_over_deploys_and_are_restored(host: Host, cluster: Cluster) -> None:
    app = await host.app(build=START)
    await publish(host, app, counter("one"))
    await add(host, app, 3)
    snapshot = await host.call("POST", f"/account/apps/{app}/data/snapshots")
    await add(host, app, 2)
    await publish(host, app, counter("two"))
    await serves(host, app, "two 5")
    pod = find(cluster, "pods", await app_id(host, app))[0]
    cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--wait=false")
    await serves(host, app, "two 5", 60)
    archive = await host.account.get(f"/account/apps/{app}/data/snapshots/{snapshot['id']}")
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert tar.extractfile("visits").read() == b"xxx"  # type: ignore[union-attr]
    restored = await host.call("POST", f"/account/apps/{app}/data/restore", json={"snapshotId": snapshot["id"]})
    await until_live(host, restored["deployId"])
    await serves(host, app, "two 3", 30)
    data = await wait_until(lambda: show(host, app), 10, holds=lambda data: data["state"] == "running")
    assert data["usedBytes"] > 1000
    assert {each["reason"] for each in data["snapshots"]} == {"manual", "deploy", "restore"}
    own = await app_id(host, app)
    await delete(host, cluster, app)
    assert own in {each["appId"] for each in await host.call("GET", "/account/data/deleted")}


async def test_a_preview_has_an_empty_folder(host: Host, cluster: Cluster) -> None:
    app = await host.app(build=START)
    await publish(host, app, counter("one"))
    await add(host, app, 2)
    await until_live(host, await queue_preview(host, app))
    assert (await get(host, f"{app}-preview")).text == "one 0"
    assert len(find(cluster, "persistentvolumeclaims", await app_id(host, app))) == 1


async def test_too_much_data_stops_the_app_until_they_are_cleared(host: Host, cluster: Cluster) -> None:
    app = await host.app(build=START)
    await publish(host, app, counter("one"))
    await wait_until(lambda: show(host, app), 10, holds=lambda data: data["state"] == "running")
    limit = (await show(host, app))["limitBytes"]
    [claim] = find(cluster, "persistentvolumeclaims", await app_id(host, app))
    volume = cluster.get("persistentvolume", claim["spec"]["volumeName"])["spec"]["hostPath"]["path"]
    with open(f"{volume}/files/large", "wb") as file:
        file.truncate(limit + 1)
    data = await wait_until(lambda: show(host, app), 20, holds=lambda data: data["state"] == "full")
    assert "so the app is stopped" in data["problem"]
    await wait_until(lambda: get(host, app), 20, holds=lambda answer: answer.status_code >= 500)
    assert (await host.account.call("DELETE", f"/account/apps/{app}/data")).status_code == 204
    await serves(host, app, "one 0", 60)
    [crash] = await host.call("GET", f"/account/apps/{app}/crashes")
    assert crash["reason"] == "exit"


async def test_a_volume_that_is_lost_begins_with_the_newest_snapshot(host: Host, cluster: Cluster) -> None:
    """As does one of an app that comes from another engine."""
    app = await host.app(build=START)
    await publish(host, app, counter("one"))
    await add(host, app, 3)
    await host.call("POST", f"/account/apps/{app}/data/snapshots")
    await add(host, app, 1)
    [claim] = find(cluster, "persistentvolumeclaims", own := await app_id(host, app))
    [pod] = find(cluster, "pods", own)
    cluster.kubectl("delete", "pvc", claim["metadata"]["name"], "-n", NAMESPACE, "--wait=false")
    cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--wait=false")
    await serves(host, app, "one 3", 90)
    # The container has started again for the new files, so the cluster may count its pod as not ready for a moment.
    await wait_until(lambda: get(host, app, "/add"), 20, holds=lambda answer: answer.status_code == 200)
    await serves(host, app, "one 4")


async def test_a_claim_without_a_volume_fails_the_deploy_with_the_reason(host: Host, volumes: Volumes | None) -> None:
    assert volumes is not None, "the test needs a cluster of its own"
    app = await host.app(build=START)
    volumes.paused = True
    try:
        deploy = await host.in_state(await host.publish(app, counter("one")), "failed", "live", timeout=240)
    finally:
        volumes.paused = False
    assert deploy["state"] == "failed"
    assert "there is no volume for its data" in deploy["error"]
    await publish(host, app, counter("two"))


# -- parts of the cluster and of the service are killed ------------------------------------------------------


LOST = "node.kubernetes.io/out-of-service"


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


# -- sleep ---------------------------------------------------------------------------------------------------


async def sleeps(host: Host, cluster: Cluster, app: str) -> None:
    own = await app_id(host, app)

    async def asleep() -> bool:
        data: Any = await host.call("GET", f"/account/apps/{app}/data")
        return data["state"] == "asleep" and not find(cluster, "pods", own)

    await wait_until(asleep, 90)


async def test_an_app_sleeps_and_its_first_requests_wake_it(host: Host, running: Host, cluster: Cluster) -> None:
    plan = {"plan": "starter"}  # the only one whose apps sleep here
    assert (await host.gateway.platform("PATCH", f"accounts/{host.account.id}", plan)).is_success
    app = await host.app(build=START)
    await publish(host, app, server("one"))
    await sleeps(host, cluster, app)
    for answer in await asyncio.gather(*(get(host, app) for _ in range(8))):
        assert (answer.status_code, answer.text) == (200, "one")
    assert await host.page(app) == "one"
    assert await host.call("GET", f"/account/apps/{app}/crashes") == []
    await sleeps(host, cluster, app)
    for worker in find_sites(running):  # the next one's activator is elsewhere
        worker.kill()
        await worker.start()
    await wait_until(lambda: get(host, app), 60, holds=lambda answer: answer.text == "one")
    await sleeps(host, cluster, app)
    snapshot = await host.account.call("POST", f"/account/apps/{app}/data/snapshots")
    assert snapshot.status_code == 404, snapshot.text  # it has no files; a pod beside the app has looked
    await publish(host, app, server("two"))
    await serves(host, app, "two")
    await sleeps(host, cluster, app)
    await delete(host, cluster, app)


@pytest.mark.timeout(900)
async def test_a_preview_sleeps_as_apps_of_the_free_plan_do(host: Host, cluster: Cluster) -> None:
    app = await host.app(build=START)  # of the plan `max`, whose apps never sleep
    own = await app_id(host, app)
    await publish(host, app, server("one"))
    await until_live(host, await queue_preview(host, app))

    def addresses() -> list[str]:
        """Returns the addresses of the app's pods."""
        return sorted(each["metadata"]["labels"]["capsule/address"] for each in find(cluster, "pods", own))

    await wait_until(addresses, 90, holds=lambda found: found == ["live"])
    await serves(host, f"{app}-preview", "one", 90)
    assert addresses() == ["live", "preview"]
    await wait_until(addresses, 90, holds=lambda found: found == ["live"])


# It does not start while another process of it runs.
LOCKED = """
const fs = require('fs'), lock = process.env.DATA_DIR + '/lock'
fs.mkdirSync(lock)
process.on('SIGTERM', () => { fs.rmdirSync(lock); process.exit(0) })
require('http').createServer((request, answer) => answer.end('TEXT')).listen(process.env.PORT)
"""
ALONE = '[build]\nstart = "exec node server.js"\noverlap = false\n'


async def test_releases_that_must_not_overlap_are_swapped_without_a_failed_request(host: Host) -> None:
    app = await host.app(build=START)

    def files(text: str) -> dict[str, str]:
        return {"capsule.toml": ALONE, "server.js": LOCKED.replace("TEXT", text)}

    await publish(host, app, files("one"))
    async with visitors(host, app, {"one", "two"}) as seen:
        await publish(host, app, files("two"))
        await wait_until(lambda: seen["two"] > 10, 30)
        failing = await host.in_state(
            await host.publish(app, {**files("three"), "server.js": "process.exit(7)"}), "failed", "live", timeout=120
        )
        assert failing["error"].startswith("health: the start command ended with status 7; the data from before")
        before = seen["two"]
        await wait_until(lambda: seen["two"] > before + 10, 60)

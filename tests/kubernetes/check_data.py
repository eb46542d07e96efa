"""The data of apps on a real cluster: kept, copied, restored, bounded and forgotten.

The contract in `tests/workers/engine/test_data.py` says what each command does, and what a killed worker leaves.
"""

import io
import tarfile
from typing import Any

import pytest

from tests.kubernetes.check_apps import app_id, delete, find, get, publish, queue_preview, serves, until_live
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import NAMESPACE
from tests.kubernetes.volumes import Volumes
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

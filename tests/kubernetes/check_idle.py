"""Apps that nobody asks sleep, and the first request wakes them, on a real cluster.

How previews make room for live addresses, `test_driver_contract.py` says.
"""

import asyncio
from typing import Any

import pytest

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
from tests.kubernetes.cluster import Cluster
from tests.support.deployment import START, Host
from tests.support.polling import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


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

"""Deploys on one host whose worker is killed, whose machine loses power, or whose Redis is away, at each step."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from gateway.keys import APPS_FOLDER_KEY, ENGINE_KEY, partition_tag, served_apps_key, serving_key
from tests.support.deployment import Host
from tests.support.folders import kill_caddies, passable_folder
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

SOON = {"GATEWAY_WEBHOOK_CLAIM_IDLE": "3"}
OFTEN = {"workers.builds.builder.TIDY_SECONDS": 0.3, "workers.engine.reconciler.TIDY_SECONDS": 0.3}
# It listens after a while, so that a deploy stays in each state for some time.
SERVER = """
const server = require('http').createServer((_, answer) => answer.end('{}'))
setTimeout(() => server.listen(process.env.PORT), {})
"""


def files(text: str, after_ms: int = 0) -> dict[str, str]:
    return {"server.js": SERVER.replace("{}", text, 1).replace("{}", str(after_ms), 1)}


def lose_power(host: Host) -> None:
    """Kills every process of the machine: the worker, Caddy, and the keepers with their apps."""
    running = host.gateway.data_folder / "running"
    keepers = [msgspec.json.decode(path.read_bytes())["keeper"] for path in running.glob("*.state")]
    host.workers[-1].kill()
    kill_caddies(host.gateway.data_folder)
    for keeper in keepers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGKILL)


async def find_page(host: Host, app: str) -> str:
    """Returns the page; empty while no server answers."""
    with contextlib.suppress(httpx.TransportError):
        return await host.page(app)
    return ""


def what_is_left(folder: Path) -> dict[str, list[str]]:
    """Of a worker that has not made its folders yet, nothing is left."""
    found = {
        "builds": [path for name in ("builds", "built", "fetched") for path in folder.glob(f"{name}/*")],
        "releases": [*(folder / "releases").glob("*/*/dep_*")],
        "archives": [*(folder / "archives").glob("*/*.tar.gz")],
        "running": [path for path in folder.glob("running/*") if path.is_symlink()],
        "marks": [path for name in ("canary", "held") for path in (folder / "releases").glob(f"*/*/{name}")],
    }
    return {kind: sorted({path.name.partition(".")[0] for path in paths}) for kind, paths in found.items()}


@pytest.mark.parametrize("state", ["building", "checking", "canary"])
@pytest.mark.parametrize("fault", ["the worker is killed", "the power fails"])
async def test_the_same_release_serves_and_nothing_is_left(own: Host, fault: str, state: str) -> None:
    app = await own.app(build={"command": "sleep 1.5", "start": "exec node server.js"})
    await own.worker("deploys", constants=OFTEN, GATEWAY_CANARY="60")
    good = await own.publish(app, files("good"))
    await own.in_state(good, "canary")
    await own.workers[-1].stop()
    await own.worker("deploys", constants=OFTEN)
    ended = await own.over(good)
    assert ended["state"] == "live", ended
    await own.workers[-1].stop()
    await own.worker("deploys", constants=OFTEN, GATEWAY_CANARY="60")
    coming = await own.publish(app, files("coming", 1_500))
    await own.in_state(coming, state)
    if fault == "the power fails":
        lose_power(own)
        await asyncio.to_thread(own.gateway.redis.freeze)  # it comes back last
    else:
        own.workers[-1].kill()
    try:
        await own.worker("deploys", joined=False, constants=OFTEN, **SOON)
        expected = {"good", "coming"} if state == "canary" else {"good"}
        await wait_until(lambda: find_page(own, app), 20, holds=lambda text: text in expected)
    finally:
        await asyncio.to_thread(own.gateway.redis.thaw)
    failed = await own.over(coming)
    assert (failed["state"], failed["error"].partition(": ")[2]) == (
        "failed",
        "the worker stopped during the deploy; deploy again",
    )
    ended = await wait_until(lambda: own.deploy(coming), holds=lambda deploy: "Failed: " in deploy["log"])
    assert ended["log"].splitlines()[-1] == f"Failed: {failed['error']}"
    await wait_until(lambda: find_page(own, app), 10, holds=lambda text: text == "good")
    folder = own.gateway.data_folder
    only_good = {"builds": [], "releases": [good], "archives": [good], "running": [good], "marks": []}
    await wait_until(lambda: what_is_left(folder), 10, holds=lambda found: found == only_good)


@pytest.mark.parametrize("state", ["building", "checking", "canary"])
async def test_an_outage_of_redis_fails_no_deploy(own: Host, state: str) -> None:
    """It is longer than an engine holds its place, and longer than the builder waits for a host."""
    short = {"gateway.deploys.serving.HOLD_SECONDS": 3.0, "workers.builds.rollout.NO_HOST_SECONDS": 4.0}
    often = {"workers.hosting.hold_engine.RENEWAL_SECONDS": 0.5}
    app = await own.app(build={"command": "sleep 1", "start": "exec node server.js"})
    worker = await own.worker("deploys", "webhooks", constants={**short, **often}, GATEWAY_CANARY="2")
    await wait_until(lambda: "sites.serving" in worker.log, 60)
    deploy = await own.publish(app, files("page", 1_500))
    await own.in_state(deploy, state)
    await asyncio.to_thread(own.gateway.redis.freeze)
    await asyncio.sleep(8)
    await asyncio.to_thread(own.gateway.redis.thaw)
    ended = await own.over(deploy)
    assert ended["state"] == "live", ended
    assert await own.page(app) == "page"
    assert [event for event, _ in await own.events(deploy)] == ["deploy.succeeded"]


async def test_a_release_whose_record_redis_has_lost_is_served_until_a_deploy_replaces_it(own: Host) -> None:
    app, account = await own.app(), own.account.id
    await own.worker("deploys")
    assert (await own.over(await own.publish(app, {"index.html": "first"})))["state"] == "live"
    await wait_until(lambda: not what_is_left(own.gateway.data_folder)["marks"])
    await own.workers[-1].stop()
    with own.gateway.redis.client() as client:
        assert client.delete(serving_key(account, app), served_apps_key(partition_tag(account))) == 2
    await own.worker("deploys")
    failed = await own.over(await own.publish(app, {"other.html": "bad"}))
    assert failed["state"] == "failed"
    assert await own.page(app) == "first"
    assert (await own.over(await own.publish(app, {"index.html": "second"})))["state"] == "live"
    assert await own.page(app) == "second"


@pytest.fixture
def other_folder() -> Iterator[Path]:
    with passable_folder() as folder:
        yield folder


async def test_a_machine_without_the_apps_stands_by_until_an_operator_says_that_they_are_gone(
    own: Host, other_folder: Path
) -> None:
    app = await own.app()
    await own.worker("deploys")
    first = await own.publish(app, {"index.html": "first"})
    assert (await own.over(first))["state"] == "live"
    elsewhere = {"GATEWAY_DATA_DIR": str(other_folder), "GATEWAY_APPS_LISTEN": f"127.0.0.1:{free_port()}"}
    own.workers[0].kill()
    with own.gateway.redis.client() as client:
        await wait_until(lambda: not client.exists(ENGINE_KEY), 20)
    other = await own.worker("deploys", joined=False, **elsewhere)
    await wait_until(lambda: "deploys.elsewhere" in other.log and "sites.elsewhere" in other.log, 20)
    coming = await own.publish(app, {"index.html": "second"})
    await asyncio.sleep(3)
    assert (await own.deploy(coming))["state"] == "queued"
    assert await own.page(app) == "first"
    with own.gateway.redis.client() as client:
        assert client.delete(APPS_FOLDER_KEY)
    ended = await own.over(coming)
    assert ended["error"] == "build: the stored source was removed; publish it again", "it was in the former folder"
    await other.stop()

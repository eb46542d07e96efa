"""Deploys where builders and the host of the apps are machines of their own, with one Redis and one storage, and on one
host whose worker is killed, whose machine loses power, or whose Redis is away, at each step.
"""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock

import httpx
import msgspec
import pytest
import pytest_asyncio

from gateway.cancellation import end_if_canceled
from gateway.deploys.serving import Holder, Records, StepAnswer
from gateway.keys import APPS_FOLDER_KEY
from gateway.settings import Settings
from tests.fakes import FakeProvider
from tests.support.background import in_background
from tests.support.deployment import BUILD, START, Host, hosting, live, packed, page, server
from tests.support.folders import kill_caddies, passable_folder
from tests.support.gateway_process import Gateway
from tests.support.logs import captured
from tests.support.machines import QUICK, Machine, empty_host, sharing_gateway, start, until_served
from tests.support.polling import wait_until
from tests.support.s3_server import SECRET, S3Server
from tests.support.stores import opened
from workers.builds import rollout

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway() -> AsyncIterator[Gateway]:
    async with sharing_gateway() as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def host(gateway: Gateway) -> AsyncIterator[Host]:
    async with empty_host(gateway) as host:
        yield host


@pytest_asyncio.fixture(loop_scope="session")
async def on_s3() -> AsyncIterator[tuple[Host, S3Server]]:
    with passable_folder() as folder, passable_folder() as stored:
        async with (
            S3Server(stored) as s3,
            FakeProvider() as provider,
            hosting(provider, folder, **s3.environment) as host,
        ):
            host.gateway.confidential.add(SECRET)
            yield host, s3


async def test_deploys_of_every_kind_with_s3(on_s3: tuple[Host, S3Server]) -> None:
    host, s3 = on_s3
    machine = await start(host)
    app, runs = await host.app(build=BUILD), await host.app(build=START)
    secret = secrets.token_hex(8)
    host.gateway.confidential.add(secret)
    await host.call("PUT", f"/account/apps/{runs}/env", json={"TEXT": secret})
    first = await live(host, app, page("first", "echo to the log;"))
    assert "to the log" in (await host.deploy(first))["log"]
    assert await machine.page(app) == "first"
    await live(host, runs, server("' + process.env.TEXT + '"))
    assert await machine.page(runs) == secret
    preview = (await host.gateway.platform("POST", f"apps/{app}/deploys", {"kind": "preview"})).json()["deployId"]
    assert (await host.over(preview))["state"] == "live"
    await live(host, app, page("second"))
    assert await machine.page(app) == "second"
    rollback = await host.call("POST", f"/account/apps/{app}/rollback", json={"deployId": first})
    back = await host.over(rollback["deployId"])
    assert (back["state"], back["release"]) == ("live", first), back
    assert await machine.page(app) == "first"
    promoted = await host.over((await host.call("POST", f"/account/deploys/{preview}/promote"))["deployId"])
    assert (promoted["state"], promoted["release"]) == ("live", preview), promoted
    coming = await host.publish(app, page("third", "echo begun; sleep 2;"))
    await wait_until(lambda: host.deploy(coming), holds=lambda deploy: "begun" in deploy["log"])
    async with s3.refusing("507 Insufficient Storage", "XMinioStorageFull"):
        failed = await host.over(coming)
    assert failed["error"] == "build: the disk of the service is full; deploy again later"
    assert failed["nextStep"]["text"].startswith("The service failed")
    assert not list((host.gateway.folder / "builder" / "releases").glob("*/*/dep_*")), "a builder keeps no release"
    assert await machine.page(app) == "first"
    assert (await host.gateway.platform("DELETE", f"apps/{app}")).status_code == 204
    await until_served(machine, app, "404")


@contextlib.asynccontextmanager
async def phantom(host: Host, app: str, *steps: str, failure: StepAnswer | None = None) -> AsyncIterator[None]:
    """Simulates a host that answers only these steps, and has no good probe in a canary. Or it fails the canary."""
    holder = Holder("phantom", "a test")

    async def haunt(records: Records) -> None:
        while True:
            end_if_canceled()
            await records.hold_engine(holder)
            for _, wanted in (await records.read(host.account.id, app)).values():
                if wanted.step == "canary" and failure is not None:
                    await records.write_answer(wanted, msgspec.structs.replace(failure, token=wanted.token))
                elif wanted.step in (*steps, "undo"):
                    await records.write_answer(wanted, StepAnswer(wanted.token, True))
            await asyncio.sleep(0.05)

    async with opened(host.gateway.environment["GATEWAY_REDIS_URL"]) as store:
        records = Records(store)
        try:
            async with in_background(haunt(records)):
                yield
        finally:
            await records.leave_engine(holder)


BAD_PAGE = StepAnswer("", False, "GET / returned 500", served=True)
FULL = StepAnswer("", False, "the cluster is full; deploy again later", served=True, service_fault=True)


@pytest.mark.parametrize(
    ("steps", "failure", "error"),
    [
        (None, None, "health: no host serves apps; is a `sites` worker running?"),
        ([], None, "health: the release was not fetched and checked in time"),
        (["check", "canary"], None, "canary: no request of the canary has been answered"),
        (["check"], BAD_PAGE, "canary: GET / returned 500"),
        (["check"], FULL, "canary: the cluster is full; deploy again later"),
    ],
)
async def test_each_step_waits_for_its_answer(
    host: Host, monkeypatch: pytest.MonkeyPatch, steps: list[str] | None, failure: StepAnswer | None, error: str
) -> None:
    for name in ("STEP_SECONDS", "NO_HOST_SECONDS"):
        monkeypatch.setitem(QUICK, f"workers.builds.rollout.{name}", 2.0)
    await Machine(host, "builder").start("deploys")
    app = await host.app(build=BUILD)
    async with contextlib.nullcontext() if steps is None else phantom(host, app, *steps, failure=failure):
        failed = await host.over(await host.publish(app, page("bad")))
    assert (failed["state"], failed["error"]) == ("failed", error), failed
    assert failed["nextStep"]["text"].startswith("The service failed") == (failure != BAD_PAGE)


async def test_an_outage_of_the_storage_delays_deploys_and_stops_no_app(host: Host) -> None:
    folder = host.gateway.folder
    machine = await start(host)
    app = await host.app(build=BUILD)
    first = await live(host, app, page("first"))
    coming = await host.publish(app, page("second", "echo begun; sleep 1;"))
    await host.in_state(coming, "building")
    (folder / "storage").rename(folder / "elsewhere")
    answer = await host.account.call("PUT", f"/account/apps/{app}/source", content=packed(page("x")))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "STORAGE_UNAVAILABLE")
    assert await host.gateway.answers("/ready")
    assert "storage does not answer" in (await host.deploy(first))["log"]
    await wait_until(lambda: "storage.failed" in "".join(worker.log for worker in host.workers), 20)
    assert (await host.deploy(coming))["state"] == "building"
    # A host that restarts without Redis and storage serves its present releases.
    await machine.worker.stop()
    await asyncio.to_thread(host.gateway.redis.freeze)
    try:
        await machine.start("sites")
        assert await machine.page(app) == "first"
    finally:
        await asyncio.to_thread(host.gateway.redis.thaw)
    (folder / "elsewhere").rename(folder / "storage")
    assert (await host.over(coming))["state"] == "live"
    await until_served(machine, app, "second")


async def test_builders_share_the_queue_and_take_over_from_a_dead_builder(host: Host) -> None:
    soon = {"GATEWAY_WEBHOOK_CLAIM_IDLE": "5"}
    other = await Machine(host, "other").start("deploys", **soon)
    machine = await Machine(host, "one").start("deploys", "sites", **soon)  # one process, one data folder
    slow = [await host.publish(await host.app(build=BUILD), page("x", "sleep 60;")) for _ in range(4)]

    async def building() -> list[str]:
        return [deploy for deploy in slow if (await host.deploy(deploy))["state"] == "building"]

    await wait_until(building, 20, holds=lambda found: len(found) == 4)
    app = await host.app(build=BUILD)
    behind = await host.publish(app, page("behind"))
    other.worker.kill()

    async def two_failed() -> bool:
        return [(await host.deploy(deploy))["state"] for deploy in slow].count("failed") == 2

    await wait_until(two_failed, 40)
    for deploy in await building():
        await host.call("POST", f"/account/deploys/{deploy}/cancel")
    assert (await host.over(behind))["state"] == "live"
    assert await machine.page(app) == "behind"
    assert "sites.fetched" not in machine.worker.log, "the release was already there"


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
    app = await own.app(build={"command": "sleep 1", **START})
    worker = await own.worker("deploys", "webhooks", constants={**short, **often}, GATEWAY_CANARY="2")
    await wait_until(lambda: "sites.serving" in worker.log, 60)
    deploy = await own.publish(app, files("page", 1_500))
    await own.in_state(deploy, state)
    await asyncio.to_thread(own.gateway.redis.freeze)
    await asyncio.sleep(8)
    await asyncio.to_thread(own.gateway.redis.thaw)
    assert (await own.over(deploy))["state"] == "live"
    assert await own.page(app) == "page"
    assert [event for event, _ in await own.events(deploy)] == ["deploy.succeeded"]


async def test_a_builder_without_the_apps_waits_until_an_operator_says_that_they_are_gone(
    redis_url: str, tmp_path: Path
) -> None:
    async with opened(redis_url) as store:
        await Records(store, "another folder").hold_engine(Holder("phantom", "a test"))
        builder = rollout.Rollout(Settings(data_dir=str(tmp_path)), store, *[AsyncMock()] * 4)
        with captured(rollout) as lines:
            async with (
                contextlib.AsyncExitStack() as stack,
                in_background(stack.enter_async_context(builder.open())) as joining,
            ):
                await wait_until(lambda: lines)
                assert not joining.done()
                await store.client.delete(APPS_FOLDER_KEY)
                await wait_until(joining.done)
        assert [line["event"] for line in lines] == ["deploys.elsewhere"]

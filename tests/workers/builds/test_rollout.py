"""Deploys where builders and the host of the apps are machines of their own, with one Redis and one storage."""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.cancellation import end_if_canceled
from gateway.deploys.serving import Holder, Records, StepAnswer
from tests.fakes import FakeProvider
from tests.support.background import in_background
from tests.support.deployment import BUILD, START, Host, hosting, live, packed, page, server
from tests.support.folders import passable_folder
from tests.support.gateway_process import Gateway
from tests.support.machines import QUICK, Machine, empty_host, sharing_gateway, start, until_served
from tests.support.polling import wait_until
from tests.support.s3_server import SECRET, S3Server
from tests.support.stores import opened

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
async def s3() -> AsyncIterator[S3Server]:
    with passable_folder() as folder:
        async with S3Server(folder) as server:
            yield server


@pytest_asyncio.fixture(loop_scope="session")
async def s3_host(s3: S3Server) -> AsyncIterator[Host]:
    with passable_folder() as folder:
        async with FakeProvider() as provider, hosting(provider, folder, **s3.environment) as host:
            host.gateway.confidential.add(SECRET)
            yield host


async def test_deploys_of_every_kind_with_s3(s3_host: Host) -> None:
    host, folder = s3_host, s3_host.gateway.folder
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
    back = await host.over(
        (await host.call("POST", f"/account/apps/{app}/rollback", json={"deployId": first}))["deployId"]
    )
    assert (back["state"], back["release"]) == ("live", first), back
    assert await machine.page(app) == "first"
    promoted = await host.over((await host.call("POST", f"/account/deploys/{preview}/promote"))["deployId"])
    assert (promoted["state"], promoted["release"]) == ("live", preview), promoted
    assert not list((folder / "builder" / "releases").glob("*/*/dep_*")), "a builder keeps no release"
    assert (await host.gateway.platform("DELETE", f"apps/{app}")).status_code == 204
    await until_served(machine, app, "404")


async def test_a_host_that_stands_still_in_a_canary_does_not_fail_it(host: Host) -> None:
    machine = await start(host, GATEWAY_CANARY="5")
    app = await host.app(build=BUILD)
    deploy = await host.publish(app, page("first"))
    await host.in_state(deploy, "canary")
    assert machine.worker is not None
    with machine.worker.paused():
        await asyncio.sleep(3.5)
    ended = await host.over(deploy)
    assert ended["state"] == "live", ended


@contextlib.asynccontextmanager
async def phantom(
    host: Host, app: str, *steps: str, failure: str = "", service_fault: bool = False, good_after: float = math.inf
) -> AsyncIterator[None]:
    """Simulates a host that answers only these steps, and has no good probe in a canary until `good_after` seconds.

    Or it fails the canary at once.
    """
    holder, begun = Holder("phantom", "a test"), dict[str, float]()

    async def haunt(records: Records) -> None:
        while True:
            end_if_canceled()
            await records.hold_engine(holder)
            for _, wanted in (await records.read(host.account.id, app)).values():
                if wanted.step == "canary" and failure:
                    answer = StepAnswer(wanted.token, False, failure, served=True, service_fault=service_fault)
                    await records.write_answer(wanted, answer)
                elif wanted.step in (*steps, "undo"):
                    since = time.monotonic() - begun.setdefault(wanted.token, time.monotonic())
                    answer = StepAnswer(wanted.token, True, good_probes=int(since > good_after))
                    await records.write_answer(wanted, answer)
            await asyncio.sleep(0.05)

    async with opened(host.gateway.environment["GATEWAY_REDIS_URL"]) as store:
        records = Records(store)
        try:
            async with in_background(haunt(records)):
                yield
        finally:
            await records.leave_engine(holder)


LATE = "the release was not fetched and checked in time"


@pytest.mark.parametrize(
    ("steps", "failure", "service_fault", "error"),
    [
        (None, "", True, "health: no host serves apps; is a `sites` worker running?"),
        ([], "", True, f"health: {LATE}"),
        (["check"], "", True, f"health: {LATE}"),
        (["check", "canary"], "", True, "canary: no request of the canary has been answered"),
        (["check"], "GET / returned 500", False, "canary: GET / returned 500"),
        (["check"], "the cluster is full; deploy again later", True, "canary: the cluster is full; deploy again later"),
    ],
)
async def test_each_step_waits_for_its_answer(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[str] | None,
    failure: str,
    service_fault: bool,
    error: str,
) -> None:
    for name in ("STEP_SECONDS", "NO_HOST_SECONDS"):
        monkeypatch.setitem(QUICK, f"workers.builds.rollout.{name}", 2.0)
    await Machine(host, "builder").start("deploys")
    app = await host.app(build=BUILD)
    answering = {"failure": failure, "service_fault": service_fault}
    async with contextlib.nullcontext() if steps is None else phantom(host, app, *steps, **answering):
        failed = await host.over(await host.publish(app, page("bad")))
    assert (failed["state"], failed["error"]) == ("failed", error), failed
    assert failed["nextStep"]["text"].startswith("The service failed") == service_fault


async def test_a_host_that_takes_a_canary_over_may_need_long_until_its_first_probe(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(QUICK, "workers.builds.rollout.NO_HOST_SECONDS", 1.0)
    await Machine(host, "builder").start("deploys")
    app = await host.app(build=BUILD)
    async with phantom(host, app, "check", "canary", good_after=5):
        ended = await host.over(await host.publish(app, page("first")))
    assert ended["state"] == "live", ended


async def test_a_deploy_fails_soon_whose_address_is_ended(host: Host) -> None:
    """Nothing answers its step any more, and the app's next deploys wait for it."""
    await Machine(host, "builder").start("deploys")
    app = await host.app(build=BUILD)
    async with phantom(host, app), opened(host.gateway.environment["GATEWAY_REDIS_URL"]) as store:
        deploy = await host.publish(app, page("first"))
        records = Records(store)
        await wait_until(lambda: records.read(host.account.id, app))
        await records.end(host.account.id, app, "live")
        failed = await host.over(deploy)
    assert (failed["state"], failed["error"]) == (
        "failed",
        "health: what was to be served was replaced or removed meanwhile; deploy again",
    )


async def test_a_deploy_fails_soon_on_a_full_storage(s3_host: Host, s3: S3Server) -> None:
    host = s3_host
    machine = await start(host)
    app = await host.app(build=BUILD)
    await live(host, app, page("first"))
    coming = await host.publish(app, page("second", "echo begun; sleep 2;"))
    await wait_until(lambda: host.deploy(coming), holds=lambda deploy: "begun" in deploy["log"])
    async with s3.refusing("507 Insufficient Storage", "XMinioStorageFull"):
        failed = await host.over(coming)
    assert (failed["state"], failed["error"]) == (
        "failed",
        "build: the disk of the service is full; deploy again later",
    )
    assert failed["nextStep"]["text"].startswith("The service failed")
    assert await machine.page(app) == "first"


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

"""Deploys where builders and the host of the apps are machines of their own, with one Redis and one storage."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.cancellation import end_if_canceled
from gateway.deploys.serving import Holder, Records, StepAnswer
from gateway.keys import partition_tag, served_apps_key, serving_key
from tests.fakes import FakeProvider
from tests.support.background import in_background
from tests.support.deployment import BUILD, START, Host, hosting, live, packed, page, server
from tests.support.folders import passable_folder
from tests.support.gateway_process import Gateway
from tests.support.machines import QUICK, Machine, empty_host, sharing_gateway, start, until_served
from tests.support.polling import wait_until
from tests.support.s3_server import SECRET, S3Server
from tests.support.sandbox import require_control_groups
from tests.support.stores import opened
from workers.hosting.release_files import read_release_manifest

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
async def s3_host() -> AsyncIterator[Host]:
    with passable_folder() as folder:
        async with (
            S3Server(folder) as storage,
            FakeProvider() as provider,
            hosting(provider, folder, **storage.environment) as host,
        ):
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
async def phantom(host: Host, app: str, *steps: str, failure: str = "") -> AsyncIterator[None]:
    """Simulates a host that answers only these steps, and has no good probe in a canary, or fails it at once."""
    holder = Holder("phantom", "a test")

    async def haunt(records: Records) -> None:
        while True:
            end_if_canceled()
            await records.hold_engine(holder)
            for _, wanted in (await records.read(host.account.id, app)).values():
                if wanted.step == "canary" and failure:
                    await records.write_answer(wanted, StepAnswer(wanted.token, False, failure, served=True))
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


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([], "the release was not fetched and checked in time"),
        (["check"], "the release was not fetched and checked in time"),
        (["check", "canary"], "no request of the canary has been answered"),
    ],
)
async def test_each_step_waits_for_its_answer(
    host: Host, monkeypatch: pytest.MonkeyPatch, steps: list[str], error: str
) -> None:
    monkeypatch.setitem(QUICK, "workers.builds.engine.STEP_SECONDS", 2.0)
    monkeypatch.setitem(QUICK, "workers.builds.engine.NO_HOST_SECONDS", 2.0)
    await Machine(host, "builder").start("deploys")
    app = await host.app(build=BUILD)
    async with phantom(host, app, *steps):
        failed = await host.over(await host.publish(app, page("bad")))
    assert (failed["state"], failed["error"].partition(": ")[2]) == ("failed", error), failed


async def test_without_a_host_a_deploy_fails(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUICK, "workers.builds.engine.NO_HOST_SECONDS", 1.0)
    await Machine(host, "builder").start("deploys")
    failed = await host.over(await host.publish(await host.app(build=BUILD), page("bad")))
    assert failed["error"] == "health: no host serves apps; is a `sites` worker running?"


async def test_a_host_that_fails_at_once_fails_the_canary_and_not_the_swap(host: Host) -> None:
    await Machine(host, "builder").start("deploys")
    app = await host.app(build=BUILD)
    async with phantom(host, app, "check", failure="GET / returned 500"):
        failed = await host.over(await host.publish(app, page("bad")))
    assert failed["error"] == "canary: GET / returned 500"


async def test_a_damaged_archive_is_never_served_and_an_empty_host_serves_everything(host: Host) -> None:
    folder = host.gateway.folder
    one = await start(host)
    apps = [await host.app(build=BUILD) for _ in range(3)]
    deploys = [await live(host, app, page(app)) for app in apps]
    truncated, exchanged, _ = archives = [
        folder / "storage" / "archives" / a / f"{d}.tar.gz" for a, d in zip(apps, deploys, strict=True)
    ]
    whole = [path.read_bytes() for path in archives]
    truncated.write_bytes(whole[0][:-10])
    exchanged.write_bytes(whole[2])
    assert one.worker is not None
    assert await one.worker.stop() == 0
    empty = await Machine(host, "empty").start("sites")
    assert [await empty.page(app) for app in apps] == ["404", "404", apps[2]]
    assert empty.worker.log.count("the archive of the release is damaged") >= 2
    # A new release replaces one that could not be served, and a damaged record does not affect the others.
    with host.gateway.redis.client() as client:
        client.hset(serving_key(host.account.id, "broken"), "live", "{")
        client.zadd(served_apps_key(partition_tag(host.account.id)), {"broken": 1e14})
    await live(host, apps[1], page(apps[1]))
    assert await empty.page(apps[1]) == apps[1]
    for path, text in zip(archives, whole, strict=True):
        path.write_bytes(text)
    for app in apps:
        await until_served(empty, app, app)


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


async def test_a_rollback_brings_the_manifest_of_its_release_back(host: Host) -> None:
    """The builder keeps no release, and every host finds the manifest in the archive."""
    machine = await start(host)
    app = await host.app()
    manifest = '[build]\nstart = "exec node server.js"\noverlap = false\n[auth]\nkind = "jwks"\nurl = "/{}"\n'
    first = await live(host, app, {**server("first"), "capsule.toml": manifest.format("keys")})
    await live(host, app, {**server("second"), "capsule.toml": manifest.format("more")})
    settings = await host.call("GET", f"/account/apps/{app}/settings")
    assert settings["auth"]["url"] == "/more"
    back = await host.call("POST", f"/account/apps/{app}/rollback", json={"deployId": first})
    assert (await host.over(back["deployId"]))["state"] == "live"
    settings = await host.call("GET", f"/account/apps/{app}/settings")
    assert settings["auth"]["url"] == "/keys"
    assert await machine.page(app) == "first"
    found = [read_release_manifest(release) for release in machine.folder.glob("releases/*/live/dep_*")]
    assert [manifest.overlap for manifest in found if manifest is not None] == [False] * 3


async def test_a_domain_is_served_as_soon_as_it_is_verified(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host tidies the addresses only now and then; it hears of changes."""
    monkeypatch.setitem(QUICK, "workers.engine.reconciler.TIDY_SECONDS", 60.0)
    machine = await start(host)
    app, domain = await host.app(build=BUILD), f"{secrets.token_hex(6)}.example.org"
    await live(host, app, page("shop"))

    async def read_page() -> str:
        answer = await host.web.get(f"http://127.0.0.1:{machine.port}/", headers={"Host": domain})
        return answer.text.strip() if answer.status_code == 200 else ""

    for fields, expected in (({"customDomain": domain, "customDomainVerified": True}, "shop"), ({}, "")):
        record = {"account": host.account.id, "build": BUILD, **fields}
        assert (await host.gateway.platform("PUT", f"apps/{app}", record)).is_success
        await wait_until(read_page, 2, holds=lambda found, expected=expected: found == expected)


# Counts the POST requests in its data.
COUNTER = """
const fs = require('fs'), file = process.env.DATA_DIR + '/count'
const read = () => fs.existsSync(file) ? Number(fs.readFileSync(file, 'utf8')) : 0
require('http').createServer((request, response) => {
  if (request.method === 'POST') fs.writeFileSync(file, String(read() + 1))
  response.end('count ' + read())
}).listen(process.env.PORT)
"""


async def test_the_service_moves_to_another_host_and_back(host: Host) -> None:
    """Each host goes on with the last snapshot of the one before, also where it has older files of its own."""
    require_control_groups()
    one, two = await start(host), Machine(host, "two")
    app, pages = await host.app(build=START), await host.app(build=BUILD)
    await live(host, app, {"server.js": COUNTER})
    await live(host, pages, page("pages"))
    assert await count(one, app) == "count 1"
    await until_refused(two, app)
    for number, (former, now) in enumerate([(one, two), (two, one)], start=2):
        assert former.worker is not None
        assert await former.worker.stop(60) == 0
        snapshots = (await host.call("GET", f"/account/apps/{app}/data"))["snapshots"]
        assert [each["reason"] for each in snapshots].count("stop") == 1
        await now.start("sites")
        await until_served(now, app, f"count {number - 1}", 30)
        assert await now.page(pages) == "pages"
        assert await count(now, app) == f"count {number}"
        # A worker that starts where the apps were ends what has gone on there.
        assert await former.page(app) == f"count {number - 1}"
        await until_refused(former, app)
    # Cleared data stay cleared.
    assert (await host.account.call("DELETE", f"/account/apps/{app}/data")).status_code == 204
    await until_served(one, app, "count 0", 30)
    assert one.worker is not None
    assert await one.worker.stop(60) == 0
    await two.start("sites")
    await until_served(two, app, "count 0", 30)


async def until_refused(machine: Machine, app: str) -> None:
    """Starts a host while another one serves. It ends, and answers no visitor."""
    await machine.launch("sites")
    worker = machine.worker
    assert worker is not None
    await wait_until(lambda: worker.code is not None, 60)
    assert worker.code == 78
    assert "The apps are served by the host" in worker.log
    assert "docs/kubernetes.md" in worker.log
    assert await machine.ask(app) is None


async def count(machine: Machine, app: str) -> str:
    answer = await machine.ask(app, "POST")
    assert answer is not None
    return answer.text

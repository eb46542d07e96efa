"""Several hosts on one Redis and one storage. Each has its own data folder and processes."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.cancellation import end_if_canceled
from gateway.deploys.serving import HostAnswer, Records
from gateway.keys import HOSTS_KEY, partition_tag, served_apps_key, serving_key
from tests.fakes import FakeProvider
from tests.support.background import in_background
from tests.support.deployment import BUILD, START, Host, hosting, live, packed, page, server
from tests.support.folders import passable_folder
from tests.support.gateway_process import Gateway
from tests.support.machines import QUICK, Machine, empty_host, sharing_gateway, start, until_served
from tests.support.polling import wait_until
from tests.support.s3_server import SECRET, S3Server
from tests.support.stores import opened
from workers.hosting import caddy
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


async def test_deploys_of_every_kind_on_two_hosts_and_s3(s3_host: Host) -> None:
    host, folder = s3_host, s3_host.gateway.folder
    machines = await start(host, "one", "two")
    app, runs = await host.app(build=BUILD), await host.app(build=START)
    secret = secrets.token_hex(8)
    host.gateway.confidential.add(secret)
    await host.call("PUT", f"/account/apps/{runs}/env", json={"TEXT": secret})
    first = await live(host, app, page("first", "echo to the log;"))
    assert "to the log" in (await host.deploy(first))["log"]
    assert [await machine.page(app) for machine in machines] == ["first", "first"]
    await live(host, runs, server("' + process.env.TEXT + '"))
    assert [await machine.page(runs) for machine in machines] == [secret, secret]
    preview = (await host.gateway.platform("POST", f"apps/{app}/deploys", {"kind": "preview"})).json()["deployId"]
    assert (await host.over(preview))["state"] == "live"
    await live(host, app, page("second"))
    assert [await machine.page(app) for machine in machines] == ["second", "second"]
    back = await host.over(
        (await host.call("POST", f"/account/apps/{app}/rollback", json={"deployId": first}))["deployId"]
    )
    assert (back["state"], back["release"]) == ("live", first), back
    assert [await machine.page(app) for machine in machines] == ["first", "first"]
    promoted = await host.over((await host.call("POST", f"/account/deploys/{preview}/promote"))["deployId"])
    assert (promoted["state"], promoted["release"]) == ("live", preview), promoted
    assert not list((folder / "builder" / "releases").glob("*/*/dep_*")), "a builder keeps no release"
    assert (await host.gateway.platform("DELETE", f"apps/{app}")).status_code == 204
    await until_served(machines, app, "404")


async def test_a_host_fails_dies_or_stalls(host: Host) -> None:
    one, dies, stops = await start(host, "one", "two", "three", GATEWAY_CANARY="5")
    app = await host.app(build=BUILD)
    await live(host, app, page("good"))
    # A canary that fails on one host is undone on all.
    bad = await host.publish(app, page("bad"))
    await host.in_state(bad, "canary")
    assert [await machine.page(app) for machine in (one, dies, stops)] == ["bad"] * 3
    (dies.folder / "releases" / app / "live" / bad / "files" / "index.html").unlink()
    failed = await host.over(bad)
    assert (failed["state"], failed["error"]) == ("failed", "canary: GET / returned 404")
    assert [await machine.page(app) for machine in (one, dies, stops)] == ["good"] * 3
    # Hosts without a heartbeat do not count.
    server = caddy.read_process(stops.folder)
    assert server is not None
    with stops.worker.paused():
        os.kill(server.pid, signal.SIGSTOP)
        coming = await host.publish(app, page("second"))
        await host.in_state(coming, "checking")
        dies.worker.kill()
        assert (await host.over(coming))["state"] == "live"
        assert await one.page(app) == "second"
        assert await dies.page(app) == "good", "Caddy goes on without its worker"
    # They catch up before they serve again.
    await wait_until(lambda: "sites.was_paused" in stops.worker.log)
    os.kill(server.pid, signal.SIGCONT)
    pages: set[str] = set()

    async def caught_up() -> bool:
        pages.add(await stops.page(app))
        return "second" in pages

    await wait_until(caught_up, 20)
    assert pages <= {"503", "second"}, "it answers no visitor before it has caught up"
    began = asyncio.create_task(dies.start("sites"))
    await wait_until(lambda: began.done() or caddy.catching_up_file(dies.folder).exists(), 60)
    while not began.done():
        assert await dies.page(app) in ("503", "second")
    await began
    assert await dies.page(app) == "second"


async def test_a_host_that_stands_still_in_a_canary_does_not_fail_it(host: Host) -> None:
    """Until it has caught up, it answers its own probes with 503."""
    _, pauses = await start(host, "one", "two", GATEWAY_CANARY="5")
    app = await host.app(build=BUILD)
    deploy = await host.publish(app, page("first"))
    await host.in_state(deploy, "canary")
    with pauses.worker.paused():
        await asyncio.sleep(3.5)
    ended = await host.over(deploy)
    assert ended["state"] == "live", ended


@contextlib.asynccontextmanager
async def phantom(host: Host, app: str, *steps: str, failure: str = "") -> AsyncIterator[None]:
    """Simulates a host that answers only these steps, and has no good probe in a canary, or fails it at once."""

    async def haunt(records: Records) -> None:
        while True:
            end_if_canceled()
            await records.send_heartbeat("phantom")
            for _, wanted in (await records.read(host.account.id, app)).values():
                if wanted.step == "canary" and failure:
                    await records.write_answer(wanted, "phantom", HostAnswer(wanted.token, False, failure, served=True))
                elif wanted.step in (*steps, "undo"):
                    await records.write_answer(wanted, "phantom", HostAnswer(wanted.token, True))
            await asyncio.sleep(0.05)

    async with opened(host.gateway.environment["GATEWAY_REDIS_URL"]) as store:
        try:
            async with in_background(haunt(Records(store))):
                yield
        finally:
            await store.client.zrem(HOSTS_KEY, "phantom")


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([], "not every host that serves apps fetched and checked the release in time"),
        (["check"], "not every host that serves apps fetched and checked the release in time"),
        (["check", "canary"], "not every host that serves apps has passed the canary"),
    ],
)
async def test_each_step_waits_for_every_host(
    host: Host, monkeypatch: pytest.MonkeyPatch, steps: list[str], error: str
) -> None:
    monkeypatch.setitem(QUICK, "workers.builds.engine.STEP_SECONDS", 10.0)  # the good deploy needs some of it
    monkeypatch.setitem(QUICK, "workers.builds.engine.NO_HOST_SECONDS", 8.0)
    (one,) = await start(host, "one")
    app = await host.app(build=BUILD)
    await live(host, app, page("good"))
    async with phantom(host, app, *steps):
        failed = await host.over(await host.publish(app, page("bad")))
    assert (failed["state"], failed["error"].partition(": ")[2]) == ("failed", error), failed
    await until_served([one], app, "good")


async def test_a_host_that_fails_at_once_fails_the_canary_and_not_the_swap(host: Host) -> None:
    (one,) = await start(host, "one")
    app = await host.app(build=BUILD)
    await live(host, app, page("good"))
    async with phantom(host, app, "check", failure="GET / returned 500"):
        failed = await host.over(await host.publish(app, page("bad")))
    assert failed["error"] == "canary: GET / returned 500"
    await until_served([one], app, "good")


async def test_a_damaged_archive_is_never_served_and_an_empty_host_serves_everything(host: Host) -> None:
    folder = host.gateway.folder
    await start(host, "one")
    apps = [await host.app(build=BUILD) for _ in range(3)]
    deploys = [await live(host, app, page(app)) for app in apps]
    truncated, exchanged, _ = archives = [
        folder / "storage" / "archives" / a / f"{d}.tar.gz" for a, d in zip(apps, deploys, strict=True)
    ]
    whole = [path.read_bytes() for path in archives]
    truncated.write_bytes(whole[0][:-10])
    exchanged.write_bytes(whole[2])
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
        await until_served([empty], app, app)


async def test_an_outage_of_the_storage_delays_deploys_and_stops_no_app(host: Host) -> None:
    folder = host.gateway.folder
    [machine] = await start(host, "one")
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
    await until_served([machine], app, "second")


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
    (machine,) = await start(host, "one")
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


async def test_every_host_serves_a_domain_as_soon_as_it_is_verified(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts tidy the addresses only now and then; they hear of changes."""
    monkeypatch.setitem(QUICK, "workers.hosting.host_agent.TIDY_SECONDS", 60.0)
    machines = await start(host, "one", "two")
    app, domain = await host.app(build=BUILD), f"{secrets.token_hex(6)}.example.org"
    await live(host, app, page("shop"))

    async def shown() -> set[str]:
        answers = [await host.web.get(f"http://127.0.0.1:{each.port}/", headers={"Host": domain}) for each in machines]
        return {answer.text.strip() if answer.status_code == 200 else "" for answer in answers}

    for fields, expected in (({"customDomain": domain, "customDomainVerified": True}, {"shop"}), ({}, {""})):
        record = {"account": host.account.id, "build": BUILD, **fields}
        assert (await host.gateway.platform("PUT", f"apps/{app}", record)).is_success
        await wait_until(shown, 2, holds=lambda found, expected=expected: found == expected)

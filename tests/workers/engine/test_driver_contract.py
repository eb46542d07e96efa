"""The contract of a driver, which serves apps on a host or in a cluster: deploys, names, previews, suspension, sleep.

Then how a deploy fails, when a release does, a worker or a builder dies, or what it needs is away.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import time
from collections.abc import AsyncIterator, Collection, Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio

from gateway.accounts.records import App, Domain, replace_domains
from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.deploys.release import Release
from gateway.deploys.serving import Records, Step, Wanted
from gateway.keys import partition_tag, served_apps_key, serving_key
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.fakes.start_commands import http_server
from tests.support.background import cancel, in_background
from tests.support.engines import TIDY_SECONDS, ClusterEngine, Engine, HostEngine, engine_on, nothing_happens
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.shops import AGAIN, APP, FIRST, HOST, PREVIEW, SECOND, THIRD, Builder, Shop
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy
from workers.engine.health import NotUp, request_health
from workers.engine.names import Names
from workers.engine.reconciler import Reconciler
from workers.engine.steps import ReleaseSteps
from workers.hosting.driver import HostPlaces
from workers.hosting.releases import Releases

DRAIN_SECONDS = 0.5  # for requests in progress


@pytest.fixture(params=["host", "cluster"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def worker_redis(request: pytest.FixtureRequest, redis_url: str) -> str:
    """The URL for the worker, which is the proxy's for a test that has one."""
    url: str = request.getfixturevalue("proxy").url if "proxy" in request.fixturenames else redis_url
    return url


@pytest_asyncio.fixture
async def engine(kind: str, worker_redis: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    with passable_folder() as folder:
        async with opened(worker_redis) as own, engine_on(kind, folder, own, monkeypatch) as engine:
            yield engine


@pytest_asyncio.fixture
async def shop(engine: Engine, store: Store) -> AsyncIterator[Shop]:
    shop = Shop(engine, store)
    shop.visitors.come()
    yield shop
    await shop.visitors.leave()


# -- a deploy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [True, False], ids=["app", "pages"])
async def test_visitors_get_a_release_once_it_is_checked(shop: Shop, runs: bool) -> None:
    shop.engine.drain_seconds = DRAIN_SECONDS
    await shop.begin("check", runs=runs)
    await shop.visitors.until(FIRST)
    assert shop.visitors.pages == [FIRST], "it was only to be checked"
    canary = await shop.builder.write("canary", SECOND)
    assert (await shop.builder.watch(canary)).ok
    assert not runs or {FIRST, SECOND} <= shop.commands.running, "a canary can be undone at once"
    began = time.monotonic()
    await shop.go_on("live")
    await shop.until_served(FIRST, SECOND)
    assert not runs or shop.commands.ended[FIRST] > began + DRAIN_SECONDS, "requests in progress are answered"
    if not runs:
        await shop.builder.make(THIRD, runs=False, page=False)
        assert not (await shop.builder.deploy(THIRD)).ok, "pages without an index are never served"
        await shop.until_served(FIRST, SECOND)


@pytest.mark.parametrize("kind", ["host"], indirect=True)
async def test_a_host_takes_variables_that_were_sealed_again(shop: Shop, store: Store) -> None:
    """Its file would need a key that is withdrawn. The app goes on."""
    await shop.open()
    [(before, wanted)] = (await Records(store).read(APP.account, APP.id)).values()
    resealed = msgspec.structs.replace(wanted.releases[FIRST], environment="sealed again")
    await Records(store).write(before, msgspec.structs.replace(wanted, token="again", releases={FIRST: resealed}), "")
    await wait_until(lambda: [path.read_text() for path in shop.engine.folder.rglob("environment")] == ["sealed again"])
    assert shop.visitors.pages == [FIRST]


async def test_releases_that_must_not_overlap_run_one_after_the_other(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in ("host", "cluster"):
        monkeypatch.setattr(f"tests.fakes.{engine}.END_SECONDS", 0.5)  # longer than the other one takes to begin
    waiting = list[bool]()

    async def look(call: str) -> None:
        if call == "route":
            waiting.append(shop.engine.is_holding())

    await shop.begin(overlap=False)
    shop.engine.after = look
    assert (await shop.builder.deploy(SECOND)).ok
    await shop.until_served(FIRST, SECOND)
    assert waiting
    assert not any(waiting), "no request waits any longer, in the canary neither"


# -- previews ------------------------------------------------------------------------------------------------


async def test_a_preview_that_is_ended_leaves_nothing(shop: Shop) -> None:
    """In each state. A deploy begins it again. Both may run at once, although releases of one address must not."""
    await shop.open(overlap=False)
    for state in ("running", "asleep", "while it is checked", "while the worker is away"):
        await shop.preview.serve(SECOND, overlap=False)
        assert await shop.engine.visit(PREVIEW) == (200, SECOND)
        assert shop.commands.ran_together(FIRST, SECOND)
        if state == "running":
            await shop.preview.serve(THIRD, overlap=False)
            assert await shop.engine.visit(PREVIEW) == (200, THIRD)
        elif state == "asleep":
            await shop.engine.let_sleep(SECOND)
        elif state == "while it is checked":
            await shop.preview.make(THIRD, overlap=False)
            assert (await shop.preview.step("check", THIRD)).ok
        else:
            await shop.engine.stop()
        assert await shop.preview.end()
        if state == "while the worker is away":
            assert await shop.preview.end(), "it can be repeated"
            await shop.engine.start()
        await shop.preview.until_ended()
        assert await shop.engine.visit(PREVIEW) == (404, "")
        await wait_until(lambda: shop.engine.list_kept() == {FIRST} and shop.commands.running <= {FIRST})
        assert not await shop.preview.end()
    await shop.visitors.until(FIRST)
    assert shop.visitors.pages == [FIRST]


async def test_the_first_release_at_an_address_leaves_nothing(shop: Shop) -> None:
    """When its deploy is undone, or its preview ended, also while the worker looks at all names again and again."""
    shop.engine.apps.append(APP)
    await shop.engine.start()
    if isinstance(shop.engine, ClusterEngine):
        shop.engine.cluster.deletion_seconds = 2 * TIDY_SECONDS  # of each object, one by one
    for builder, host in ((shop.builder, HOST), (shop.preview, PREVIEW)):
        await builder.make(FIRST)
        for step in ("check", "canary"):
            assert (await builder.step(step, FIRST)).ok
        assert await shop.engine.visit(host) == (200, FIRST)
        if builder is shop.builder:
            assert (await builder.step("undo", FIRST)).ok
        else:
            assert await builder.end()
            await builder.until_ended()
        assert await shop.engine.visit(host) == (404, "")
        await wait_until(lambda: not shop.engine.list_kept() and not shop.commands.running)


@pytest.mark.parametrize("kind", ["cluster"], indirect=True)
async def test_a_preview_sleeps_where_an_app_needs_its_place(shop: Shop) -> None:
    """As many addresses of an account have pods as its plan allows."""
    await shop.open()
    await shop.visitors.leave()
    assert isinstance(shop.engine, ClusterEngine)
    shop.engine.plan = "free"
    await shop.preview.serve("dep_preview")
    others = [msgspec.structs.replace(APP, id=f"other{number}", name=f"other{number}") for number in (1, 2)]
    builders = [Builder(shop.engine, shop.store, app) for app in others]
    shop.engine.apps += others
    await builders[0].serve("dep_other0")
    await wait_until(lambda: shop.commands.running, holds=lambda running: running == {FIRST, "dep_other0"})
    await builders[1].make("dep_other1")
    assert "as many as its plan allows" in (await builders[1].deploy("dep_other1")).reason
    assert (await shop.engine.visit(PREVIEW))[0] == 503, "it takes no place of an app"
    await shop.builder.serve(SECOND)  # a swap needs no further place
    await shop.engine.let_sleep(SECOND)
    assert await shop.engine.visit(PREVIEW) == (200, "dep_preview")
    assert await shop.engine.visit(HOST) == (200, SECOND)
    await wait_until(lambda: shop.commands.running, holds=lambda running: running == {SECOND, "dep_other0"})


@pytest.mark.parametrize("kind", ["cluster"], indirect=True)
async def test_visits_of_a_preview_in_a_cluster_are_noted(shop: Shop) -> None:
    """When its pod is asked how long it has been idle, and when it wakes."""
    await shop.open()
    await shop.visitors.leave()
    assert isinstance(shop.engine, ClusterEngine)
    await shop.preview.serve(SECOND)
    assert await shop.engine.read_visits() == set()
    for deploy in (FIRST, SECOND):
        await shop.engine.let_sleep(deploy)
    assert await shop.engine.read_visits() == {"preview"}
    assert await shop.engine.read_visits() == set()
    assert await shop.engine.visit(PREVIEW) == (200, SECOND)
    assert await shop.engine.visit(HOST) == (200, FIRST)
    assert await shop.engine.read_visits() == {"preview"}


# -- names ---------------------------------------------------------------------------------------------------


async def test_a_name_that_is_taken_stays_with_its_app(shop: Shop) -> None:
    """Two records with one name, such as after a failover that lost a renaming. No preview takes a name either."""
    await shop.open()
    shop.engine.apps.append(App(id="namesake", name="shop-preview", account="acc_2", createdAt=""))
    await shop.preview.make("dep_0")
    assert "belongs to another app" in (await shop.preview.deploy("dep_0")).reason
    assert await shop.engine.visit(PREVIEW) == (404, "")
    await shop.preview.until_ended()
    namesake = shop.engine.apps.pop()
    await shop.preview.serve(SECOND)
    shop.engine.apps.append(namesake)
    other = msgspec.structs.replace(APP, id="other", account="acc_2")
    shop.engine.apps.append(other)
    for address in ("live", "preview"):
        thief = Builder(shop.engine, shop.store, other, address)
        await thief.make(THIRD)
        assert "belongs to another app" in (await thief.deploy(THIRD)).reason
    assert await shop.engine.visit(PREVIEW) == (200, SECOND)
    await wait_until(lambda: shop.engine.list_kept() == {FIRST, SECOND})
    assert shop.visitors.pages == [FIRST]


async def test_the_domains_of_an_app_lead_to_its_primary_one(shop: Shop) -> None:
    names = ("example.org", "www.example.org")
    apex, www = [Domain(name, verified=True) for name in names]
    none, to_apex, to_www = (404, ""), (308, f"https://{apex.name}"), (308, f"https://{www.name}")

    async def visit() -> list[tuple[int, str]]:
        return [await shop.engine.visit(name) for name in names]

    async def follows(domains: list[Domain], answers: list[tuple[int, str]]) -> None:
        shop.engine.apps[:] = [replace_domains(APP, domains)]
        await wait_until(visit, holds=lambda found: found == answers)

    await shop.open()
    await follows([apex, www], [(200, FIRST), to_apex])
    await follows([www, apex], [to_www, (200, FIRST)])
    await shop.builder.serve(SECOND)
    assert await visit() == [to_www, (200, SECOND)]
    # Nobody is led to a domain that is not verified.
    await follows([Domain(www.name), apex], [(200, SECOND), none])
    await follows([apex, www], [(200, SECOND), to_apex])
    await shop.restart()
    assert await visit() == [(200, SECOND), to_apex]
    await follows([www], [none, (200, SECOND)])
    await follows([], [none, none])
    assert await shop.engine.visit(HOST) == (200, SECOND)


async def test_an_app_that_is_gone_is_not_served(shop: Shop) -> None:
    """Another app may have its name by now."""
    await shop.open()
    moved = msgspec.structs.replace(APP, account="acc_2")

    for number, (left, when) in enumerate([([], "before the step"), ([moved], "during the step")]):
        await shop.builder.make(deploy := f"dep_{number + 2}")
        await shop.go_on("check", deploy=deploy)

        async def change_apps(call: str = "", apps: list[App] = left) -> None:
            if call != "tidy":  # which may come before the step
                shop.engine.apps[:] = apps

        if when == "before the step":
            await change_apps()
        else:
            shop.engine.after = change_apps
        assert "deleted" in (await shop.builder.step("canary", deploy)).reason
        shop.engine.after = nothing_happens
        shop.engine.apps[:] = [APP]
        await shop.go_on("undo", deploy=deploy)
    assert {page for _, page in shop.visitors.answers} <= {FIRST, ""}


# -- suspension, sleep ---------------------------------------------------------------------------------------


async def test_an_app_that_is_suspended_during_its_deploy_serves_nobody(shop: Shop) -> None:
    """A checked release that the suspension has ended runs before visitors get it."""
    await shop.begin("check")

    async def suspend() -> None:
        await list_suspended(shop.store, APP.account, APP.id)
        await shop.visitors.until_refused()
        await wait_until(lambda: not shop.commands.running)
        assert not isinstance(shop.engine, ClusterEngine) or not shop.engine.cluster.pods, "open connections end"

    await suspend()
    await unlist_suspended(shop.store, APP.account, APP.id)
    await shop.visitors.until(FIRST)
    shop.visitors.forget()
    await shop.visitors.until(FIRST)
    await shop.go_on("canary")
    await shop.visitors.until(SECOND)
    assert shop.visitors.pages == [FIRST, SECOND]
    for deploy in (SECOND, THIRD):
        if deploy == THIRD:
            await shop.builder.make(THIRD)
            await shop.go_on("check", deploy=THIRD)
        await suspend()
        await shop.go_on("live", deploy=deploy)  # it waits for no start command
        await asyncio.sleep(0.3)
        assert {status for status, _ in shop.visitors.answers} == {503}
        assert not shop.commands.running
        await unlist_suspended(shop.store, APP.account, APP.id)
        await shop.until_only(deploy)


@pytest.mark.parametrize("overlap", [True, False], ids=["side by side", "one after the other"])
async def test_an_app_that_sleeps_is_woken(shop: Shop, overlap: bool) -> None:
    """By its first visitor, after whom its address leads to one place alone, and by deploys."""
    await shop.open(overlap=overlap)
    await shop.visitors.leave()
    for _ in range(2):
        await shop.engine.let_sleep(FIRST)
        assert [await shop.engine.visit(HOST) for _ in range(AGAIN)] == [(200, FIRST)] * AGAIN
        assert shop.commands.running == {FIRST}
    await shop.engine.let_sleep(FIRST)
    await shop.restart()
    assert not shop.commands.running, "a worker that starts wakes nobody"
    await shop.builder.make(SECOND, overlap=overlap)
    shop.commands.ending.add(SECOND)
    assert not (await shop.builder.deploy(SECOND)).ok
    assert await shop.engine.visit(HOST) == (200, FIRST)
    await wait_until(lambda: shop.commands.running == {FIRST})
    await shop.engine.let_sleep(FIRST)
    await shop.builder.serve(THIRD, overlap=overlap)
    assert await shop.engine.visit(HOST) == (200, THIRD)
    await wait_until(lambda: shop.commands.running == {THIRD})
    if not overlap:
        shop.require_one_at_a_time()


BOTH_WAYS = ["side by side", "one after the other"]


# -- a release that fails ------------------------------------------------------------------------------------


# What is wrong with a release, and what its deploy is told. Every second one must not run beside the one before.
# `ANSWERS` has other answers.
FAULTS = {
    "it has no archive": "no longer kept",
    "it ends": "status 3",
    "a disk is full": "the disk of the service is full; deploy again later",
    "it listens elsewhere": "It listens at 9999; listen at $PORT (8080).",
    "it is not healthy": "answered 404 to GET /healthz after 0 seconds; it must answer with 2xx or 3xx",
    "it answers 500": "answered 500 to GET / after 0 seconds",
    "its archive is damaged": "release",
    "it listens nowhere": "nothing listens at $PORT (8080)",
}
SLOW = ("it answers 500", "it is not healthy", "it listens nowhere")  # which take all the time to start


@pytest.mark.parametrize(("overlap", "faults"), [(True, [*FAULTS][::2]), (False, [*FAULTS][1::2])], ids=BOTH_WAYS)
async def test_a_release_that_fails_its_check_is_never_served(
    shop: Shop, overlap: bool, faults: Collection[str]
) -> None:
    async def fill_disk(call: str) -> None:
        if call == "place":
            shop.engine.after = nothing_happens
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    await shop.open(overlap=overlap)
    for number, fault in enumerate(faults):
        shop.visitors.forget()
        health = "/healthz" if fault == "it is not healthy" else ""
        await shop.builder.make(deploy := f"dep_{number + 2}", overlap=overlap, health=health)
        if fault in SLOW and shop.engine.start_seconds != 0.4:
            shop.engine.start_seconds = 0.4
            await shop.restart()
        if fault == "it ends":
            shop.commands.ending.add(deploy)
        elif fault == "it listens elsewhere":
            shop.commands.elsewhere[deploy] = ["127.0.0.1:9999"]
        elif fault == "it has no archive":
            await shop.engine.lose_release(APP, deploy)
        elif fault == "a disk is full":
            shop.engine.after = fill_disk
        elif fault == "it answers 500":
            shop.commands.failing.add(deploy)
        elif fault == "it is not healthy":
            shop.commands.statuses[deploy, "/healthz"] = 404
        elif fault == "it listens nowhere":
            shop.commands.elsewhere[deploy] = []
        else:
            shop.engine.damage_release(APP, deploy)
            shop.engine.place_seconds = 0.4
            await shop.restart()
        began = time.monotonic()
        answer = await shop.builder.deploy(deploy)
        assert not answer.ok, fault
        assert FAULTS[fault] in answer.reason
        assert answer.service_fault == (fault in ("its archive is damaged", "a disk is full"))
        assert time.monotonic() - began < 10
        await shop.until_served(FIRST)


# What happens to a release during its canary, and why it fails.
BREAKS = {
    "ending": "the start command exited 1 time",
    "restarted": "the start command exited 1 time",
    "failing": "GET / returned 500",
    "unhealthy": "GET /healthz returned 404",
}


@pytest.mark.parametrize(
    ("overlap", "faults"), [(True, ["restarted", "unhealthy"]), (False, ["ending", "failing"])], ids=BOTH_WAYS
)
async def test_a_release_that_fails_its_canary_is_undone(shop: Shop, overlap: bool, faults: Collection[str]) -> None:
    """At once, and by the worker alone: its builder may be dead."""
    await shop.open(overlap=overlap)
    for number, fault in enumerate(faults):
        health = "/healthz" if fault == "unhealthy" else ""
        await shop.builder.make(deploy := f"dep_{number + 2}", overlap=overlap, health=health)
        await shop.go_on("check", deploy=deploy)
        canary = await shop.builder.write("canary", deploy)
        assert (await shop.builder.watch(canary)).ok
        await shop.visitors.until(deploy)
        if fault == "unhealthy":
            shop.commands.statuses[deploy, "/healthz"] = 404
        else:
            getattr(shop.commands, fault).add(deploy)
        answer = await shop.builder.until_answered(canary, lambda answer: answer and not answer.ok)
        assert answer.reason == BREAKS[fault]
        await shop.visitors.until(FIRST)
        shop.visitors.forget()
        await shop.go_on("undo", deploy=deploy)
        await shop.until_served(FIRST)


async def test_a_command_may_take_long_and_listen_at_other_ports_first(shop: Shop) -> None:
    """A worker that starts does not wait for it: other apps' deploys would fail meanwhile."""
    await shop.begin()
    shop.commands.elsewhere[SECOND] = []
    wanted = await shop.builder.write("check", SECOND)
    await wait_until(lambda: SECOND in shop.commands.running)
    async with asyncio.timeout(10):
        await shop.restart()
    shop.commands.elsewhere[SECOND] = ["127.0.0.1:9229"]
    await asyncio.sleep(0.1)
    del shop.commands.elsewhere[SECOND]
    answer = await shop.builder.until_answered(wanted)
    assert answer.ok, answer


# -- a worker or a builder that dies -------------------------------------------------------------------------


class Death:
    """A worker dies after a call to its driver: after the first one of a name, or after so many calls."""

    def __init__(self, shop: Shop, name: str = "", number: int = 0) -> None:
        self._shop, self._name, self._number = shop, name, number
        self.calls: list[str] = []
        self._died = asyncio.Event()
        shop.engine.after = self._note

    async def _note(self, name: str) -> None:
        if name == "tidy":
            return
        self.calls.append(name)
        if name == self._name or len(self.calls) == self._number:
            self._died.set()
            await asyncio.Event().wait()

    async def wait(self, *starting: asyncio.Task[None]) -> None:
        await asyncio.wait_for(self._died.wait(), 10)
        await cancel(*starting)
        if self._shop.engine.holds_requests:  # that would leave their connections open
            await self._shop.visitors.leave()
            await asyncio.sleep(0.02)
        await self._shop.engine.stop()
        if self._shop.engine.holds_requests:
            self._shop.visitors.come()


LAST_CALLS: dict[Step, str] = {"check": "until_answers", "canary": "visit", "live": "retire", "undo": "remove"}


async def die_in_step(shop: Shop, step: Step, deploy: str) -> None:
    """A worker dies after the step's last call, and the next ones after one call, two calls, and so on."""
    last = LAST_CALLS[step]
    death = Death(shop, last)
    wanted = await shop.builder.write(step, deploy)
    await death.wait()
    for number in itertools.count(1):
        death = Death(shop, number=number)
        await death.wait(asyncio.create_task(shop.engine.start()))
        if last in death.calls:
            break
    shop.engine.pause = 0.05
    await shop.engine.start()
    answer = await shop.builder.until_answered(wanted)
    assert answer.ok, (step, deploy, answer)
    shop.engine.pause = 0.0


async def test_workers_that_die_in_a_step_go_on(shop: Shop) -> None:
    """In each step of a deploy, and in the undoing of a check and of a canary.

    The releases must not run side by side, which is the harder way: there is nothing to go back to at once.
    """
    if isinstance(shop.engine, HostEngine):
        shop.engine.host.held_seconds = 60.0  # so many deaths take long
    await shop.begin(overlap=False)
    shop.visitors.waiting_may_be_refused = shop.engine.holds_requests
    for step in ("check", "canary", "live"):
        await die_in_step(shop, step, SECOND)
    await shop.until_served(FIRST, SECOND)
    before: dict[str, list[Step]] = {"dep_3": ["check"], "dep_4": ["check", "canary"]}
    for deploy, steps in before.items():
        await shop.builder.make(deploy, overlap=False)
        await shop.go_on(*steps, deploy=deploy)
        if "canary" in steps:
            await shop.visitors.until(deploy)
        await die_in_step(shop, "undo", deploy)
        await shop.until_only(SECOND)
    await shop.until_served(FIRST, SECOND, "dep_4", SECOND)


async def test_a_release_whose_builder_has_died_after_its_check_gives_way_again(shop: Shop) -> None:
    shop.engine.next_step_seconds = 0.2
    await shop.begin("check", overlap=False)
    await wait_until(lambda: FIRST in shop.commands.running)
    await shop.visitors.until(FIRST)
    assert set(shop.visitors.pages) == {FIRST}
    shop.require_one_at_a_time()


async def test_a_worker_that_starts_again_serves_what_the_records_say(shop: Shop) -> None:
    """It changes nothing for visitors, unless all is lost: then it serves the app as soon as its archive is whole.

    Another record cannot be read.
    """
    await shop.open()
    began = len(shop.commands.together)
    await shop.restart()
    await shop.until_served(FIRST)
    assert len(shop.commands.together) == began, "it runs on"
    await shop.engine.stop()
    shop.engine.resync_seconds = shop.engine.start_seconds = shop.engine.place_seconds = 0.3
    shop.engine.lose_everything()
    await shop.store.client.hset(serving_key(APP.account, "broken"), "live", "{")
    await shop.store.client.zadd(served_apps_key(partition_tag(APP.account)), {"broken": 1e14})
    repair = shop.engine.damage_release(APP, FIRST)
    shop.visitors.waiting_may_be_refused = True
    await wait_until(lambda: not shop.commands.running)
    await shop.engine.start()
    await asyncio.sleep(0.5)
    shop.visitors.forget()
    await wait_until(lambda: len(shop.visitors.answers) > AGAIN)
    assert shop.visitors.pages == []
    repair()
    await shop.until_only(FIRST)


# -- what it needs is away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["redis", "storage or API server"])
async def test_an_outage_delays_a_deploy_and_refuses_nobody(shop: Shop, proxy: Proxy, what: str) -> None:
    await shop.begin()
    for step in ("check", "canary"):
        with contextlib.ExitStack() as stack:
            if what == "redis":
                proxy.down = True
                stack.callback(setattr, proxy, "down", False)
                for link in [*proxy.links]:
                    link.cut()
            else:
                stack.enter_context(shop.engine.outage())
            wanted = await shop.builder.write(step, SECOND)
            await asyncio.sleep(0.5)
            if not (step == "canary" and what != "redis"):  # a host has the release by then
                assert await shop.builder.records.read_answer(wanted) is None
        answer = await shop.builder.until_answered(wanted, seconds=20)
        assert answer.ok
    await shop.go_on("live")
    await shop.until_served(FIRST, SECOND)


@pytest.mark.parametrize("kind", ["cluster"], indirect=True)
async def test_a_cluster_whose_writes_conflict_is_asked_again(shop: Shop) -> None:
    await shop.begin()
    assert isinstance(shop.engine, ClusterEngine)
    shop.engine.cluster.conflicts = 3
    await shop.go_on("check")
    shop.engine.cluster.conflicts = 3
    await shop.go_on("canary", "live")
    await shop.until_served(FIRST, SECOND)
    assert shop.engine.cluster.conflicts == 0


# -- parts of the engine alone ----------------------------------------------------------------------------------


# The path of its health check, what it answers at which path (and 200 at all others), and whether it is up.
ANSWERS = [
    *[("", "/", status, True) for status in (200, 302, 401, 404, 405, 429)],
    *[("", "/", status, False) for status in (500, 503)],
    *[("/healthz", "/healthz", status, True) for status in (204, 301)],
    *[("/healthz", "/healthz", status, False) for status in (401, 404, 500)],
    ("/healthz", "/", 500, True),
]


@pytest.mark.parametrize(("health", "path", "status", "is_up"), ANSWERS)
async def test_a_release_is_up_as_its_health_check_says(health: str, path: str, status: int, is_up: bool) -> None:
    async def answer(host: str, asked: str) -> tuple[int, str]:
        assert host == "shop.apps.test"
        return (status if asked == path else 200), ""

    async with await asyncio.start_server(http_server(answer), "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        request = request_health(Release("digest", 1, runs=True, health=health), url, "shop.apps.test")
        if is_up:
            return await request
        with pytest.raises(NotUp, match=f"^GET {path} returned {status}$") as refused:
            await request
        assert refused.value.status == status


async def nothing(*_: object) -> Any:
    return None


async def test_a_release_that_begins_while_others_are_tidied_is_kept() -> None:
    """Whoever tidies has the set of the deploys in progress, which changes meanwhile."""
    changed, begun, over, kept = list[Wanted](), asyncio.Event(), asyncio.Event(), list[set[str]]()

    async def read_changes(_: dict[str, float]) -> AsyncIterator[list[Wanted]]:
        yield changed

    async def tidy(_: Set[str], deploys: Set[str]) -> None:
        begun.set()
        await over.wait()
        kept.append({*deploys})

    records = cast("Records", SimpleNamespace(read_changes=read_changes))
    names = SimpleNamespace(follow_some=nothing, gone=set())
    driver = SimpleNamespace(tidy=tidy, note=lambda _: None)
    steps = cast("ReleaseSteps", SimpleNamespace(driver=driver, names=names))
    quick = {"poll_seconds": 0.01, "tidy_seconds": 0.01}
    reconciler = Reconciler(records, steps, lambda _: asyncio.sleep(60), 1.0, **quick)
    async with in_background(reconciler.run()):
        await begun.wait()
        changed.append(Wanted("acc_1", "shop", "live", "check", "dep_1"))
        await wait_until(lambda: reconciler._steps)
        over.set()
        await wait_until(lambda: kept)
    await reconciler.aclose()
    assert kept[0] == {"dep_1"}


UNPUBLISHED = App(id="app-1", name="shop", account="acc_1", createdAt="2026-01-01T00:00:00.000Z")


async def test_an_app_that_was_never_live_has_a_site_without_a_release(tmp_path: Path) -> None:
    apps, releases = [UNPUBLISHED], Releases(tmp_path)
    releases.create_folders()

    async def find_app(name: str) -> App | None:
        return next((app for app in apps if name in (app.id, app.name)), None)

    async def find_apps(app_ids: Sequence[str]) -> dict[str, App]:
        return {app.id: app for app in apps if app.id in app_ids}

    async def follow(*present: App) -> list[str]:
        """Returns the host names that lead to a site, after each way in which the records are followed."""
        apps[:] = present
        await names.follow_app("app-1")
        for _ in range(8):
            await names.follow_some()
        return sorted(name for found in releases.list_names().values() for name in found)

    places = HostPlaces(Settings(data_dir=str(tmp_path)), releases)
    names = Names(places, find_app, find_apps, "apps.test")
    assert await follow(UNPUBLISHED) == ["shop.apps.test"]
    site = releases.site_at("shop.apps.test")
    assert site is not None
    assert (site.app_id, site.account, site.current) == ("app-1", "acc_1", None)
    assert (site.folder / "unpublished").exists()
    assert await follow(msgspec.structs.replace(UNPUBLISHED, name="store")) == ["store.apps.test"]
    assert await follow(msgspec.structs.replace(UNPUBLISHED, account="acc_2")) == [], "the site is the former account's"
    assert await follow() == []

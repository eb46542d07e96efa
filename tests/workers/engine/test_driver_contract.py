"""The contract of a driver, which serves apps on a host or in a cluster: deploys, names, previews, suspension, sleep.

How a deploy fails, `test_driver_faults.py` says.
"""

import asyncio
import time

import msgspec
import pytest

from gateway.accounts.records import App, Domain, replace_domains
from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.deploys.serving import Records
from gateway.redis.client import Store
from tests.support.engines import TIDY_SECONDS, ClusterEngine, nothing_happens
from tests.support.polling import wait_until
from tests.support.shops import AGAIN, APP, FIRST, HOST, PREVIEW, SECOND, THIRD, Builder, Shop

DRAIN_SECONDS = 0.5  # for requests in progress


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

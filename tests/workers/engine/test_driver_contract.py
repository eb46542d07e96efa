"""The contract of a driver, which serves apps on a host or in a cluster: each step of a deploy, and how it fails."""

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from gateway.accounts.records import App, Domain, replace_domains
from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.deploys.release import Release
from gateway.deploys.serving import Records, Step, StepAnswer, Wanted
from gateway.keys import partition_tag, served_apps_key, serving_key
from gateway.redis.client import Store
from tests.support.background import cancel, in_background
from tests.support.engines import TIDY_SECONDS, ClusterEngine, Engine, engine_on, nothing_happens
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy

APP = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")
HOST, PREVIEW = "shop.apps.test", "shop-preview.apps.test"
FIRST, SECOND = "dep_1", "dep_2"
DRAIN_SECONDS = 0.5  # for requests in progress
AGAIN = 5  # answers in a row, after which it is clear what visitors get
WAYS = pytest.mark.parametrize("overlap", [True, False], ids=["side by side", "one after the other"])


class Builder:
    """Makes releases, and writes the steps of their deploys as a builder does."""

    def __init__(self, engine: Engine, store: Store, app: App = APP, address: str = "live") -> None:
        self.engine, self.app, self.address, self._records = engine, app, address, Records(store)
        self._made: dict[str, Release] = {}

    async def make(
        self, deploy: str, *, runs: bool = True, overlap: bool = True, page: bool = True, health: str = ""
    ) -> None:
        self._made[deploy] = await self.engine.store_release(
            self.app, deploy, runs=runs, overlap=overlap, page=page, health=health
        )

    async def write(self, step: Step, deploy: str) -> Wanted:
        found = await self._records.read(self.app.account, self.app.id)
        before, former = found.get(self.address, ("", None))
        served = "" if former is None else former.served if former.deploy == deploy else former.serves
        releases = {name: self._made[name] for name in (served, deploy) if name and (name, step) != (deploy, "undo")}
        wanted = Wanted(self.app.account, self.app.id, self.address, step, deploy, served, releases)
        await self._records.write(before, wanted, "")
        return wanted

    async def read_answer(self, wanted: Wanted) -> StepAnswer | None:
        return await self._records.read_answer(wanted)

    async def step(self, step: Step, deploy: str) -> StepAnswer:
        wanted = await self.write(step, deploy)
        found: StepAnswer = await wait_until(lambda: self.read_answer(wanted))
        return found

    async def watch(self, wanted: Wanted) -> StepAnswer:
        """Waits until a canary has failed, or has a good probe."""
        found: StepAnswer = await wait_until(
            lambda: self.read_answer(wanted), holds=lambda answer: answer and (answer.good_probes or not answer.ok)
        )
        return found

    async def deploy(self, deploy: str) -> StepAnswer:
        """Goes through the steps. After one that fails, undoes them, and returns its answer."""
        answer = await self.step("check", deploy)
        if answer.ok:
            answer = await self.watch(await self.write("canary", deploy))
        if not answer.ok:
            await self.step("undo", deploy)
            return answer
        return await self.step("live", deploy)


class Visitors:
    """Visitors ask for the app all the time."""

    def __init__(self, engine: Engine, host: str = HOST) -> None:
        self._engine, self._host = engine, host
        self.answers: list[tuple[int, str]] = []
        self.waiting_may_be_refused = False

    async def run(self) -> None:
        while True:
            try:
                self.answers.append(await self._engine.visit(self._host))
            except (OSError, EOFError) as error:
                self.answers.append((0, repr(error)))
            await asyncio.sleep(0.005)

    async def until(self, deploy: str) -> None:
        """Waits until all get this deploy's release."""
        await wait_until(lambda: self.answers[-AGAIN:], holds=lambda last: last == [(200, deploy)] * AGAIN)

    def forget(self) -> None:
        self.answers.clear()

    @property
    def pages(self) -> list[str]:
        """The deploys whose releases they got, in order. Nobody was refused, unless the waiting may be."""
        refused = [answer for answer in self.answers if answer[0] != 200]
        assert not refused or self.waiting_may_be_refused, refused
        pages = [page for status, page in self.answers if status == 200]
        return [page for page, former in zip(pages, ["", *pages], strict=False) if page != former]


class Shop:
    """An app whose first release is served."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine, self.store, self.commands = engine, store, engine.commands
        self.builder, self.visitors = Builder(engine, store), Visitors(engine)
        self.overlap = True

    async def open(self, *, runs: bool = True, overlap: bool = True) -> None:
        self.overlap = overlap
        self.engine.apps.append(APP)
        await self.engine.start()
        await self.builder.make(FIRST, runs=runs, overlap=overlap)
        assert (await self.builder.deploy(FIRST)).ok
        await self.until_only(FIRST)
        self.visitors.forget()

    async def begin(self, *steps: Step, runs: bool = True, overlap: bool = True, page: bool = True) -> None:
        """Opens, makes the second release, and takes these steps of its deploy."""
        await self.open(runs=runs, overlap=overlap)
        await self.builder.make(SECOND, runs=runs, overlap=overlap, page=page)
        await self.go_on(*steps)

    async def go_on(self, *steps: Step) -> None:
        for step in steps:
            assert (await self.builder.step(step, SECOND)).ok

    async def until_served(self, *deploys: str) -> None:
        """Waits until only the last one's release is left. Visitors must have got their releases in this order."""
        await self.until_only(deploys[-1])
        assert self.visitors.pages == [*deploys]
        assert self.overlap or not self.commands.ran_together(FIRST, SECOND)
        if deploys[-1] == FIRST:
            await wait_until(lambda: self.engine.list_kept() == {FIRST})

    async def until_only(self, deploy: str) -> None:
        """Waits until nothing is served, runs or is kept but this deploy's release, and its predecessor's files."""
        await self.visitors.until(deploy)
        await wait_until(lambda: self.commands.running, holds=lambda running: running <= {deploy})
        await wait_until(lambda: not self.engine.is_holding())

    async def restart(self) -> None:
        await self.engine.stop()
        await self.engine.start()


@pytest.fixture(params=["host", "cluster"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest_asyncio.fixture
async def engine(kind: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """An engine whose Redis is behind the proxy."""
    with passable_folder() as folder:
        async with opened(proxy.url) as own, engine_on(kind, folder, own, monkeypatch) as engine:
            yield engine


@pytest_asyncio.fixture
async def shop(engine: Engine, store: Store) -> AsyncIterator[Shop]:
    shop = Shop(engine, store)
    async with in_background(shop.visitors.run()):
        yield shop


# -- a deploy that succeeds ----------------------------------------------------------------------------------


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
    await shop.begin(overlap=False)
    assert (await shop.builder.deploy(SECOND)).ok
    await shop.until_served(FIRST, SECOND)


async def test_a_preview_has_an_address_of_its_own(shop: Shop) -> None:
    await shop.open(overlap=False)
    preview = Builder(shop.engine, shop.store, address="preview")
    await preview.make(SECOND, overlap=False)
    assert (await preview.deploy(SECOND)).ok
    assert await shop.engine.visit(PREVIEW) == (200, SECOND)
    assert shop.commands.ran_together(FIRST, SECOND)
    await shop.visitors.until(FIRST)
    assert shop.visitors.pages == [FIRST]


@pytest.mark.parametrize("state", ["running", "asleep", "while the worker is away", "while it is checked"])
async def test_a_preview_that_is_ended_leaves_nothing(shop: Shop, state: str) -> None:
    await shop.open()
    preview, serving = Builder(shop.engine, shop.store, address="preview"), Records(shop.store)
    for deploy in (SECOND, "dep_3"):  # one that is served, and one that it has replaced
        await preview.make(deploy)
        assert (await preview.deploy(deploy)).ok
    if state == "asleep":
        await shop.engine.let_sleep("dep_3")
    elif state == "while it is checked":
        await preview.make("dep_4")
        assert (await preview.step("check", "dep_4")).ok
    elif state == "while the worker is away":
        await shop.engine.stop()
    assert await serving.end(APP.account, APP.id, "preview")
    if state == "while the worker is away":
        assert await serving.end(APP.account, APP.id, "preview"), "it can be repeated"
        await shop.engine.start()
    await wait_until(lambda: serving.read(APP.account, APP.id), holds=lambda found: found.keys() == {"live"})
    assert await shop.engine.visit(PREVIEW) == (404, "")
    await wait_until(lambda: shop.engine.list_kept() == {FIRST} and shop.commands.running <= {FIRST})
    assert not await serving.end(APP.account, APP.id, "preview")
    await shop.visitors.until(FIRST)
    assert shop.visitors.pages == [FIRST]
    await preview.make("dep_5")
    assert (await preview.deploy("dep_5")).ok, "a deploy begins it again"
    assert await shop.engine.visit(PREVIEW) == (200, "dep_5")


# -- a deploy that fails -------------------------------------------------------------------------------------


REASONS = {
    "it ends": "status 3",
    "it answers 500": "500",
    "it has no archive": "no longer kept",
    "its archive is damaged": "release",
    "a disk is full": "the disk of the service is full; deploy again later",
}


@WAYS
@pytest.mark.parametrize("fault", REASONS)
async def test_a_release_that_fails_its_check_is_never_served(shop: Shop, overlap: bool, fault: str) -> None:
    await shop.begin(overlap=overlap)
    if fault == "it ends":
        shop.commands.ending.add(SECOND)
    elif fault == "it answers 500":
        shop.commands.failing.add(SECOND)
        shop.engine.start_seconds = 1.0
        await shop.restart()
    elif fault == "it has no archive":
        await shop.engine.lose_release(APP, SECOND)
    elif fault == "a disk is full":

        async def fail(call: str) -> None:
            if call == "place":
                shop.engine.after = nothing_happens
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        shop.engine.after = fail
    else:
        shop.engine.damage_release(APP, SECOND)
        shop.engine.start_seconds = shop.engine.place_seconds = 0.5
        await shop.restart()
    answer = await shop.builder.deploy(SECOND)
    assert not answer.ok
    assert REASONS[fault] in answer.reason
    assert answer.service_fault == (fault in ("its archive is damaged", "a disk is full"))
    await shop.until_served(FIRST)


# What a release answers at a path, and whether it is up. `test_health.py` has the other answers.
ANSWERS = [
    ("", "/", 404, True),
    ("", "/", 500, False),
    ("/healthz", "/", 500, True),
    ("/healthz", "/healthz", 404, False),
]


@pytest.mark.parametrize(("health", "path", "status", "is_up"), ANSWERS)
async def test_a_start_command_is_up_as_its_health_check_says(
    shop: Shop, health: str, path: str, status: int, is_up: bool
) -> None:
    await shop.open()
    await close_to_visitors(shop)
    if not is_up:  # which takes all of this time
        shop.engine.start_seconds = 1.0
        await shop.restart()
    await shop.builder.make(SECOND, health=health)
    shop.commands.statuses[SECOND, path] = status
    answer = await shop.builder.deploy(SECOND)
    assert answer.ok == is_up, answer
    if not is_up:
        assert f"answered {status} to GET {path} after" in answer.reason
        assert ("2xx or 3xx" in answer.reason) == bool(health)
        assert await shop.engine.visit(HOST) == (200, FIRST)
    elif path == "/":
        assert await shop.engine.visit(HOST) == (status, SECOND if status == 200 else "")


@pytest.mark.parametrize(("health", "before", "after"), [("", 404, 500), ("/healthz", 200, 404)])
async def test_a_canary_notices_an_app_that_breaks(shop: Shop, health: str, before: int, after: int) -> None:
    await shop.open()
    await close_to_visitors(shop)
    await shop.builder.make(SECOND, health=health)
    path = health or "/"
    shop.commands.statuses[SECOND, path] = before
    await shop.go_on("check")
    canary = await shop.builder.write("canary", SECOND)
    assert (await shop.builder.watch(canary)).ok
    shop.commands.statuses[SECOND, path] = after
    answer = await wait_until(lambda: shop.builder.read_answer(canary), holds=lambda answer: not answer.ok)
    assert answer.reason == f"GET {path} returned {after}"
    await wait_until(lambda: shop.engine.visit(HOST), holds=lambda answer: answer == (200, FIRST))


ELSEWHERE = {
    "It listens at 9999; listen at $PORT (8080).": ["127.0.0.1:9999"],
    "It listens at 3000 and 9229; listen at $PORT (8080).": ["0.0.0.0:3000", "[::]:3000", "127.0.0.1:9229"],
    "It listens at [::1]:8080; listen at $HOST (127.0.0.1).": ["[::1]:8080", "127.0.0.1:9229"],
}


@pytest.mark.parametrize("reason", ELSEWHERE)
async def test_a_check_fails_as_soon_as_the_command_listens_elsewhere(shop: Shop, reason: str) -> None:
    await shop.begin()
    shop.commands.elsewhere[SECOND] = ELSEWHERE[reason]
    began = time.monotonic()
    answer = await shop.builder.deploy(SECOND)
    assert (answer.ok, answer.reason) == (False, reason)
    assert time.monotonic() - began < 10
    await shop.until_served(FIRST)


async def test_a_command_may_listen_at_other_ports_first(shop: Shop) -> None:
    await shop.begin()
    shop.commands.elsewhere[SECOND] = ["127.0.0.1:9229"]
    wanted = await shop.builder.write("check", SECOND)
    await wait_until(lambda: SECOND in shop.commands.running)
    del shop.commands.elsewhere[SECOND]
    answer = await wait_until(lambda: shop.builder.read_answer(wanted))
    assert answer.ok, answer


async def test_a_check_says_that_nothing_listens(shop: Shop) -> None:
    await shop.begin()
    shop.engine.start_seconds = 1.0
    await shop.restart()
    shop.commands.elsewhere[SECOND] = []
    answer = await shop.builder.deploy(SECOND)
    assert answer.reason.endswith("nothing listens at $PORT (8080)")
    await shop.until_served(FIRST)


async def test_pages_without_an_index_are_never_served(shop: Shop) -> None:
    await shop.begin(runs=False, page=False)
    assert not (await shop.builder.deploy(SECOND)).ok
    await shop.until_served(FIRST)


@WAYS
@pytest.mark.parametrize(
    "fault",
    ["ending", "restarted", "failing"],
    ids=["it ends", "it ends and is started again", "it answers 500"],
)
async def test_a_release_that_fails_its_canary_is_undone(shop: Shop, overlap: bool, fault: str) -> None:
    """At once, and by the worker alone: its builder may be dead."""
    await shop.begin("check", overlap=overlap)
    canary = await shop.builder.write("canary", SECOND)
    assert (await shop.builder.watch(canary)).ok
    await shop.visitors.until(SECOND)
    getattr(shop.commands, fault).add(SECOND)
    await wait_until(lambda: shop.builder.read_answer(canary), holds=lambda answer: not answer.ok)
    await shop.visitors.until(FIRST)
    shop.visitors.forget()
    await shop.go_on("undo")
    await shop.until_served(FIRST)


@WAYS
@pytest.mark.parametrize(
    ("steps", "pages"),
    [(["check"], [FIRST]), (["check", "canary"], [FIRST, SECOND, FIRST])],
    ids=["check", "canary"],
)
async def test_a_builder_undoes_a_deploy_that_is_canceled(
    shop: Shop, overlap: bool, steps: list[Step], pages: list[str]
) -> None:
    await shop.begin(*steps, overlap=overlap)
    if "canary" in steps:
        await shop.visitors.until(SECOND)
    await shop.go_on("undo")
    await shop.until_served(*pages)


async def test_the_first_release_of_an_app_leaves_nothing_when_it_is_undone(shop: Shop) -> None:
    shop.engine.apps.append(APP)
    await shop.engine.start()
    await shop.builder.make(FIRST)
    assert (await shop.builder.step("check", FIRST)).ok
    assert (await shop.builder.step("canary", FIRST)).ok
    await shop.visitors.until(FIRST)
    assert (await shop.builder.step("undo", FIRST)).ok
    assert await shop.engine.visit(HOST) == (404, "")
    await wait_until(lambda: not shop.engine.list_kept() and not shop.commands.running)


@pytest.mark.parametrize("kind", ["cluster"], indirect=True)
@pytest.mark.parametrize("address", ["live", "preview"])
async def test_names_that_are_taken_away_are_not_given_again_meanwhile(shop: Shop, address: str) -> None:
    """The worker looks at all names again and again, also while the objects of an address are deleted one by one."""
    assert isinstance(shop.engine, ClusterEngine)
    shop.engine.apps.append(APP)
    await shop.engine.start()
    builder, serving = Builder(shop.engine, shop.store, address=address), Records(shop.store)
    await builder.make(FIRST)
    for step in ("check", "canary"):
        assert (await builder.step(step, FIRST)).ok
    shop.engine.cluster.deletion_seconds = 2 * TIDY_SECONDS
    if address == "live":
        assert (await builder.step("undo", FIRST)).ok
    else:
        assert await serving.end(APP.account, APP.id, "preview")
        await wait_until(lambda: serving.read(APP.account, APP.id), holds=lambda found: not found)
    assert await shop.engine.visit(HOST if address == "live" else PREVIEW) == (404, "")


# -- a worker or a builder that dies -------------------------------------------------------------------------


# The calls of each step, after which the worker dies.
CALLS: dict[Step, list[str]] = {
    "check": ["prepare", "place", "hold", "stop", "start", "until_answers"],
    "canary": ["prepare", "place", "route", "visit"],
    "live": ["prepare", "route", "retire"],
    "undo": ["prepare", "start", "route", "remove"],
}
# The steps before, the one in which the worker dies, the steps after it, and what visitors get.
DEATHS: dict[str, tuple[list[Step], Step, list[Step], list[str]]] = {
    "check": ([], "check", ["canary", "live"], [FIRST, SECOND]),
    "canary": (["check"], "canary", ["live"], [FIRST, SECOND]),
    "live": (["check", "canary"], "live", [], [FIRST, SECOND]),
    "undo of a check": (["check"], "undo", [], [FIRST]),
    "undo of a canary": (["check", "canary"], "undo", [], [FIRST, SECOND, FIRST]),
}


@pytest.mark.parametrize(
    ("case", "call"), [(case, call) for case, (_, step, *_) in DEATHS.items() for call in CALLS[step]]
)
async def test_a_worker_that_dies_in_a_step_goes_on(shop: Shop, case: str, call: str) -> None:
    """The releases must not run side by side, which is the harder way: there is nothing to go back to at once."""
    before, step, after, pages = DEATHS[case]
    died = asyncio.Event()

    async def die(name: str) -> None:
        if name == call:
            died.set()
            await asyncio.Event().wait()

    await shop.begin(*before, overlap=False)
    if "canary" in before:
        await shop.visitors.until(SECOND)
    shop.engine.after = die
    shop.visitors.waiting_may_be_refused = shop.engine.holds_requests
    wanted = await shop.builder.write(step, SECOND)
    await asyncio.wait_for(died.wait(), 10)
    shop.engine.pause = 0.05
    await shop.restart()
    answer = await wait_until(lambda: shop.builder.read_answer(wanted))
    assert answer.ok, answer
    await shop.go_on(*after)
    await shop.until_served(*pages)


@WAYS
async def test_a_release_whose_builder_has_died_after_its_check_gives_way_again(shop: Shop, overlap: bool) -> None:
    shop.engine.next_step_seconds = 0.2
    await shop.begin("check", overlap=overlap)
    await wait_until(lambda: FIRST in shop.commands.running)
    await shop.visitors.until(FIRST)
    assert set(shop.visitors.pages) == {FIRST}
    assert overlap or not shop.commands.ran_together(FIRST, SECOND)


async def test_a_worker_that_starts_again_changes_nothing_for_visitors(shop: Shop) -> None:
    await shop.open()
    began = len(shop.commands.together)
    await shop.restart()
    await shop.until_served(FIRST)
    assert len(shop.commands.together) == began, "it runs on"


async def test_a_worker_that_finds_nothing_serves_what_the_records_say(shop: Shop) -> None:
    """Beside a record that cannot be read, and as soon as the archive of the release is whole again."""
    await shop.open()
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


# -- names, suspension, sleep --------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "name"), [("live", HOST), ("preview", PREVIEW)])
async def test_a_name_that_is_taken_stays_with_its_app(engine: Engine, store: Store, address: str, name: str) -> None:
    """Two records with one name, such as after a failover that lost a renaming."""
    engine.apps.append(APP)
    await engine.start()
    owner = Builder(engine, store, address=address)
    await owner.make(FIRST)
    assert (await owner.deploy(FIRST)).ok
    other = msgspec.structs.replace(APP, id="other", account="acc_2")
    engine.apps.append(other)
    thief = Builder(engine, store, other, address)
    await thief.make(SECOND)
    assert "belongs to another app" in (await thief.deploy(SECOND)).reason
    assert await engine.visit(name) == (200, FIRST)
    await wait_until(lambda: engine.list_kept() == {FIRST})


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
    await shop.builder.make(SECOND)
    await shop.go_on("check", "canary", "live")
    assert await visit() == [to_www, (200, SECOND)]
    # Nobody is led to a domain that is not verified.
    await follows([Domain(www.name), apex], [(200, SECOND), none])
    await follows([apex, www], [(200, SECOND), to_apex])
    await shop.restart()
    assert await visit() == [(200, SECOND), to_apex]
    await follows([www], [none, (200, SECOND)])
    await follows([], [none, none])
    assert await shop.engine.visit(HOST) == (200, SECOND)


async def test_no_preview_takes_the_name_of_another_app(shop: Shop) -> None:
    other = App(id="other", name="shop-preview", account="acc_2", createdAt="")
    shop.engine.apps.append(other)
    await shop.open()
    preview = Builder(shop.engine, shop.store, address="preview")
    await preview.make(SECOND)
    assert "belongs to another app" in (await preview.deploy(SECOND)).reason
    assert await shop.engine.visit(PREVIEW) == (404, "")


@pytest.mark.parametrize("left", [[], [msgspec.structs.replace(APP, account="acc_2")]], ids=["deleted", "moved"])
@pytest.mark.parametrize("when", ["before the step", "during the step"])
async def test_an_app_that_is_gone_is_not_served(shop: Shop, left: list[App], when: str) -> None:
    """Another app may have its name by now."""
    await shop.begin("check")

    async def change_apps(_: str = "") -> None:
        shop.engine.apps[:] = left

    if when == "before the step":
        await change_apps()
    else:
        shop.engine.after = change_apps
    answer = await shop.builder.step("canary", SECOND)
    assert "deleted" in answer.reason
    assert (200, SECOND) not in shop.visitors.answers


@pytest.mark.parametrize("steps", [["check"], ["check", "canary"]], ids=["check", "canary"])
async def test_an_app_that_is_suspended_during_its_deploy_serves_nobody(shop: Shop, steps: list[Step]) -> None:
    await shop.begin(*steps)
    await list_suspended(shop.store, APP.account, APP.id)
    await wait_until(lambda: [status for status, _ in shop.visitors.answers[-AGAIN:]] == [503] * AGAIN)
    await wait_until(lambda: not shop.commands.running)
    assert not isinstance(shop.engine, ClusterEngine) or not shop.engine.cluster.pods, "open connections end"
    shop.visitors.forget()
    assert (await shop.builder.step("live", SECOND)).ok, "the step waits for no start command"
    await asyncio.sleep(0.3)
    assert {status for status, _ in shop.visitors.answers} == {503}
    assert not shop.commands.running
    await unlist_suspended(shop.store, APP.account, APP.id)
    await shop.until_only(SECOND)


async def test_a_suspension_between_two_steps_of_a_deploy(shop: Shop) -> None:
    """The checked release has ended, and runs before visitors get it."""
    await shop.begin("check")
    await list_suspended(shop.store, APP.account, APP.id)
    await wait_until(lambda: not shop.commands.running)
    await unlist_suspended(shop.store, APP.account, APP.id)
    await shop.visitors.until(FIRST)
    shop.visitors.forget()
    await shop.go_on("live")
    await shop.until_served(FIRST, SECOND)


async def test_an_app_that_sleeps_is_woken_by_its_first_visitor(shop: Shop) -> None:
    """While it sleeps, and afterwards, its address leads to one place alone."""
    await shop.open()
    await close_to_visitors(shop)
    for _ in range(2):
        await shop.engine.let_sleep(FIRST)
        assert not shop.commands.running
        assert [await shop.engine.visit(HOST) for _ in range(AGAIN)] == [(200, FIRST)] * AGAIN
        assert shop.commands.running == {FIRST}


async def test_a_deploy_of_an_app_that_sleeps_wakes_it(shop: Shop) -> None:
    await shop.open()
    await close_to_visitors(shop)
    await shop.engine.let_sleep(FIRST)
    await shop.builder.make(SECOND)
    assert (await shop.builder.deploy(SECOND)).ok
    assert await shop.engine.visit(HOST) == (200, SECOND)
    await wait_until(lambda: shop.commands.running == {SECOND})


@WAYS
async def test_a_check_that_fails_leaves_an_app_to_wake_that_sleeps(shop: Shop, overlap: bool) -> None:
    await shop.open(overlap=overlap)
    await close_to_visitors(shop)
    await shop.engine.let_sleep(FIRST)
    assert not shop.commands.running
    await shop.builder.make(SECOND, overlap=overlap)
    shop.commands.ending.add(SECOND)
    assert not (await shop.builder.deploy(SECOND)).ok
    assert await shop.engine.visit(HOST) == (200, FIRST)
    await wait_until(lambda: shop.commands.running == {FIRST})
    assert overlap or not shop.commands.ran_together(FIRST, SECOND)


@pytest.mark.parametrize("kind", ["cluster"], indirect=True)
async def test_a_preview_sleeps_where_an_app_needs_its_place(shop: Shop) -> None:
    """As many addresses of an account have pods as its plan allows."""
    await shop.open()
    await close_to_visitors(shop)
    assert isinstance(shop.engine, ClusterEngine)
    shop.engine.plan = "free"
    preview = Builder(shop.engine, shop.store, address="preview")
    await preview.make("dep_preview")
    assert (await preview.deploy("dep_preview")).ok
    others = [msgspec.structs.replace(APP, id=f"other{number}", name=f"other{number}") for number in (1, 2)]
    builders = [Builder(shop.engine, shop.store, app) for app in others]
    shop.engine.apps += others
    for number, builder in enumerate(builders):
        await builder.make(f"dep_other{number}")
    assert (await builders[0].deploy("dep_other0")).ok
    await wait_until(lambda: shop.commands.running, holds=lambda running: running == {FIRST, "dep_other0"})
    assert "as many as its plan allows" in (await builders[1].deploy("dep_other1")).reason
    assert (await shop.engine.visit(PREVIEW))[0] == 503, "it takes no place of an app"
    await shop.builder.make(SECOND)
    assert (await shop.builder.deploy(SECOND)).ok, "a swap needs no further place"
    await shop.engine.let_sleep(SECOND)
    assert await shop.engine.visit(PREVIEW) == (200, "dep_preview")
    assert await shop.engine.visit(HOST) == (200, SECOND)
    await wait_until(lambda: shop.commands.running, holds=lambda running: running == {SECOND, "dep_other0"})


@pytest.mark.parametrize("kind", ["cluster"], indirect=True)
async def test_visits_of_a_preview_in_a_cluster_are_noted(shop: Shop) -> None:
    """When its pod is asked how long it has been idle, and when it wakes."""
    await shop.open()
    await close_to_visitors(shop)
    assert isinstance(shop.engine, ClusterEngine)
    preview = Builder(shop.engine, shop.store, address="preview")
    await preview.make(SECOND)
    assert (await preview.deploy(SECOND)).ok
    assert await shop.engine.read_visits() == set()
    for deploy in (FIRST, SECOND):
        await shop.engine.let_sleep(deploy)
    assert await shop.engine.read_visits() == {"preview"}
    assert await shop.engine.read_visits() == set()
    assert await shop.engine.visit(PREVIEW) == (200, SECOND)
    assert await shop.engine.visit(HOST) == (200, FIRST)
    assert await shop.engine.read_visits() == {"preview"}


async def close_to_visitors(shop: Shop) -> None:
    """Lets nobody ask any more."""
    [visiting] = [task for task in asyncio.all_tasks() if "Visitors.run" in str(task.get_coro())]
    await cancel(visiting)


# -- what it needs is away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["redis", "storage or API server"])
@pytest.mark.parametrize("step", ["check", "canary"])
async def test_an_outage_delays_a_deploy_and_refuses_nobody(shop: Shop, proxy: Proxy, what: str, step: Step) -> None:
    await shop.begin()
    if step == "canary":
        await shop.go_on("check")
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
            assert await shop.builder.read_answer(wanted) is None
    answer = await wait_until(lambda: shop.builder.read_answer(wanted), 20)
    assert answer.ok
    if step == "check":
        await shop.go_on("canary")
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

"""An app with data on several hosts: one of them runs it, and another one continues when that host stops or dies."""

import asyncio
import contextlib
import signal
import tarfile
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from gateway.keys import claims_key, partition_tag
from tests.support.background import cancel, in_background
from tests.support.deployment import Host, live
from tests.support.gateway_process import Gateway
from tests.support.machines import QUICK, Machine, empty_host, sharing_gateway, start
from tests.support.polling import wait_until
from tests.support.sandbox import require_control_groups
from workers.hosting.claims import Claim
from workers.hosting.watchdog import is_running, read_state

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Counts the POST requests, and says since when it runs.
COUNTER = """
const fs = require('fs'), file = process.env.DATA_DIR + '/count', born = Date.now()
const read = () => fs.existsSync(file) ? Number(fs.readFileSync(file, 'utf8')) : 0
require('http').createServer((request, response) => {
  if (request.method === 'POST') fs.writeFileSync(file, String(read() + 1))
  response.setHeader('X-Born', born)
  response.setHeader('X-Seen', JSON.stringify(request.headers))
  response.end(VERSION + ' ' + read())
}).listen(process.env.PORT)
"""


def counter(version: str) -> dict[str, str]:
    return {"server.js": f"const VERSION = '{version}'\n{COUNTER}"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway() -> AsyncIterator[Gateway]:
    require_control_groups()
    async with sharing_gateway(GATEWAY_APP_DATA_SYNC="1", GATEWAY_APP_SLEEP="free=900") as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def host(gateway: Gateway) -> AsyncIterator[Host]:
    async with empty_host(gateway) as host:
        yield host


class Watch:
    """Looks regularly which hosts run the app. It must never be two."""

    def __init__(self, machines: list[Machine], app: str) -> None:
        self.machines, self.app, self.deploy = machines, app, ""
        self.most = 0

    def runners(self) -> list[Machine]:
        return [machine for machine in self.machines if self._runs(machine)]

    def _runs(self, machine: Machine) -> bool:
        states = [
            read_state(machine.folder, path.name.removesuffix(".state"))
            for path in (machine.folder / "running").glob("*.state")
        ]
        return any(is_running(state.keeper, state.began) for state in states)

    def owner(self) -> Machine:
        [owner] = self.runners()
        return owner

    def others(self) -> list[Machine]:
        return [machine for machine in self.machines if machine not in self.runners()]

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                self.most = max(self.most, len(self.runners()))
                await asyncio.sleep(0.01)

        async with in_background(watch()):
            yield
        assert self.most == 1, "two hosts have run the app at once"

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[set[str]]:
        """Asks all machines all the time, and yields the pages that they answer."""
        seen: set[str] = set()

        async def ask(machine: Machine) -> None:
            while True:
                seen.add(await machine.page(self.app))
                await asyncio.sleep(0.001)

        asking = [asyncio.create_task(ask(machine)) for machine in self.machines for _ in range(2)]
        try:
            yield seen
        finally:
            await cancel(*asking)

    async def until_served(self, machine: Machine, text: str) -> None:
        """Waits until the app answers at the machine, which answers nothing else than 503 before."""
        seen: set[str] = set()

        async def answered() -> bool:
            seen.add(await machine.page(self.app))
            return text in seen

        await wait_until(answered, 30)
        assert seen <= {text, "503", ""}, seen


@contextlib.asynccontextmanager
async def counting(host: Host, *names: str) -> AsyncIterator[Watch]:
    """Runs an app that has counted to three on several hosts."""
    machines = await start(host, *names)
    app = await host.app(build={"start": "exec node server.js"})
    watch = Watch(machines, app)
    async with watch.watching():
        watch.deploy = await live(host, app, counter("a"))
        for number in range(1, 4):
            answer = await machines[number % len(machines)].ask(app, "POST")
            assert answer is not None
            assert (answer.status_code, answer.text) == (200, f"a {number}")
        yield watch


async def until_copied(host: Host, watch: Watch) -> None:
    """Waits until a copy of the present data is in the storage."""
    copies = host.gateway.folder / "storage" / "data" / watch.app / "copies"
    files = watch.owner().folder / "data" / watch.app / "files"
    claims = claims_key(partition_tag(host.account.id))

    def is_copied() -> bool:
        copy = msgspec.json.decode(client.hget(claims, watch.app), type=Claim).copy
        if copy is None:
            return False
        # A newer copy removes it, and the first one may have no file.
        with contextlib.suppress(FileNotFoundError, KeyError), tarfile.open(copies / copy.name) as tar:
            return tar.extractfile("count").read() == (files / "count").read_bytes()
        return False

    with host.gateway.redis.client() as client:
        await wait_until(is_copied, 20)


async def test_every_host_answers_for_the_one_that_runs_the_app(host: Host) -> None:
    async with counting(host, "one", "two") as watch:
        born = set()
        for machine in watch.machines:
            answer = await machine.ask(watch.app, **{"X-Forwarded-For": "192.0.2.7", "Capsule-Passed-On": "guess"})
            assert answer is not None
            assert answer.text == "a 3"
            born.add(answer.headers["X-Born"])
            assert '"x-forwarded-for":"192.0.2.7, 127.0.0.1' in answer.headers["X-Seen"]
            assert "capsule-passed-on" not in answer.headers["X-Seen"]
        assert len(born) == 1
        # A deploy of the same app is checked where it runs, and all hosts serve it.
        await live(host, watch.app, counter("b"))
        for machine in watch.machines:
            assert await machine.page(watch.app) == "b 3"


async def test_a_host_that_stops_hands_everything_over(host: Host) -> None:
    async with counting(host, "one", "two") as watch:
        owner, [other] = watch.owner(), watch.others()
        counting_on = Counting(other, watch.app)
        assert await owner.worker.stop(60) == 0
        await wait_until(lambda: watch.runners() == [other], 30)
        counted = await counting_on.stop()
        answer = await other.ask(watch.app)
        assert answer is not None
        assert answer.text == f"a {3 + counted}", "nothing is lost"
        assert "dataAt" not in await host.deploy(watch.deploy)
        # It comes back, and serves again by passing on.
        await owner.start("sites")
        assert await owner.page(watch.app) == f"a {3 + counted}"
        assert watch.runners() == [other]


class Counting:
    """Counts up at a machine, until it is stopped."""

    def __init__(self, machine: Machine, app: str) -> None:
        self._machine, self._app, self._over = machine, app, False
        self.counted = 0
        self._task = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while not self._over:
            answer = await self._machine.ask(self._app, "POST")
            if answer is not None and answer.status_code == 200:
                self.counted += 1
            else:
                assert answer is None or answer.status_code == 503, answer.text
                assert answer is None or answer.headers["Retry-After"]
            await asyncio.sleep(0.02)

    async def stop(self) -> int:
        """Returns how many requests have succeeded."""
        await asyncio.sleep(0.5)
        self._over = True
        await self._task
        return self.counted


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_host_takes_over_from_one_that_dies_or_stands_still(host: Host, number: signal.Signals) -> None:
    async with counting(host, "one", "two") as watch:
        owner, [other] = watch.owner(), watch.others()
        await until_copied(host, watch)
        owner.worker.signal(number)
        began = time.monotonic()
        await watch.until_served(other, "a 3")
        await wait_until(lambda: watch.runners() == [other], 30)
        assert time.monotonic() - began < 30
        deploy = await host.deploy(watch.deploy)
        assert deploy["createdAt"] < deploy["dataAt"]
        answer = await other.ask(watch.app, "POST")
        assert answer is not None
        assert answer.text == "a 4"
        if number == signal.SIGSTOP:
            owner.worker.signal(signal.SIGCONT)
            await wait_until(lambda: "sites.lease_lost" in owner.worker.log, 20)
        else:
            owner.worker.kill()
            await owner.start("sites")

        async def passed_on() -> bool:
            return await owner.page(watch.app) == "a 4"

        await wait_until(passed_on, 30)
        assert watch.runners() == [other]


async def test_without_redis_the_app_ends_in_time_and_continues_where_it_was(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The owner has the time in between to come back before its claim is free.
    monkeypatch.setitem(QUICK, "workers.hosting.leases.TAKEOVER_SECONDS", 9.0)
    async with counting(host, "one", "two") as watch, watch.asking() as seen:
        owner = watch.owner()
        await asyncio.to_thread(host.gateway.redis.freeze)
        try:
            began = time.monotonic()
            await wait_until(lambda: not watch.runners(), 20)
            assert time.monotonic() - began < QUICK["workers.hosting.leases.TAKEOVER_SECONDS"]
            answer = await owner.ask(watch.app)
            assert answer is not None
            assert (answer.status_code, bool(answer.headers["Retry-After"])) == (503, True)
        finally:
            await asyncio.to_thread(host.gateway.redis.thaw)
        for machine in watch.machines:
            await watch.until_served(machine, "a 3")
        assert watch.runners() == [owner], "it has the newest data"
        assert seen <= {"a 3", "503", ""}, seen
        assert "dataAt" not in await host.deploy(watch.deploy)


async def test_an_app_whose_claim_is_lost_ends_and_is_claimed_again(host: Host) -> None:
    async with counting(host, "one") as watch, watch.asking() as seen:
        [owner] = watch.machines
        before = await owner.ask(watch.app)
        assert before is not None
        with host.gateway.redis.client() as client:
            claims = claims_key(partition_tag(host.account.id))
            assert client.hdel(claims, watch.app) == 1
            client.hset(claims, "version", "after the loss")

        async def has_started_again() -> bool:
            answer = await owner.ask(watch.app)
            return answer is not None and answer.headers.get("X-Born", "") > before.headers["X-Born"]

        await wait_until(has_started_again, 20)
        assert seen <= {"a 3", "503", ""}, seen


async def test_an_app_goes_on_while_its_worker_restarts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other host, so it need not move."""
    # As in production, because the lease must outlast the restart.
    monkeypatch.setitem(QUICK, "workers.hosting.leases.LEASE_SECONDS", 11.0)
    monkeypatch.setitem(QUICK, "workers.hosting.leases.TAKEOVER_SECONDS", 15.0)
    async with counting(host, "one") as watch:
        [owner] = watch.machines
        answer = await owner.ask(watch.app)
        assert answer is not None
        assert await owner.worker.stop(60) == 0
        counting_on = Counting(owner, watch.app)
        await owner.start("sites")
        counted = await counting_on.stop()
        again = await owner.ask(watch.app)
        assert again is not None
        assert (again.text, again.headers["X-Born"]) == (f"a {3 + counted}", answer.headers["X-Born"])


async def set_build(host: Host, app: str, **build: str) -> None:
    await host.gateway.platform("PUT", f"apps/{app}", {"account": host.account.id, "build": build})


async def test_an_app_without_a_start_command_needs_no_owner(host: Host) -> None:
    async with counting(host, "one", "two") as watch:
        await set_build(host, watch.app, output=".")
        await live(host, watch.app, {"index.html": "static"})
        for machine in watch.machines:
            assert await machine.page(watch.app) == "static"
            link = machine.folder / "releases" / watch.app / "live" / "owner"
            await wait_until(lambda: not link.is_symlink())  # noqa: B023
        await wait_until(lambda: not watch.runners(), 20)
        await set_build(host, watch.app, start="exec node server.js")
        await live(host, watch.app, counter("c"))
        for machine in watch.machines:
            assert await machine.page(watch.app) == "c 3", "its data have stayed"


async def test_a_suspended_app_stops_wherever_it_runs_and_its_data_stay(host: Host) -> None:
    async with counting(host, "one", "two") as watch:
        target, owner = f"apps/{watch.app}/suspension", watch.owner()
        assert (await host.gateway.platform("PUT", target, {"reason": "test"})).status_code == 200
        for machine in watch.machines:
            await wait_until(lambda machine=machine: machine.page(watch.app), holds=lambda page: page == "503")
            answer = await machine.ask(watch.app)
            assert answer is not None
            assert answer.text == "This app is suspended.\n", "each host answers itself"
        await wait_until(lambda: not watch.runners())
        # A host that comes later does not start it, and is ready soon.
        third = await Machine(host, "three").start("sites")
        assert await third.page(watch.app) in ("503", "404")
        await wait_until(lambda: third.page(watch.app), 10, holds=lambda page: page == "503")
        # Another host takes the app over meanwhile, and does not start it either.
        assert await owner.worker.stop(60) == 0
        await asyncio.sleep(2)
        assert not watch.runners()
        assert (await host.gateway.platform("DELETE", target)).status_code == 204
        watch.machines = [third, *(machine for machine in watch.machines if machine is not owner)]
        for machine in watch.machines:
            await wait_until(lambda machine=machine: machine.page(watch.app), 20, holds=lambda page: page == "a 3")
        assert len(watch.runners()) == 1

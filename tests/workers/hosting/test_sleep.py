"""Apps that sleep while nobody asks them: real start commands in the real sandbox, behind a real Caddy."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from tests.support.folders import passable_folder
from tests.support.hosted_apps import HOST, Hosting
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.stores import change_plan, opened
from tests.support.watched_apps import Watch, watching
from workers.hosting.sleep_limits import SleepLimits
from workers.hosting.watchdog import is_running
from workers.sandbox.relay import MONITOR

SLEEP_SECONDS = 0.6
# It answers with the time of its start, and keeps streams and upgraded connections open. It takes a while to end.
SERVER = """
const born = String(process.hrtime.bigint())
const server = require('http').createServer((request, response) => {
  if (request.url === '/stream') return response.writeHead(200).flushHeaders()
  if (request.url === '/exit') process.exit(3)
  request.on('data', () => {}).on('end', () => response.end(born))
})
server.on('upgrade', (_, socket) => {
  socket.write('HTTP/1.1 101 Switching Protocols\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n')
  socket.on('error', () => {}).on('end', () => socket.end()).resume()
})
process.on('SIGTERM', () => { server.close(); setTimeout(process.exit, 200) })
setTimeout(() => server.listen(process.env.PORT, '127.0.0.1'), 200)
"""


class Shop:
    """An app whose visitors come through Caddy."""

    def __init__(self, watch: Watch, hosting: Hosting) -> None:
        self.watch, self.hosting = watch, hosting
        self.client = aiohttp.ClientSession(f"http://127.0.0.1:{hosting.port}", headers={"Host": HOST})

    @property
    def asleep(self) -> bool:
        return self.watch.state("dep_1").asleep

    async def ask(self, method: str = "GET", path: str = "/") -> str:
        """Returns the answer, which must not be an error: when the app was started."""
        async with self.client.request(method, path, data=b"x" * 1_000 if method == "POST" else None) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.text()

    async def falls_asleep(self) -> None:
        await wait_until(lambda: self.asleep, 20)


@pytest_asyncio.fixture
async def shop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shop]:
    with passable_folder() as folder:
        hosting = Hosting(folder)
        async with watching(watch := Watch(hosting), monkeypatch), hosting.served():
            watch.sleeps_after = SLEEP_SECONDS
            watch.publish("dep_1", server=SERVER)
            hosting.releases.serve_as(HOST, hosting.site(hosting.deploy("dep_1")))
            shop = Shop(watch, hosting)
            async with shop.client:
                yield shop


async def test_a_preview_sleeps_by_a_limit_of_its_own(shop: Shop) -> None:
    shop.watch.sleeps_after, shop.watch.preview_sleeps_after = None, SLEEP_SECONDS
    shop.watch.publish("dep_2", server=SERVER, kind="preview")
    shop.watch.start()
    await shop.watch.ask("dep_1")
    await wait_until(lambda: shop.watch.state("dep_2").asleep, 20)
    assert not shop.asleep


@pytest.mark.parametrize("trusted", [False, True], ids=["sandbox", "trusted"])
async def test_an_idle_app_costs_no_process_and_the_next_request_starts_it(shop: Shop, trusted: bool) -> None:
    shop.watch.trusted = trusted
    shop.watch.start()
    first = await shop.watch.ask("dep_1")
    state = shop.watch.state("dep_1")
    for _ in range(2):
        await shop.falls_asleep()
        assert not is_running(state.keeper, state.began)
        second = await shop.ask()
        assert second != first
        assert await shop.ask() == second
        state = shop.watch.state("dep_1")
        assert (state.asleep, state.exits, is_running(state.keeper, state.began)) == (False, 0, True)
        first = second
    assert shop.watch.crashes == []


async def test_no_request_fails_at_the_moment_at_which_it_goes_to_sleep(shop: Shop) -> None:
    shop.watch.sleeps_after = 0.2
    shop.watch.start()
    await shop.watch.ask("dep_1")

    starts = []
    for pause in range(20, 52, 2):  # hundredths of a second after the last answer
        await asyncio.sleep(pause / 100)
        starts.append(await asyncio.gather(*(shop.ask(method) for method in ("GET", "POST"))))
    assert len({*itertools.chain(*starts)}) > 5
    assert shop.watch.crashes == []


@pytest.mark.parametrize("kind", ["stream", "socket"])
async def test_an_open_connection_keeps_it_awake(shop: Shop, kind: str) -> None:
    shop.watch.start()
    born = await shop.watch.ask("dep_1")
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"} if kind == "socket" else {}
    async with shop.client.get("/stream", headers=headers) as answer:
        assert answer.status == (101 if kind == "socket" else 200)
        await asyncio.sleep(3 * SLEEP_SECONDS)
        assert not shop.asleep
        assert await shop.ask() == born
        answer.close()
    await shop.falls_asleep()


async def test_probes_neither_keep_it_awake_nor_wake_it(shop: Shop) -> None:
    shop.watch.start()
    await shop.watch.ask("dep_1")
    statuses = []
    for _ in range(60):
        async with shop.client.get("/", headers={"User-Agent": MONITOR}) as answer:
            statuses.append(answer.status)
        await asyncio.sleep(0.05)
    assert (statuses[0], statuses[-1], {*statuses}) == (200, 204, {200, 204})
    assert shop.asleep


async def test_many_requests_wait_for_the_next_watchdog_which_starts_it_once(shop: Shop) -> None:
    shop.watch.start()
    await shop.watch.ask("dep_1")
    await shop.falls_asleep()
    await shop.watch.stop()
    waiting = [asyncio.create_task(shop.ask(method)) for method in ("GET", "POST") for _ in range(25)]
    await asyncio.sleep(1)
    assert not any(each.done() for each in waiting)
    shop.watch.start()
    [born] = set(await asyncio.gather(*waiting))
    await shop.watch.stop()
    await asyncio.sleep(2 * SLEEP_SECONDS)
    assert await shop.ask() == born, "without a watchdog it stays awake"
    shop.watch.start()
    await shop.falls_asleep()
    assert await shop.ask() != born


async def test_a_crash_after_waking_is_a_crash(shop: Shop) -> None:
    shop.watch.start()
    await shop.watch.ask("dep_1")
    await shop.falls_asleep()
    with contextlib.suppress(aiohttp.ClientError, AssertionError):
        await shop.ask("POST", "/exit")
    await wait_until(lambda: shop.watch.crashes, 20)
    assert shop.watch.crashes == [("shop", "exit", 3)]
    await shop.falls_asleep()
    assert shop.watch.state("dep_1").exits == 1


async def test_a_replaced_app_that_sleeps_is_removed(shop: Shop) -> None:
    shop.watch.start()
    await shop.watch.ask("dep_1")
    await shop.falls_asleep()
    shop.watch.sleeps_after = None
    shop.watch.build("dep_2", server=SERVER)
    born = await shop.watch.ask("dep_2")
    shop.hosting.site(shop.hosting.deploy("dep_2")).swap("dep_2")
    shop.hosting.releases.stop("dep_1")
    await wait_until(lambda: not [*shop.hosting.releases.running.glob("dep_1*")], 10)
    assert await shop.ask() == born


async def test_the_plan_decides_and_the_last_one_known_counts_while_redis_is_away() -> None:
    with RedisServer() as server:
        async with opened(server.url) as store:
            registry = Registry(store, Vault(""))
            account, _ = await registry.create_account("A", "max")
            await registry.put_app(App(id="shop", name="shop", account=account.id, createdAt=""), None)
            limits = SleepLimits(registry, {"free": 900.0, "max": 0.0})
            assert await limits.find("shop") is None, "0 is never"
            assert await limits.find("other") is None
            await change_plan(registry, account.id, "maker")
            assert await limits.find("shop") is None, "a plan without a limit"
            assert await limits.find("shop", is_preview=True) == 900
            assert await limits.find("other", is_preview=True) is None
            await change_plan(registry, account.id, "free")
            assert await limits.find("shop") == 900
            server.kill()
            assert await limits.find("shop") == 900
            assert await limits.find("other") is None

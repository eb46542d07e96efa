"""Real start commands in the real sandbox: Node servers that describe their environment, sleep while nobody asks them,
and are suspended.
"""

import asyncio
import base64
import contextlib
import itertools
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.accounts.vault import Vault
from gateway.deploys.line_times import split_stamp
from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store
from tests.support.background import in_background
from tests.support.folders import passable_folder
from tests.support.hosted_apps import HOST, Hosting
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.redis_servers import RedisServer, free_port
from tests.support.sandbox import marked, require_control_groups
from tests.support.stores import change_plan, opened
from tests.support.watched_apps import Watch, watching
from workers.engine.health import Listening
from workers.hosting import watchdog as watchdog_module
from workers.hosting.release_files import write_environment
from workers.hosting.sleep import ask_listening
from workers.hosting.sleep_limits import SleepLimits
from workers.hosting.suspensions import Suspensions
from workers.hosting.watchdog import LIMITS, AppState, control_path, is_running, output_path
from workers.sandbox.keeper import CADDY_USER
from workers.sandbox.relay import MONITOR
from workers.sandbox.sandbox import MIB


def read_output(hosting: Hosting, deploy_id: str) -> str:
    """Returns what a start command has written, without the times of its lines."""
    lines = output_path(hosting.folder, deploy_id).read_text().splitlines(keepends=True)
    return "".join(split_stamp(line)[1] for line in lines)


@pytest.mark.parametrize("address", ["0.0.0.0:9999", "[::1]:8080"])
async def test_the_relay_says_where_an_app_listens_instead(watch: Watch, address: str) -> None:
    host, _, port = address.rpartition(":")
    script = f"require('net').createServer().listen({port}, '{host.strip('[]')}')"
    watch.publish("dep_1", f'exec node -e "{script}"')
    watch.start()

    async def find_listening() -> Listening | None:
        with contextlib.suppress(OSError):
            return msgspec.json.decode(await ask_listening(control_path(watch.hosting.folder, "dep_1")), type=Listening)
        return None

    found = await wait_until(find_listening, 20, holds=lambda found: found and found.addresses)
    assert found == Listening(8080, False, [address])


async def test_only_crashes_of_live_releases_are_reported(watch: Watch) -> None:
    watch.publish("dep_1")
    watch.publish("dep_2", kind="preview")
    watch.build("dep_3")  # still being checked
    watch.start()
    for deploy_id in ("dep_2", "dep_3", "dep_1"):
        await watch.end(deploy_id, "/exit")
        await wait_until(lambda deploy_id=deploy_id: watch.state(deploy_id).exits == 1, 20)
        assert await watch.ask(deploy_id) == f"release {deploy_id}", "started again"
        assert watch.state(deploy_id).last == "the start command ended with status 3"
    assert watch.crashes == [("shop", "exit", 3)]
    await watch.end("dep_1", "/kill")
    await wait_until(lambda: len(watch.crashes) == 2, 20)
    assert watch.crashes[1] == ("shop", "exit", 137)


async def test_running_out_of_memory_is_reported(watch: Watch) -> None:
    watch.limits = LIMITS.__class__(memory=96 * MIB, grace=1)
    watch.publish("dep_1")
    watch.start()
    await watch.end("dep_1", "/eat")
    await wait_until(lambda: watch.crashes, 20)
    assert watch.crashes[0][:2] == ("shop", "oom")
    assert "out of memory" in watch.state("dep_1").last
    assert await watch.ask("dep_1") == "release dep_1"


async def test_the_pause_grows(watch: Watch, hosting: Hosting) -> None:
    watch.publish("dep_1", "echo once; exit 7")
    times: list[float] = []

    async def crashed(*_: object) -> None:
        times.append(asyncio.get_running_loop().time())

    watch.crashed = crashed  # type: ignore[method-assign]
    watch.start()
    await wait_until(lambda: len(times) == 3, 30)
    pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert [pause > least for pause, least in zip(pauses, (0.1, 0.2), strict=True)] == [True] * 2
    assert read_output(hosting, "dep_1") == "once\n" * 3


async def test_an_app_that_is_stopped_on_purpose_has_not_crashed(watch: Watch) -> None:
    """It finishes the requests in progress, which may take longer than the app's grace period."""
    watch.limits = LIMITS.__class__(memory=LIMITS.memory, grace=0.1)
    watch.publish("dep_1")
    watch.publish("dep_2", app_id="other")
    watch.start()
    for deploy_id in ("dep_1", "dep_2"):
        await watch.ask(deploy_id)
    keeper = watch.state("dep_1").keeper
    under_way = [asyncio.create_task(watch.get("dep_1", "/slow")) for _ in range(8)]
    await asyncio.sleep(0.2)
    watch.hosting.releases.stop("dep_1")
    assert await asyncio.gather(*under_way) == ["slow"] * 8
    await wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 20)
    await wait_until(lambda: watch.state("dep_1") == AppState(), 20)
    assert await watch.ask("dep_2") == "release dep_2"
    assert watch.crashes == []


async def test_an_app_that_must_stop_soon_does_not_wait_for_open_connections(watch: Watch) -> None:
    """Requests for the next release wait meanwhile."""
    watch.publish("dep_1")
    watch.start()
    await watch.ask("dep_1")
    keeper = watch.state("dep_1").keeper
    _, writer = await asyncio.open_unix_connection(watch.state("dep_1").socket)
    watch.hosting.releases.stop_soon("dep_1")
    await wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 10)
    await wait_until(lambda: not watch.hosting.releases.is_stopping("dep_1"), 10)
    writer.close()
    assert watch.crashes == []


# -- apps outlive the watchdog -------------------------------------------------------------------------------


async def test_a_new_watchdog_adopts_the_running_apps(watch: Watch) -> None:
    watch.publish("dep_1")
    watch.publish("dep_2", app_id="other")
    watch.start()
    assert await watch.ask("dep_1", "/write") == "kept"
    before = await watch.ask("dep_1", "/born"), await watch.ask("dep_2", "/born")
    await watch.stop()
    assert await watch.get("dep_1", "/born") == before[0], "it runs without a watchdog"
    watch.hosting.releases.stop("dep_2")
    keeper = watch.state("dep_2").keeper
    await wait_until(lambda: not Path(f"/proc/{keeper}").exists(), 15)
    watch.start()
    await wait_until(lambda: not [*watch.hosting.releases.running.glob("dep_2*")], 20)
    assert await watch.ask("dep_1", "/born") == before[0]
    await watch.end("dep_1", "/exit")
    await wait_until(lambda: watch.crashes, 20)
    assert watch.crashes == [("shop", "exit", 3)]
    assert (born := await watch.ask("dep_1", "/born")) != before[0]
    os.kill(watch.state("dep_1").keeper, signal.SIGKILL)  # the kernel kills the app with it
    await wait_until(lambda: len(watch.crashes) == 2, 20)
    assert await watch.ask("dep_1", "/born") != born


async def test_a_crash_without_a_watchdog_is_reported_unless_the_machine_has_ended_the_app(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker compose restart` kills the keepers too. The next watchdog starts the apps, and tells nobody."""
    watch.publish("dep_1")
    watch.start()
    await watch.ask("dep_1")
    for with_machine, expected in ((True, []), (False, [("shop", "exit", 3)])):
        keeper = watch.state("dep_1").keeper
        await watch.stop()
        if with_machine:
            os.kill(keeper, signal.SIGKILL)
            monkeypatch.setattr(watchdog_module, "identify_boot", lambda: "the next boot")
        else:
            await watch.end("dep_1", "/exit")
        await wait_until(lambda keeper=keeper: not Path(f"/proc/{keeper}").exists(), 20)
        watch.start()
        assert await watch.ask("dep_1") == "release dep_1"
        assert (watch.crashes, watch.state("dep_1").exits) == (expected, len(expected))


async def test_no_app_can_impersonate_another(watch: Watch) -> None:
    """All apps have the same port in their own networks, and cannot reach the sockets of others, or their own files."""
    watch.publish("dep_1")
    watch.publish("dep_2", app_id="other")
    watch.start()
    who = eval(await watch.ask("dep_1", "/who"))
    assert (who["cwd"], who["home"]) == ("/app", "/home/app")
    assert (who["uid"] in Watch.users) == (os.geteuid() == 0)
    assert await watch.ask("dep_1", "/write") == "kept"
    assert await watch.ask("dep_1", "/deface") == "EROFS"
    for deploy_id in ("dep_1", "dep_2"):
        assert await watch.ask(deploy_id) == f"release {deploy_id}"
        assert await watch.ask(deploy_id, "/neighbours") == '["app"]'
        assert await watch.ask(deploy_id, "/exists/app/server.js") == "true"
        assert await watch.ask(deploy_id, f"/exists{watch.hosting.folder}") == "false", "no path of the host is visible"
    sockets = [Path(watch.state(deploy_id).socket) for deploy_id in ("dep_1", "dep_2")]
    assert [path.stat().st_mode & 0o777 for path in sockets] == [0o600, 0o600]
    caddy_user = CADDY_USER if os.geteuid() == 0 else os.geteuid()
    assert {path.stat().st_uid for path in sockets} == {caddy_user}


async def test_secrets_reach_the_app_but_not_its_output_or_command_lines(watch: Watch, hosting: Hosting) -> None:
    secret = f"secret-{secrets.token_hex(8)}"
    watch.publish("dep_1", 'echo "it is $TOKEN"; exec node server.js')
    vault = Vault(base64.b64encode(os.urandom(32)).decode())
    sealed = vault.seal(msgspec.json.encode({"TOKEN": secret}).decode())
    write_environment(hosting.site(hosting.deploy("dep_1")).release("dep_1"), sealed)
    watch.vault = vault
    watch.start()
    await watch.ask("dep_1")
    await wait_until(lambda: read_output(hosting, "dep_1") == "it is ***\nstarting\n")
    assert not marked(secret)


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

    async def ask(self, method: str = "GET", path: str = "/") -> str:
        """Returns the answer, which must not be an error: when the app was started."""
        async with self.client.request(method, path, data=b"x" * 1_000 if method == "POST" else None) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.text()

    async def falls_asleep(self, deploy_id: str = "dep_1") -> None:
        await wait_until(lambda: self.watch.state(deploy_id).asleep, 20)


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
    await shop.falls_asleep("dep_2")
    assert not shop.watch.state("dep_1").asleep


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
        assert not shop.watch.state("dep_1").asleep
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
    assert shop.watch.state("dep_1").asleep


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


ACCOUNT = "acc_1"  # of all apps of `Hosting`
# A server that ignores SIGTERM, as one may that should not run.
STUBBORN = """
process.on('SIGTERM', () => {})
require('http').createServer((request, response) => response.end('stubborn')).listen(process.env.PORT)
"""


async def test_the_pages_of_a_suspended_app_answer_503(hosting: Hosting, store: Store) -> None:
    site = hosting.publish("dep_1", {"index.html": "shop"})
    hosting.publish("dep_2", {"index.html": "preview"}, "shop-preview.apps.test", kind="preview")
    hosting.publish("dep_3", {"index.html": "other"}, "other.apps.test", app_id="other")
    names = (HOST, "shop-preview.apps.test")
    async with hosting.served(), in_background(Suspensions(store, hosting.releases).run()):

        async def statuses() -> list[int]:
            return [(await hosting.ask("/", host=name)).status for name in names]

        for subject in ("shop", ""):  # the app, and then its account
            await list_suspended(store, ACCOUNT, subject)
            await wait_until(statuses, holds=lambda found: found == [503, 503])
            said = await hosting.ask("/any/page")
            assert (said.status, said.body) == (503, b"This app is suspended.\n")
            assert said.headers["cache-control"] == "no-store"
            assert (await hosting.ask("/", host="other.apps.test")).status == (200 if subject else 503)
            # A swap changes nothing, and a new site is marked too.
            hosting.publish(f"dep_4{subject}", {"index.html": "new"})
            assert await statuses() == [503, 503]
            fresh = hosting.site(hosting.deploy(f"dep_5{subject}", kind="preview", branch=f"of-{subject or 'all'}"))
            await wait_until(lambda: fresh.is_suspended)  # noqa: B023
            await unlist_suspended(store, ACCOUNT, subject)
            await wait_until(statuses, holds=lambda found: found == [200, 200])
    assert not site.is_suspended


async def test_without_redis_what_is_suspended_stays_so(hosting: Hosting, valkey: RedisServer, redis_url: str) -> None:
    suspended = hosting.publish("dep_1", {"index.html": "shop"})
    served = hosting.publish("dep_2", {"index.html": "other"}, "other.apps.test", app_id="other")
    store = Store(redis_url)
    await list_suspended(store, ACCOUNT, "shop")
    await Suspensions(store, hosting.releases).catch_up()
    async with opened(f"redis://127.0.0.1:{free_port()}/0") as away:
        fresh = Suspensions(away, hosting.releases)
        await fresh.catch_up()
        fresh.mark(suspended)
        assert (suspended.is_suspended, served.is_suspended) == (True, False)
        with pytest.raises(BackboneUnavailable):
            await list_suspended(away, ACCOUNT, "other")
        await store.close()


async def test_start_commands_stop_and_start_again(watch: Watch, hosting: Hosting) -> None:
    require_control_groups()
    watch.publish("dep_1")
    watch.publish("dep_2", server=STUBBORN, kind="preview")
    watch.start()
    born = await watch.ask("dep_1", "/born")
    assert await watch.ask("dep_2") == "stubborn"
    states = [watch.state(each) for each in ("dep_1", "dep_2")]
    sites = [*hosting.releases.sites()]
    for site in sites:
        site.set_suspended(suspended=True)
    # The grace that other apps get is twice as long.
    await wait_until(lambda: not any(is_running(state.keeper, state.began) for state in states), PATIENCE_SECONDS)
    await asyncio.sleep(0.5)  # and they do not come back
    assert [watch.state(each).socket for each in ("dep_1", "dep_2")] == ["", ""]
    await watch.stop()
    watch.start()
    await asyncio.sleep(0.5)
    assert watch.state("dep_1").socket == ""
    for site in sites:
        site.set_suspended(suspended=False)
    assert await watch.ask("dep_1", "/born") != born
    assert await watch.ask("dep_2") == "stubborn"
    assert watch.crashes == []
    assert [watch.state(each).exits for each in ("dep_1", "dep_2")] == [0, 0]

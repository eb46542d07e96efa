"""The `sites` worker as a process: serving, crashes of apps, kills and restarts."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import pytest_asyncio

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.data.records import DataRecords
from gateway.keys import PARTITION_TAGS, bodies_key, crashes_key, partition_tag
from tests.support.folders import kill_caddies, passable_folder
from tests.support.hosted_apps import HOST, Hosting
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.sandbox import require_control_groups
from tests.support.stores import opened
from tests.support.worker_process import Worker
from workers.hosting import caddy

APP = """
const born = Date.now()
require('http').createServer((request, response) => {
  if (request.url === '/exit') console.log('about to end'), process.exit(3)
  response.end(born + ' ' + Object.keys(process.env).filter(name => name.startsWith('GATEWAY')))
}).listen(process.env.PORT, '127.0.0.1')
"""


@pytest.fixture
def hosting() -> Iterator[Hosting]:
    with passable_folder() as folder:
        hosting = Hosting(folder)
        hosting.port = free_port()
        hosting.publish("dep_1", {"index.html": "files"})
        hosting.publish("dep_2", {"app.js": APP}, "live.apps.test", "exec node app.js", app_id="live")
        yield hosting


@pytest_asyncio.fixture
async def pair(hosting: Hosting, redis_url: str) -> AsyncIterator[tuple[Worker, Worker]]:
    pair = (hosting.worker(redis_url), hosting.worker(redis_url))
    yield pair
    for worker in pair:
        assert await worker.stop() in (0, None)
        worker.assert_log_is_clean()


async def app_birth(hosting: Hosting, path: str = "/") -> int:
    """Waits until the app answers. Returns its start time."""
    require_control_groups()

    async def answered() -> int:
        said = await hosting.ask(path, host="live.apps.test")
        if said.status != 200:
            return 0
        birth, _, settings = said.body.decode().partition(" ")
        assert settings == "", "it can read the worker's environment"
        return int(birth)

    found: int = await wait_until(answered, 30, every=0.05)
    return found


async def test_it_serves_reports_crashes_and_stops_cleanly(
    pair: tuple[Worker, Worker], hosting: Hosting, redis_url: str
) -> None:
    worker, _ = pair
    async with opened(redis_url) as store:
        registry = Registry(store, Vault(""))
        account, _ = await registry.create_account("A", "free")
        await registry.put_app(App(id="live", name="renamed", account=account.id, createdAt=""), None)
        await (await worker.start()).serving()
        assert (await hosting.ask("/")).body == b"files"
        assert caddy.read_address(hosting.folder) == f"http://127.0.0.1:{hosting.port}"
        first = await app_birth(hosting)
        await hosting.ask("/exit", host="live.apps.test")

        async def queued_events() -> list[dict[str, str]]:
            entries = [entry for tag in PARTITION_TAGS for entry in await store.client.xrange(f"{tag}:events")]
            return [fields for _, fields in entries]

        [event] = await wait_until(queued_events, 30)
        data = msgspec.json.decode(await store.client.hget(bodies_key(event["account"]), event["id"]))
        assert (data["appName"], data["reason"], data["exitCode"]) == ("renamed", "exit", 3)
        second = await app_birth(hosting)
        assert second != first
        [(_, kept)] = await store.client.xrange(crashes_key(partition_tag(account.id), "live"))
        assert msgspec.json.decode(kept["crash"])["lines"] == ["about to end"]
        server = caddy.read_process(hosting.folder)
        assert await worker.stop() == 0
        assert (await hosting.ask("/")).body == b"files", "visitors do not notice"
        assert await app_birth(hosting) == second, "an app outlives the worker"
        again = hosting.worker(redis_url)
        await (await again.start()).serving()
        assert caddy.read_process(hosting.folder) == server, "Caddy is adopted"
        assert (await hosting.ask("/")).body == b"files"
        assert await app_birth(hosting) == second
        assert await again.stop() == 0
        assert len(await queued_events()) == 1, "an app that is stopped on purpose has not crashed"


async def test_it_waits_for_its_port_and_works_without_redis(pair: tuple[Worker, Worker], hosting: Hosting) -> None:
    """It also ends with its worker if it is to. What is in progress ends first."""
    big = b"x" * 20_000_000
    hosting.publish("dep_9", {"big.bin": big}, "big.apps.test", app_id="big")
    worker, _ = pair
    worker.environment["GATEWAY_REDIS_URL"] = f"redis://127.0.0.1:{free_port()}/0"
    worker.environment["GATEWAY_KEEP_SERVING"] = "off"
    with socket.create_server(("127.0.0.1", hosting.port)):
        await worker.start()
        await wait_until(lambda: "sites.port_taken" in worker.log, 60)
        assert '"reason":"Address already in use"' in worker.log
    await worker.serving()
    assert (await hosting.ask("/", host=HOST)).body == b"files"
    first = await app_birth(hosting)
    await hosting.ask("/exit", host="live.apps.test")
    assert await app_birth(hosting) != first
    reader, writer = await asyncio.open_connection("127.0.0.1", hosting.port)
    writer.write(b"GET /big.bin HTTP/1.1\r\nHost: big.apps.test\r\nConnection: close\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0.5)
    assert await reader.readexactly(len(big)) == big
    assert await stopping == 0
    writer.close()
    assert caddy.read_process(hosting.folder) is None


async def test_a_caddy_is_replaced_when_it_ends_hangs_or_must_listen_elsewhere(
    pair: tuple[Worker, Worker], hosting: Hosting
) -> None:
    worker, again = pair
    await (await worker.start()).serving()
    kill_caddies(hosting.folder)
    await wait_until(lambda: worker.log.count("sites.serving") > 1, 20)
    assert (await hosting.ask("/")).body == b"files"
    assert worker.log.count("sites.caddy_ended") == 1
    first = caddy.read_process(hosting.folder)
    await worker.stop()
    again.environment |= {"GATEWAY_UPSTREAM": "127.0.0.1:1", "GATEWAY_BASE_URL": "http://api.test"}
    await (await again.start()).serving()
    assert caddy.read_process(hosting.folder) == first, "a changed setting reaches the running one"
    assert (await hosting.ask("/", host="api.test")).status == 502
    await again.stop()
    hosting.port = free_port()
    again.environment["GATEWAY_APPS_LISTEN"] = f"127.0.0.1:{hosting.port}"
    again.log_file.unlink()
    await (await again.start()).serving()
    second = caddy.read_process(hosting.folder)
    assert second is not None
    assert second != first
    assert (await hosting.ask("/")).body == b"files"
    await again.stop()
    os.kill(second.pid, signal.SIGSTOP)
    again.constants = {"workers.hosting.caddy.LOAD_SECONDS": 3.0, "workers.hosting.caddy.DRAIN_SECONDS": 0.5}
    again.log_file.unlink()
    await (await again.start()).serving()
    assert caddy.read_process(hosting.folder) != second
    assert (await hosting.ask("/")).body == b"files"


async def test_an_app_sleeps_as_its_plan_says(pair: tuple[Worker, Worker], hosting: Hosting, redis_url: str) -> None:
    """The worker reports that it sleeps."""
    async with opened(redis_url) as store:
        registry = Registry(store, Vault(""))
        account, _ = await registry.create_account("A", "starter")
        app = App(id="live", name="live", account=account.id, createdAt="")
        await registry.put_app(app, None)
        (hosting.site(hosting.deploy("dep_2", "live")).folder.parent / "account").write_text(account.id)
        for worker in pair:
            worker.environment["GATEWAY_APP_SLEEP"] = "starter=1"
        worker, _ = pair
        await (await worker.start()).serving()
        first = await app_birth(hosting)
        status = DataRecords(store).read_status
        await wait_until(lambda: status(app), 20, holds=lambda found: found.state == "asleep")
        assert await app_birth(hosting) > first

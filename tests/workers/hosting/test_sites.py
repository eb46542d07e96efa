"""The `sites` worker as a process: serving, crashes of apps, kills and restarts."""

import asyncio
import contextlib
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
from gateway.events.keys import bodies_key
from gateway.redis.client import Store
from gateway.redis.partitions import PARTITION_TAGS
from tests.support.folders import passable_folder
from tests.support.gateway_process import ENCRYPTION_KEY
from tests.support.hosted_apps import HOST, SERVERS, Hosting, needs_nginx
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.sandbox import require_control_groups
from tests.support.sites_process import Sites
from workers.hosting import sites

APP = """
const born = Date.now()
require('http').createServer((request, response) => {
  if (request.url === '/exit') process.exit(3)
  response.end(born + ' ' + Object.keys(process.env).filter(name => name.startsWith('GATEWAY')))
}).listen(process.env.PORT, '127.0.0.1')
"""


@pytest.fixture
def hosting() -> Iterator[Hosting]:
    with passable_folder() as folder:
        hosting = Hosting(folder)
        hosting.port = free_port()
        hosting.publish("dep_1", {"index.html": "files"})
        site = hosting.build(hosting.deploy("dep_2", "live"), {"app.js": APP}, start="exec node app.js")
        site.swap("dep_2")
        hosting.releases.serve_as("live.apps.test", site)
        hosting.releases.run(site.release("dep_2"))
        yield hosting


@pytest_asyncio.fixture
async def pair(hosting: Hosting, redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Sites, Sites]]:
    server = getattr(request, "param", "nginx")
    if server == "nginx":
        needs_nginx(hosting.folder)
    pair = (Sites(hosting, redis_url, server), Sites(hosting, redis_url, server))
    yield pair
    for worker in pair:
        if worker.process is not None and worker.process.poll() is None:
            assert await worker.stop() == 0
        for sign in ("Traceback", "never retrieved", "never awaited", "Unclosed", ENCRYPTION_KEY):
            assert sign not in worker.log, worker.log[-4_000:]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", hosting.port)


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
    pair: tuple[Sites, Sites], hosting: Hosting, redis_url: str
) -> None:
    worker, _ = pair
    store = Store(redis_url)
    registry = Registry(store, Vault(""))
    account, _ = await registry.create_account("A", "free")
    await registry.put_app(App(id="live", name="renamed", account=account.id, createdAt=""), None)
    worker.start()
    await worker.wait_until_serving()
    assert (await hosting.ask("/")).body == b"files"
    assert sites.read_address(hosting.folder) == f"127.0.0.1:{hosting.port}"
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
    assert await worker.stop() == 0
    again = Sites(hosting, redis_url, "nginx")
    again.start()
    await again.wait_until_serving()
    assert (await hosting.ask("/")).body == b"files"
    assert await app_birth(hosting) == second, "an app outlives the worker"
    assert await again.stop() == 0
    assert len(await queued_events()) == 1, "an app that is stopped on purpose has not crashed"
    await store.close()


@pytest.mark.parametrize("pair", SERVERS, indirect=True)
async def test_a_killed_worker_is_replaced(pair: tuple[Sites, Sites], hosting: Hosting) -> None:
    """A worker that stood by takes over the apps, the port and the nginx that was left behind."""
    worker, standby = pair
    worker.start()
    await worker.wait_until_serving()
    first = await app_birth(hosting)
    standby.start()
    await wait_until(lambda: "worker.standing_by" in standby.log, 60)
    answers: list[int] = []

    async def visitor() -> None:
        while True:
            with contextlib.suppress(OSError):
                answers.append((await hosting.ask("/")).status)
            await asyncio.sleep(0.01)

    visiting = asyncio.create_task(visitor())
    await wait_until(lambda: len(answers) > 10)
    assert "sites.serving" not in standby.log
    worker.kill()
    await standby.wait_until_serving()
    assert await app_birth(hosting) == first, "an app outlives the worker"
    visiting.cancel()
    assert set(answers) <= {200, 0}, "connections may be refused or cut during the change, but no answer is wrong"
    assert await standby.stop() == 0


@pytest.mark.parametrize("pair", ["auto"], indirect=True)
async def test_it_waits_for_its_port_and_works_without_redis(pair: tuple[Sites, Sites], hosting: Hosting) -> None:
    worker, _ = pair
    worker.environment["GATEWAY_REDIS_URL"] = f"redis://127.0.0.1:{free_port()}/0"
    with socket.create_server(("127.0.0.1", hosting.port)):
        worker.start()
        await wait_until(lambda: "sites.port_taken" in worker.log, 60)
        assert '"reason":"Address already in use"' in worker.log
    await worker.wait_until_serving()
    assert (await hosting.ask("/", host=HOST)).body == b"files"
    first = await app_birth(hosting)
    await hosting.ask("/exit", host="live.apps.test")
    assert await app_birth(hosting) != first
    assert (await hosting.ask("/")).body == b"files"


async def test_the_worker_ends_when_nginx_ends(pair: tuple[Sites, Sites], hosting: Hosting) -> None:
    """The worker's supervisor starts both again."""
    worker, again = pair
    worker.start()
    await worker.wait_until_serving()
    os.kill(int((hosting.folder / "web" / "nginx.pid").read_text()), signal.SIGKILL)
    assert worker.process is not None
    assert await asyncio.to_thread(worker.process.wait, 20) == 1
    assert "nginx ended unexpectedly" in worker.log
    worker.log_file.unlink()
    again.start()
    await again.wait_until_serving()
    assert (await hosting.ask("/")).body == b"files"

"""A primary behind Sentinels is replaced while tokens stream: the service recovers, and the spend is exact."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk
from tests.support.accounts import App
from tests.support.gateway_process import gateway
from tests.support.polling import wait_until
from tests.support.prices import cost
from tests.support.redis_servers import RedisServer, replicated, sentinels

pytestmark = pytest.mark.asyncio(loop_scope="session")

USERS = 3  # per app
RECOVERY_SECONDS = 5.0  # after Sentinel's own recovery
# The primary accepts no writes without a replica.
OPTIONS = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "10")
SETTINGS = {"GATEWAY_RATE_LIMITS": "app=100000,user=100000", "GATEWAY_REDIS_WAIT": "1"}
STREAM = [ROLE, chunk("one"), 0.2, chunk("two"), 0.2, chunk(finish="stop"), chunk(usage=(70, 30)), DONE]


class Load:
    """Requests streams for several users of each app, one after another."""

    def __init__(self, apps: list[App], prompt: str) -> None:
        self.apps, self.prompt = apps, prompt
        self.complete = dict.fromkeys((app.name for app in apps), 0)  # complete streams
        self.broken: list[str] = []
        self.served: dict[str, float] = {}  # when each app's last stream began
        self.stopping = False

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._ask(app)) for app in self.apps for _ in range(USERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, app: App) -> None:
        while not self.stopping:
            began = time.monotonic()
            try:
                async with app.stream(self.prompt) as source:
                    if source.response.status_code == 200:
                        text = "".join([event.data async for event in source.aiter_sse()])
                        self.complete[app.name] += 1
                        self.served[app.name] = max(began, self.served.get(app.name, 0.0))
                        assert "one" in text, text
                        assert "two" in text, text
                    else:
                        body = await source.response.aread()
                        assert b"BACKBONE_UNAVAILABLE" in body, body
            except httpx.HTTPError as error:
                self.broken.append(repr(error))
            await asyncio.sleep(random.uniform(0, 0.05))

    async def wait_until_all_served(self, since: float) -> None:
        await wait_until(lambda: all(self.served.get(app.name, 0) > since for app in self.apps), 40)


def count_scripts(server: RedisServer) -> int:
    with server.client() as client:
        stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))


def find_primary(url: str) -> int:
    with redis.Redis(port=urlsplit(url).port, socket_timeout=5) as sentinel:
        return int(sentinel.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", "gateway")[1])


def takes_writes(servers: list[RedisServer], port: int) -> bool:
    server = next(each for each in servers if each.port == port)
    with contextlib.suppress(redis.exceptions.RedisError), server.client() as client:
        return bool(client.set("probe", "1", ex=60))
    return False


def switch_over(servers: list[RedisServer], url: str) -> None:
    with redis.Redis(port=urlsplit(url).port, socket_timeout=5) as sentinel:
        sentinel.execute_command("SENTINEL FAILOVER", "gateway")


def kill(servers: list[RedisServer], url: str) -> None:
    servers[0].kill()


def freeze(servers: list[RedisServer], url: str) -> None:
    servers[0].freeze()


@pytest.mark.parametrize("fault", [switch_over, kill, freeze])
async def test_the_spend_is_exact(
    provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path, fault: Callable[[list[RedisServer], str], None]
) -> None:
    prompt = provider.plays(STREAM)
    with replicated("valkey", *OPTIONS, replicas=2) as servers, sentinels(servers[0]) as url:
        async with gateway(url, provider, tmp_path, **SETTINGS) as gw:
            apps = [await gw.app(backend) for _ in range(8)]
            async with Load(apps, prompt) as load:
                await load.wait_until_all_served(time.monotonic())
                await asyncio.sleep(1)
                await asyncio.to_thread(fault, servers, url)
                await wait_until(lambda: find_primary(url) != servers[0].port, 20)
                superseded = time.monotonic()
                await asyncio.sleep(0.3)  # scripts that were already sent may still arrive
                before = count_scripts(servers[0]) if fault is switch_over else 0
                await wait_until(lambda: takes_writes(servers, find_primary(url)), 20)
                recovered = time.monotonic()
                await load.wait_until_all_served(recovered)
                took = time.monotonic() - recovered
                if fault is switch_over:
                    late = count_scripts(servers[0]) - before
                    print(f"{late} scripts at the former primary; writes {recovered - superseded:.2f} s later")
                await asyncio.sleep(2)
                if fault is freeze:
                    servers[0].thaw()
                    await asyncio.sleep(3)
            streams = sum(load.complete.values())
            print(f"{fault.__name__}: all apps are served {took:.2f} s after the store; {streams} streams")
            assert took < RECOVERY_SECONDS
            settled = {app.name: (await wait_until(app.account._at_rest, 30))["settled"] for app in apps}
            expected = {name: count * cost(70, 30) for name, count in load.complete.items()}
            wrong = {name: (settled[name], expected[name]) for name in settled if settled[name] != expected[name]}
            assert not wrong, (wrong, load.broken)
            if fault is switch_over:
                assert late <= 5

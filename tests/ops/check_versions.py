"""Two neighboring versions serve side by side, and one replaces the other and is replaced again, under load.

`make check-versions` runs it. The former version is a commit of this repository, so it needs the whole history.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.receiver import FakeReceiver
from tests.support.accounts import App
from tests.support.deployment import Host, host_on
from tests.support.folders import passable_folder
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, free_port
from tests.support.versions import unpack_version
from tests.support.worker_process import Worker

FORMER = "cadb1ed14b2c"  # replace it with the last tag once there is one
SETTINGS = {"GATEWAY_RATE_LIMITS": "app=100000,user=100000", "GATEWAY_CANARY": "0.5", "GATEWAY_LOG_LEVEL": "info"}
GROUPS = (("webhooks", "monitors"), ("deploys",))
STOPPED = (0, -15)  # exit codes of a gateway after SIGTERM
ENOUGH = 20  # requests of each kind in each phase


class Load:
    """Users who ask the model at the gateways in turn, and visitors of the app. Nothing of theirs may fail."""

    def __init__(self, app: App, gateways: list[Gateway], host: Host) -> None:
        self.app, self.gateways, self.host = app, gateways, host
        self.answers = self.pages = 0
        self.seen: set[str] = set()
        self.is_over = False

    async def ask(self) -> None:
        for number in itertools.count():
            if self.is_over:
                break
            gw = self.gateways[number % len(self.gateways)]
            events = await self.app.at(gw).events("x")
            assert events[-1].event == "done", events
            self.answers += 1

    async def visit(self, name: str) -> None:
        while not self.is_over:
            try:
                answer = await self._look_at(name)
            except httpx.RemoteProtocolError:  # Caddy has just closed the idle connection; browsers repeat it too
                answer = await self._look_at(name)
            assert answer.status_code == 200, answer.text
            self.seen.add(answer.text)
            self.pages += 1
            await asyncio.sleep(0.02)

    async def _look_at(self, name: str) -> httpx.Response:
        return await self.host.web.get("/", headers={"Host": f"{name}.apps.localhost"})

    async def go_on(self) -> None:
        answers, pages = self.answers + ENOUGH, self.pages + ENOUGH
        await wait_until(lambda: self.answers >= answers and self.pages >= pages, 60)


@contextlib.asynccontextmanager
async def applied(load: Load, name: str) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        for work in (load.ask(), load.ask(), load.visit(name)):
            group.create_task(work)
        yield
        load.is_over = True


async def start_workers(host: Host, prefix: Sequence[str]) -> list[Worker]:
    return [await host.worker(*names, joined=False, prefix=prefix) for names in GROUPS]


async def test_neighboring_versions_replace_each_other(tmp_path: Path) -> None:
    (former := tmp_path / "former").mkdir()
    (disk := tmp_path / "redis").mkdir()
    prefix = await asyncio.to_thread(unpack_version, FORMER, former)
    with RedisServer("valkey", folder=disk) as redis:
        async with FakeProvider() as provider, FakeReceiver() as receiver, FakeAppBackend() as backend:
            with passable_folder() as data:
                settings = {**SETTINGS, "GATEWAY_DATA_DIR": str(data)}
                old, new = (Gateway(redis.url, provider, tmp_path, **settings) for _ in range(2))
                old.prefix = prefix
                try:
                    await old.start()
                    async with host_on(old, receiver, free_port()) as host:
                        await replace_and_return(host, old, new, await old.app(backend), prefix)
                finally:
                    for each in (old, new):
                        await each.stop()
                        await each.http.aclose()
            for each in (old, new):
                each.assert_log_is_clean()


async def replace_and_return(host: Host, old: Gateway, new: Gateway, app: App, prefix: Sequence[str]) -> None:
    gateways, name, deploys = [old], await host.app(), list[str]()
    await app.events("x")
    cost = await app.account.settled()

    async def publish(at: Gateway) -> None:
        host.account.gateway = at
        deploys.append(await host.publish(name, {"index.html": f"page {len(deploys)}"}))
        assert (deploy := await host.over(deploys[-1]))["state"] == "live", deploy["error"]

    old_workers = await start_workers(host, prefix)
    await publish(old)
    load = Load(app, gateways, host)
    async with applied(load, name):
        await new.start()
        gateways.append(new)
        await load.go_on()
        await publish(new)  # the former workers build it
        new_workers = await start_workers(host, ())
        await load.go_on()
        for worker in old_workers:
            assert await worker.stop() == 0
        await publish(old)  # the new workers build it
        gateways.remove(old)
        await load.go_on()
        assert await old.stop() in STOPPED

        await old.start()
        gateways.append(old)
        old_workers = await start_workers(host, prefix)
        await load.go_on()
        for worker in new_workers:
            assert await worker.stop() == 0
        await publish(new)  # the former workers build it
        gateways.remove(new)
        await load.go_on()
        assert await new.stop() in STOPPED
        await publish(old)
        await load.go_on()
    app.account.gateway = host.account.gateway = old
    assert await app.account.settled() == cost * (load.answers + 1), "the books are not exact"
    assert load.seen == {f"page {number}" for number in range(len(deploys))}
    events = Counter(
        event["data"]["deployId"]
        for event in (exchange.json for exchange in host.receiver.exchanges)
        if event["type"] == "deploy.succeeded"
    )
    assert events == dict.fromkeys(deploys, 1)

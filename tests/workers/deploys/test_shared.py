"""Several hosts on one Redis and one storage: each has a data folder and processes of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeProvider
from tests.support.accounts import DOMAIN
from tests.support.deployment import Host, hosting
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.s3_server import SECRET, S3Server
from tests.support.worker_process import Worker

PAGE = {"command": "sh build.sh", "output": "dist"}
START = {"start": "exec node server.js"}


def page(text: str, before: str = "") -> dict[str, str]:
    return {"build.sh": f"{before} mkdir dist; echo {text} > dist/index.html"}


def server(text: str, more: str = "") -> dict[str, str]:
    serve = f"require('http').createServer((_, answer) => answer.end('{text}')).listen(process.env.PORT)"
    return {"server.js": f"{serve}\n{more}\n"}


class Machine:
    """A host that serves: its data folder, its port and its worker."""

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.folder, self.port = host, host.gateway.folder / name, free_port()
        self.worker: Worker | None = None

    async def start(self, *names: str, **settings: str) -> Worker:
        settings = {"GATEWAY_DATA_DIR": str(self.folder), "GATEWAY_APPS_LISTEN": f"127.0.0.1:{self.port}", **settings}
        self.worker = await self.host.worker(*(names or ("sites",)), joined="deploys" in names, **settings)
        if "deploys" not in names or "sites" in names:
            await wait_until(lambda: "sites.serving" in self.worker.log, 30)
        return self.worker

    async def page(self, app: str) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get(f"http://127.0.0.1:{self.port}/", headers={"Host": f"{app}.{DOMAIN}"})
                return answer.text.strip() if answer.status_code == 200 else str(answer.status_code)
        return ""


async def until_served(machines: list[Machine], app: str, text: str, timeout: float = 10) -> None:
    async def served() -> bool:
        return [await machine.page(app) for machine in machines] == [text] * len(machines)

    await wait_until(served, timeout)


@pytest.fixture
async def s3(tmp_path: Path) -> AsyncIterator[S3Server]:
    server = await S3Server(tmp_path).start()
    yield server
    server.stop()


@pytest.fixture
async def host(tmp_path: Path, s3: S3Server) -> AsyncIterator[Host]:
    async with FakeProvider() as provider, hosting(provider, tmp_path, **s3.environment) as host:
        host.gateway.confidential.add(SECRET)
        yield host


async def test_deploys_of_every_kind_on_two_hosts(host: Host, tmp_path: Path) -> None:
    one, two = Machine(host, "one"), Machine(host, "two")
    await asyncio.gather(one.start("sites"), two.start("sites"), Machine(host, "builder").start("deploys"))
    app, runs = await host.app(build=PAGE), await host.app(build=START)
    first = await host.over(await host.publish(app, page("first")))
    assert first["state"] == "live", first
    assert [await machine.page(app) for machine in (one, two)] == ["first", "first"]
    deploy = await host.over(await host.publish(runs, server("runs")))
    assert deploy["state"] == "live", deploy
    assert [await machine.page(runs) for machine in (one, two)] == ["runs", "runs"]
    assert "to the log" not in deploy["log"]
    second = await host.over(await host.publish(app, page("second")))
    assert second["state"] == "live", second
    back = await host.over((await host.call("POST", f"/account/apps/{app}/rollback", json={}))["deployId"])
    assert (back["state"], back["release"]) == ("live", first["id"]), back
    assert back["durationMs"] < 10_000
    assert [await machine.page(app) for machine in (one, two)] == ["first", "first"]
    assert not list((tmp_path / "builder" / "releases").glob("*/*/dep_*")), "a builder keeps no release"


async def test_a_canary_that_fails_on_one_host_is_undone_on_both(host: Host, tmp_path: Path) -> None:
    one, two = Machine(host, "one"), Machine(host, "two")
    slow = {"GATEWAY_CANARY": "4"}
    await asyncio.gather(one.start("sites"), two.start("sites"), Machine(host, "builder").start("deploys", **slow))
    app = await host.app(build=PAGE)
    assert (await host.over(await host.publish(app, page("good"))))["state"] == "live"
    bad = await host.publish(app, page("bad"))
    await host.in_state(bad, "canary")
    assert await two.page(app) == "bad"
    (two.folder / "releases" / app / "live" / bad / "files" / "index.html").unlink()
    failed = await host.over(bad)
    assert (failed["state"], failed["error"]) == ("failed", "canary: GET / was answered with 404")
    await until_served([one, two], app, "good", 5)

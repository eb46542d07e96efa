"""Releases that must not run side by side: real start commands behind a real Caddy, while visitors ask.

How deploys fail and are undone, `test_driver_contract.py` says.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from gateway.accounts.records import App
from gateway.deploys.manifest import Manifest, ManifestBuild
from gateway.deploys.serving import Step
from gateway.settings import Settings
from tests.support.folders import passable_folder
from tests.support.hosted_apps import DOMAIN, HOST, Hosting, hosted
from tests.support.polling import wait_until
from tests.support.watched_apps import Watch, watching
from workers.engine.driver import Target
from workers.engine.steps import ReleaseSteps
from workers.hosting import caddy
from workers.hosting.driver import HostDriver
from workers.hosting.release_files import write_release_manifest

APP = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")
# It logs its life, and answers with the name of its release.
SERVER = """
const name = require('fs').readFileSync('name', 'utf8'), now = () => process.hrtime.bigint()
console.log('up ' + now())
const server = require('http').createServer((request, response) => {
  if (request.url === '/stream') return response.writeHead(200).flushHeaders()
  setTimeout(() => response.end(name), request.url === '/slow' ? 900 : 0)
})
process.on('SIGTERM', () => server.close(() => { console.log('down ' + now()); process.exit(0) }))
setTimeout(() => server.listen(process.env.PORT, '127.0.0.1'), 200)
"""


class Shop:
    """An app of which one release runs. Visitors ask for it all the time."""

    def __init__(self, watch: Watch, hosting: Hosting) -> None:
        self.watch, self.hosting = watch, hosting
        settings = Settings(data_dir=str(hosting.folder), apps_domain=DOMAIN)
        self.steps = ReleaseSteps(HostDriver(settings), self.find_app, self.find_apps, settings, drain_seconds=0.1)
        self.site = hosting.site(hosting.deploy("dep_1"))
        self.answers: list[str] = []
        self.longest = 0.0  # seconds
        self.over = False

    async def find_app(self, _: str) -> App:
        return APP

    async def find_apps(self, _: Sequence[str]) -> dict[str, App]:
        return {APP.id: APP}

    def target(self, deploy_id: str, step: Step) -> Target:
        return self.hosting.target(self.hosting.deploy(deploy_id), APP, step, "dep_1" if deploy_id > "dep_1" else "")

    async def deploy(self, deploy_id: str) -> None:
        start = "exec node server.js"
        self.hosting.build(self.hosting.deploy(deploy_id), {"server.js": SERVER, "name": deploy_id}, start)
        manifest = Manifest(build=ManifestBuild(start=start, overlap=False))
        write_release_manifest(self.site.release(deploy_id), manifest)
        await self.steps.check(self.target(deploy_id, "check"))
        await self.steps.serve(canary := self.target(deploy_id, "canary"))
        await self.steps.probe(canary)
        await self.steps.finish(self.target(deploy_id, "live"))

    async def visit(self, client: aiohttp.ClientSession, number: int) -> None:
        while not self.over:
            began = asyncio.get_running_loop().time()
            async with client.request("POST" if number % 2 else "GET", "/slow" if number % 4 == 0 else "/") as answer:
                text = await answer.text()
                assert answer.status == 200, text
                self.answers.append(text)
            self.longest = max(self.longest, asyncio.get_running_loop().time() - began)

    def output(self, deploy_id: str) -> Path:
        return self.hosting.releases.running / f"{deploy_id}.output"


@pytest_asyncio.fixture
async def shop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shop]:
    with passable_folder() as folder:
        hosting = Hosting(folder)
        async with watching(watch := Watch(hosting), monkeypatch), hosting.served():
            shop = Shop(watch, hosting)
            watch.start()
            await shop.deploy("dep_1")
            base, headers = f"http://127.0.0.1:{hosting.port}", {"Host": HOST}
            async with aiohttp.ClientSession(base, headers=headers) as client, asyncio.TaskGroup() as group:
                for number in range(8):
                    group.create_task(shop.visit(client, number))
                await wait_until(lambda: len(shop.answers) > 16)
                yield shop
                shop.over = True


async def test_the_former_release_ends_before_the_next_one_begins(shop: Shop) -> None:
    kept = shop.hosting.folder / "kept"
    kept.hardlink_to(shop.output("dep_1"))
    await shop.deploy("dep_2")
    [ended], [began] = (
        re.findall(r"down (\d+)", kept.read_text()),
        re.findall(r"up (\d+)", shop.output("dep_2").read_text()),
    )
    assert int(ended) < int(began)
    await wait_until(lambda: shop.answers[-1] == "dep_2")
    assert set(shop.answers) == {"dep_1", "dep_2"}
    assert shop.answers.index("dep_2") > len(shop.answers) - shop.answers[::-1].index("dep_1") - 16
    assert not (shop.site.folder / "held").is_symlink()
    url = f"http://127.0.0.1:{shop.hosting.port}/stream"
    async with aiohttp.ClientSession(headers={"Host": HOST}) as client, client.get(url) as answer:
        assert answer.status == 200
        await shop.deploy("dep_3")
    assert shop.longest < 10, "an open stream does not hold up the next release"


async def test_requests_wait_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caddy, "HELD_SECONDS", 1)
    with hosted() as hosting:
        hosting.site(hosting.deploy("dep_1")).hold_requests("dep_1")
        async with hosting.served():
            began = asyncio.get_running_loop().time()
            said = await hosting.ask("/")
            assert 1 <= asyncio.get_running_loop().time() - began < 3
            assert (said.status, said.headers["retry-after"]) == (502, "1")

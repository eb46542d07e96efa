"""Machines with one Redis and one storage: one serves the apps, and others build. Each has its own data folder."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import Self

import httpx

from tests.fakes import FakeProvider
from tests.fakes.receiver import FakeReceiver
from tests.support.accounts import DOMAIN
from tests.support.deployment import Host, host_on
from tests.support.folders import passable_folder
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.worker_process import Worker

# Short intervals, so that no test waits long.
QUICK: dict[str, float] = {
    "gateway.storage.LONGEST_PAUSE_SECONDS": 0.5,
    "workers.builds.schedule.HELD_MS": 6_000,
    "workers.builds.schedule.POLL_SECONDS": 0.1,
    "gateway.deploys.serving.HOLD_SECONDS": 4.0,
    "workers.hosting.hold_engine.RENEWAL_SECONDS": 0.5,
    "workers.engine.reconciler.RESYNC_SECONDS": 1.0,
    "workers.engine.reconciler.TIDY_SECONDS": 0.5,
}


class Machine:
    """A host: its data folder, its port and its worker."""

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.folder, self.port = host, host.gateway.folder / name, free_port()
        self.worker: Worker | None = None

    async def start(self, *names: str, **settings: str) -> Self:
        await self.launch(*names, **settings)
        if self.worker is not None and "sites" in names:
            await self.worker.serving()
        return self

    async def launch(self, *names: str, **settings: str) -> None:
        """Starts the worker, which need not serve."""
        settings = {"GATEWAY_DATA_DIR": str(self.folder), "GATEWAY_APPS_LISTEN": f"127.0.0.1:{self.port}", **settings}
        self.worker = await self.host.worker(*names, joined="deploys" in names, constants=QUICK, **settings)

    async def ask(self, app: str, method: str = "GET") -> httpx.Response | None:
        """Requests an app's page at this host. Returns None if no response came."""
        with contextlib.suppress(httpx.TransportError):
            headers = {"Host": f"{app}.{DOMAIN}"}
            return await self.host.web.request(method, f"http://127.0.0.1:{self.port}/", headers=headers)
        return None

    async def page(self, app: str) -> str:
        answer = await self.ask(app)
        if answer is None:
            return ""
        return answer.text.strip() if answer.status_code == 200 else str(answer.status_code)


async def until_served(machine: Machine, app: str, text: str, timeout: float = 10) -> None:
    await wait_until(lambda: machine.page(app), timeout, holds=lambda page: page == text)


async def start(host: Host, **settings: str) -> Machine:
    """Starts a machine that serves, and one that builds."""
    machines = Machine(host, "one").start("sites", **settings), Machine(host, "builder").start("deploys", **settings)
    return (await asyncio.gather(*machines))[0]


@contextlib.asynccontextmanager
async def sharing_gateway(**settings: str) -> AsyncIterator[Gateway]:
    """Runs a gateway whose storage is a folder that all hosts mount."""
    with passable_folder() as folder:
        settings = {"GATEWAY_STORAGE_URL": f"file://{folder}/storage", "GATEWAY_CANARY": "0.5", **settings}
        async with FakeProvider() as provider, gateway_with_redis(provider, folder, **settings) as gateway:
            yield gateway


@contextlib.asynccontextmanager
async def empty_host(gateway: Gateway) -> AsyncIterator[Host]:
    (gateway.folder / "storage").mkdir()
    try:
        async with FakeReceiver() as receiver, host_on(gateway, receiver, free_port()) as host:
            yield host
    finally:
        gateway.empty()
        for path in gateway.folder.iterdir():  # the storage, and a folder for each host
            if path.is_dir():
                shutil.rmtree(path)

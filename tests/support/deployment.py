"""A gateway with its workers, and an account that deploys apps and receives events."""

import contextlib
import io
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.fakes import FakeProvider
from tests.fakes.receiver import FakeReceiver
from tests.support.accounts import DOMAIN, Account
from tests.support.deploys import a_hook, an_app
from tests.support.folders import kill_caddies
from tests.support.gateway_process import Gateway, gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.worker_process import Worker

# Short intervals, so that no test waits long for the next check.
QUICK: dict[str, float] = {
    "gateway.settings.parsing.SHORTEST_CLAIM_IDLE_SECONDS": 1.0,
    "workers.builds.builder.CANCEL_CHECK_SECONDS": 0.1,
    "workers.builds.builder.FLUSH_SECONDS": 0.1,
    "workers.hosting.driver.POLL_SECONDS": 0.05,
    "workers.engine.steps.DRAIN_SECONDS": 0.3,
}


# How an app of `page` is built, and how one of `server` is started.
BUILD = {"command": "sh build.sh", "output": "dist"}
START = {"start": "exec node server.js"}


def page(text: str, before: str = "") -> dict[str, str]:
    """Returns the files of an app with one page. Its build runs the commands `before`."""
    return {"build.sh": f"{before} mkdir dist; echo {text} > dist/index.html"}


def server(text: str, more: str = "") -> dict[str, str]:
    """Returns the files of an app that answers with the text."""
    serve = f"require('http').createServer((_, answer) => answer.end('{text}')).listen(process.env.PORT)"
    return {"server.js": f"{serve}\n{more}\n"}


def packed(files: Mapping[str, str | bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in files.items():
            content, member = text.encode() if isinstance(text, str) else text, tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


class Host:
    """A gateway with its workers, and one account with a receiver for its events."""

    def __init__(self, gateway: Gateway, account: Account, receiver: FakeReceiver, apps_port: int) -> None:
        self.gateway, self.account, self.receiver, self.apps_port = gateway, account, receiver, apps_port
        self.workers: list[Worker] = []
        self.apps: list[str] = []
        self.web = httpx.AsyncClient(base_url=f"http://127.0.0.1:{apps_port}", trust_env=False, timeout=10)

    async def worker(
        self,
        *names: str,
        joined: bool = True,
        constants: Mapping[str, float] = {},
        prefix: Sequence[str] = (),
        **settings: str,
    ) -> Worker:
        settings = {**self.gateway.environment, "GATEWAY_APPS_LISTEN": f"127.0.0.1:{self.apps_port}", **settings}
        worker = Worker(
            settings.pop("GATEWAY_REDIS_URL"),
            self.gateway.folder,
            *names,
            confidential=self.gateway.confidential,
            constants={**QUICK, **constants},
            prefix=prefix,
            **settings,
        )
        self.workers.append(worker)
        await worker.start()
        return await worker.joined() if joined else worker

    async def call(self, method: str, path: str, **options: Any) -> Any:
        answer = await self.account.call(method, path, options.pop("json", None), **options)
        assert answer.is_success, answer.text
        return answer.json()

    async def app(self, **fields: Any) -> str:
        self.apps.append(name := await an_app(self.account, **fields))
        return name

    async def remove_apps(self) -> None:
        """Deletes the apps, and cancels their builds."""
        for deploy in await self.call("GET", "/account/deploys"):
            if deploy["state"] in ("queued", "building"):
                with contextlib.suppress(AssertionError):  # it has just ended
                    await self.call("POST", f"/account/deploys/{deploy['id']}/cancel")
        for app in self.apps:
            await self.gateway.platform("DELETE", f"apps/{app}")

    async def publish(self, app: str, files: dict[str, str]) -> str:
        return (await self.call("PUT", f"/account/apps/{app}/source", content=packed(files)))["deployId"]

    async def hook(self, app: str) -> str:
        return httpx.URL((await a_hook(self.account, app))["url"]).path

    async def trigger(self, hook: str) -> str:
        return (await self.gateway.http.post(hook)).raise_for_status().json()["deployId"]

    async def deploy(self, deploy_id: str) -> dict[str, Any]:
        return await self.call("GET", f"/account/deploys/{deploy_id}")

    async def in_state(self, deploy_id: str, *states: str, timeout: float = 60) -> dict[str, Any]:
        return await wait_until(lambda: self.deploy(deploy_id), timeout, holds=lambda deploy: deploy["state"] in states)

    async def over(self, deploy_id: str) -> dict[str, Any]:
        return await self.in_state(deploy_id, "live", "failed", "canceled")

    async def page(self, host: str) -> str:
        answer = await self.web.get("/", headers={"Host": f"{host}.{DOMAIN}"})
        return answer.text if answer.status_code == 200 else str(answer.status_code)

    async def events(self, deploy_id: str, count: int = 1) -> list[tuple[str, dict[str, Any]]]:
        """Returns the events of one deploy once `count` have been received."""

        def received() -> list[tuple[str, dict[str, Any]]]:
            events = [exchange.json for exchange in self.receiver.exchanges]
            return [(e["type"], e["data"]) for e in events if e["data"].get("deployId") == deploy_id]

        await wait_until(lambda: len(received()) >= count, 30)
        return received()


async def live(host: Host, app: str, files: dict[str, str]) -> str:
    """Publishes the files, and waits until they are live."""
    deploy = await host.over(await host.publish(app, files))
    assert deploy["state"] == "live", (deploy, [worker.log[-3000:] for worker in host.workers])
    return deploy["id"]


@contextlib.asynccontextmanager
async def hosting(provider: FakeProvider, folder: Path, **more: str) -> AsyncIterator[Host]:
    settings = {"GATEWAY_CANARY": "0.5", **more}
    async with (
        FakeReceiver() as receiver,
        gateway_with_redis(provider, folder, **settings) as gw,
        host_on(gw, receiver, free_port()) as host,
    ):
        yield host


@contextlib.asynccontextmanager
async def host_on(gw: Gateway, receiver: FakeReceiver, apps_port: int) -> AsyncIterator[Host]:
    """Yields a host with a new account on a running gateway. Its workers stop with it."""
    host = Host(gw, await gw.account("maker"), receiver, apps_port)
    await host.account.set_webhook(receiver.url())
    try:
        yield host
        for worker in host.workers:
            worker.assert_log_is_clean()
    finally:
        for worker in host.workers:
            await worker.stop()
        for folder in {worker.environment.get("GATEWAY_DATA_DIR", str(gw.folder)) for worker in host.workers}:
            kill_caddies(Path(folder))
        await host.web.aclose()


@contextlib.asynccontextmanager
async def account_on(host: Host) -> AsyncIterator[Host]:
    """Yields a host with a new account, whose apps the workers of this one serve, and removes its apps."""
    async with host_on(host.gateway, host.receiver, host.apps_port) as own:
        try:
            yield own
        finally:
            await own.remove_apps()


@contextlib.asynccontextmanager
async def all_processes(url: str, provider: FakeProvider, site: FakeReceiver, folder: Path) -> AsyncIterator[Host]:
    """Runs the gateway and two processes with every kind of worker on a Redis. The uptime probes go to `site`."""
    settings = {
        "GATEWAY_RATE_LIMITS": "app=100000,user=100000",
        "GATEWAY_CANARY": "0.5",
        "GATEWAY_PROBE_INTERVAL": "0.2",
        "GATEWAY_PROBE_TIMEOUT": "1",
        "GATEWAY_PROBE_URL": site.url(),
    }
    async with (
        FakeReceiver() as receiver,
        gateway(url, provider, folder, **settings) as gw,
        host_on(gw, receiver, free_port()) as host,
    ):
        await (await host.worker("sites", joined=False)).serving()
        await host.worker("webhooks", "deploys", "monitors")
        yield host
        for worker in host.workers:
            assert worker.code is None, worker.log

"""A whole service is backed up while it works, and restored on another machine."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

from gateway.keys import PROCESSES_KEY, worker_key
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.receiver import FakeReceiver
from tests.support.background import cancel
from tests.support.deployment import Host, host_on
from tests.support.folders import passable_folder
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, free_port
from workers.engine.app_data import AppData

ROOT = Path(__file__).parents[3]
# Each POST adds its body to a file in DATA_DIR, and a GET returns the file.
NOTES = """\
const fs = require('fs'), http = require('http')
const file = process.env.DATA_DIR + '/notes'
http.createServer((request, answer) => {
  if (request.method !== 'POST') return answer.end(fs.existsSync(file) ? fs.readFileSync(file, 'utf8') : '')
  request.on('data', (chunk) => fs.appendFileSync(file, chunk)).on('end', () => answer.end('kept'))
}).listen(process.env.PORT)
"""


async def capsule(gw: Gateway, *arguments: str, code: int = 0) -> str:
    """Runs a command on the machine of the service. Returns what it prints."""
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "capsule_gateway", *arguments],
        env=gw.environment | {"PYTHONPATH": str(ROOT)},
        cwd=gw.folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == code, run.stderr
    assert not gw.find_secrets((run.stdout + run.stderr).encode())
    return run.stdout + run.stderr


async def restore_in_place(gw: Gateway, server: RedisServer, folder: Path, app: str, target: str) -> None:
    """An app outlives its worker, and has written since the backup. What it wrote later would be lost."""
    with server.client() as client:
        beats = [PROCESSES_KEY, *(key.decode() for key in client.scan_iter(worker_key("*", "*")))]
        await wait_until(lambda: not client.exists(*beats), 30)
    data = AppData(folder, app)
    refused = await capsule(gw, "restore", target, code=1)
    assert f"1 apps of this data folder run and would change their former data, such as {app}; --force" in refused
    assert (data.is_running, (data.files / "notes").read_text()) == (True, "one lost")
    await capsule(gw, "restore", target, "--force")
    assert (data.is_running, (data.files / "notes").read_text()) == (False, "one ")


async def test_apps_data_hooks_and_money_are_back(tmp_path: Path) -> None:
    async with FakeProvider() as provider, FakeAppBackend("ES256") as backend:
        await back_up_and_restore(provider, backend, tmp_path)


async def back_up_and_restore(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    (tmp_path / "redis-1").mkdir()
    (tmp_path / "redis-2").mkdir()
    first = RedisServer(folder=tmp_path / "redis-1").start()
    second = RedisServer(folder=tmp_path / "redis-2").start()
    gateways: list[Gateway] = []
    try:
        with passable_folder() as data, passable_folder() as other:
            async with FakeReceiver() as receiver:
                gw = Gateway(first.url, provider, tmp_path, GATEWAY_DATA_DIR=str(data), GATEWAY_CANARY="0.2")
                gateways.append(await gw.start())
                async with host_on(gw, receiver, free_port()) as host:
                    await host.worker("deploys", "webhooks")
                    page = await host.app()
                    hook = await host.hook(page)
                    await host.over(await host.publish(page, {"index.html": "first"}))
                    await host.over(await host.publish(page, {"index.html": "second"}))
                    notes = await host.app(build={"start": "exec node server.js"})
                    assert (await host.over(await host.publish(notes, {"server.js": NOTES})))["state"] == "live"
                    headers = {"Host": f"{notes}.apps.localhost"}
                    assert (await host.web.post("/", content="one ", headers=headers)).text == "kept"
                    inference = await host.account.app(backend)
                    assert (await inference.ask("hello")).status_code == 200
                    spent = await host.account.settled()
                    await wait_until(
                        lambda: host.call("GET", f"/account/apps/{notes}/data"), holds=lambda found: found["usedBytes"]
                    )

                    async def load() -> None:
                        while True:
                            await inference.ask("hello")

                    loading = asyncio.create_task(load())
                    printed = await capsule(gw, "backup", str(tmp_path / "target"))
                    await cancel(loading)
                    assert "Note" not in printed, printed
                    assert (await host.web.post("/", content="lost", headers=headers)).text == "kept"
                await gw.stop()
                await restore_in_place(gw, first, data, notes, str(tmp_path / "target"))
                first.kill()
                shutil.rmtree(data / "releases")

                restored = Gateway(second.url, provider, tmp_path, GATEWAY_DATA_DIR=str(other), GATEWAY_CANARY="0.2")
                gateways.append(restored)
                await capsule(restored, "restore", str(tmp_path / "target"))
                second.kill()
                second.start()
                await restored.start()
                host.account.gateway = restored
                back = Host(restored, host.account, receiver, free_port())
                worker = await back.worker("deploys", "webhooks")
                try:
                    await wait_until(lambda: "sites.serving" in worker.log, 60)
                    await wait_until(lambda: back.page(page), 60, holds=lambda text: text == "second")
                    await wait_until(lambda: back.page(notes), 60, holds=lambda text: text == "one ")
                    assert await host.account.settled() >= spent
                    received = len(receiver.exchanges)
                    assert (await back.over(await back.trigger(hook)))["state"] == "live"
                    await wait_until(lambda: len(receiver.exchanges) > received, 30)
                    deploys = await back.call("GET", f"/account/deploys?app={page}")
                    former = {"deployId": deploys[-1]["id"]}
                    rolled = await back.call("POST", f"/account/apps/{page}/rollback", json=former)
                    assert (await back.over(rolled["deployId"]))["state"] == "live"
                    assert await back.page(page) == "first"
                finally:
                    for worker in back.workers:
                        await worker.stop()
                    await back.web.aclose()
    finally:
        for each in gateways:
            each.kill()
            await each.http.aclose()
        first.stop()
        second.stop()

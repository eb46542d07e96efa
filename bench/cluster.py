"""Measures the worker that serves apps from Kubernetes: what it costs at rest, per event, and per deploy.

The worker runs alone on core 1, against a fake API server that lists, watches and applies. All apps are live and have a
start command; the pods answer from one server. With several numbers of apps, the columns show what grows with them. The
exit code is 1 if a deploy failed, but never because of a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent.parent))

from rig import cpu_seconds, open_folder, redis_server, resident_mib

from gateway.deploys.serving import Records, Step, Wanted
from gateway.loops import freeze_heap
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.kubeconfig import write_kubeconfig
from tests.support.live_apps import RELEASE, FakeApi, fill, register
from workers.engine.data_keeper import DataReport
from workers.kubernetes.data import REPORT_SECONDS, REPORTED
from workers.kubernetes.data_pod import NONCE, PROOF, sign
from workers.kubernetes.pod import DATA_PORT, WEB_PORT
from workers.sandbox.sandbox import MIB

APPS = (100, 1_000, 5_000)
SETTLE_SECONDS, REST_SECONDS = 20.0, 60.0  # the first ones begin when each pod has reported the data of its app
EVENTS = 2_000
DEPLOYS = 10
DOMAIN = "apps.test"
KEY = "bench-encryption-key-of-no-value-0123456789"


async def visit(_: web.Request) -> web.Response:
    return web.Response(text="hello")


async def report_data(reported: set[str], request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    _, _, high, low = map(int, request.transport.get_extra_info("sockname")[0].split("."))
    name = f"app-{(high << 8 | low) - 1}"
    reported.add(name)
    token = hmac.digest(KEY.encode(), f"data acc_{name} {name}".encode(), "sha256").hex()
    proof = sign(token, request.headers[NONCE], PROOF)
    if request.path == "/report":
        report = DataReport(used=MIB, full=False, held=False, stale=False, replacements=[], daily=False)
        return web.Response(body=msgspec.json.encode(report), headers={PROOF: proof})
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    await socket.send_str(proof)
    for _ in range(2):  # no daily snapshot, because nothing has changed
        await socket.receive()
        await socket.send_json({})
    return socket


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int) -> AsyncIterator[None]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def deploy(store: Store, wanted: Wanted) -> None:
    """Takes an app through the steps of a deploy, as a builder does. Raises RuntimeError."""
    records, next_deploy = Records(store), f"{wanted.deploy}_next"
    releases = {**wanted.releases, next_deploy: RELEASE}
    steps: tuple[Step, ...] = ("check", "canary", "live")
    for step in steps:
        text = (await records.read(wanted.account, wanted.app))["live"][0]
        now = Wanted(wanted.account, wanted.app, "live", step, next_deploy, wanted.deploy, releases)
        await records.write(text, now, "")
        ends = time.monotonic() + 60
        while (answer := await records.read_answer(now)) is None:
            if time.monotonic() > ends:
                raise RuntimeError(f"no answer to the step {step}")
            await asyncio.sleep(0.05)
        if not answer.ok:
            raise RuntimeError(f"{step}: {answer.reason}")


async def measure(folder: Path, number: int) -> None:
    settings = Settings(
        apps_domain=DOMAIN, kubernetes_image="capsule", data_dir=str(folder / "data"), encryption_key=KEY
    )
    api, reported = FakeApi(), set[str]()
    with redis_server() as redis_port:
        store = Store(f"redis://127.0.0.1:{redis_port}/0")
        wanted = await register(store, folder / "storage", number)
        fill(api, wanted, settings)
        freeze_heap()  # a collection of the API server's objects would hold up the worker's deploys
        data = partial(report_data, reported)
        async with api.serving() as api_port, serving(visit, WEB_PORT), serving(data, DATA_PORT):
            environment = os.environ | {
                "KUBECONFIG": str(write_kubeconfig(folder, api_port)),
                "GATEWAY_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
                "GATEWAY_APPS_ENGINE": "kubernetes",
                "GATEWAY_APPS_DOMAIN": DOMAIN,
                "GATEWAY_KUBERNETES_IMAGE": "capsule",
                "GATEWAY_STORAGE_URL": (folder / "storage").as_uri(),
                "GATEWAY_DATA_DIR": settings.data_dir,
                "GATEWAY_ENCRYPTION_KEY": KEY,
                "GATEWAY_CANARY": "1",
                "GATEWAY_ALLOW_PRIVATE_ADDRESSES": "true",
            }
            log = (folder / "worker.log").open("w+")
            command = ["taskset", "-c", "1", sys.executable, "-m", "capsule_gateway", "worker", "sites"]
            worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                await report(store, api, wanted, reported, worker.pid, folder / "worker.log")
            finally:
                worker.terminate()
                await asyncio.to_thread(worker.wait)
        await store.close()


async def report(store: Store, api: FakeApi, wanted: list[Wanted], reported: set[str], pid: int, log: Path) -> None:
    began = time.monotonic()
    while '"sites.serving"' not in log.read_text():
        if time.monotonic() - began > 300:
            raise RuntimeError(f"the worker does not serve:\n{log.read_text()[-3_000:]}")
        await asyncio.sleep(0.2)
    start = cpu_seconds(pid)
    while len(reported) < len(wanted):
        if time.monotonic() - began > 300 + 2 * REPORT_SECONDS * len(wanted) / REPORTED:
            raise RuntimeError(f"only {len(reported)} apps were asked for their data:\n{log.read_text()[-3_000:]}")
        await asyncio.sleep(0.5)
    await asyncio.sleep(SETTLE_SECONDS)
    used = cpu_seconds(pid)
    await asyncio.sleep(REST_SECONDS)
    rest = (cpu_seconds(pid) - used) / REST_SECONDS
    # Slowly, so that events are not read together.
    used = cpu_seconds(pid)
    for event in range(EVENTS):
        api.touch(event)
        await asyncio.sleep(0.005)
    await asyncio.sleep(1)
    event_ms = max(0.0, cpu_seconds(pid) - used - rest * (EVENTS * 0.006 + 1)) / EVENTS * 1_000
    used, began = cpu_seconds(pid), time.monotonic()
    for each in wanted[:DEPLOYS]:
        await deploy(store, each)
    waited = time.monotonic() - began
    deploy_ms = (cpu_seconds(pid) - used - rest * waited) / DEPLOYS * 1_000
    print(
        f"{len(wanted):>6,} apps: start {start:6.2f} s, at rest {rest * 100:5.2f} % of a core, "
        f"an event {event_ms:6.3f} ms, a deploy {deploy_ms:6.1f} ms ({waited / DEPLOYS:.1f} s), "
        f"{resident_mib(pid):,.0f} MiB",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", type=int, nargs="*", default=APPS, help="numbers of apps, by default 100 1000 5000")
    for number in parser.parse_args().apps:
        folder = open_folder(f"cluster-{number}")
        (folder / "data").mkdir()
        try:
            asyncio.run(measure(folder, number))
        except RuntimeError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

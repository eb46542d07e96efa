"""Causes the failures of docs/runbook.md, and checks that their alerts fire, end, and notify of the cause alone.

`make check-alerts` runs it, as root, in about six minutes: real servers and processes, and the rules of ops/ with
shorter times. It needs Prometheus, Alertmanager, the exporter and faketime.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.keys import APPS_FOLDER_KEY, WORKER_STARTS_KEY
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import chunk
from tests.fakes.receiver import FakeReceiver, certificate
from tests.fakes.server import CLOSE
from tests.support.deployment import Host, host_on
from tests.support.folders import kill_caddies, passable_folder
from tests.support.gateway_process import Gateway, gateway
from tests.support.polling import wait_until
from tests.support.processes import limit_descriptors
from tests.support.programs import miss, require, running
from tests.support.providers import UNSET, plays, states, write_providers
from tests.support.redis_servers import RedisServer, free_port
from tests.support.responses import answered
from tests.support.worker_process import Worker

OPS = Path(__file__).parents[2] / "ops"
PATIENCE_SECONDS = 120.0  # for an alert that fires or ends
WINDOW_SECONDS = 40  # instead of the minutes or hours for which an alert looks back
STARTS_SECONDS = (
    120  # the same, for 15 minutes: three starts fit in, although each takes half a minute on a busy machine
)
GATEWAY = {
    "gateway.keys.HEARTBEAT_SECONDS": 5,
    "gateway.inference.health.PROBE_INTERVAL_SECONDS": 1.0,
    "gateway.inference.health.PROBE_HOLD_SECONDS": 1,
    "gateway.operations.overview.GAUGES_SECONDS": 1.0,
    "gateway.keys.WORKER_STARTS_SECONDS": STARTS_SECONDS,
}
WORKER = {
    "gateway.keys.HEARTBEAT_SECONDS": 5,
    "gateway.keys.WORKER_STARTS_SECONDS": STARTS_SECONDS,
    "workers.engine.reconciler.RESYNC_SECONDS": 2.0,
    "workers.hosting.host_watch.WATCH_SECONDS": 1.0,
}
GROUPS = ("webhooks", "monitors", "deploys", "sites")
WORKERS = ("webhooks", "monitors", "deploys")  # the last one runs `sites` too


def shorten(rules: str) -> str:
    """Makes each alert wait for two seconds, and look back for `WINDOW_SECONDS` or `STARTS_SECONDS`."""
    rules = re.sub(r"offset \d+h", f"offset {WINDOW_SECONDS}s", re.sub(r"for: \w+", "for: 2s", rules))
    return re.sub(r"\[\d+[mh]\]", f"[{WINDOW_SECONDS}s]", rules.replace("[15m]", f"[{STARTS_SECONDS}s]"))


@contextlib.contextmanager
def small_disk(mib: int) -> Iterator[Path]:
    with passable_folder() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=711", "none", folder], check=True)
        try:
            yield folder
        finally:
            kill_caddies(folder)
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def shrunk(disk: Path) -> Iterator[None]:
    """Shrinks the disk to a little more than what is used."""
    usage = shutil.disk_usage(disk)
    resize(disk, usage.used + 8192)
    try:
        yield
    finally:
        resize(disk, usage.total)


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


class Service:
    """Two gateways, each worker in a process of its own, an app, and the programs that watch them."""

    def __init__(
        self,
        redis: RedisServer,
        providers: Sequence[FakeProvider],
        gateways: tuple[Gateway, Gateway],
        host: Host,
        receiver: FakeReceiver,
    ) -> None:
        self.redis, self.providers, self.host, self.receiver = redis, providers, host, receiver
        self.first, self.second = gateways
        self.workers: dict[str, Worker] = {}
        self.ending: set[str] = set()  # alerts that end so late that other failures are caused meanwhile
        self.prometheus = httpx.AsyncClient(trust_env=False)
        self.exporter = contextlib.ExitStack()
        self.exporter_port = free_port()

    async def firing(self) -> set[str]:
        with contextlib.suppress(httpx.HTTPError):  # it answers 503 while it starts
            found = (await self.prometheus.get("/api/v1/alerts")).raise_for_status().json()["data"]["alerts"]
            return {alert["labels"]["alertname"] for alert in found if alert["state"] == "firing"}
        return {"no answer"}

    async def fires(self, *alerts: str) -> None:
        await wait_until(self.firing, PATIENCE_SECONDS, every=0.2, holds=lambda found: found >= set(alerts))

    async def is_quiet(self) -> None:
        await wait_until(self.firing, PATIENCE_SECONDS, every=0.2, holds=lambda found: found <= self.ending)

    def notified(self) -> list[str]:
        sent = [exchange.json for exchange in self.receiver.exchanges if exchange.path == "/alerts"]
        alerts = [alert for notification in sent for alert in notification["alerts"]]
        return [alert["labels"]["alertname"] for alert in alerts if alert["status"] == "firing"]

    async def start_gateway(self, gw: Gateway) -> None:
        """Starts the gateway, and waits until Prometheus has seen it: counters that it has not seen do not increase."""
        began = time.time()
        await gw.start()
        query = f'gateway_process_start_time_seconds{{instance="127.0.0.1:{gw.port}"}} > {began}'

        async def seen() -> Any:
            found = await self.prometheus.get("/api/v1/query", params={"query": query})
            return found.json()["data"]["result"]

        await wait_until(seen)

    def start_exporter(self) -> None:
        address = [f"--redis.addr={self.redis.url}", f"--web.listen-address=127.0.0.1:{self.exporter_port}"]
        self.exporter.enter_context(running(require("prometheus-redis-exporter", "redis_exporter"), *address))

    async def start_worker(self, name: str) -> None:
        self.workers[name] = await self.host.worker(name, joined=False, constants=WORKER, **SETTINGS)

    @contextlib.contextmanager
    def lines(self, log: Callable[[], str], **expected: int) -> Iterator[None]:
        """Checks how often lines appear meanwhile. Their names have `__` in place of the dot."""
        begins = len(log())
        yield
        events = Counter(json.loads(line)["event"] for line in log()[begins:].splitlines() if line.startswith("{"))
        assert {name: events[name.replace("__", ".")] for name in expected} == expected


SETTINGS: dict[str, str] = {}  # of the workers


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    assert os.geteuid() == 0, "make check-alerts needs root, to mount small disks"
    stack = contextlib.AsyncExitStack()
    async with stack:
        disk, data = stack.enter_context(small_disk(100)), stack.enter_context(small_disk(8_000))
        redis = RedisServer("valkey", folder=disk).start()
        stack.callback(redis.stop)
        provider = await stack.enter_async_context(FakeProvider())
        receiver = await stack.enter_async_context(FakeReceiver())
        tls, _ = certificate(tmp_path, "shop.example.com", days=3)
        edge = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls)
        spare = await stack.enter_async_context(FakeProvider())
        settings = {
            **UNSET,
            "GATEWAY_PROVIDERS_FILE": str(write_providers(tmp_path, {"one": provider, "two": spare})),
            "GATEWAY_DATA_DIR": str(data),
            "GATEWAY_CANARY": "0.2",
            "GATEWAY_LOG_LEVEL": "info",
            "GATEWAY_RATE_LIMITS": "app=100000,user=100000",
        }
        port = edge.sockets[0].getsockname()[1]
        SETTINGS.update(GATEWAY_CERTIFICATE_ADDRESS=f"127.0.0.1:{port}", GATEWAY_CERTIFICATE_INTERVAL="1")
        first = await stack.enter_async_context(gateway(redis.url, provider, tmp_path, GATEWAY, **settings))
        second = await stack.enter_async_context(gateway(redis.url, provider, tmp_path, GATEWAY, **settings))
        host = await stack.enter_async_context(host_on(first, receiver, free_port()))
        service = Service(redis, (provider, spare), (first, second), host, receiver)
        for name in WORKERS:
            await service.start_worker(name)
        service.start_exporter()
        stack.enter_context(service.exporter)
        stack.push_async_callback(service.prometheus.aclose)
        watch(service, tmp_path, stack)
        yield service
        edge.close()


def watch(service: Service, folder: Path, stack: contextlib.AsyncExitStack) -> None:
    """Starts Prometheus and Alertmanager with what is in ops/."""
    ports = free_port(), free_port()
    (folder / "alerts.yml").write_text(shorten((OPS / "alerts.yml").read_text()))
    rules = (OPS / "alertmanager.yml").read_text().replace("group_wait: 30s", "group_wait: 4s")
    hook = f"  - name: operators\n    webhook_configs: [{{ url: {service.receiver.url('/alerts')!r} }}]"
    (folder / "alertmanager.yml").write_text(re.sub("  - name: operators.*", hook, rules))
    targets = {
        "capsule": [f"127.0.0.1:{each.port}" for each in (service.first, service.second)],
        "redis": [f"127.0.0.1:{service.exporter_port}"],
    }
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{ports[1]}"]}]}]},
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": found}]} for job, found in targets.items()],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))
    prometheus = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    stack.enter_context(running(require("prometheus"), *prometheus, f"--web.listen-address=127.0.0.1:{ports[0]}"))
    alertmanager = [
        f"--config.file={folder}/alertmanager.yml",
        f"--storage.path={folder}/am",
        "--cluster.listen-address=",
    ]
    address = f"--web.listen-address=127.0.0.1:{ports[1]}"
    stack.enter_context(running(require("prometheus-alertmanager", "alertmanager"), *alertmanager, address))
    service.prometheus.base_url = httpx.URL(f"http://127.0.0.1:{ports[0]}")


@pytest.mark.timeout(600)
async def test_each_failure_is_announced_and_ends(service: Service) -> None:
    app = await service.host.app()
    deploy = await service.host.publish(app, {"index.html": "here"})
    over = await service.host.over(deploy)
    assert over["state"] == "live", over["error"]
    await service.is_quiet()
    await lose_the_provider(service)
    await lose_gateways(service)
    await lose_a_worker_repeatedly(service)
    await lose_releases(service, app, deploy)
    await lose_time_on_a_certificate(service)
    await lose_workers(service)
    await lose_redundancy(service)
    await lose_the_settings_of_redis(service)
    await lose_the_exporter(service)
    await lose_redis(service)
    assert await service.host.page(app) == "here"


async def lose_the_provider(service: Service) -> None:
    """A disabled provider is no help, and its own state concerns nobody."""
    gw, provider = service.first, service.first.provider

    async def enable(**providers: bool) -> None:
        for name, enabled in providers.items():
            assert (await gw.platform("PUT", f"providers/{name}", {"enabled": enabled})).status_code == 200

    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
        await enable(two=False)
        for _ in range(4):
            await app.ask(provider.plays(CLOSE))
        await service.fires("ProviderDown")
        await enable(one=False, two=True)
        await service.is_quiet()
        await enable(one=True)
        await service.fires("ProviderFailingOver")

        async def is_back() -> bool:  # only an answer shows it
            answered(await app.ask("x"))
            return (await states(gw))["one"]["status"] == "operational"

        await wait_until(is_back, every=0.5)
    await service.is_quiet()
    gw.off_file.touch()
    await service.fires("InferenceOff")
    gw.off_file.unlink()
    await service.is_quiet()


async def lose_gateways(service: Service) -> None:
    """One is killed three times: it starts again as before, then with a wrong clock, then with few descriptors."""
    gw = service.second
    gw.kill()
    await service.fires("GatewayDown")
    await service.start_gateway(gw)
    gw.kill()
    # Not through `faketime` itself: it is the parent of the process that it starts, and would get the signals.
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None) or miss("faketime")
    gw.prefix = ["env", f"LD_PRELOAD={library}", "FAKETIME=+40s", "FAKETIME_DONT_FAKE_MONOTONIC=1"]
    await service.start_gateway(gw)
    await service.fires("ClockOff")
    assert (await gw.http.get("/ready")).status_code == 503
    assert gw.log.count('"clock.off"') == 1
    gw.kill()
    gw.prefix = limit_descriptors("-n 256")
    await service.start_gateway(gw)
    await service.fires("GatewayRestarts")
    service.ending.add("GatewayRestarts")
    async with FakeAppBackend() as backend, contextlib.AsyncExitStack() as streams:
        app, prompt = await gw.app(backend), plays(service.providers, *[[chunk("a word"), 5.0] * 30] * 2)
        for _ in range(110):  # it has room for 96 connections
            with contextlib.suppress(httpx.TransportError):
                await streams.enter_async_context(app.stream(prompt))
        await service.fires("GatewayDown")  # it refuses Prometheus too
    await service.fires("ConnectionsRefused")
    await gw.stop()
    gw.prefix = ()
    await service.start_gateway(gw)
    await service.is_quiet()


async def lose_a_worker_repeatedly(service: Service) -> None:
    with service.redis.client() as client:

        def find_new(known: set[bytes]) -> set[bytes]:
            return {*client.zrange(WORKER_STARTS_KEY, 0, -1)} - known

        for _ in range(3):
            known = find_new(set())
            service.workers["monitors"].kill()
            await service.start_worker("monitors")
            await wait_until(partial(find_new, known))
    await service.fires("WorkerRestarts")
    assert "NoWorker" not in await service.firing()
    service.ending.add("WorkerRestarts")
    await service.is_quiet()


async def lose_releases(service: Service, app: str, deploy: str) -> None:
    host, data = service.host, service.host.gateway.data_folder
    with service.lines(lambda: service.workers["deploys"].log, disk__low=1):
        with shrunk(data):
            await service.fires("DiskFull")
        await service.is_quiet()
    (release,) = data.glob(f"releases/*/live/{deploy}")
    (archive,) = data.glob(f"archives/*/{deploy}.tar.gz")
    with service.lines(lambda: service.workers["deploys"].log, sites__releases_missing=1, sites__step_failed=0):
        subprocess.run(["mv", release, archive, data / "builds"], check=True)
        await service.fires("ReleasesMissing")
        assert await host.page(app) == "404"
        (data / "builds" / archive.name).rename(archive)  # the host fetches it
        await service.is_quiet()
    assert await host.page(app) == "here"
    await service.workers["deploys"].stop()
    with service.redis.client() as client:
        own = client.get(APPS_FOLDER_KEY)
        client.set(APPS_FOLDER_KEY, "another folder", ex=600)
        await service.start_worker("deploys")
        await service.fires("HostsStandBy")
        assert service.workers["deploys"].log.count('"sites.elsewhere"') == 1
        client.set(APPS_FOLDER_KEY, own, ex=600)
    await service.is_quiet()


async def lose_time_on_a_certificate(service: Service) -> None:
    app = await service.host.app(customDomain="shop.example.com", customDomainVerified=True)
    await service.fires("CertificatesExpire")
    await service.host.gateway.platform("DELETE", f"apps/{app}")
    await service.is_quiet()


async def lose_workers(service: Service) -> None:
    """All of a host: its workers, its Caddy and its apps."""
    for name in WORKERS:
        service.workers[name].kill()
    kill_caddies(service.host.gateway.data_folder)

    async def missing() -> set[str]:
        found: list[dict[str, Any]] = (await service.prometheus.get("/api/v1/alerts")).json()["data"]["alerts"]
        return {alert["labels"].get("group", "") for alert in found if alert["state"] == "firing"}

    await wait_until(missing, PATIENCE_SECONDS, every=0.2, holds=lambda found: found >= set(GROUPS))
    for name in WORKERS:
        await service.start_worker(name)
    await service.is_quiet()


async def lose_redundancy(service: Service) -> None:
    """A second worker and a replica of Redis."""
    spare = await service.host.worker("webhooks", joined=False, constants=WORKER, **SETTINGS)
    with RedisServer("valkey", "--replicaof", "127.0.0.1", str(service.redis.port)):
        await asyncio.sleep(WINDOW_SECONDS + 5)
        assert await service.firing() <= service.ending
        service.ending.clear()
        await service.is_quiet()
    spare.kill()
    await service.fires("WorkersLost", "RedisReplicaLost")
    await service.is_quiet()


async def lose_the_settings_of_redis(service: Service) -> None:
    with service.redis.client() as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory-policy", "allkeys-lru")
        await service.fires("RedisNotPersistent", "RedisEvicts")
        client.config_set("appendonly", "yes")
        client.config_set("maxmemory-policy", "noeviction")
    await service.is_quiet()


async def lose_the_exporter(service: Service) -> None:
    service.exporter.close()
    await service.fires("RedisExporterDown")
    service.start_exporter()
    await service.is_quiet()


async def lose_redis(service: Service) -> None:
    """In each case, the operators are notified of Redis alone, although the workers seem to be missing too."""
    redis, logs = service.redis, [service.first, *(service.workers[name] for name in WORKERS)]
    before = [each.log.count('"redis.unavailable"') for each in logs]

    def lines(fault: str) -> int:
        return sum(fault in line for line in service.first.log.splitlines() if '"redis.unavailable"' in line)

    with redis.client() as client:
        notified = len(service.notified())
        client.config_set("maxmemory", "1mb")
        await service.fires("RedisDown", "RedisFull", "NoWorker")
        await wait_until(lambda: "RedisDown" in service.notified()[notified:], PATIENCE_SECONDS)
        client.config_set("maxmemory", "0")
    await service.is_quiet()
    assert set(service.notified()[notified:]) == {"RedisDown"}
    assert lines('"OOM"') == 1

    with shrunk(redis.folder or Path()):  # Valkey exits when it is full
        await wait_until(lambda: redis.has_ended, PATIENCE_SECONDS)
        await service.fires("RedisDown")
    assert lines("such as a full disk") == 1
    redis.start()
    await service.is_quiet()

    redis.stop()
    await service.fires("RedisDown")
    redis.start()
    await service.is_quiet()
    for each, count in zip(logs, before, strict=True):  # a fault may change once, such as to LOADING
        processes = 2 if each is service.workers["deploys"] else 1
        assert 3 * processes <= each.log.count('"redis.unavailable"') - count <= 6 * processes

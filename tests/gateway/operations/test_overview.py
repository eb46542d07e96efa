"""The snapshot of the operators' page and the gauges show the state of the service."""

import asyncio
import math
import time
from typing import Any

import msgspec

from gateway.accounts.records import App
from gateway.deploys.serving import HostReport, Records
from gateway.events import catalog
from gateway.keys import BACKUP_KEY, PARTITION_TAGS, spend_key, spenders_key
from gateway.operations.backlog import read_backlog
from gateway.operations.overview import SNAPSHOT_SECONDS, SnapshotFeed
from gateway.services import Services
from gateway.settings import Settings
from tests.support.counters import request_line
from tests.support.gateway_parts import open_gateway
from tests.support.redis_servers import cluster
from tests.support.virtual_time import virtual_time

CRASH = catalog.AppCrashed(reason="oom", exitCode=137, at="2026-07-02T10:00:00.000Z")


async def take_snapshot(gateway: Services) -> dict[str, Any]:
    return msgspec.to_builtins(await gateway.overview.take_snapshot())


async def crash(gateway: Services, account: str, times: int = 1) -> None:
    app = App(id="app", name="app", account=account, createdAt="")
    for _ in range(times):
        await gateway.webhooks.emit(app, CRASH)


async def test_the_accounts_that_spent_the_most_come_first(gateway: Services) -> None:
    accounts = [(await gateway.registry.create_account(f"Account {n}", "free"))[0] for n in range(10)]
    day = time.strftime("%Y-%m-%d", time.gmtime())
    for n, account in enumerate(accounts):
        gateway.counters.count_request(account.id, request_line(nano_euro=1000 * (n + 1)))
        await gateway.store.client.hset(spend_key(account.id, day), mapping={"settled": 7 * n, "reserved": 5})
        await gateway.store.client.expire(spend_key(account.id, day), 60)
    await gateway.counters.flush()
    await gateway.store.client.sadd("{ops}:processes", "dead-1")
    snapshot = await take_snapshot(gateway)
    assert [process["id"] for process in snapshot["gateways"]] == [gateway.counters._id], "a dead process is not shown"
    assert await gateway.store.client.scard("{ops}:processes") == 1
    spend, cap = snapshot["spend"], Settings().daily_caps["free"]
    assert spend["total"] == 55_000
    assert [row["name"] for row in spend["top"]] == [f"Account {n}" for n in range(9, 1, -1)]
    highest = {"account": accounts[9].id, "name": "Account 9", "plan": "free", "cap": cap}
    assert spend["top"][0] == highest | {"settled": 63, "reserved": 5}
    assert await gateway.store.client.ttl(spenders_key(day)) > 0


async def test_queues_and_workers_of_all_partitions() -> None:
    with cluster("redis") as url:
        async with open_gateway(url) as gateway:
            for n in range(40):
                await crash(gateway, f"acc_{n}")
            client, now = gateway.store.client, await gateway.overview._read_clock() + 5000
            backlog = await read_backlog(gateway.store, now)
            assert (backlog.webhooks.waiting, backlog.webhooks.pending, backlog.workers) == (40, 0, [])
            assert 5000 <= backlog.webhooks.oldestMs < 15_000
            # Two workers read; one of them dies with pending entries.
            for tag in PARTITION_TAGS:
                await client.xgroup_create(f"{tag}:events", "webhooks", "0", mkstream=True)
                await client.xgroup_create(f"{tag}:builds", "deploys", "0", mkstream=True)
                await client.xgroup_createconsumer(f"{tag}:builds", "deploys", "builder")
                await client.xgroup_createconsumer(f"{tag}:events", "webhooks", "long gone")
                for name in ("one", "two"):
                    await client.xreadgroup("webhooks", name, {f"{tag}:events": ">"}, count=1)
            for worker, seconds in (("webhooks:one", 12), ("deploys:builder", 15), ("monitors:one", 15)):
                await client.set(f"worker:{worker}", "token", ex=seconds)
            await client.sadd("{ops}:workers", "monitors:one", "monitors:dead")
            await client.expire("{ops}:workers", 60)
            for tag, delivered in ((PARTITION_TAGS[3], 2), (PARTITION_TAGS[9], 3)):
                await client.hincrby(f"{tag}:outcomes", "delivered", delivered)
            backlog = await read_backlog(gateway.store, now)
            workers = [f"{worker.group} {worker.name}" for worker in backlog.workers]
            assert workers == ["deploys builder", "monitors one", "webhooks one", "webhooks two"]
            builder, _, one, two = backlog.workers
            assert (builder.pending, one.pending + two.pending) == (0, backlog.webhooks.pending)
            assert 0 <= builder.heartbeatMs < 2000
            assert 3000 <= one.heartbeatMs < 5000
            assert two.heartbeatMs is None
            assert two.pending > 0
            alive = backlog.count_workers_alive(Settings())
            assert alive == {"webhooks": 1, "deploys": 1, "monitors": 1, "sites": 0}
            assert await client.smembers("{ops}:workers") == {"monitors:one"}, "dead workers are removed"
            assert backlog.outcomes == {"delivered": 5}
            snapshot = await take_snapshot(gateway)
            assert snapshot["webhooks"]["waiting"] == 40
            assert snapshot["redis"]["clients"] >= 1


def gauge(gateway: Services, name: str, **labels: str) -> float | None:
    return gateway.metrics.registry.get_sample_value(name, labels)


async def test_the_gauges(gateway: Services) -> None:
    """Counts of all time are no zeros before they are read, because the first count would look like an increase."""
    outcomes, ended = ("delivered", "failed", "dropped"), ("live", "failed", "canceled")
    assert [gauge(gateway, "gateway_deliveries", outcome=each) for each in outcomes] == [None] * 3
    await gateway.store.client.hset(f"{PARTITION_TAGS[3]}:outcomes", mapping={"failed": 7, "failed:timeout": 7})
    await gateway.store.client.hset(f"{PARTITION_TAGS[3]}:builds:ended", mapping={"live": 5})
    await crash(gateway, "acc", 3)
    await asyncio.sleep(0.01)
    await gateway.overview.refresh_gauges()
    assert [gauge(gateway, "gateway_deliveries", outcome=each) for each in outcomes] == [0, 7, 0]
    assert [gauge(gateway, "gateway_deploys_ended", state=each) for each in ended] == [5, 0, 0]
    assert gauge(gateway, "gateway_apps_unhealthy") == 0
    assert gauge(gateway, "gateway_webhook_queue_events") == 3
    assert 0 < (gauge(gateway, "gateway_webhook_queue_oldest_seconds") or 0) < 5
    assert gauge(gateway, "gateway_deploy_queue_deploys") == 0
    assert gauge(gateway, "gateway_dead_letters") == 0
    assert gauge(gateway, "gateway_workers", group="webhooks") == 0
    assert math.isnan(gauge(gateway, "gateway_backup_last_success_timestamp_seconds")), "so that no alert fires"

    gateway.counters.count_request("acc", request_line(nano_euro=10))
    await gateway.counters.flush()
    await gateway.store.client.delete(*[f"{tag}:events" for tag in PARTITION_TAGS])
    now, records = await gateway.overview._read_clock(), Records(gateway.store)
    await records.write_report("a", HostReport(now, False, 2, 0.5, 0.9))
    await records.write_report("b", HostReport(now, True, 0, 0.04, None))
    await gateway.store.client.set(BACKUP_KEY, "2026-07-02T10:00:00.123Z")
    await gateway.overview.refresh_gauges()
    assert gauge(gateway, "gateway_webhook_queue_oldest_seconds") == 0
    assert [gauge(gateway, "gateway_hosts", state=state) for state in ("serving", "standing by")] == [1, 1]
    assert gauge(gateway, "gateway_releases_missing") == 2
    assert gauge(gateway, "gateway_data_disk_free_ratio") == 0.04
    assert gauge(gateway, "gateway_own_certificate_left_ratio") == 0.9
    assert gauge(gateway, "gateway_backup_last_success_timestamp_seconds") == 1_782_986_400.123

    # Grafana reads the names of current keys from Redis, because it renders times in the viewer's time zone.
    clock = await gateway.store.client.hgetall("{ops}:clock")
    assert await gateway.store.client.exists(spenders_key(clock["day"]))
    assert clock["minute"].startswith(clock["hour"])
    assert clock["hour"].startswith(clock["day"])
    assert 0 < await gateway.store.client.ttl("{ops}:clock") <= 60


async def test_an_account_above_its_cap_is_noticed(gateway: Services) -> None:
    cap = Settings().daily_caps["free"]
    day = time.strftime("%Y-%m-%d", time.gmtime())
    account, _ = await gateway.registry.create_account("One", "free")

    async def breaches(settled: int, reserved: int) -> float | None:
        await gateway.store.client.hset(spend_key(account.id, day), mapping={"settled": settled, "reserved": reserved})
        await gateway.store.client.expire(spend_key(account.id, day), 60)
        await gateway.overview.refresh_gauges()
        return gauge(gateway, "gateway_cap_breaches_total")

    assert await breaches(cap, 1) == 0  # an account whose spend did not change is not checked
    gateway.counters.count_request(account.id, request_line(nano_euro=1))
    assert await breaches(cap - 1, 1) == 0
    gateway.counters.count_request(account.id, request_line(nano_euro=1))
    assert await breaches(cap - 1, 2) == 1
    assert await breaches(cap - 1, 2) == 1


# -- watching ------------------------------------------------------------------------------------------------


class Counted:
    taken = 0

    async def take_snapshot(self) -> dict[str, int]:
        self.taken += 1
        return {"n": self.taken}


@virtual_time
async def test_all_viewers_share_a_snapshot_and_without_viewers_none_is_taken() -> None:
    overview = Counted()
    feed = SnapshotFeed(overview)  # type: ignore[arg-type]
    viewers = [feed.stream_events() for _ in range(20)]
    for seen in range(1, 4):
        events = set(await asyncio.gather(*(anext(viewer) for viewer in viewers)))
        assert events == {b'data: {"n":%d}\n\n' % seen}
    viewers.append(feed.stream_events())
    assert await anext(viewers[-1]) == b'data: {"n":3}\n\n'  # at once, without waiting for the next
    for viewer in viewers:
        await viewer.aclose()
    await asyncio.sleep(2 * SNAPSHOT_SECONDS)
    assert (feed.viewers, overview.taken) == (0, 3)
    again = feed.stream_events()
    assert await anext(again) == b'data: {"n":4}\n\n'
    await again.aclose()

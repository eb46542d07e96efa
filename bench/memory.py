"""Measures how much memory the service's data takes in Redis, on a separate server, through the service's own code.

Prints the bytes per item that docs/redis.md lists: the growth of `used_memory`, divided by the number of items.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from rig import redis_server

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.deploys import scripts as deploys_scripts
from gateway.events import scripts as events_scripts
from gateway.events.catalog import AppCrashed, Finding, SecurityFinding, prepare_event
from gateway.events.deliveries import SHARE_BYTES
from gateway.events.records import DeliveryResult, QueuedEvent
from gateway.ids import new_id, now_iso
from gateway.inference.spend import scripts as spend_scripts
from gateway.inference.spend.limits import Limits
from gateway.keys import app_spend_fields, partition_tag, spend_key, stored_key, stream_key, worker_key
from gateway.redis.client import Store

KEY = "bench-encryption-key-of-no-value-0123456789"
DAYS = 35  # for which a day's spend is kept
HEADERS = msgspec.json.encode(
    {"Content-Type": "application/json", "Content-Length": "15", "Date": "Sat, 21 Nov 2026 12:00:00 GMT", "Server": "x"}
).decode()
LONG_HEADERS = msgspec.json.encode({f"X-{n}": "v" * 90 for n in range(10)}).decode()  # with 1 KB, all that is kept
GROUP = "webhooks"

Fill = Callable[[Store, int], Awaitable[None]]


async def fill_accounts(store: Store, count: int) -> None:
    """Creates accounts, each with an API key."""
    registry = Registry(store, Vault(KEY))
    for number in range(count):
        await registry.create_account(f"Account {number}", "free")


async def fill_apps(store: Store, count: int) -> None:
    registry = Registry(store, Vault(KEY))
    account, _ = await registry.create_account("One", "free")
    for number in range(count):
        name = f"app-{number}"
        await registry.put_app(App(id=new_id("app"), name=name, account=account.id, createdAt=now_iso()), None)


async def fill_days(store: Store, count: int) -> None:
    for number in range(count):
        key = spend_key(f"acc_{number // DAYS:016x}", f"2026-01-{number % DAYS:02d}")
        settled, reserved = app_spend_fields("app_0123456789abcdef")
        spend = {"settled": 12_345_678, "reserved": 0, settled: 12_345_678, reserved: 0}
        await store.client.hset(key, mapping=spend)
        await store.client.expire(key, 3_024_000)


async def fill_windows(store: Store, count: int) -> None:
    """Reserves and settles one request for each user."""
    for number in range(count):
        account = f"acc_{number % 16}"
        decision = await admit(store, account, number)
        assert decision == "ok", decision
        await spend_scripts.settle(store, partition_tag(account), f"res_{number:020}", 1000)


async def fill_running(store: Store, count: int) -> None:
    for number in range(count):
        assert await admit(store, "acc_running", number, user="u") == "ok"


async def admit(store: Store, account: str, number: int, user: str = "") -> str:
    decision = await spend_scripts.admit(
        store,
        account,
        "app",
        user or f"user-{number}",
        Limits(10**9, 10**9, 10**15),
        1_000_000,
        reservation=f"res_{number:020}",
        life=360_000,
        deadline=0,
    )
    return decision.verdict


def crash(account: str) -> QueuedEvent:
    event = AppCrashed(reason="oom", exitCode=137, at="2026-07-02T10:00:00.000Z")
    return prepare_event(event, new_id("evt"), account, new_id("app"), "sample-app")


async def fill_waiting(store: Store, count: int) -> None:
    for number in range(count):
        await events_scripts.emit_event(store, crash(f"acc_{number % 10}"))


async def deliver(store: Store, event: QueuedEvent, headers: str, body: str) -> None:
    await events_scripts.emit_event(store, event)
    tag = partition_tag(event.account)
    stream = stream_key(tag, "events")
    if not await store.client.exists(worker_key(GROUP, tag)):
        await store.client.set(worker_key(GROUP, tag), "", ex=600)
        await store.client.xgroup_create(stream, GROUP, "0")
    ((_, ((entry, _),)),) = await store.client.xreadgroup(GROUP, "one", {stream: ">"})
    url = "https://hooks.example.com/capsule"
    ended = DeliveryResult("delivered", 200, "", url, headers, body)
    assert await events_scripts.record_delivery(
        store, tag, event, ended, group=GROUP, entry=entry, at=int(time.time() * 1000), duration=45
    )


async def fill_deliveries(store: Store, count: int, headers: str = HEADERS, body: str = '{"status":"ok"}') -> None:
    """Records deliveries answered with four headers and a short body, unless others are given."""
    for number in range(count):
        await deliver(store, crash(f"acc_{number // 1000}"), headers, body)


async def fill_shares(store: Store, count: int) -> None:
    """Fills accounts' stores, which have `SHARE_BYTES` each, with events of the largest size."""
    finding = Finding(
        cve="CVE-2026-0001", component="c" * 200, severity="critical", fixedIn="1", tier="red", deadlineAt=now_iso()
    )
    for number in range(count):
        for _ in range(60):
            event = SecurityFinding(findings=[finding] * 600)
            account = f"acc_{number}"
            await deliver(store, prepare_event(event, new_id("evt"), account, "app", "app"), HEADERS, "x" * 1024)
        used = await store.client.zscore(stored_key(partition_tag(account)), account)
        assert SHARE_BYTES * 0.9 < used <= SHARE_BYTES, used


async def fill_deploys(store: Store, count: int) -> None:
    """Creates finished deploys. Their logs are files, and not in Redis."""
    for number in range(count):
        account, deploy = f"acc_{number // 1000}", new_id("dep")
        record = {
            "id": deploy,
            "account": account,
            "app": "sample-app",
            "appId": "app_0123456789",
            "kind": "live",
            "trigger": "hook",
            "createdAt": now_iso(),
        }
        triggered = await deploys_scripts.queue_deploy(
            store,
            account,
            "app_1",
            deploy,
            record,
            address="live",
            now=now_iso(),
            hook="",
            hook_limit=6,
            suspended=False,
            quota=10**9,
            source="src_1",
            has_repository=True,
        )
        assert triggered.verdict == "queued"
        ended = {"state": "live", "startedAt": now_iso(), "finishedAt": now_iso(), "durationMs": "41250"}
        ended |= {"url": "https://sample-app.apps.example.com", "commit": "0" * 40}
        move = deploys_scripts.Transition(
            account=account, app="app_1", deploy=deploy, expected="queued", fields=ended, dequeue=True
        )
        assert await deploys_scripts.advance_deploy(store, move)


THINGS: list[tuple[str, int, Fill]] = [
    ("account with an API key", 2_000, fill_accounts),
    ("app", 2_000, fill_apps),
    ("account, per day with requests", 20_000, fill_days),
    ("user of an app, active in the last minute", 20_000, fill_windows),
    ("running request", 5_000, fill_running),
    ("waiting event", 10_000, fill_waiting),
    ("logged delivery, short answer", 5_000, fill_deliveries),
    ("logged delivery, longest answer", 3_000, partial(fill_deliveries, headers=LONG_HEADERS, body="x" * 1024)),
    ("account with a full store of events", 4, fill_shares),
    ("finished deploy", 3_000, fill_deploys),
]


async def used(store: Store) -> int:
    return int((await store.info())[0]["used_memory"])


async def measure(url: str) -> None:
    store = Store(url)
    print(f"{'bytes in Redis per':44} {'':>10}")
    for name, count, fill in THINGS:
        await store.client.flushall()
        await fill(store, min(count, 10))  # scripts, groups and the first entries of each structure
        await store.client.flushall()
        before = await used(store)
        await fill(store, count)
        print(f"{name:44} {(await used(store) - before) / count:>10,.0f}", flush=True)
    await store.close()


def main() -> None:
    with redis_server() as port:
        asyncio.run(measure(f"redis://127.0.0.1:{port}/0"))


if __name__ == "__main__":
    main()

"""What all accounts spent by day and month, from the books of each day."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import RequestMalformed
from gateway.keys import spend_by_provider_key, spenders_key, usage_by_provider_key
from gateway.operations.spend import SpendPeriod, read_spend_by_account
from gateway.redis.client import Store
from gateway.telemetry.usage_reports import Group, Period, UsageRow, read_usage

DAY = 86_400
NOW = int(time.mktime((2026, 7, 2, 12, 0, 0, 0, 0, 0)) - time.timezone)
SPAN = {"start": NOW - 100 * DAY, "end": NOW, "now": NOW}


async def rows_of(pages: AsyncIterator[list[Any]]) -> list[Any]:
    return [row async for page in pages for row in page]


async def spend(store: Store, day: str, **spends: int) -> None:
    await store.client.zadd(spenders_key(day), spends)
    await store.client.expire(spenders_key(day), 60)


async def test_by_account(store: Store) -> None:
    registry = Registry(store, Vault(""))
    ada, bob = [(await registry.create_account(name, "max"))[0].id for name in ("=Ada", "Bob")]
    await spend(store, "2026-06-29", **{ada: 5, "total": 5})
    await spend(store, "2026-06-30", **{ada: 7, bob: 2, "total": 12})  # 3 of an account that was deleted
    await spend(store, "2026-07-01", **{bob: 1, "total": 1})

    async def read(period: SpendPeriod, **span: int) -> list[tuple[str, str, str, int]]:
        rows = await rows_of(read_spend_by_account(store, period, **{**SPAN, **span}))
        return [(row.start[:10], row.account, row.accountName, row.nanoEuro) for row in rows]

    june = [("2026-06-01", "", "", 3), ("2026-06-01", ada, "=Ada", 12), ("2026-06-01", bob, "Bob", 2)]
    assert await read("month") == [june[0], *sorted(june[1:]), ("2026-07-01", bob, "Bob", 1)]
    assert await read("day", start=NOW - 3 * DAY, end=NOW - DAY) == [
        ("2026-06-30", "", "", 3),
        *sorted([("2026-06-30", ada, "=Ada", 7), ("2026-06-30", bob, "Bob", 2)]),
        ("2026-07-01", bob, "Bob", 1),
    ]
    assert await read("month", end=NOW - 3 * DAY) == [("2026-06-01", ada, "=Ada", 5)]
    with pytest.raises(RequestMalformed, match="at most 31 days"):
        await read("day")


async def test_by_model_and_provider(store: Store) -> None:
    days = {"2026-06-29": 1, "2026-06-30": 10, "2026-07-01": 100}
    for day, nano in days.items():
        for key in (spend_by_provider_key(day), usage_by_provider_key("acc", day)):
            for provider, model in (("paris-1", "gpt"), ("paris-2", "gpt"), ("paris-2", "qwen/3")):
                await store.client.hset(key, f"{provider}/{model}/nanoEuro", nano)
                await store.client.hset(key, f"{provider}/{model}/requests", 1)
            await store.client.expire(key, 60)

    async def read(account: str | None, period: Period, group: Group, **more: Any) -> list[tuple[str, int, int]]:
        rows: list[UsageRow] = await rows_of(read_usage(store, account, period, group, **SPAN, **more))
        return [(f"{row.start[5:10]} {getattr(row, group, '')}", row.requests, row.nanoEuro) for row in rows]

    june = [("06-01 paris-1", 2, 11), ("06-01 paris-2", 4, 22)]
    july = [("07-01 paris-1", 1, 100), ("07-01 paris-2", 2, 200)]
    for account in (None, "acc"):
        assert await read(account, "month", "provider") == june + july
        assert await read(account, "day", "provider") == [
            (f"{day[5:]} paris-{n}", n, n * nano) for day, nano in days.items() for n in (1, 2)
        ]
    by_model = [("06-01 gpt", 4, 22), ("06-01 qwen/3", 2, 11), ("07-01 gpt", 2, 200), ("07-01 qwen/3", 1, 100)]
    assert await read(None, "month", "model") == by_model
    assert await read(None, "month", "none") == [("06-01 ", 6, 33), ("07-01 ", 3, 300)]
    for period, more in (("hour", {}), ("day", {"app": "notes"})):
        with pytest.raises(RequestMalformed, match="by provider"):
            await read("acc", period, "provider", **more)  # type: ignore[arg-type]

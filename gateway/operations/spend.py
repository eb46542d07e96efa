"""Reports what all accounts spent, by day or month, and by account, model or provider.

- By account, the books are the sorted set of each day (`spend-by-account:<day>`).
- By model and provider, they are the counts of each day (`spend-by-provider:<day>`).

`gateway/telemetry/counters.py` writes both. They are kept for 400 days.
"""

import time
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from gateway.errors import RequestMalformed
from gateway.ids import Time, now_iso
from gateway.keys import account_key, spenders_key
from gateway.loops import batched
from gateway.redis.client import Store
from gateway.telemetry.counters import TOTAL
from gateway.telemetry.usage_reports import KEY_FORMATS, list_begins, sum_months

SpendPeriod = Literal["day", "month"]
SpendGroup = Literal["account", "model", "provider", "none"]

MAX_DAYS = 31  # of a report by account and day
PAGE = 500  # accounts that are read together


class AccountSpendRow(msgspec.Struct):
    """A day or a month of an account. That of all deleted accounts has no id and no name."""

    start: Time
    account: str
    accountName: str
    nanoEuro: int


ACCOUNT_COLUMNS = AccountSpendRow.__struct_fields__


class NamedAccount(msgspec.Struct):
    """What a report reads of an account's record."""

    name: str


async def read_spend_by_account(
    store: Store, period: SpendPeriod, *, start: int, end: int, now: int
) -> AsyncIterator[list[AccountSpendRow]]:
    """Yields the rows of each day or month, oldest first. Times are seconds since the epoch.

    Raises RequestMalformed or BackboneUnavailable.
    """
    begins = list_begins("day", start, end, now)
    if period == "day" and len(begins) > MAX_DAYS:
        raise RequestMalformed(f"from: by account and day, a report has at most {MAX_DAYS} days; use by=month.")
    days = _read_days(store, begins)
    async for rows in sum_months(days, "account", ["nanoEuro"]) if period == "month" else days:
        await _add_names(store, rows)
        yield rows


async def _read_days(store: Store, begins: range) -> AsyncIterator[list[AccountSpendRow]]:
    for begin in begins:
        key = spenders_key(time.strftime(KEY_FORMATS["day"], time.gmtime(begin)))
        # In one command, because accounts that spend meanwhile move from one page to another.
        spends = {name: int(spent) for name, spent in await store.client.zrange(key, 0, -1, withscores=True)}
        of_deleted = spends.pop(TOTAL, 0) - sum(spends.values())
        if of_deleted > 0:
            spends[""] = of_deleted
        if spends:
            yield [AccountSpendRow(now_iso(begin), account, "", spent) for account, spent in sorted(spends.items())]


async def _add_names(store: Store, rows: list[AccountSpendRow]) -> None:
    for batch in batched(rows, PAGE):
        page = [row for row in batch if row.account]
        for row, record in zip(page, await store.get_all([account_key(row.account) for row in page]), strict=True):
            row.accountName = msgspec.json.decode(record, type=NamedAccount).name if record else ""

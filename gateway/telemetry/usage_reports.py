"""Reads the usage of each account by hour and day, which `gateway/telemetry/usage.py` writes."""

import asyncio
import csv
import functools
import io
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from gateway.errors import RequestMalformed
from gateway.ids import Time, now_iso
from gateway.keys import spend_by_provider_key, usage_by_provider_key, usage_key
from gateway.loops import batched
from gateway.redis.client import Store
from gateway.telemetry.usage import UsageCounts

Period = Literal["hour", "day", "month"]
Group = Literal["app", "model", "provider", "none"]
Dated = Literal["hour", "day"]  # periods that Redis has counts of

PAGE_PERIODS = 4  # that are read together; each may have a thousand numbers
SLICE_ROWS = 100  # that are processed before other tasks may run
KEY_FORMATS: dict[Dated, str] = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d"}
PERIOD_SECONDS: dict[Dated, int] = {"hour": 3_600, "day": 86_400}
KEPT_SECONDS: dict[Dated, int] = {"hour": 14 * 86_400, "day": 400 * 86_400}  # as in lua/telemetry/record_usage.lua
COUNTS = UsageCounts.__struct_fields__


class DatedRow(Protocol):
    start: Time


R = TypeVar("R", bound=DatedRow)


class UsageRow(UsageCounts, kw_only=True):
    """An hour, a day or a month, of all together or of one app, model or provider."""

    start: Time
    app: str | msgspec.UnsetType = msgspec.UNSET  # `*` stands for further apps
    model: str | msgspec.UnsetType = msgspec.UNSET  # '' for requests without a model that has a price
    provider: str | msgspec.UnsetType = msgspec.UNSET  # the last one that was asked


async def read_usage(
    store: Store,
    account: str | None,
    period: Period,
    group: Group,
    *,
    app: str | None = None,
    start: int,
    end: int,
    now: int,
) -> AsyncIterator[list[UsageRow]]:
    """Yields the rows of each hour, day or month, oldest first, without empty ones.

    The hours or days begin in [start, end), and months add up such days. Without an account, the rows are of all
    accounts, by day or month, and not by app. `app` is the name of the only app to count. Times are seconds since the
    epoch. Raises RequestMalformed or BackboneUnavailable. The caller should not keep the rows: with many apps, even
    freeing them takes a while.
    """
    if group == "provider" and (period == "hour" or app is not None):
        raise RequestMalformed("group: by provider, there are counts of days and months, and of all apps together.")
    if account is None:
        key_of = spend_by_provider_key
    else:
        key_of = functools.partial(usage_by_provider_key if group == "provider" else usage_key, account)
    dated: Dated = "hour" if period == "hour" else "day"
    rows = _read_rows(store, key_of, dated, group, app, list_begins(dated, start, end, now))
    async for page in sum_months(rows, group, COUNTS) if period == "month" else rows:
        yield page


def list_begins(period: Dated, start: int, end: int, now: int) -> range:
    """Returns when the hours or days in [start, end) begin of which there may be counts."""
    size = PERIOD_SECONDS[period]
    first = -(-max(start, now - KEPT_SECONDS[period]) // size) * size
    return range(first, min(end, now + size), size)


async def _read_rows(
    store: Store, key_of: Callable[[str], str], period: Dated, group: Group, app: str | None, begins: range
) -> AsyncIterator[list[UsageRow]]:
    for page in batched(begins, PAGE_PERIODS):
        names = [time.strftime(KEY_FORMATS[period], time.gmtime(begin)) for begin in page]
        hashes = await store.read_each(names, lambda pipe, name: pipe.hgetall(key_of(name)))
        for begin, counted in zip(page, hashes, strict=True):
            if rows := _sum_up(now_iso(begin), counted, group, app):
                yield rows
            await asyncio.sleep(0)


def _sum_up(start: str, counted: Mapping[str, str], group: Group, only: str | None) -> list[UsageRow]:
    """Returns one row per app, provider or model, or one row for all of them."""
    rows: dict[str, UsageRow] = {}
    for field, value in counted.items():
        pair, _, name = field.rpartition("/")
        part, _, model = pair.partition("/")
        if only not in (None, part):
            continue
        key = {"app": part, "provider": part, "model": model, "none": ""}[group]
        if key not in rows:
            rows[key] = UsageRow(start=start)
            if group != "none":
                setattr(rows[key], group, key)
        if name in COUNTS:
            setattr(rows[key], name, getattr(rows[key], name) + int(value))
    return [rows[key] for key in sorted(rows)]


async def sum_months(days: AsyncIterator[list[R]], group: str, counts: Sequence[str]) -> AsyncIterator[list[R]]:
    """Adds up the `counts` of the rows of each month. A month starts with its first day, even if that is left out."""
    sums: dict[str, R] = {}
    month = ""
    async for rows in days:
        if rows[0].start[:7] != month:
            if sums:
                yield [sums[key] for key in sorted(sums)]
            sums, month = {}, rows[0].start[:7]
        for row in rows:
            total = sums.setdefault("" if group == "none" else getattr(row, group), row)
            if total is row:
                row.start = f"{month}-01T00:00:00.000Z"
            else:
                for name in counts:
                    setattr(total, name, getattr(total, name) + getattr(row, name))
    if sums:
        yield [sums[key] for key in sorted(sums)]


async def as_json(usage: AsyncIterator[Sequence[msgspec.Struct]]) -> list[bytes]:
    """Returns `{"rows": […]}` in pieces, because it may have megabytes."""
    pieces, separator = [b'{"rows":['], b""
    async for rows in usage:
        pieces.append(separator + _ENCODER.encode(rows)[1:-1])
        separator = b","
    return [*pieces, b"]}"]


async def as_csv(usage: AsyncIterator[Sequence[msgspec.Struct]], columns: Sequence[str]) -> list[bytes]:
    """Returns the rows as CSV, in pieces."""
    table = [csv_lines([getattr(row, column) for column in columns] for row in rows) async for rows in usage]
    return [csv_lines([columns]), *table]


def csv_lines(rows: Iterable[Iterable[object]]) -> bytes:
    """A text that a spreadsheet would run as a formula gets an apostrophe."""
    text = io.StringIO()
    csv.writer(text).writerows([_escape(value) for value in row] for row in rows)
    return text.getvalue().encode()


def _escape(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


_ENCODER = msgspec.json.Encoder()

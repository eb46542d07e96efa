"""Reads the usage of each account by hour and day, and its last requests. `gateway/telemetry/usage.py` writes them."""

import asyncio
import csv
import io
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from gateway.errors import NotFound, RequestMalformed, TokenFault
from gateway.ids import Time, now_iso
from gateway.keys import requests_key, usage_key
from gateway.redis.client import Store
from gateway.telemetry.usage import LIMIT_NAMES, LimitName, LoggedRequest, Outcome, UsageCounts, outcome_of
from gateway.times import ALWAYS, TimeSpan

Period = Literal["hour", "day"]
Group = Literal["app", "model", "none"]

PAGE_PERIODS = 4  # that are read together; each may have a thousand numbers
SLICE_ROWS = 100  # that are processed before other tasks may run
KEY_FORMATS: dict[Period, str] = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d"}
PERIOD_SECONDS: dict[Period, int] = {"hour": 3_600, "day": 86_400}
KEPT_SECONDS: dict[Period, int] = {"hour": 14 * 86_400, "day": 400 * 86_400}  # as in lua/telemetry/record_usage.lua
COUNTS = UsageCounts.__struct_fields__


class UsageRow(UsageCounts, kw_only=True):
    """An hour or a day of the account, or of one of its apps or models."""

    start: Time
    app: str | msgspec.UnsetType = msgspec.UNSET  # `*` stands for further apps
    model: str | msgspec.UnsetType = msgspec.UNSET  # '' for requests refused before their model was known


class RequestRow(msgspec.Struct):
    """One request, without its prompt, answer and user."""

    id: str  # its X-Request-Id
    at: Time  # when it arrived
    app: str
    model: str  # '' if it was refused before its model was known
    status: int  # 0 if the client disconnected before the response began
    code: str  # '' if the answer is complete
    inputTokens: int
    outputTokens: int
    nanoEuro: int
    ttftMs: int | None  # null if no token came; only streams have one
    durationMs: int
    reason: TokenFault | None  # why its token was refused; null if it was not


class UsedLimit(msgspec.Struct):
    """A limit that was in force, and its use when the request was decided, including the request if it passed.

    Rates are requests within 60 seconds. The others are nano-euro of the UTC day, settled and reserved.
    """

    name: LimitName
    limit: int
    used: int


class ProviderAttempt(msgspec.Struct):
    provider: str
    code: str  # of its failure; '' if the answer is complete
    durationMs: int


class DetailedRequest(RequestRow):
    reservedNanoEuro: int  # the maximum cost, reserved while the request ran; 0 if it was not admitted
    waitedMs: int  # for a permit of the provider
    limits: list[UsedLimit]  # empty if the request was refused before they were checked
    provider: str | None  # that was asked last; null if none was
    region: str | None  # where it processes prompts
    attempts: list[ProviderAttempt]  # the failed ones first; empty if no provider was asked


class RequestFilter(msgspec.Struct, frozen=True):
    app: str | None = None
    model: str | None = None
    outcome: Outcome | None = None
    code: str | None = None
    span: TimeSpan = ALWAYS  # of arrival

    def matches(self, request: LoggedRequest) -> bool:
        return (
            self.span.contains(request.at / 1000)
            and self.app in (None, request.app)
            and self.model in (None, request.model)
            and self.code in (None, request.code)
            and self.outcome in (None, outcome_of(request.code, request.nanoEuro))
        )


# -- usage ---------------------------------------------------------------------------------------------------


async def read_usage(
    store: Store, account: str, period: Period, group: Group, *, app: str | None = None, start: int, end: int, now: int
) -> AsyncIterator[list[UsageRow]]:
    """Yields the rows of each hour or day that begins in [start, end), oldest first, without empty ones.

    `app` is the name of the only app to count. Times are seconds since the epoch. Raises BackboneUnavailable. The
    caller should not keep the rows: with many apps, even freeing them takes a while.
    """
    size = PERIOD_SECONDS[period]
    first = -(-max(start, now - KEPT_SECONDS[period]) // size) * size
    begins = range(first, min(end, now + size), size)
    for n in range(0, len(begins), PAGE_PERIODS):
        page = begins[n : n + PAGE_PERIODS]
        for begin, counted in zip(page, await _read_hashes(store, account, period, page), strict=True):
            if rows := _sum_up(now_iso(begin), counted, group, app):
                yield rows
            await asyncio.sleep(0)


async def _read_hashes(store: Store, account: str, period: Period, begins: Sequence[int]) -> list[dict[str, str]]:
    async with store.client.pipeline(transaction=False) as pipe:
        for begin in begins:
            pipe.hgetall(usage_key(account, time.strftime(KEY_FORMATS[period], time.gmtime(begin))))
        hashes: list[dict[str, str]] = await pipe.execute()
        return hashes


def _sum_up(start: str, counted: Mapping[str, str], group: Group, only: str | None) -> list[UsageRow]:
    """Returns one row per app or model, or one row for all of them."""
    rows: dict[str, UsageRow] = {}
    for field, value in counted.items():
        pair, _, name = field.rpartition("/")
        app, _, model = pair.partition("/")
        if only not in (None, app):
            continue
        key = {"app": app, "model": model, "none": ""}[group]
        if key not in rows:
            rows[key] = UsageRow(start=start)
            if group != "none":
                setattr(rows[key], group, key)
        if name in COUNTS:
            setattr(rows[key], name, getattr(rows[key], name) + int(value))
    return [rows[key] for key in sorted(rows)]


async def as_json(usage: AsyncIterator[list[UsageRow]]) -> list[bytes]:
    """Returns `{"rows": […]}` in pieces, because it may have megabytes."""
    pieces, separator = [b'{"rows":['], b""
    async for rows in usage:
        pieces.append(separator + _ENCODER.encode(rows)[1:-1])
        separator = b","
    return [*pieces, b"]}"]


async def as_csv(usage: AsyncIterator[list[UsageRow]], group: Group) -> list[bytes]:
    """Returns the rows as CSV, in pieces. No value begins with a character that starts a formula in a spreadsheet."""
    columns = ["start", *([] if group == "none" else [group]), *COUNTS]
    table = [_lines([getattr(row, column) for column in columns] for row in rows) async for rows in usage]
    return [_lines([columns]), *table]


def _lines(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


# -- requests ------------------------------------------------------------------------------------------------


async def read_requests(
    store: Store, account: str, chosen: RequestFilter, limit: int, before: str | None = None
) -> list[RequestRow]:
    """Returns the requests that match the filter, newest first; only older ones than the request with the id `before`.

    Raises RequestMalformed if the log has no request with this id, or BackboneUnavailable.
    """
    found, rows = before is None, list[RequestRow]()
    async for requests in _read_log(store, account):
        for request in requests:
            if found and len(rows) < limit and chosen.matches(request):
                rows.append(RequestRow(**_fields(request)))
            found = found or request.id == before
        if len(rows) >= limit:
            break
    if not found:
        raise RequestMalformed("before: the log has no request with this id; give the id of a listed request.")
    return rows


async def read_request(store: Store, account: str, id: str) -> DetailedRequest:
    """Raises NotFound or BackboneUnavailable."""
    async for requests in _read_log(store, account):
        for request in requests:
            if request.id == id:
                uses = zip(LIMIT_NAMES, request.limits, strict=False)
                return DetailedRequest(
                    **_fields(request),
                    reservedNanoEuro=request.reservedNanoEuro,
                    waitedMs=request.waitedMs,
                    limits=[UsedLimit(name, *use) for name, use in uses if use is not None],
                    provider=request.attempts[-1].provider if request.attempts else None,
                    region=request.region or None,
                    attempts=[ProviderAttempt(*msgspec.structs.astuple(each)) for each in request.attempts],
                )
    raise NotFound("The log has no request with this id; it keeps an account's last 1,000 requests.")


async def _read_log(store: Store, account: str) -> AsyncIterator[list[LoggedRequest]]:
    """Yields the account's requests, newest first. Other tasks may run in between."""
    lines: list[str] = await store.client.zrange(requests_key(account), 0, -1, desc=True)
    for n in range(0, len(lines), SLICE_ROWS):
        yield [_DECODER.decode(line) for line in lines[n : n + SLICE_ROWS]]
        await asyncio.sleep(0)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(LoggedRequest)


def _fields(request: LoggedRequest) -> dict[str, Any]:
    """Returns the fields of the request's row."""
    return {name: getattr(request, name) for name in RequestRow.__struct_fields__} | {"at": now_iso(request.at / 1000)}

"""Reads the last requests of each account: rows, figures, and the details of one. `usage.py` logs them.

Each reading goes through the whole log once, at most 1,000 requests, and other tasks may run in between. The figures
are of all requests that match, however many rows a page shows.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from gateway.errors import NotFound, RequestMalformed, TokenFault
from gateway.ids import ALWAYS, Time, TimeSpan, now_iso
from gateway.keys import requests_key
from gateway.loops import batched
from gateway.redis.client import Store
from gateway.telemetry.usage import LIMIT_NAMES, LimitName, LoggedRequest, Outcome, outcome_of
from gateway.telemetry.usage_reports import SLICE_ROWS, csv_lines

BARS = 60  # of a chart, at most
LEAST_BARS = 12
DAY_SECONDS = 86_400
BAR_SECONDS = (60, 300, 900, 3_600, 21_600, DAY_SECONDS)  # longer ones are whole days


class RequestRow(msgspec.Struct):
    """One request, without its prompt, answer and user."""

    id: str  # its X-Request-Id
    at: Time  # when it arrived
    app: str
    model: str  # '' if it was refused before its model was known, or names a model without a price
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


class RequestBar(msgspec.Struct):
    """A part of the time of a chart."""

    start: Time
    requests: int
    codes: dict[str, int]  # of the requests whose answer is not complete


class Percentiles(msgspec.Struct):
    """Nearest ranks, in milliseconds."""

    p50: int
    p95: int
    p99: int


class LoggedValues(msgspec.Struct):
    """What occurs in the log, or in the part of it that is of the chosen app, whatever else is chosen."""

    apps: list[str]
    models: list[str]
    codes: list[str]


class RequestFigures(msgspec.Struct):
    """The figures of all requests in the log that match a filter."""

    matching: int
    logged: int  # in the log, or the part of it that is of the chosen app
    codes: dict[str, int]  # the most frequent first
    firstTokenMs: Percentiles | None  # null if no token came
    answerMs: Percentiles | None  # of complete answers; null if there is none
    barSeconds: int
    bars: list[RequestBar]  # oldest first, with empty ones; none if no request matches
    values: LoggedValues


# -- reading -------------------------------------------------------------------------------------------------


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


def as_csv(rows: Sequence[RequestRow]) -> list[bytes]:
    """Returns the rows as CSV, in pieces."""
    columns = RequestRow.__struct_fields__
    return [csv_lines([columns]), csv_lines([getattr(row, column) for column in columns] for row in rows)]


async def read_figures(store: Store, account: str, chosen: RequestFilter) -> RequestFigures:
    """Of a chosen app, nothing of the others is told, because a key may be for one app. Raises BackboneUnavailable."""
    matching, logged, oldest = list[LoggedRequest](), 0, time.time()
    apps, models, codes = set[str](), set[str](), set[str]()
    async for page in _read_log(store, account):
        requests = [request for request in page if chosen.app in (None, request.app)]
        if not requests:
            continue
        logged, oldest = logged + len(requests), requests[-1].at / 1000
        apps.update(request.app for request in requests)
        models.update(request.model for request in requests)
        codes.update(request.code for request in requests)
        matching += filter(chosen.matches, requests)
    size, bars = _draw_bars(matching, chosen.span, oldest)
    return RequestFigures(
        matching=len(matching),
        logged=logged,
        codes=dict(Counter(request.code for request in matching if request.code).most_common()),
        firstTokenMs=_rank([request.ttftMs for request in matching if request.ttftMs is not None]),
        answerMs=_rank([request.durationMs for request in matching if not request.code]),
        barSeconds=size,
        bars=bars,
        values=LoggedValues(*(sorted(found - {""}) for found in (apps, models, codes))),
    )


def _draw_bars(requests: Sequence[LoggedRequest], span: TimeSpan, oldest: float) -> tuple[int, list[RequestBar]]:
    """Returns the seconds of a bar, and the bars of the part of the span that the log covers."""
    if not requests:
        return BAR_SECONDS[0], []
    begin, end = max(span.since, oldest), min(span.until, max(time.time(), requests[0].at / 1000))
    days = math.ceil((end - begin) / BARS / DAY_SECONDS) * DAY_SECONDS
    size = next((seconds for seconds in BAR_SECONDS if (end - begin) / seconds < BARS), days)
    first, last = int(begin // size), math.ceil(end / size)
    first = min(first, last - LEAST_BARS)
    bars = [RequestBar(now_iso(n * size), 0, {}) for n in range(first, last)]
    for request in requests:
        n = int(request.at / 1000 // size) - first
        bar = bars[min(n, len(bars) - 1)]  # the newest may have come right at the end
        bar.requests += 1
        if request.code:
            bar.codes[request.code] = bar.codes.get(request.code, 0) + 1
    return size, bars


def _rank(values: list[int]) -> Percentiles | None:
    ranked = sorted(values)
    return Percentiles(*(ranked[math.ceil(p * len(ranked) / 100) - 1] for p in (50, 95, 99))) if ranked else None


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
    for batch in batched(lines, SLICE_ROWS):
        yield [_DECODER.decode(line) for line in batch]
        await asyncio.sleep(0)


_DECODER = msgspec.json.Decoder(LoggedRequest)


def _fields(request: LoggedRequest) -> dict[str, Any]:
    """Returns the fields of the request's row."""
    return {name: getattr(request, name) for name in RequestRow.__struct_fields__} | {"at": now_iso(request.at / 1000)}

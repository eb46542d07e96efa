"""Records what each account used by hour and day, app, model and provider, and logs its last requests.

A process counts in memory, so a request costs no round trip. Every two seconds, `Counters` writes the counts with one
script call for each account that had requests.

- `{pNN}:usage:<account>:<hour>` and `…:<day>`: a number for each app, model and field of `UsageCounts`, such as
  `notes/gpt-oss-120b/requests`. The model is empty for a request that was refused before its model was known. A key
  has about 1,000 numbers; beyond that, further apps are counted together as `*`
- `{pNN}:usage-by-provider:<account>:<day>`: the same counts of the requests that a provider was asked for, such as
  `paris-1/gpt-oss-120b/nanoEuro`. The provider is the last one that was asked, which is the one that is paid
- `{pNN}:request-log:<account>`: the last 1,000 requests, each a `LoggedRequest`, ordered by their arrival,
  whichever processes served them and whenever these processes wrote them

Neither contains prompts, answers or users. Both are for display: charges are based on the spend hashes.

Failure policy: that of `gateway/telemetry/counters.py`. While Redis is unavailable, up to 10,000 requests wait to be
logged. Beyond that, the oldest are dropped and counted in a metric.
"""

import asyncio
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
import structlog

from gateway.errors import BackboneRefused, BackboneUnavailable, TokenFault
from gateway.keys import usage_key
from gateway.log import RequestLine
from gateway.loops import batched
from gateway.redis.client import Store
from gateway.redis.errors import code_of
from gateway.telemetry import scripts

logger = structlog.get_logger()

MAX_ATTEMPTS = 3  # of one request, each at another provider
MAX_WAITING_REQUESTS = 10_000  # to be logged
LOGGED_REQUESTS = 1_000  # kept per account
BATCH_ACCOUNTS = 50  # accounts that are written together

LimitName = Literal["cap", "dailyEuro", "userDailyEuro", "requestsPerMinute", "userRequestsPerMinute"]  # in the API
LIMIT_NAMES: tuple[LimitName, ...] = get_args(LimitName)
LimitUses = tuple[tuple[int, int] | None, ...]  # in this order each limit and its use, or None without such a limit

Outcome = Literal["answered", "interrupted", "refused"]
# Codes of requests that failed, although there was nothing wrong with them.
FAILURE = re.compile(r"PROVIDER_(?!REFUSED)|BACKBONE_|APP_BACKEND_|INTERNAL")


class UsageCounts(msgspec.Struct, kw_only=True, gc=False):
    """`requests` counts all of them: answered, interrupted and refused."""

    requests: int = 0
    refused: int = 0
    failed: int = 0  # the part of `refused` that failed at the provider, the app's backend or the service
    interrupted: int = 0
    inputTokens: int = 0
    outputTokens: int = 0
    nanoEuro: int = 0
    interruptedNanoEuro: int = 0  # the part of `nanoEuro` for interrupted answers


class Attempt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One attempt to get an answer from a provider."""

    provider: str
    code: str  # of its failure; '' if the answer is complete
    duration_ms: int


class LoggedRequest(msgspec.Struct, array_like=True, gc=False):
    """A request as Redis stores it. Times are in milliseconds."""

    id: str
    at: int
    app: str
    model: str  # '' if it was refused before its model was known, or names a model without a price
    status: int  # 0 if the client disconnected before the response began
    code: str  # '' if the answer is complete
    inputTokens: int
    outputTokens: int
    nanoEuro: int
    ttftMs: int | None  # None if no token came
    durationMs: int
    reason: TokenFault | None = None
    reservedNanoEuro: int = 0
    waitedMs: int = 0
    limits: LimitUses = ()
    region: str = ""  # of the last provider
    attempts: tuple[Attempt, ...] = ()  # in order


class RequestDetails(NamedTuple):
    """What the log of the account holds beside the line of the service's own log."""

    reason: TokenFault | None = None  # why its token was refused
    reserved: int = 0  # nano-euro
    waited_ms: int = 0  # for a permit
    limits: LimitUses = ()
    region: str = ""  # of the provider that was asked last
    attempts: tuple[Attempt, ...] = ()


NO_DETAILS = RequestDetails()


def outcome_of(code: str, nano_euro: int) -> Outcome:
    """Classifies a request: it is interrupted if the client disconnected, or if it failed but cost something."""
    if not code:
        return "answered"
    return "interrupted" if nano_euro or code == "CLIENT_GONE" else "refused"


Key = tuple[str, str, str]  # account, app or provider, model
UsageByKey = dict[Key, UsageCounts]


class _Hour:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.counts: UsageByKey = {}
        self.by_provider: UsageByKey = {}


Entry = tuple[RequestLine, RequestDetails]


class _Write(NamedTuple):
    """The arguments of one call of the script."""

    account: str
    hour: str
    began: float
    counts: UsageByKey
    by_provider: UsageByKey
    lines: list[Entry]  # oldest first


class UsageRecorder:
    def __init__(self, store: Store, on_drop: Callable[[int], None]) -> None:
        """`on_drop` gets the number of requests that may be missing from the log."""
        self._store, self._on_drop = store, on_drop
        self._hours: dict[str, _Hour] = {}
        self._lines: deque[tuple[str, Entry]] = deque()  # to be logged, with their accounts; oldest first
        self.start_hour("")

    # -- counting --------------------------------------------------------------------------------------------

    def start_hour(self, hour: str) -> None:
        """Counts further requests for `hour`, such as `2026-07-02T12`."""
        self._hour = hour
        self._present = self._hours.setdefault(hour, _Hour())

    def add_request(self, account: str, line: RequestLine, details: RequestDetails) -> None:
        """Counts a request and queues its log entry. Never waits."""
        _count_line(self._present.counts, (account, line.app, line.model), line)
        if details.attempts:
            _count_line(self._present.by_provider, (account, details.attempts[-1].provider, line.model), line)
        self._lines.append((account, (line, details)))
        if len(self._lines) > MAX_WAITING_REQUESTS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        surplus = len(self._lines) - MAX_WAITING_REQUESTS
        for _ in range(surplus):
            self._lines.popleft()
        self._on_drop(surplus)

    # -- writing ---------------------------------------------------------------------------------------------

    async def write_counts(self) -> None:
        """Writes the counts and log entries. Those that Redis rejects wait for the next call."""
        writes = self._take_writes()
        for batch in batched(writes, BATCH_ACCOUNTS):
            await asyncio.gather(*map(self._write, batch))

    def _take_writes(self) -> list[_Write]:
        lines: defaultdict[str, list[Entry]] = defaultdict(list)
        for account, line in self._lines:
            lines[account].append(line)
        writes: dict[tuple[str, str], _Write] = {}
        for hour, counted in self._hours.items():
            for key, counts in counted.counts.items():
                account = key[0]
                if (account, hour) not in writes:
                    # The log keeps no more than the last ones.
                    mine = lines.pop(account, [])[-LOGGED_REQUESTS:]
                    writes[account, hour] = _Write(account, hour, counted.began, {}, {}, mine)
                writes[account, hour].counts[key] = counts
            for key, counts in counted.by_provider.items():  # each request counts by app too
                writes[key[0], hour].by_provider[key] = counts
        if lines:  # the counts of their hour were dropped
            self._on_drop(sum(map(len, lines.values())))
        self._lines.clear()
        self._hours = {}
        self.start_hour(self._hour)
        return list(writes.values())

    async def _write(self, write: _Write) -> None:
        requests = [_encode(*entry) for entry in write.lines]
        try:
            counts, by_provider = name_counts(write.counts), name_counts(write.by_provider)
            await scripts.record_usage(self._store, write.account, write.hour, counts, by_provider, requests)
        except BackboneRefused:
            self._put_back(write)  # Redis changed nothing, for example because its memory is full
        except BackboneUnavailable as error:
            key = usage_key(write.account, write.hour)
            logger.warning("counters.lost", key=key, error=code_of(error.__cause__))
            self._on_drop(len(write.lines))

    def _put_back(self, write: _Write) -> None:
        hour = self._hours.setdefault(write.hour, _Hour())
        hour.began = min(hour.began, write.began)
        for waiting, counted in ((hour.counts, write.counts), (hour.by_provider, write.by_provider)):
            for key, counts in counted.items():
                _add(waiting.setdefault(key, UsageCounts()), counts)
        self._lines.extendleft((write.account, line) for line in reversed(write.lines))
        if len(self._lines) > MAX_WAITING_REQUESTS:
            self._drop_oldest()

    def drop_old(self, oldest: float) -> None:
        """Drops the counts of hours that have waited since before `oldest` (monotonic seconds)."""
        self._hours = {name: hour for name, hour in self._hours.items() if hour.began >= oldest}
        self.start_hour(self._hour)

    def count_waiting(self) -> int:
        """Returns the number of accounts' hours that wait."""
        return len({(key[0], name) for name, hour in self._hours.items() for key in hour.counts})


def _count_line(usage: UsageByKey, key: Key, line: RequestLine) -> None:
    """Adds a request to the counts of the key."""
    counts = usage.get(key)
    if counts is None:
        counts = usage[key] = UsageCounts()
    counts.requests += 1
    counts.nanoEuro += line.nano_euro
    if line.input_tokens is not None and line.output_tokens is not None:
        counts.inputTokens += line.input_tokens
        counts.outputTokens += line.output_tokens
    if line.code:
        _count_code(counts, line)


def count_lines(lines: Sequence[RequestLine]) -> UsageCounts:
    """Returns the counts of many requests, in less time than one by one."""
    counts = UsageCounts(
        requests=len(lines),
        inputTokens=sum([line.input_tokens or 0 for line in lines]),
        outputTokens=sum([line.output_tokens or 0 for line in lines]),
        nanoEuro=sum([line.nano_euro for line in lines]),
    )
    for line in lines:
        if line.code:
            _count_code(counts, line)
    return counts


def _count_code(counts: UsageCounts, line: RequestLine) -> None:
    """Counts what kept the answer from being complete."""
    if outcome_of(line.code, line.nano_euro) == "interrupted":
        counts.interrupted += 1
        counts.interruptedNanoEuro += line.nano_euro
    else:
        counts.refused += 1
        counts.failed += FAILURE.match(line.code) is not None


def _add(total: UsageCounts, more: UsageCounts) -> None:
    for name in UsageCounts.__struct_fields__:
        setattr(total, name, getattr(total, name) + getattr(more, name))


def name_counts(counts: UsageByKey) -> dict[str, int]:
    """Returns the counts by field name, without zeros."""
    return {
        f"{part}/{model}/{name}": value
        for (_, part, model), each in counts.items()
        for name in UsageCounts.__struct_fields__
        if (value := getattr(each, name))
    }


def _encode(line: RequestLine, details: RequestDetails) -> tuple[float, str]:
    """Returns when the request arrived, in milliseconds, and its log entry."""
    began = line.timestamp.timestamp() * 1000 - line.duration_ms
    logged = LoggedRequest(
        line.request_id,
        round(began),
        line.app,
        line.model,
        line.status,
        line.code,
        line.input_tokens or 0,
        line.output_tokens or 0,
        line.nano_euro,
        None if line.ttft_ms is None else round(line.ttft_ms),
        round(line.duration_ms),
        *details,
    )
    return began, msgspec.json.encode(logged).decode()

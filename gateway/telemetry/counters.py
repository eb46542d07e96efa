"""Counters per minute, hour and day, for the operators' page and dashboards on Redis.

A process counts in memory and adds the counts to Redis every two seconds, so a request costs no round trip. It counts
many requests together, which takes less time than one by one.

- `{ops}:minute:<minute>`: `requests`; `code:<CODE>` for requests that ended with an error; `streams` and `ttft:<ms>`,
  streams by the time to their first token, each in the first bucket that fits (`ttft:more` above all of them);
  `inputTokens`, `outputTokens`; `settled` in nano-euro; `model:<model>:requests`, `…:errors` (of the provider) and
  `…:ttft:<ms>` of each model
- `{ops}:hour:<hour>`: `requests`, `code:<CODE>` and `settled`, as for a minute
- `{ops}:providers:<day>`: `<provider>:attempts`, the requests that were sent to a provider, and `<provider>:failovers`,
  those of them that failed and went to another one
- `spend-by-account:<day>`: the spend of each account, and `total`. For display only: charges are based on the spend
  hashes
- `spend-by-provider:<day>`: the counts of all accounts by provider and model, as in
  `{pNN}:usage-by-provider:<account>:<day>`
- `{ops}:processes`, `{ops}:process:<id>`: the gateway processes, and the number of open streams of each
- the usage of each account: `gateway/telemetry/usage.py`

A request is counted when it ends, in the minute, hour and day of this process's clock.

Failure policy: a flush first writes the process's heartbeat. While that fails, nothing else is sent, and the counts
wait for up to an hour. Counts that were sent without a reply may have been written, so they are not sent again. After a
fault, counts may be missing, but nothing is counted twice.
"""

import asyncio
import contextlib
import os
import socket
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import structlog

from gateway.errors import PROVIDER_FAULT_CODES, BackboneRefused, BackboneUnavailable
from gateway.ids import day_of, now_iso
from gateway.keys import (
    PROCESSES_KEY,
    hour_key,
    minute_key,
    process_key,
    provider_counts_key,
    spend_by_provider_key,
    spenders_key,
)
from gateway.log import RequestLine
from gateway.loops import batched, every
from gateway.redis.client import Store
from gateway.redis.errors import code_of
from gateway.redis.scripts import increment_counters
from gateway.telemetry.usage import (
    NO_DETAILS,
    Attempt,
    RequestDetails,
    UsageRecorder,
    count_lines,
    name_counts,
)

logger = structlog.get_logger()

FLUSH_SECONDS = 2.0  # between two flushes
MAX_WAIT_SECONDS = 3600.0  # that a count waits for Redis
BATCH_REQUESTS = 1_000  # that are counted together at most
BATCH_KEYS = 50  # keys that are written together
PROCESS_SECONDS = 15  # until a heartbeat expires
MINUTE_KEY_SECONDS, PROVIDERS_KEY_SECONDS, DAY_KEY_SECONDS = 2 * 3600, 2 * 86_400, 400 * 86_400
HOUR_KEY_SECONDS = 15 * 86_400  # two weeks, to compare one with the other
TTFT_BUCKETS_MS = (10, 20, 50, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000, 30_000)
TTFT_FIELDS = (*(f"ttft:{ms}" for ms in TTFT_BUCKETS_MS), "ttft:more")
MODEL_PREFIX = "model:"  # of the fields of a model, before its name
TOTAL = "total"  # a member of the day's spend, beside the accounts


Ended = tuple[str, RequestLine, RequestDetails, bool]  # of a request, with its account and whether it was admitted


class Tally:
    """Counts to add to one key."""

    __slots__ = ("began", "counts", "key", "kind", "life")

    def __init__(self, key: str, kind: str, life: int) -> None:
        self.key, self.kind, self.life = key, kind, life
        self.began = time.monotonic()
        self.counts: defaultdict[str, int] = defaultdict(int)


class Counters:
    def __init__(
        self,
        store: Store,
        streams_open: Callable[[], int],
        on_drop: Callable[[int], None],
        clock: Callable[[], float] = time.time,
        *,
        max_wait_seconds: float = MAX_WAIT_SECONDS,
    ) -> None:
        """Calls `on_drop` with the number of requests that may be missing from accounts' logs."""
        self._store, self._streams_open, self._clock = store, streams_open, clock
        self._max_wait_seconds = max_wait_seconds
        self._usage = UsageRecorder(store, on_drop)
        self._ended: list[Ended] = []  # in the present minute, not counted yet
        self._tallies: dict[str, Tally] = {}
        self._minute = -1
        self._minute_counts: defaultdict[str, int]
        self._hour_counts: defaultdict[str, int]
        self._day_spend: defaultdict[str, int]
        self._provider_counts: defaultdict[str, int]
        self._day_by_provider: defaultdict[str, int]
        self._flushing = asyncio.Lock()
        self._id = f"{socket.gethostname()}-{os.getpid()}"
        self._started = now_iso()
        self.spenders: set[str] = set()  # accounts that spent since `Overview` last checked their caps

    # -- counting --------------------------------------------------------------------------------------------

    def count_request(
        self, account: str, line: RequestLine, details: RequestDetails = NO_DETAILS, *, admitted: bool = False
    ) -> None:
        """Counts a request that ended. Never waits.

        `account` is empty for an unknown app. An `admitted` request also counts for its model.
        """
        minute = int(self._clock()) // 60
        if minute != self._minute:
            self._start_minute(minute)
        if account:
            self._usage.add_request(account, line, details)
        if line.nano_euro:
            self.spenders.add(account)
        self._ended.append((account, line, details, admitted))
        if len(self._ended) >= BATCH_REQUESTS:
            self._count_ended()

    def _count_ended(self) -> None:
        """Counts the requests of the present minute that ended since the last call."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        by_model: defaultdict[str, list[RequestLine]] = defaultdict(list)  # the admitted ones
        by_provider: defaultdict[tuple[str, str], list[RequestLine]] = defaultdict(list)  # the last one, and the model
        failed: list[Attempt] = []  # those before the last
        spend = self._day_spend
        for account, line, details, admitted in ended:
            if admitted:
                by_model[line.model].append(line)
            if line.nano_euro:
                spend[account] += line.nano_euro
                spend[TOTAL] += line.nano_euro
            if attempts := details.attempts:
                *before, last = attempts
                by_provider[last.provider, line.model].append(line)
                failed += before
        for (provider, model), requests in by_provider.items():
            self._provider_counts[f"{provider}:attempts"] += len(requests)
            _add(self._day_by_provider, name_counts({("", provider, model): count_lines(requests)}))
        for attempt in failed:
            self._provider_counts[f"{attempt.provider}:attempts"] += 1
            self._provider_counts[f"{attempt.provider}:failovers"] += 1
        lines = [line for _, line, _, _ in ended]
        outcomes = _count_outcomes(lines)
        _add(self._hour_counts, outcomes)
        _add(self._minute_counts, outcomes | _count_tokens(lines))
        for model, requests in by_model.items():
            _add(self._minute_counts, _count_for_model(f"{MODEL_PREFIX}{model}:", requests))

    def _start_minute(self, minute: int) -> None:
        """Starts the tallies of a new minute, or new tallies after a flush has taken the old ones."""
        self._count_ended()
        moment = time.gmtime(minute * 60)
        self._minute = minute
        hour = time.strftime("%Y-%m-%dT%H", moment)
        self._usage.start_hour(hour)
        self._hour_counts = self._tally(hour_key(hour), "hash", HOUR_KEY_SECONDS)
        self._minute_counts = self._tally(
            minute_key(time.strftime("%Y-%m-%dT%H:%M", moment)), "hash", MINUTE_KEY_SECONDS
        )
        day = time.strftime("%Y-%m-%d", moment)
        self._day_spend = self._tally(spenders_key(day), "zset", DAY_KEY_SECONDS)
        self._provider_counts = self._tally(provider_counts_key(day), "hash", PROVIDERS_KEY_SECONDS)
        self._day_by_provider = self._tally(spend_by_provider_key(day), "hash", DAY_KEY_SECONDS)

    def _tally(self, key: str, kind: str, life: int) -> defaultdict[str, int]:
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = Tally(key, kind, life)
        return tally.counts

    # -- writing ---------------------------------------------------------------------------------------------

    async def keep_flushing(self) -> None:
        """Runs for the life of the process."""
        await every(FLUSH_SECONDS, self.flush, first=FLUSH_SECONDS)

    async def flush(self) -> bool:
        """Adds the new counts to Redis. Returns False if they must wait."""
        async with self._flushing:
            try:
                await self._write_heartbeat()
            except BackboneUnavailable as error:
                logger.debug("counters.waiting", error=code_of(error.__cause__))
                self._drop_old()
                return False
            self._count_ended()
            tallies = [tally for tally in self._tallies.values() if tally.counts]
            self._tallies, self._minute = {}, -1
            for batch in batched(tallies, BATCH_KEYS):
                await asyncio.gather(*map(self._write, batch))
            await self._usage.write_counts()
        return True

    async def _write(self, tally: Tally) -> None:
        try:
            await increment_counters(self._store, tally.key, tally.kind, tally.life, tally.counts)
        except BackboneRefused:
            # Redis changed nothing, for example because its memory is full: the counts wait for the next flush.
            self._put_back(tally)
        except BackboneUnavailable as error:
            logger.warning("counters.lost", key=tally.key, error=code_of(error.__cause__))

    def _put_back(self, tally: Tally) -> None:
        waiting = self._tallies.setdefault(tally.key, Tally(tally.key, tally.kind, tally.life))
        waiting.began = tally.began
        for name, count in tally.counts.items():
            waiting.counts[name] += count
        self._drop_old()

    def _drop_old(self) -> None:
        self._count_ended()
        oldest = time.monotonic() - self._max_wait_seconds
        self._tallies = {key: tally for key, tally in self._tallies.items() if tally.began >= oldest}
        self._usage.drop_old(oldest)
        self._minute = -1

    async def _write_heartbeat(self) -> None:
        """Writes this process's heartbeat with the number of its open streams. Raises BackboneUnavailable."""
        heartbeat = {"streams": self._streams_open(), "startedAt": self._started, "seenAt": now_iso()}
        async with self._store.client.pipeline(transaction=True) as pipe:
            pipe.hset(process_key(self._id), mapping=heartbeat)
            pipe.expire(process_key(self._id), PROCESS_SECONDS)
            pipe.sadd(PROCESSES_KEY, self._id)
            pipe.expire(PROCESSES_KEY, PROCESS_SECONDS)
            await pipe.execute()

    async def close(self) -> None:
        """Writes the remaining counts and removes the heartbeat, when the process stops."""
        if not await self.flush() and (left := len(self._tallies) + self._usage.count_waiting()):
            logger.warning("counters.left", keys=left)
            return
        with contextlib.suppress(BackboneUnavailable):
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.srem(PROCESSES_KEY, self._id)
                pipe.delete(process_key(self._id))
                await pipe.execute()


def _add(counts: defaultdict[str, int], more: Mapping[str, int]) -> None:
    """Adds what is not zero."""
    for name, number in more.items():
        if number:
            counts[name] += number


def _count_outcomes(lines: Sequence[RequestLine]) -> dict[str, int]:
    """Returns the fields that a minute and an hour have."""
    codes = Counter(line.code for line in lines)
    del codes[""]
    settled = sum([line.nano_euro for line in lines])
    return {"requests": len(lines), "settled": settled, **{f"code:{code}": number for code, number in codes.items()}}


def _count_tokens(lines: Sequence[RequestLine]) -> dict[str, int]:
    used = [
        (line.input_tokens, line.output_tokens)
        for line in lines
        if line.input_tokens is not None and line.output_tokens is not None
    ]
    first = _count_first_tokens(lines)
    return {
        "inputTokens": sum([into for into, _ in used]),
        "outputTokens": sum([out for _, out in used]),
        "streams": first.total(),
        **first,
    }


def _count_for_model(prefix: str, lines: Sequence[RequestLine]) -> dict[str, int]:
    errors = sum([line.code in PROVIDER_FAULT_CODES for line in lines])
    first = {prefix + bucket: number for bucket, number in _count_first_tokens(lines).items()}
    return {prefix + "requests": len(lines), prefix + "errors": errors, **first}


def _count_first_tokens(lines: Sequence[RequestLine]) -> Counter[str]:
    """Returns the number of streams in each bucket of the time to their first token."""
    times = [line.ttft_ms for line in lines if line.ttft_ms is not None]
    return Counter([TTFT_FIELDS[bisect_left(TTFT_BUCKETS_MS, time)] for time in times])


class ProviderCounts(NamedTuple):
    """What all gateways have asked of a provider."""

    attempts: int  # requests that were sent to it
    failovers: int  # of them, those that failed and went to another provider


async def read_provider_counts(store: Store, names: Iterable[str]) -> dict[str, ProviderCounts]:
    """Returns the counts of the UTC day by provider. Raises BackboneUnavailable."""
    counts = await store.client.hgetall(provider_counts_key(day_of(int(time.time() * 1000))))
    return {
        name: ProviderCounts(*(int(counts.get(f"{name}:{field}", 0)) for field in ProviderCounts._fields))
        for name in names
    }

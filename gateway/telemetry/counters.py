"""Counters per minute, hour and day, for the operators' page and dashboards on Redis.

A process counts in memory and adds the counts to Redis every two seconds, so a request costs no round trip.

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
from collections import defaultdict
from collections.abc import Callable, Iterable
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
from gateway.loops import every
from gateway.redis.client import Store
from gateway.redis.errors import code_of
from gateway.redis.scripts import increment_counters
from gateway.telemetry.usage import (
    NO_DETAILS,
    RequestDetails,
    UsageByKey,
    UsageRecorder,
    count_line,
    name_counts,
)

logger = structlog.get_logger()

FLUSH_SECONDS = 2.0  # between two flushes
MAX_WAIT_SECONDS = 3600.0  # that a count waits for Redis
BATCH_KEYS = 50  # keys that are written together
PROCESS_SECONDS = 15  # until a heartbeat expires
MINUTE_KEY_SECONDS, PROVIDERS_KEY_SECONDS, DAY_KEY_SECONDS = 2 * 3600, 2 * 86_400, 400 * 86_400
HOUR_KEY_SECONDS = 15 * 86_400  # two weeks, to compare one with the other
TTFT_BUCKETS_MS = (10, 20, 50, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000, 30_000)
TTFT_FIELDS = (*(f"ttft:{ms}" for ms in TTFT_BUCKETS_MS), "ttft:more")
MODEL_PREFIX = "model:"  # of the fields of a model, before its name
TOTAL = "total"  # a member of the day's spend, beside the accounts


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
        self._tallies: dict[str, Tally] = {}
        self._minute = -1
        self._minute_counts: defaultdict[str, int]
        self._hour_counts: defaultdict[str, int]
        self._day_spend: defaultdict[str, int]
        self._provider_counts: defaultdict[str, int]
        self._day_by_provider: UsageByKey
        self._by_provider: dict[str, UsageByKey] = {}  # by the key of the day
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
        counts, hour_counts = self._minute_counts, self._hour_counts
        counts["requests"] += 1
        hour_counts["requests"] += 1
        if line.code:
            counts[f"code:{line.code}"] += 1
            hour_counts[f"code:{line.code}"] += 1
        bucket = None if line.ttft_ms is None else TTFT_FIELDS[bisect_left(TTFT_BUCKETS_MS, line.ttft_ms)]
        if bucket is not None:
            counts["streams"] += 1
            counts[bucket] += 1
        if admitted:
            prefix = f"{MODEL_PREFIX}{line.model}:"
            counts[prefix + "requests"] += 1
            if line.code in PROVIDER_FAULT_CODES:
                counts[prefix + "errors"] += 1
            if bucket is not None:
                counts[prefix + bucket] += 1
        if line.input_tokens is not None and line.output_tokens is not None:
            counts["inputTokens"] += line.input_tokens
            counts["outputTokens"] += line.output_tokens
        if line.nano_euro:
            counts["settled"] += line.nano_euro
            hour_counts["settled"] += line.nano_euro
            self._day_spend[account] += line.nano_euro
            self._day_spend[TOTAL] += line.nano_euro
            self.spenders.add(account)
        for attempt in details.attempts:
            self._provider_counts[f"{attempt.provider}:attempts"] += 1
        for failed in details.attempts[:-1]:
            self._provider_counts[f"{failed.provider}:failovers"] += 1
        if account:
            self._usage.add_request(account, line, details)
        if details.attempts:
            count_line(self._day_by_provider, ("", details.attempts[-1].provider, line.model), line)

    def _start_minute(self, minute: int) -> None:
        """Starts the tallies of a new minute, or new tallies after a flush has taken the old ones."""
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
        self._day_by_provider = self._by_provider.setdefault(spend_by_provider_key(day), {})

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
                self._tally_providers()
                self._drop_old()
                return False
            self._tally_providers()
            tallies = [tally for tally in self._tallies.values() if tally.counts]
            self._tallies, self._by_provider, self._minute = {}, {}, -1
            for first in range(0, len(tallies), BATCH_KEYS):
                batch = tallies[first : first + BATCH_KEYS]
                await asyncio.gather(*map(self._write, batch))
            await self._usage.write_counts()
        return True

    def _tally_providers(self) -> None:
        """Adds the counts by provider to the tallies of their days; a request has no time for their names."""
        for key, usage in self._by_provider.items():
            if usage:
                counts = self._tally(key, "hash", DAY_KEY_SECONDS)
                for name, value in name_counts(usage).items():
                    counts[name] += value
                usage.clear()

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

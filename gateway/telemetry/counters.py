"""Counters per minute and day, for the operators' page and Redis dashboards.

A process counts in memory and adds the counts to Redis every two seconds, so a request costs no round trip for them.

- `{ops}:minute:<minute>`: `requests`; `code:<CODE>` for requests that ended with an error; `streams` and `ttft:<ms>`,
  streams by the time to their first token, each in the first bucket that fits (`ttft:more` above all of them);
  `inputTokens`, `outputTokens`; `settled` in nano-euro; `model:<model>:requests`, `…:errors` (of the provider) and
  `…:ttft:<ms>` of each model
- `{ops}:spend:<day>`: what each account spent, and `total`. For display only: the spend hashes are the books
- what each account used: `gateway/telemetry/usage.py`
- `{ops}:processes`, `{ops}:process:<id>`: the gateway processes, and the streams each has open

A request counts when it ends, by this process's clock, in the minute, hour and day of that moment.

Failure policy: a flush first writes the process's heartbeat. While that fails, nothing else is sent, and the counts
wait for up to an hour. Counts that were sent without an answer may have been written, so they are not sent again. After
a fault the figures may lack something, but they never count it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable

import structlog

from gateway.errors import PROVIDER_FAULT_CODES, BackboneRefused, BackboneUnavailable
from gateway.ids import now_iso
from gateway.log import RequestLine
from gateway.redis.client import Store
from gateway.redis.errors import backbone
from gateway.redis.faults import code_of
from gateway.redis.scripts import increment
from gateway.telemetry.keys import PROCESSES_KEY, minute_key, process_key, spenders_key
from gateway.telemetry.usage import UsageRecorder

logger = structlog.get_logger()

INTERVAL = 2.0  # seconds between two flushes
PATIENCE = 3600.0  # seconds for which a count waits for Redis
BATCH = 50  # keys that are written together
PROCESS_LIFE = 15  # seconds
MINUTE_LIFE, DAY_LIFE = 2 * 3600, 48 * 3600  # seconds
TTFT = (10, 20, 50, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000, 30_000)  # ms
TTFT_FIELDS = (*(f"ttft:{ms}" for ms in TTFT), "ttft:more")
MODEL = "model:"  # before a model's name, in the names of its fields
TOTAL = "total"  # among the accounts of a day's spend


class Tally:
    """The counts to add to one key."""

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
    ) -> None:
        """`on_drop` gets the number of requests that may be missing from accounts' logs."""
        self._store, self._streams_open, self._clock = store, streams_open, clock
        self._usage = UsageRecorder(store, on_drop)
        self._tallies: dict[str, Tally] = {}
        self._minute = -1
        self._here: defaultdict[str, int]
        self._spent: defaultdict[str, int]
        self._flushing = asyncio.Lock()
        self._id = f"{socket.gethostname()}-{os.getpid()}"
        self._started = now_iso()
        self.spenders: set[str] = set()  # accounts that spent since `Overview` last checked their caps

    # -- counting --------------------------------------------------------------------------------------------

    def request(self, account: str, line: RequestLine, *, admitted: bool = False) -> None:
        """Counts a request that ended. Never waits.

        `account` is empty if it was for an unknown app. `admitted`: it counts among those of its model.
        """
        minute = int(self._clock()) // 60
        if minute != self._minute:
            self._start_minute(minute)
        here = self._here
        here["requests"] += 1
        if line.code:
            here[f"code:{line.code}"] += 1
        bucket = None if line.ttft_ms is None else TTFT_FIELDS[bisect_left(TTFT, line.ttft_ms)]
        if bucket is not None:
            here["streams"] += 1
            here[bucket] += 1
        if admitted:
            prefix = f"{MODEL}{line.model}:"
            here[prefix + "requests"] += 1
            if line.code in PROVIDER_FAULT_CODES:
                here[prefix + "errors"] += 1
            if bucket is not None:
                here[prefix + bucket] += 1
        if line.input_tokens is not None and line.output_tokens is not None:
            here["inputTokens"] += line.input_tokens
            here["outputTokens"] += line.output_tokens
        if line.nano_euro:
            here["settled"] += line.nano_euro
            self._spent[account] += line.nano_euro
            self._spent[TOTAL] += line.nano_euro
            self.spenders.add(account)
        if account:
            self._usage.add(account, line)

    def _start_minute(self, minute: int) -> None:
        """Starts the tallies of another minute, or new ones after a flush took the old ones."""
        moment = time.gmtime(minute * 60)
        self._minute = minute
        self._usage.start_hour(time.strftime("%Y-%m-%dT%H", moment))
        self._here = self._tally(minute_key(time.strftime("%Y-%m-%dT%H:%M", moment)), "hash", MINUTE_LIFE)
        self._spent = self._tally(spenders_key(time.strftime("%Y-%m-%d", moment)), "zset", DAY_LIFE)

    def _tally(self, key: str, kind: str, life: int) -> defaultdict[str, int]:
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = Tally(key, kind, life)
        return tally.counts

    # -- writing ---------------------------------------------------------------------------------------------

    async def keep_flushing(self) -> None:
        """Runs for the life of the process."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.flush()

    async def flush(self) -> bool:
        """Adds the new counts to Redis. Returns False if they have to wait."""
        async with self._flushing:
            try:
                await self._beat()
            except BackboneUnavailable as error:
                logger.debug("counters.waiting", error=code_of(error.__cause__))
                self._drop_old()
                return False
            tallies = [tally for tally in self._tallies.values() if tally.counts]
            self._tallies, self._minute = {}, -1
            for first in range(0, len(tallies), BATCH):
                batch = tallies[first : first + BATCH]
                await asyncio.gather(*map(self._write, batch))
            await self._usage.write()
        return True

    async def _write(self, tally: Tally) -> None:
        try:
            await increment(self._store, tally.key, tally.kind, tally.life, tally.counts)
        except BackboneRefused:
            # Redis took none of it, for want of memory for instance: it waits with what is counted from now on.
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
        oldest = time.monotonic() - PATIENCE
        self._tallies = {key: tally for key, tally in self._tallies.items() if tally.began >= oldest}
        self._usage.drop_old(oldest)
        self._minute = -1

    async def _beat(self) -> None:
        """Shows that this process lives, and the streams it has open. Raises BackboneUnavailable."""
        heartbeat = {"streams": self._streams_open(), "startedAt": self._started, "seenAt": now_iso()}
        async with self._store.client.pipeline(transaction=True) as pipe:
            pipe.hset(process_key(self._id), mapping=heartbeat)
            pipe.expire(process_key(self._id), PROCESS_LIFE)
            pipe.sadd(PROCESSES_KEY, self._id)
            pipe.expire(PROCESSES_KEY, PROCESS_LIFE)
            await pipe.execute()

    async def leave(self) -> None:
        """Ends the counting of a process that stops: writes what is left, and removes its heartbeat."""
        if not await self.flush() and (left := len(self._tallies) + self._usage.waiting()):
            logger.warning("counters.left", keys=left)
            return
        with contextlib.suppress(BackboneUnavailable), backbone():
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.srem(PROCESSES_KEY, self._id)
                pipe.delete(process_key(self._id))
                await pipe.execute()

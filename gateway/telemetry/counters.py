"""Counters per minute, hour and day: for the operators' page, an account's chart and Redis dashboards.

A process counts in memory and adds the counts to Redis every two seconds, so a request costs no round trip for them.

- `{ops}:minute:<minute>`: `requests`; `code:<CODE>` for requests that ended with an error; `streams` and `ttft:<ms>`,
  streams by the time to their first token, each in the first bucket that fits (`ttft:more` above all of them);
  `inputTokens`, `outputTokens`; `settled` in nano-euro; `model:<model>:requests`, `…:errors` (of the provider) and
  `…:ttft:<ms>` of each model
- `{ops}:spend:<day>`: what each account spent, and `total`. For display only: the spend hashes are the books
- `{pNN}:usage:<account>:<hour>`: `requests`, `refused`, `inputTokens`, `outputTokens`
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
from typing import Protocol

import msgspec
import structlog

from gateway.errors import BackboneRefused, BackboneUnavailable
from gateway.events.catalogue import Time
from gateway.ids import now_iso
from gateway.store import keys, scripts
from gateway.store.client import Store, backbone
from gateway.store.faults import code_of

logger = structlog.get_logger()

INTERVAL = 2.0  # seconds between two flushes
PATIENCE = 3600.0  # seconds for which a count waits for Redis
BATCH = 50  # keys that are written together
PROCESS_LIFE = 15  # seconds
MINUTE_LIFE, HOUR_LIFE, DAY_LIFE = 2 * 3600, 48 * 3600, 48 * 3600  # seconds
HOURS = 24  # shown of an account
TTFT = (10, 20, 50, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000, 30_000)  # ms
TTFT_FIELDS = (*(f"ttft:{ms}" for ms in TTFT), "ttft:more")
MOST_TOKENS = 1_000_000_000  # counted per request
MODEL = "model:"  # before a model's name, in the names of its fields
TOTAL = "total"  # among the accounts of a day's spend


class Usage(Protocol):
    """Tokens of one request."""

    @property
    def input(self) -> int: ...
    @property
    def output(self) -> int: ...


class HourlyUsage(msgspec.Struct):
    hour: Time
    requests: int
    refused: int
    inputTokens: int
    outputTokens: int


class Tally:
    """The counts to add to one key."""

    __slots__ = ("began", "counts", "key", "kind", "life")

    def __init__(self, key: str, kind: str, life: int) -> None:
        self.key, self.kind, self.life = key, kind, life
        self.began = time.monotonic()
        self.counts: defaultdict[str, int] = defaultdict(int)


class Counters:
    def __init__(self, store: Store, streams_open: Callable[[], int], clock: Callable[[], float] = time.time) -> None:
        self._store, self._streams_open, self._clock = store, streams_open, clock
        self._tallies: dict[str, Tally] = {}
        self._usages: dict[str, defaultdict[str, int]] = {}  # by account: the tallies of the present hour
        self._minute = -1
        self._here: defaultdict[str, int]
        self._spent: defaultdict[str, int]
        self._hour = ""
        self._flushing = asyncio.Lock()
        self._id = f"{socket.gethostname()}-{os.getpid()}"
        self._started = now_iso()
        self.spenders: set[str] = set()  # accounts that spent since `Overview` last checked their caps

    # -- counting --------------------------------------------------------------------------------------------

    def request(self, account: str, code: str, ttft: float | None, usage: Usage | None, nano_euro: int) -> None:
        """Counts a request that ended. `ttft` is in seconds, and None without a stream. Never waits."""
        minute = int(self._clock()) // 60
        if minute != self._minute:
            self._start_minute(minute)
        here = self._here
        here["requests"] += 1
        mine = self._usages.get(account) or self._usage_of(account)
        mine["requests"] += 1
        if code:
            here[f"code:{code}"] += 1
            if code != "CLIENT_GONE":
                mine["refused"] += 1
        if ttft is not None:
            here["streams"] += 1
            here[TTFT_FIELDS[bisect_left(TTFT, ttft * 1000)]] += 1
        if usage is not None:
            for counts in (here, mine):
                # A provider may report any number, and Redis refuses integers beyond 64 bits.
                counts["inputTokens"] += min(usage.input, MOST_TOKENS)
                counts["outputTokens"] += min(usage.output, MOST_TOKENS)
        if nano_euro:
            here["settled"] += nano_euro
            self._spent[account] += nano_euro
            self._spent[TOTAL] += nano_euro
            self.spenders.add(account)

    def model(self, model: str, code: str, ttft: float | None) -> None:
        """Counts a request that reached a model. `ttft` is in seconds, and None without a stream. Never waits."""
        minute = int(self._clock()) // 60
        if minute != self._minute:
            self._start_minute(minute)
        self._here[f"{MODEL}{model}:requests"] += 1
        if code.startswith("PROVIDER_"):
            self._here[f"{MODEL}{model}:errors"] += 1
        if ttft is not None:
            self._here[f"{MODEL}{model}:{TTFT_FIELDS[bisect_left(TTFT, ttft * 1000)]}"] += 1

    def _start_minute(self, minute: int) -> None:
        """Starts the tallies of another minute, or new ones after a flush took the old ones."""
        moment = time.gmtime(minute * 60)
        self._minute = minute
        self._hour = time.strftime("%Y-%m-%dT%H", moment)
        self._usages.clear()
        self._here = self._tally(keys.minute_key(time.strftime("%Y-%m-%dT%H:%M", moment)), "hash", MINUTE_LIFE)
        self._spent = self._tally(keys.spenders_key(time.strftime("%Y-%m-%d", moment)), "zset", DAY_LIFE)

    def _usage_of(self, account: str) -> defaultdict[str, int]:
        if not account:
            return defaultdict(int)  # the request was for an unknown app
        usage = self._usages[account] = self._tally(keys.usage_key(account, self._hour), "hash", HOUR_LIFE)
        return usage

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
        return True

    async def _write(self, tally: Tally) -> None:
        try:
            await scripts.count(self._store, tally.key, tally.kind, tally.life, tally.counts)
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
        for key in [key for key, tally in self._tallies.items() if tally.began < oldest]:
            del self._tallies[key]
            self._minute = -1

    async def _beat(self) -> None:
        """Shows that this process lives, and the streams it has open. Raises BackboneUnavailable."""
        heartbeat = {"streams": self._streams_open(), "startedAt": self._started, "seenAt": now_iso()}
        with backbone():
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.hset(keys.process_key(self._id), mapping=heartbeat)
                pipe.expire(keys.process_key(self._id), PROCESS_LIFE)
                pipe.sadd(keys.PROCESSES, self._id)
                pipe.expire(keys.PROCESSES, PROCESS_LIFE)
                await pipe.execute()

    async def leave(self) -> None:
        """Ends the counting of a process that stops: writes what is left, and removes its heartbeat."""
        if not await self.flush():
            logger.warning("counters.left", keys=len(self._tallies))
            return
        with contextlib.suppress(BackboneUnavailable), backbone():
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.srem(keys.PROCESSES, self._id)
                pipe.delete(keys.process_key(self._id))
                await pipe.execute()

    # -- reading ---------------------------------------------------------------------------------------------

    async def usage(self, account_id: str) -> list[HourlyUsage]:
        """Of the last 24 hours, oldest first; the last is the current one."""
        with backbone():
            now = (await self._store.client.time())[0] // 3600 * 3600
            hours = [time.strftime("%Y-%m-%dT%H", time.gmtime(now - 3600 * ago)) for ago in reversed(range(HOURS))]
            async with self._store.client.pipeline(transaction=False) as pipe:
                for hour in hours:
                    pipe.hgetall(keys.usage_key(account_id, hour))
                counted = await pipe.execute()
        zeros = dict.fromkeys(("requests", "refused", "inputTokens", "outputTokens"), 0)
        return [
            msgspec.convert({"hour": f"{hour}:00:00.000Z", **zeros, **counts}, HourlyUsage, strict=False)
            for hour, counts in zip(hours, counted, strict=True)
        ]

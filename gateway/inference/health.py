"""The health of one provider, which all processes share.

Requests and probes give signals about it. It is a record in Redis, and every process keeps a copy. Each change makes
every process read it again. A process therefore writes at most one change per `PUBLISH_INTERVAL_SECONDS`. It collects
the signals in between, and writes them as one change if they change anything.

**Nobody takes a provider from the others with requests of his own.** Some requests make a provider fail, and whoever
has one can send it again. Failures in a row therefore count only if two accounts met them, or if no other account had
an answer there in the last `ANSWER_SECONDS`. A key beside the record has the accounts of a row that does not count
yet. Another one has the accounts with the latest answers: a process writes there at most two of them per
`ANSWER_REFRESH_SECONDS`, and reads it only after a failure.

**What requests taught, a request ends.** `GET /models` may succeed while no request does, so a probe only shows that
the provider can be reached and accepts the credential. Of the requests of all processes, one per
`PROBE_INTERVAL_SECONDS` tries a provider that requests made unhealthy, and its first token ends that. A key in Redis
that expires gives one request the right to do so.

A provider whose quota is nearly used up answers some requests and refuses others. So a completion ends
`quota-exhausted` only if no process has been refused for `REFUSAL_SECONDS`. A key in Redis that expires tells them.

A provider that asks for a pause with `Retry-After` is passed over for so long. That changes no status.
"""

from __future__ import annotations

import asyncio
import enum
import os
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import reduce
from typing import NamedTuple, Protocol

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.cancellation import RunningTasks
from gateway.errors import BackboneUnavailable
from gateway.ids import now_iso
from gateway.inference import scripts
from gateway.inference.provider.errors import COMPLETION, ProviderSignal
from gateway.keys import failed_accounts_key, probe_key, provider_key, refusal_key, trial_key
from gateway.loops import every
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record
from gateway.redis.scripts import Companion

logger = structlog.get_logger()

FAILURES = 3  # failed attempts in a row after which the provider counts as unreachable
ROW_SECONDS = 600  # after which the accounts of a row that does not count are forgotten
ANSWER_SECONDS = 30.0  # for which an account's answer speaks against the failures of another one
ANSWER_REFRESH_SECONDS = 5.0  # between two records of answers by one process
PROBE_INTERVAL_SECONDS = 30.0  # between probes of an unhealthy provider, and between requests that try it
KEY_CHECK_SECONDS = 1.0  # between two looks at the file of the key
PROBE_HOLD_SECONDS = 20  # for which one process has the right to probe
PUBLISH_INTERVAL_SECONDS = 0.5  # between two changes of the provider's health by one process
REFUSAL_SECONDS = 2.0  # after a refusal for lack of quota, in which completions do not end the status
LONGEST_PAUSE_SECONDS = 60.0  # for which a `Retry-After` passes the provider over
PAUSE_STEP_SECONDS = 1.0  # by which a pause that is known already has to be longer to be written
SIGNALS = 16  # that are collected before old ones are dropped
ANSWERS = (ProviderSignal.COMPLETION, ProviderSignal.RECOVERED)  # which end what requests taught


class ProviderStatus(enum.StrEnum):
    """From worst to best."""

    MISCONFIGURED = "misconfigured"
    PROVIDER_UNREACHABLE = "provider-unreachable"
    QUOTA_EXHAUSTED = "quota-exhausted"
    OPERATIONAL = "operational"

    @property
    def rank(self) -> int:
        return list(ProviderStatus).index(self)


class Observation(NamedTuple):
    signal: ProviderSignal
    account: str = ""  # whose request it was; empty for a probe


class HealthRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    failures: int = 0  # in a row; at FAILURES the provider counts as unreachable
    quota: bool = False  # the quota is used up
    refused: bool = False  # the credential is refused
    passed_over_until: int = 0  # ms since 1970
    accounts: tuple[str, ...] = ()  # that met the failures, at most two; known only while a change is computed

    def after(self, seen: Observation, answered: Collection[str] = ()) -> HealthRecord:
        """Returns the health after a signal. `answered` are the accounts that had an answer lately."""
        match seen.signal:
            case ProviderSignal.COMPLETION | ProviderSignal.RECOVERED:
                return HealthRecord(passed_over_until=self.passed_over_until)
            case ProviderSignal.QUOTA:
                return HealthRecord(quota=True, passed_over_until=self.passed_over_until)
            case ProviderSignal.REACHED | ProviderSignal.CONGESTED:
                return msgspec.structs.replace(self._without_row(), refused=False)
            case ProviderSignal.REFUSED:
                return msgspec.structs.replace(self._without_row(), refused=True)
            case ProviderSignal.FAILED if self.is_up:
                return self._after_failure(seen.account, answered)
            case _:
                return self

    def _after_failure(self, account: str, answered: Collection[str]) -> HealthRecord:
        accounts = tuple(dict.fromkeys((*(self.accounts if self.failures else ()), account)))[:2]
        if self.failures < FAILURES - 1:
            return msgspec.structs.replace(self, failures=self.failures + 1, accounts=accounts)
        if len(accounts) == 2 or not any(each != account for each in answered):
            return msgspec.structs.replace(self, failures=FAILURES, accounts=())
        return msgspec.structs.replace(self, accounts=accounts)

    def _without_row(self) -> HealthRecord:
        """Returns the health without failures that do not count yet."""
        return self if self.failures >= FAILURES else msgspec.structs.replace(self, failures=0, accounts=())

    @property
    def is_up(self) -> bool:
        """Returns whether the provider answered last, has quota and accepts the credential, if there is one."""
        return self.status(configured=True) is ProviderStatus.OPERATIONAL

    @property
    def needs_trial(self) -> bool:
        """Returns whether only a request shows that the provider is healthy again."""
        return self.failures >= FAILURES or self.quota

    def status(self, *, configured: bool) -> ProviderStatus:
        """Returns the status. `configured` means that there is a credential."""
        if not configured or self.refused:
            return ProviderStatus.MISCONFIGURED
        if self.quota:
            return ProviderStatus.QUOTA_EXHAUSTED
        return ProviderStatus.PROVIDER_UNREACHABLE if self.failures >= FAILURES else ProviderStatus.OPERATIONAL


HEALTHY = HealthRecord()


def condense(seen: Sequence[Observation]) -> list[Observation]:
    """Returns the signals that matter. They change any health as all of them do, unless there are too many."""
    condensed: list[Observation] = []
    for each in seen:
        if each.signal in ANSWERS or each.signal is ProviderSignal.QUOTA:
            condensed = [each]  # earlier signals have no effect
        elif condensed[-FAILURES:] != [each] * FAILURES:
            condensed.append(each)
            del condensed[1 : 1 - SIGNALS]  # the first one may be an answer, which ends a row of failures
    return condensed


async def read_health(store: Store, provider: str) -> HealthRecord:
    """Raises BackboneUnavailable."""
    return msgspec.json.decode(await store.get(provider_key(provider)) or "{}", type=HealthRecord)


class Probed(Protocol):
    """The provider's client."""

    def is_configured(self) -> bool:
        """Returns whether there is a credential."""

    def read_key(self) -> bool:
        """Reads the credential again. Returns whether it is another one."""

    async def probe(self) -> ProviderSignal | None:
        """Sends a GET /models. Returns None if this machine could not send it."""


class Health:
    """The health of one provider in this process."""

    def __init__(
        self,
        provider: str,
        registry: Registry,
        client: Probed,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        answer_refresh: float = ANSWER_REFRESH_SECONDS,
        probe_interval: float = PROBE_INTERVAL_SECONDS,
        longest_pause: float = LONGEST_PAUSE_SECONDS,
        publish_interval: float = PUBLISH_INTERVAL_SECONDS,
        refusal_seconds: float = REFUSAL_SECONDS,
    ) -> None:
        """`answer_seconds`: for which an account's answer speaks against the failures of another one.

        `answer_refresh`: seconds between two records of answers. `probe_interval`: between requests that try it.
        `longest_pause`: seconds for which a `Retry-After` passes the provider over at most. `publish_interval`: between
        two changes of the health. `refusal_seconds`: after a refusal, in which completions do not end the status.
        """
        self._answer_ms = round(answer_seconds * 1000)
        self._answer_refresh, self._probe_interval, self._longest_pause = answer_refresh, probe_interval, longest_pause
        self._publish_interval, self._refusal_seconds = publish_interval, refusal_seconds
        self.provider, self._store, self._client = provider, registry.store, client
        self._record = HealthRecord()
        self._seen: list[Observation] = []  # not written yet
        self._pause_until = 0  # ms since 1970; not written yet
        self._resume: asyncio.TimerHandle | None = None  # ends the pause for which the provider is passed over
        self._trial_due = float("inf")  # when a request may next try the provider, on the loop's clock
        self._written = float("-inf")  # when this process last wrote the health, on the loop's clock
        self._refused = float("-inf")  # when it last wrote that the quota is used up
        self._answered: dict[str, float] = {}  # account -> when this process last wrote that it had an answer
        self._answer_due = float("-inf")  # when it next writes that, on the loop's clock
        self._recorder: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        self._background = RunningTasks()
        self.on_change: Callable[[], None] = lambda: None
        registry.cache.subscribe(provider_key(provider), self.reload)

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def status(self) -> ProviderStatus:
        return self._record.status(configured=self._client.is_configured())

    @property
    def is_up(self) -> bool:
        return self._record.is_up

    @property
    def needs_trial(self) -> bool:
        """Returns whether one request in a while should try the provider, although others are healthy."""
        return self._record.needs_trial and not self._record.refused and not self.is_passed_over

    @property
    def is_passed_over(self) -> bool:
        """Returns whether the provider has asked for a pause that is not over."""
        return self._resume is not None

    @property
    def passed_over_until(self) -> str | None:
        """Returns the time at which the pause ends that the provider has asked for; None without one."""
        return now_iso(self._record.passed_over_until / 1000) if self.is_passed_over else None

    @property
    def is_usable(self) -> bool:
        """Returns whether requests may go to this provider while others are healthy too."""
        return self.status is ProviderStatus.OPERATIONAL and not self.is_passed_over

    async def reload(self) -> None:
        self._take(await read_health(self._store, self.provider))

    def _take(self, record: HealthRecord) -> None:
        """Continues with this record, which all processes share."""
        before, self._record = self._record, record
        loop = asyncio.get_running_loop()
        if record.needs_trial and not before.needs_trial:
            self._trial_due = loop.time() + self._probe_interval
        if record.passed_over_until != before.passed_over_until:
            # Each process waits on its own clock, and not for long if another one's clock is ahead.
            left = min(record.passed_over_until / 1000 - time.time(), self._longest_pause)
            if self._resume is not None:
                self._resume.cancel()
            self._resume = loop.call_later(left, self._end_pause) if left > 0 else None
        self.on_change()

    def _end_pause(self) -> None:
        self._resume = None
        self.on_change()

    # -- signals ---------------------------------------------------------------------------------------------

    def note_signal(self, signal: ProviderSignal, account: str = "", pause: float = 0.0) -> None:
        """Records a signal in the background. Writes nothing if the signal changes nothing.

        `account`: whose request it was. `pause`: seconds for which the provider asks to be left alone.
        """
        writing = self._recorder is not None and not self._recorder.done()
        if signal is COMPLETION:
            self._note_answer(account)
            if self._record == HEALTHY and not writing:
                return  # as after almost every request
        elif signal is ProviderSignal.DENIED:
            self._check_credential(account)
            return
        elif signal is ProviderSignal.QUOTA:
            self._note_refusal()
        if pause > 0:
            self._note_pause(pause)
        seen = Observation(signal, account)
        # While a write is in progress, this process does not know the health that follows it.
        if writing or self._record.after(seen) != self._record:
            self._seen = condense([*self._seen, seen])
        if (self._seen or self._pause_until) and not writing:
            self._recorder = asyncio.create_task(self._write_signals())

    def _note_pause(self, seconds: float) -> None:
        until = round((time.time() + min(seconds, self._longest_pause)) * 1000)
        if until > max(self._pause_until, self._record.passed_over_until) + PAUSE_STEP_SECONDS * 1000:
            self._pause_until = until

    def _note_answer(self, account: str) -> None:
        """Records an answer that speaks against the failures of other accounts. Two accounts are enough for that."""
        now = asyncio.get_running_loop().time()
        if now < self._answer_due:
            return
        fresh = {of: at for of, at in self._answered.items() if at > now - self._answer_refresh}
        if account not in fresh:
            fresh[account] = now
            self._start(scripts.record_answer(self._store, self.provider, account, self._answer_ms))
        self._answered = fresh
        if len(fresh) == 2:
            self._answer_due = min(fresh.values()) + self._answer_refresh

    def _note_refusal(self) -> None:
        """Tells all processes that the quota is used up, often enough that the key lives while this goes on."""
        now = asyncio.get_running_loop().time()
        if now >= self._refused + self._refusal_seconds / 4:
            self._refused = now
            self._start(self._store.client.set(refusal_key(self.provider), "1", px=round(self._refusal_seconds * 1000)))

    def _start(self, write: Awaitable[object]) -> None:
        """Writes in the background. A write that fails is lost: the next request reveals the same."""

        async def attempt() -> None:
            with suppress(BackboneUnavailable):
                await write

        self._background.start(attempt())

    # -- probes and trials -----------------------------------------------------------------------------------

    async def take_trial(self) -> bool:
        """Returns whether the caller's request is the one that tries the unhealthy provider now.

        Makes a round trip only if no request of this process has done so for the interval.
        """
        loop = asyncio.get_running_loop()
        if not self.is_trial_due:
            return False
        self._trial_due = float("inf")  # no other request of this process asks meanwhile
        try:
            key, process = trial_key(self.provider), str(os.getpid())
            milliseconds = round(self._probe_interval * 1000)
            return bool(await self._store.client.set(key, process, nx=True, px=milliseconds))
        except BackboneUnavailable:
            return False
        finally:
            # Counted from the answer, so that the key has expired by then.
            self._trial_due = loop.time() + self._probe_interval

    @property
    def is_trial_due(self) -> bool:
        return self.needs_trial and asyncio.get_running_loop().time() >= self._trial_due

    def _check_credential(self, account: str = "") -> None:
        """Probes the provider, after a request of the account got a 401 or 403, or with another key."""
        if self._prober is None or self._prober.done():
            self._prober = asyncio.create_task(self._probe_and_note(account))

    async def probe_if_down(self) -> None:
        """Probes the provider if it is down and no other process does so. Without quota, only a request says more."""
        if self.is_up or self._record.quota:
            return
        with suppress(BackboneUnavailable):
            process = str(os.getpid())
            if await self._store.client.set(probe_key(self.provider), process, nx=True, ex=PROBE_HOLD_SECONDS):
                await self._probe_and_note()

    def check_key(self) -> None:
        """Reads the key again, and probes the provider with another one."""
        if self._client.read_key():
            self.on_change()
            if self._record.refused:
                self._check_credential()

    async def _probe_and_note(self, account: str = "") -> None:
        """Probes the provider. A refusal counts only if it confirms that of a request."""
        signal = await self._client.probe()
        if signal is not None and (signal is not ProviderSignal.REFUSED or account or self._record.refused):
            self.note_signal(signal, account)
        self.on_change()  # the probe has read the key again

    # -- the record ------------------------------------------------------------------------------------------

    async def _write_signals(self) -> None:
        """Writes the collected signals until none is left that changes anything."""
        loop = asyncio.get_running_loop()
        while self._seen or self._pause_until:
            await asyncio.sleep(self._written + self._publish_interval - loop.time())
            seen, self._seen = self._seen, []
            with suppress(BackboneUnavailable):  # the next request reveals the same
                if left := await self._time_until_quota_may_end(seen):
                    self._seen = condense([*seen, *self._seen])
                    await asyncio.sleep(left)
                    continue
                pause_until, self._pause_until = self._pause_until, 0
                await self._change(seen, pause_until)
            if reduce(HealthRecord.after, self._seen, self._record) == self._record:
                self._seen = []

    async def _time_until_quota_may_end(self, seen: Sequence[Observation]) -> float:
        """Returns the seconds for which an answer does not end `quota-exhausted`, because others were refused."""
        if not self._record.quota or not seen or seen[0].signal not in ANSWERS:
            return 0.0
        left: int = await self._store.client.pttl(refusal_key(self.provider))
        return max(0, left) / 1000

    async def _change(self, seen: Sequence[Observation], pause_until: int) -> None:
        answered: Collection[str] = ()
        if any(each.signal is ProviderSignal.FAILED for each in seen):
            answered = await scripts.list_answers(self._store, self.provider, self._answer_ms)

        async def compute(present: str) -> Change[HealthRecord]:
            before = msgspec.json.decode(present or "{}", type=HealthRecord)
            text = await self._store.get(failed_key) or ""
            failed = msgspec.json.decode(text or "[]", type=tuple[str, ...])
            before = msgspec.structs.replace(before, accounts=failed)
            after = reduce(lambda health, each: health.after(each, answered), seen, before)
            until = max(after.passed_over_until, pause_until)
            after = msgspec.structs.replace(after, passed_over_until=until if until > time.time() * 1000 else 0)
            record = msgspec.structs.replace(after, accounts=())
            if after == before:
                return Change(None, record)
            accounts = msgspec.json.encode(after.accounts).decode() if after.accounts else ""
            companion = Companion(failed_key, accounts, ROW_SECONDS, text) if failed or accounts else None
            return Change(msgspec.json.encode(record).decode(), record, companion)

        key, failed_key = provider_key(self.provider), failed_accounts_key(self.provider)
        self._take(await change_record(self._store, key, compute, subject="the provider's health"))
        self._written = asyncio.get_running_loop().time()


async def keep_probing(healths: Sequence[Health]) -> None:
    """Probes the providers that are down, and reads all keys again. Runs for the life of the process."""

    async def check_keys() -> None:
        for health in healths:
            health.check_key()

    async def probe() -> None:
        await asyncio.gather(*(health.probe_if_down() for health in healths))

    async with asyncio.TaskGroup() as group:
        pause = min(KEY_CHECK_SECONDS, PROBE_INTERVAL_SECONDS)
        group.create_task(every(pause, check_keys, first=pause))
        group.create_task(every(PROBE_INTERVAL_SECONDS, probe, first=PROBE_INTERVAL_SECONDS))

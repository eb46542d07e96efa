"""The service's health: the gauges of `/metrics` and the operators' page.

Each process refreshes its gauges every ten seconds. While somebody watches the page, the process also takes a snapshot
every two seconds.

The admission script enforces each account's daily cap. This module verifies it independently: for every account whose
spend changed, it compares the sum of the settled and reserved amounts with the cap of the account's plan.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from math import nan

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.deploys.pods import read_pod_report
from gateway.deploys.records import FINAL
from gateway.deploys.serving import HostReport, Records
from gateway.errors import BackboneUnavailable
from gateway.events.notices import count_outcomes
from gateway.ids import day_of, now_iso, seconds_of
from gateway.inference.concurrency.lease import Share
from gateway.inference.providers import Providers
from gateway.inference.spend.limits import cap_of
from gateway.keys import (
    BACKUP_KEY,
    CLOCK_KEY,
    PROCESSES_KEY,
    hour_key,
    minute_key,
    process_key,
    spend_key,
    spenders_key,
)
from gateway.loops import batched, every
from gateway.operations.backlog import (
    count_dead_letters,
    count_worker_starts,
    read_backlog,
    read_dead_letters,
    read_storage,
)
from gateway.operations.needs_attention import (
    count_ended_deploys,
    count_expiring_certificates,
    count_failed_deploys,
    count_unhealthy_apps,
)
from gateway.operations.snapshot import (
    AccountSpend,
    DaySpend,
    Hour,
    NeedsAttention,
    Process,
    ProviderShare,
    RedisFigures,
    ServiceSnapshot,
    WaitingAccount,
    first_token,
    model_figures,
    render_counts,
    render_hour,
)
from gateway.redis.errors import code_of
from gateway.settings import Settings
from gateway.telemetry.counters import TOTAL, Counters
from gateway.telemetry.metrics import Metrics

logger = structlog.get_logger()

GAUGES_SECONDS = 10.0  # between two refreshes
SNAPSHOT_SECONDS = 2.0  # between two snapshots
MINUTES = 60
TOP_ACCOUNTS = 8
CLOCK_SECONDS = 60  # lifetime of the record
OUTCOMES = ("delivered", "failed", "dropped")
ACCOUNTS_PER_READ = 100  # whose spend is read together


class Overview:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        providers: Providers,
        counters: Counters,
        metrics: Metrics,
    ) -> None:
        self._settings, self._registry, self._store = settings, registry, registry.store
        self._providers, self._availability = providers, providers.availability
        self._counters, self._metrics = counters, metrics

    # -- gauges ----------------------------------------------------------------------------------------------

    async def keep_gauges_fresh(self) -> None:
        """Refreshes the gauges every ten seconds. Runs as long as the process."""
        await every(GAUGES_SECONDS, self._refresh_all_gauges)

    async def _refresh_all_gauges(self) -> None:
        try:
            await self.refresh_gauges()
        except BackboneUnavailable as error:
            logger.debug("overview.waiting", error=code_of(error.__cause__))
        with suppress(BackboneUnavailable):  # it is not known which providers are enabled
            for provider in self._providers.all:
                up = provider.health.is_up if self._availability.is_enabled(provider.name) else nan
                self._metrics.provider_up.labels(provider.name).set(up)
        self._metrics.available.set(self._is_available())

    def _is_available(self) -> bool:
        try:
            return self._availability.status().available
        except BackboneUnavailable:  # the switch is not known, so requests are refused
            return False

    async def refresh_gauges(self) -> None:
        """Raises BackboneUnavailable."""
        now = await self._read_clock()
        backlog = await read_backlog(self._store, now)
        self._metrics.webhook_queue.set(backlog.webhooks.waiting)
        self._metrics.webhook_oldest.set((backlog.webhooks.oldestMs or 0) / 1000)
        self._metrics.deploy_queue.set(backlog.deploys.waiting)
        self._metrics.deploy_oldest.set((backlog.deploys.oldestMs or 0) / 1000)
        self._metrics.dead_letters.set(await count_dead_letters(self._store))
        starts = await count_worker_starts(self._store, now)
        for group, workers in backlog.count_workers_alive(self._settings).items():
            self._metrics.workers.labels(group).set(workers)
            self._metrics.worker_starts.labels(group).set(starts[group])
        self._show_hosts(await Records(self._store).read_reports(now))
        last_backup = await self._store.get(BACKUP_KEY)
        self._metrics.last_backup.set(seconds_of(last_backup) if last_backup else nan)
        # These are counted in Redis. A process that starts must not show zeros first: the next value would look like an
        # increase.
        ended = await count_ended_deploys(self._store)
        for outcome in OUTCOMES:
            self._metrics.deliveries.labels(outcome).set(backlog.outcomes.get(outcome, 0))
        for outcome, number in (await count_outcomes(self._store)).items():
            self._metrics.notices.labels(outcome).set(number)
        for state in FINAL:
            self._metrics.deploys_ended.labels(state).set(ended.get(state, 0))
        self._metrics.apps_unhealthy.set(await count_unhealthy_apps(self._registry))
        self._metrics.certificates_expiring.set(await count_expiring_certificates(self._store, now))
        await self._write_clock(now)
        await self._check_caps(now)

    def _show_hosts(self, reports: Sequence[HostReport]) -> None:
        """Without a host that reports a share, its gauge is NaN."""
        standing_by = sum(report.stands_by for report in reports)
        self._metrics.hosts.labels("serving").set(len(reports) - standing_by)
        self._metrics.hosts.labels("standing by").set(standing_by)
        self._metrics.releases_missing.set(sum(report.missing for report in reports))
        self._metrics.disk_free.set(min((report.disk_free for report in reports), default=nan))
        left = [report.certificate_left for report in reports if report.certificate_left is not None]
        self._metrics.certificate_left.set(min(left, default=nan))

    async def _write_clock(self, now: int) -> None:
        """Writes the time for Grafana's variables: Grafana uses the browser's time zone, names of keys are in UTC."""
        moment = time.gmtime(now // 1000)
        formats = {"day": "%Y-%m-%d", "hour": "%Y-%m-%dT%H", "minute": "%Y-%m-%dT%H:%M"}
        async with self._store.client.pipeline(transaction=True) as pipe:
            pipe.hset(CLOCK_KEY, mapping={name: time.strftime(each, moment) for name, each in formats.items()})
            pipe.expire(CLOCK_KEY, CLOCK_SECONDS)
            await pipe.execute()

    async def _check_caps(self, now: int) -> None:
        spenders, day = sorted(self._counters.spenders), day_of(now)
        for batch in batched(spenders, ACCOUNTS_PER_READ):
            spends = await self._read_spends(batch, day)
            self._counters.spenders.difference_update(batch)
            for spend in spends:
                if spend.settled + spend.reserved > spend.cap:
                    self._metrics.cap_breaches.inc()
                    logger.error("cap.breached", **msgspec.structs.asdict(spend))

    async def _read_spends(self, accounts: Sequence[str], day: str) -> list[AccountSpend]:
        """Returns the spend of the day in the same order, without accounts that no longer exist."""
        spends = await self._store.read_each(
            accounts, lambda pipe, account: pipe.hmget(spend_key(account, day), ["settled", "reserved"])
        )
        found = []
        for account, (settled, reserved) in zip(accounts, spends, strict=True):
            if (record := await self._registry.account(account)) is not None:
                cap = cap_of(record, self._settings)
                found.append(
                    AccountSpend(account, record.name, record.plan, cap, int(settled or 0), int(reserved or 0))
                )
        return found

    async def _read_clock(self) -> int:
        """Returns Redis's clock in ms."""
        seconds, microseconds = await self._store.client.time()
        return int(seconds * 1000 + microseconds // 1000)

    # -- the page's snapshot ---------------------------------------------------------------------------------

    async def take_snapshot(self) -> ServiceSnapshot:
        """Raises BackboneUnavailable."""
        now = await self._read_clock()
        backlog, minutes = await read_backlog(self._store, now), await self._read_minutes(now)
        shares = await self._providers.read_shares()
        return ServiceSnapshot(
            at=now_iso(),
            inference=self._availability.describe(self._availability.status()),
            gateways=await self._read_processes(),
            minutes=[render_counts(minute, counts) for minute, counts in minutes],
            firstToken=first_token([counts for _, counts in minutes]),
            spend=await self._read_top_spends(day_of(now)),
            webhooks=backlog.webhooks,
            deploys=backlog.deploys,
            workers=backlog.workers,
            outcomes=backlog.outcomes,
            deadLetters=await read_dead_letters(self._store),
            storage=await read_storage(self._store, self._registry),
            redis=await self._read_redis(),
            provider=await self._sum_up(shares),
            providers=await self._providers.describe(shares),
            models=model_figures([counts for _, counts in minutes]),
            needsAttention=NeedsAttention(
                failedDeploys=await count_failed_deploys(self._store, now),
                unhealthyApps=await count_unhealthy_apps(self._registry),
                missingWorkers=[
                    name for name, workers in backlog.count_workers_alive(self._settings).items() if not workers
                ],
            ),
            pods=await read_pod_report(self._store) if self._settings.apps_engine == "kubernetes" else None,
        )

    async def _read_minutes(self, now: int) -> list[tuple[str, dict[str, str]]]:
        """Returns the counts of the last hour, oldest first; the last is the current minute."""
        moments = (time.gmtime(now // 1000 - 60 * ago) for ago in reversed(range(MINUTES)))
        names = [time.strftime("%Y-%m-%dT%H:%M", moment) for moment in moments]
        counts = await self._store.read_each(names, lambda pipe, name: pipe.hgetall(minute_key(name)))
        return list(zip(names, counts, strict=True))

    async def read_hours(self, count: int) -> list[Hour]:
        """Returns the last hours, oldest first; the last is the current one. Raises BackboneUnavailable."""
        now = await self._read_clock()
        moments = (time.gmtime(now // 1000 - 3600 * ago) for ago in reversed(range(count)))
        names = [time.strftime("%Y-%m-%dT%H", moment) for moment in moments]
        counts = await self._store.read_each(names, lambda pipe, name: pipe.hgetall(hour_key(name)))
        return [render_hour(name, each) for name, each in zip(names, counts, strict=True)]

    async def _read_top_spends(self, day: str) -> DaySpend:
        top = await self._store.client.zrevrange(spenders_key(day), 0, TOP_ACCOUNTS, withscores=True)
        total = next((int(spent) for account, spent in top if account == TOTAL), 0)
        return DaySpend(day, total, await self._read_spends([account for account, _ in top if account != TOTAL], day))

    async def _read_processes(self) -> list[Process]:
        found = []
        for process in sorted(await self._store.client.smembers(PROCESSES_KEY)):
            record = await self._store.client.hgetall(process_key(process))
            if record:
                found.append(msgspec.convert({"id": process, **record}, Process, strict=False))
            else:  # it is dead; a live process adds itself again within two seconds
                await self._store.client.srem(PROCESSES_KEY, process)
        return found

    async def _sum_up(self, shares: Mapping[str, Share]) -> ProviderShare:
        waits: dict[str, int] = {}  # a request may wait for several providers
        for share in shares.values():
            for account, count in share.waiting.items():
                waits[account] = max(count, waits.get(account, 0))
        waiting = sorted(waits.items(), key=lambda each: -each[1])[:TOP_ACCOUNTS]
        names = [(account, await self._registry.account(account), count) for account, count in waiting]
        limits = [each.permits.in_force for each in self._providers.all]
        return ProviderShare(
            limit=sum(limits) if all(limits) else 0,
            used=sum(share.used for share in shares.values()),
            waiting=sum(waits.values()),
            top=[WaitingAccount(account, record.name if record else "", count) for account, record, count in names],
        )

    async def _read_redis(self) -> RedisFigures:
        began = time.perf_counter()
        await self._store.client.ping()
        latency = (time.perf_counter() - began) * 1000
        nodes = await self._store.info()
        return RedisFigures(
            latencyMs=round(latency, 2),
            memory=sum(node["used_memory"] for node in nodes),
            memoryLimit=sum(node.get("maxmemory", 0) for node in nodes),
            clients=sum(node["connected_clients"] for node in nodes),
            commandsPerSecond=sum(node["instantaneous_ops_per_sec"] for node in nodes),
        )


class SnapshotFeed:
    """Sends one snapshot every two seconds to all viewers of this process; without viewers it takes none."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview
        self._publishing: asyncio.Task[None] | None = None
        self._last = b""
        self._next: asyncio.Future[bytes]
        self.viewers = 0

    async def stream_events(self) -> AsyncGenerator[bytes]:
        """Yields server-sent events for one viewer. A viewer that is too slow for a snapshot gets the next one."""
        if self._publishing is None:
            self._last, self._next = b"", asyncio.get_running_loop().create_future()
            self._publishing = asyncio.create_task(every(SNAPSHOT_SECONDS, self._publish))
        self.viewers += 1
        try:
            if self._last:
                yield self._last
            while True:
                yield await asyncio.shield(self._next)
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._publishing.cancel()
                self._publishing = None

    async def _publish(self) -> None:
        try:
            self._last = b"data: " + msgspec.json.encode(await self._overview.take_snapshot()) + b"\n\n"
        except BackboneUnavailable:
            self._last = b"event: away\ndata: {}\n\n"
        current, self._next = self._next, asyncio.get_running_loop().create_future()
        current.set_result(self._last)

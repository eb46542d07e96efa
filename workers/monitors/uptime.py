"""Probes every live app at its public address.

A probe is one GET request within a budget, on a new connection. It does not follow redirects, and does not read the
body. A missing answer is a failure, and so is one that does not show that a start command is up (`Release.is_up`).
Files are probed like a start command without a health check of its own. `gateway.monitors.health` decides the
consequences. A probe has a User-Agent of its own, so that it neither wakes an app nor keeps it awake: for an app that
sleeps, Caddy answers.

A probe that proves nothing about the app is discarded: a probe of an address that must not be called, and a failure on
a worker without a network. After a failure the worker calls `GATEWAY_PROBE_CHECK_URL` to find out whether it has a
network. Without this setting every failure counts.
"""

import asyncio
import time
from collections.abc import Mapping

import msgspec
import structlog

from gateway.accounts.records import Account, App, find_suspension
from gateway.accounts.registry import Registry
from gateway.deploys.release import Release
from gateway.deploys.serving import Records
from gateway.events.catalog import AppRecovered
from gateway.events.notices import Notices
from gateway.ids import day_of, new_id, now_iso
from gateway.keys import awaited_key, health_key, probes_key, unhealthy_key
from gateway.monitors import health, history
from gateway.outbound.addresses import BlockedAddress, CallFailed
from gateway.outbound.client import Client
from gateway.settings import Settings
from workers.monitors.inspection_loop import InspectedApp, Inspection, InspectionLoop
from workers.sandbox.relay import MONITOR

logger = structlog.get_logger()

PROBES = 500  # at a time, per worker
USUAL = Release("", 0, runs=True)  # a release without a health check of its own
REASONS: dict[str, health.Reason] = {"dns": "dns", "tls": "tls", "timeout": "timeout"}


class NoNetwork(Exception):
    pass


class Uptime:
    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._store = settings, registry.store
        self._http = Client(
            allow_private=settings.allow_private_addresses,
            ca_file=settings.ca_file or None,
            connections=PROBES,
            connections_per_origin=0,  # all apps may share one address
            keep_alive=False,  # a kept connection would hide that the name, the proxy or the certificate is gone
            own=True,
        )
        self._network = Network(settings, self._http)
        self._notices = Notices(self._store) if settings.sends_notices else None
        self._today, self._seen = "", set[str]()  # the day, and the ids of the apps that were marked on it
        self._loop = InspectionLoop(
            registry,
            probes_key,
            health_key,
            self._applies,
            self.inspect,
            interval=settings.probe_interval,
            budget=2 * settings.probe_timeout,  # one for the app, one for the network
            at_a_time=PROBES,
            keep=self._keep,
        )

    async def run(self) -> None:
        try:
            await self._loop.run()
        finally:
            await self._http.close()

    @staticmethod
    def _applies(app: App, account: Account, live: bool) -> bool:
        return health.is_probed(account.plan, live) and find_suspension(app, account) is None

    @staticmethod
    def _keep(known: Mapping[str, str]) -> dict[str, str]:
        kept = health.pause(health.decode_health(known.get("state")))
        return {"state": msgspec.json.encode(kept).decode()} if kept.notified_at else {}

    async def inspect(self, target: InspectedApp) -> Inspection:
        settings, app = self._settings, target.app
        url = health.public_address(app.name, settings)
        again = settings.probe_interval
        try:
            reason = await probe(self._http, url, settings.probe_timeout, await self._find_release(app))
            if reason:
                await self._network.check()
        except (BlockedAddress, NoNetwork) as error:
            logger.warning("probe.void", app=app.id, error=f"{type(error).__name__}: {error}")
            return Inspection({}, [], again)
        before = health.decode_health(target.known.get("state"))
        awaited = before.awaited
        outcomes = await self._store.get_all([awaited_key(target.tag, event_id) for event_id in awaited])
        now = target.now()
        after, events = health.step(
            before,
            reason,
            dict(zip(awaited, outcomes, strict=True)),
            now,
            url=url,
            cooldown=int(settings.unhealthy_cooldown * 1000),
            new_id=lambda: new_id("evt"),
        )
        if reason:
            logger.info("probe.failed", app=app.id, reason=reason, failures=after.failures)
        await self._list_unhealthy(target, before, after)
        changed = {"state": msgspec.json.encode(after).decode()} if after != before else {}
        counts = self._mark_of_today(target, now) | history.count_ended_outage(before, after, now)

        async def note() -> None:
            """Adds to the history, and queues the notices of a recovery, even if no receiver got the app.unhealthy."""
            if counts:
                await history.add_counts(self._store, target.tag, app.id, counts, now)
            if self._notices is not None and before.notified and not after.notified:
                since = before.failing_since
                recovery = AppRecovered(url=url, downSince=now_iso(since / 1000), downMs=now - since)
                await self._notices.queue_recovery(app, before.notified, recovery)

        return Inspection(changed, events, again, note)

    async def _find_release(self, app: App) -> Release:
        """Returns the release that visitors get, if it has a health check of its own, or else one like most others.

        The setting of the app's record may be of an earlier or a later release.
        """
        if app.build is None or app.build.health is None:
            return USUAL
        records = await Records(self._store).read(app.account, app.id)
        _, wanted = records.get("live", ("", None))
        found = None if wanted is None else wanted.releases.get(wanted.serves)
        return found if found is not None and found.health else USUAL

    def _mark_of_today(self, target: InspectedApp, now: int) -> dict[str, int]:
        """Returns a mark that the app was probed today, once per app and day."""
        today = day_of(now)
        if today != self._today:
            self._today, self._seen = today, set()
        if target.app.id in self._seen:
            return {}
        self._seen.add(target.app.id)
        return {f"{today}:down": 0}

    async def _list_unhealthy(self, target: InspectedApp, before: health.AppHealth, after: health.AppHealth) -> None:
        """Updates the operators' list of unhealthy apps. Its readers also check the app's record."""
        unhealthy = unhealthy_key(target.tag)
        if after.status == "unhealthy":
            await self._store.client.zadd(unhealthy, {target.app.id: after.since})
        elif before.status == "unhealthy":
            await self._store.client.zrem(unhealthy, target.app.id)


async def probe(http: Client, url: str, budget: float, release: Release = USUAL) -> health.Reason:
    """Returns the reason why the release is not up at the address, or '' if it is. Raises BlockedAddress."""
    try:
        # The names are the operator's own.
        answer = await http.send(
            "GET",
            f"{url.rstrip('/')}{release.health}" if release.health else url,
            tenant="",
            headers={"User-Agent": MONITOR},
            budget=budget,
        )
    except BlockedAddress:
        raise
    except CallFailed as error:
        return REASONS.get(error.reason, "connect")
    return "" if release.is_up(answer.status) else "status"


class Network:
    """Checks whether this worker has a network. Concurrent checks share one call."""

    def __init__(self, settings: Settings, http: Client) -> None:
        self._url, self._budget, self._http = settings.probe_check_url, settings.probe_timeout, http
        self._lock = asyncio.Lock()
        self._checked_at = float("-inf")  # when the last call began
        self._reachable = True

    async def check(self) -> None:
        """Raises NoNetwork if the check address does not answer."""
        if not self._url:
            return
        requested = time.monotonic()
        async with self._lock:
            if self._checked_at < requested:
                self._checked_at = time.monotonic()
                self._reachable = not await probe(self._http, self._url, self._budget)
        if not self._reachable:
            raise NoNetwork(f"{self._url} does not answer either")

"""External probes: does each live app answer at its public address?

One GET within a budget, on a connection of its own, by the rules of `egress`: redirects are not followed, and nothing
of the body is read. 5xx and no answer are failures; any other status is an answer. What follows from a probe is
`gateway.health`'s to say.

A probe that tells nothing of the app is not written down: one to an address that we refuse to call, and a failure of a
worker that has no network, which it learns by asking the address of `GATEWAY_PROBE_CHECK_URL`. Not set, every failure
is believed.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.ids import new_id
from gateway.monitors import health
from gateway.outbound.addresses import BlockedAddress, CallFailed
from gateway.outbound.client import Client
from gateway.settings import Settings
from gateway.store import keys
from workers.monitors.rounds import Rounds, Seen, Taken

logger = structlog.get_logger()

PROBES = 500  # at a time, per worker
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
            keep_alive=False,  # a kept connection hides that the name, the proxy or the certificate is gone
            own=True,
        )
        self._network = Network(settings, self._http)
        self._rounds = Rounds(
            registry,
            keys.probes_key,
            keys.health_key,
            self._wanted,
            self.look,
            interval=settings.probe_interval,
            budget=2 * settings.probe_timeout,  # the app's, and the check's
            under_way=PROBES,
        )

    async def run(self) -> None:
        try:
            await self._rounds.run()
        finally:
            await self._http.close()

    @staticmethod
    def _wanted(_: App, account: Account, live: bool) -> bool:
        return health.watched(account.plan, live)

    async def look(self, taken: Taken) -> Seen:
        settings, app = self._settings, taken.app
        url = health.public_address(app.name, settings)
        again = settings.probe_interval
        try:
            reason = await probe(self._http, url, settings.probe_timeout)
            if reason:
                await self._network.check()
        except (addresses.BlockedAddress, NoNetwork) as error:
            logger.warning("probe.void", app=app.id, error=f"{type(error).__name__}: {error}")
            return Seen({}, [], again)
        before = health.read(taken.known.get("state"))
        awaited = before.awaited
        outcomes = await self._store.get_all([keys.awaited_key(taken.tag, event_id) for event_id in awaited])
        after, events = health.step(
            before,
            reason,
            dict(zip(awaited, outcomes, strict=True)),
            taken.now(),
            url=url,
            cooldown=int(settings.unhealthy_cooldown * 1000),
            new_id=lambda: new_id("evt"),
        )
        if reason:
            logger.info("probe.failed", app=app.id, reason=reason, failures=after.failures)
        changed = {"state": msgspec.json.encode(after).decode()} if after != before else {}
        return Seen(changed, events, again)


async def probe(http: outbound.Client, url: str, budget: float) -> health.Reason:
    """Why it does not answer; empty when it does. Raises BlockedAddress."""
    url = addresses.check_url(url, allow_private=http.allow_private)
    # Kept connections would not notice that the name, the proxy or the certificate has gone.
    request = http.build_request("GET", url, headers={"Connection": "close"})
    try:
        async with asyncio.timeout(budget):
            response = await http.send(request, stream=True)
            await response.aclose()
    except addresses.BlockedAddress:
        raise
    except TimeoutError:
        return "timeout"
    except addresses.CallFailed as error:
        return REASONS.get(error.reason, "connect")
    return "status" if response.status_code >= 500 else ""


class Network:
    """Whether this worker has one, asked after a failure; failures of one moment share an answer."""

    def __init__(self, settings: Settings, http: outbound.Client) -> None:
        self._url, self._budget, self._http = settings.probe_check_url, settings.probe_timeout, http
        self._asking = asyncio.Lock()
        self._asked = float("-inf")  # when the last question was asked
        self._there = True

    async def check(self) -> None:
        """Raises NoNetwork."""
        if not self._url:
            return
        failed = time.monotonic()
        async with self._asking:
            if self._asked < failed:
                self._asked = time.monotonic()
                self._there = not await probe(self._http, self._url, self._budget)
        if not self._there:
            raise NoNetwork(f"{self._url} does not answer either")

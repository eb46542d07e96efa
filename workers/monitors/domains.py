"""Asks every day for the TXT record of each custom domain that was verified by one.

A domain whose record has been missing for 7 days is no longer verified. Only the answer that there is no such record
counts: while the DNS fails, nothing changes, and the domain is checked again within the hour.

Each check also renews the app's claim to the domain. If Redis lost it and another app has verified the domain since,
the domain is withdrawn at once, so that one app has it.
"""

from collections.abc import Mapping

import structlog

from gateway.accounts.custom_domains import MISSING_SECONDS, CustomDomains
from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.errors import NameTaken
from gateway.keys import domain_check_key, domain_checks_key
from gateway.outbound.addresses import CallFailed
from gateway.outbound.dns import LOOKUP_SECONDS
from gateway.settings import Settings
from workers.monitors.inspection_loop import InspectedApp, Inspection, InspectionLoop

logger = structlog.get_logger()

INTERVAL_SECONDS = 86_400.0
AFTER_FAILURE_SECONDS = 3_600.0
CHECKS = 50  # at a time, per worker


class Domains:
    def __init__(self, settings: Settings, registry: Registry, *, interval: float = INTERVAL_SECONDS) -> None:
        self._registry, self._interval = registry, interval
        self._domains = CustomDomains(settings, registry)
        self._loop = InspectionLoop(
            registry,
            domain_checks_key,
            domain_check_key,
            self._applies,
            self.inspect,
            interval=interval,
            budget=LOOKUP_SECONDS,
            at_a_time=CHECKS,
        )

    async def run(self) -> None:
        await self._loop.run()

    @staticmethod
    def _applies(app: App, _: Account, __: bool) -> bool:
        return app.customDomainVerified and app.customDomainProven

    async def inspect(self, target: InspectedApp) -> Inspection:
        app, domain = target.app, target.app.customDomain or ""
        try:
            problem = await self._domains.find_problem(app)
        except CallFailed as error:
            logger.info("domain.unanswered", app=app.id, domain=domain, reason=error.reason)
            return Inspection({}, [], min(AFTER_FAILURE_SECONDS, self._interval))
        known, lost = judge(target.known, domain, target.now(), missing=bool(problem))
        try:
            await self._registry.domains.claim(app)
        except NameTaken:
            lost, problem = True, "another app has verified the domain"

        async def withdraw() -> None:
            if await self._domains.withdraw(app):
                logger.warning("domain.withdrawn", app=app.id, account=app.account, domain=domain, reason=problem)

        return Inspection(known, [], self._interval, withdraw if lost else None)


def judge(known: Mapping[str, str], domain: str, now: int, *, missing: bool) -> tuple[dict[str, str], bool]:
    """Returns the new record of the domain, and whether it is no longer verified. A pure function; times are in ms."""
    if not missing:
        return {"domain": domain, "missingSince": ""}, False
    since = int(known.get("missingSince") or now) if known.get("domain") == domain else now
    return {"domain": domain, "missingSince": str(since)}, now - since >= MISSING_SECONDS * 1000

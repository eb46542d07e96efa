"""Asks every day for the TXT record of each custom domain that was verified by one, those of an app at once.

A domain whose record has been missing for 7 days is no longer verified. Only the answer that there is no such record
counts: while the DNS fails, nothing changes, and the domain is checked again within the hour.

Each check also renews the app's claims to its domains. If Redis lost it and another app has verified the domain since,
the domain is withdrawn at once, so that one app has it.
"""

import asyncio
from collections.abc import Collection, Mapping

import structlog

from gateway.accounts.custom_domains import MISSING_SECONDS, CustomDomains
from gateway.accounts.domain_observations import read_missing, write_missing
from gateway.accounts.records import Account, App, Domain
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
        return any(domain.proven for domain in app.domains)

    async def inspect(self, target: InspectedApp) -> Inspection:
        app = target.app
        proven = [domain for domain in app.domains if domain.proven]
        problems = await asyncio.gather(*(self._find_problem(app, domain) for domain in proven))
        found = {domain.name: problem for domain, problem in zip(proven, problems, strict=True) if problem is not None}
        again = self._interval if len(found) == len(proven) else min(AFTER_FAILURE_SECONDS, self._interval)
        if not found:
            return Inspection({}, [], again)
        missing, lost = judge(read_missing(target.known), [each.name for each in proven], found, target.now())
        reasons = {name: found[name] for name in lost}
        for name in found:
            try:
                await self._registry.domains.claim(app, name)
            except NameTaken:
                reasons[name] = "another app has verified the domain"

        async def withdraw() -> None:
            for name in await self._domains.withdraw(app, reasons):
                logger.warning("domain.withdrawn", app=app.id, account=app.account, domain=name, reason=reasons[name])

        return Inspection(write_missing(missing), [], again, withdraw if reasons else None)

    async def _find_problem(self, app: App, domain: Domain) -> str | None:
        """Returns what is wrong with the record of a domain, or ''. None if the DNS does not answer."""
        try:
            return await self._domains.find_problem(app, domain)
        except CallFailed as error:
            logger.info("domain.unanswered", app=app.id, domain=domain.name, reason=error.reason)
            return None


def judge(
    missing: Mapping[str, int], domains: Collection[str], found: Mapping[str, str], now: int
) -> tuple[dict[str, int], set[str]]:
    """Returns since when the records of domains are missing, and which domains are lost. Times are in ms.

    `missing` is since when they were before, and `found` the problem of each domain for which the DNS has answered. A
    pure function.
    """
    since = {name: missing.get(name, now) for name in domains if found.get(name, name in missing)}
    return since, {name for name in found if name in since and now - since[name] >= MISSING_SECONDS * 1000}

"""The custom domains that account holders set, and prove to own with a TXT record.

    none ──set──▶ unverified ──the TXT record is there──▶ verified
                       ▲                                      │
                       ╰─────the record is missing for 7 days─╯

Several apps may have the same unverified domain. The first one that is verified claims it (`domain_claims.py`), and the
others are refused until the claim ends. Only a verified domain is served and may call inference.

A monitor asks for the record of each such domain every day. A domain that an operator has verified needs no record, and
is not asked for.
"""

import msgspec

from gateway.accounts.domain_claims import DOMAIN_TAKEN
from gateway.accounts.domain_names import record_name, verification_token
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.errors import NameTaken, NotFound
from gateway.keys import domain_check_key, partition_tag
from gateway.outbound.dns import Resolver

MISSING_SECONDS = 7 * 86_400  # after which a domain without its record is no longer verified


class CustomDomains:
    def __init__(self, registry: Registry, resolver: Resolver) -> None:
        self._registry, self._resolver = registry, resolver

    async def set_domain(self, app: App, domain: str) -> App:
        """Sets an unverified domain. The app's present domain stays as it is. Raises NameTaken and NotFound."""
        owner = await self._registry.domains.find_owner(domain)
        if owner is not None and owner.id != app.id:
            raise NameTaken(DOMAIN_TAKEN)

        def change(record: App) -> App:
            return record if record.customDomain == domain else _replace(record, domain)

        return await self._registry.change_domain(app, change)

    async def clear_domain(self, app: App) -> None:
        """Raises NotFound if the app has no domain."""

        def change(record: App) -> App:
            if record.customDomain is None:
                raise NotFound
            return _replace(record, None)

        await self._registry.change_domain(app, change)

    async def find_problem(self, app: App) -> str:
        """Asks the DNS for the record of the app's domain. Returns what is wrong with it, or ''. Raises CallFailed."""
        assert app.customDomain is not None
        name = record_name(app.customDomain)
        texts = await self._resolver.find_txt(name)
        if not texts:
            return f"There is no TXT record at {name}."
        if verification_token(app, app.customDomain) not in [text.strip() for text in texts]:
            return f"The TXT record at {name} has another value."
        return ""

    async def verify(self, app: App) -> App:
        """Claims the domain of an app whose record is there. Raises NameTaken and NotFound.

        The claim comes first, so that of several apps with their records, one gets the domain.
        """
        claiming = _replace(app, app.customDomain, verified=True)
        await self._registry.domains.claim(claiming)

        def change(record: App) -> App:
            if record.customDomain != app.customDomain:
                raise NotFound
            return record if record.customDomainVerified else _replace(record, record.customDomain, verified=True)

        try:
            verified = await self._registry.change_domain(app, change)
        except NotFound:  # the app was deleted, or its domain changed, since it was read
            await self._registry.domains.release(claiming)
            raise
        await self._registry.store.client.delete(domain_check_key(partition_tag(app.account), app.id))
        return verified

    async def withdraw(self, app: App) -> bool:
        """Makes the domain unverified, unless it has changed since. Returns whether it did."""

        def change(record: App) -> App:
            if record.customDomain != app.customDomain or not record.customDomainProven:
                raise NotFound
            return _replace(record, record.customDomain)

        try:
            await self._registry.change_domain(app, change)
        except NotFound:
            return False
        return True


def _replace(app: App, domain: str | None, *, verified: bool = False) -> App:
    return msgspec.structs.replace(app, customDomain=domain, customDomainVerified=verified, customDomainProven=verified)

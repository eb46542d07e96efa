"""The custom domains that account holders set, and prove to own with a TXT record.

    none ──set──▶ unverified ──the TXT record is there──▶ verified
                       ▲                                      │
                       ╰─────the record is missing for 7 days─╯

Several apps may have the same unverified domain. The first one that is verified claims it (`domain_claims.py`), and the
others are refused until the claim ends. Only a verified domain is served and may call inference.

A monitor asks for the record of each such domain every day. A domain that an operator has verified needs no record, and
is not asked for.
"""

from typing import Literal

import msgspec

from gateway.accounts.app_changes import CHANGES
from gateway.accounts.domain_claims import DOMAIN_TAKEN
from gateway.accounts.domain_names import apps_host, check_own_domain, record_name, verification_token
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.errors import NameTaken, NotFound
from gateway.ids import Time, now_iso
from gateway.keys import certificate_key, domain_check_key, domain_lookups_key, partition_tag
from gateway.loops import Allowance
from gateway.outbound.addresses import CallFailed
from gateway.outbound.dns import Resolver
from gateway.settings import Settings

LOOKUPS = Allowance(domain_lookups_key, 10, 60, "An app's domain can be verified {limit} times per minute")
MISSING_SECONDS = 7 * 86_400  # after which a domain without its record is no longer verified


class DnsRecord(msgspec.Struct):
    """A record to create in the domain's DNS."""

    type: Literal["TXT", "CNAME"]
    name: str
    value: str


class DomainCertificate(msgspec.Struct):
    """The certificate at its last inspection."""

    issuer: str | None
    expiresAt: Time


class DomainView(msgspec.Struct, omit_defaults=True):
    domain: str
    verified: bool
    records: list[DnsRecord]  # the proof of ownership, and where the domain points
    certificate: DomainCertificate | msgspec.UnsetType = msgspec.UNSET
    problem: str | msgspec.UnsetType = msgspec.UNSET  # what is wrong with the TXT record, when it was last asked for


class CustomDomains:
    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry, self._store = settings, registry, registry.store
        self._resolver = Resolver(settings.dns)

    async def set_domain(self, app: App, text: str) -> DomainView:
        """Sets an unverified domain. The app's present domain stays as it is.

        Raises RequestMalformed, RateLimited, NameTaken and NotFound.
        """
        domain = check_own_domain(text, self._settings)
        await CHANGES.count(self._store, app.account)
        owner = await self._registry.domains.find_owner(domain)
        if owner is not None and owner.id != app.id:
            raise NameTaken(DOMAIN_TAKEN)

        def change(record: App) -> App:
            return record if record.customDomain == domain else _replace(record, domain)

        return await self._view(await self._registry.change_domain(app, change))

    async def show_domain(self, app: App) -> DomainView:
        """Raises NotFound if the app has no domain."""
        _require_domain(app)
        return await self._view(app)

    async def clear_domain(self, app: App) -> None:
        """Raises RateLimited, and NotFound if the app has no domain."""
        _require_domain(app)
        await CHANGES.count(self._store, app.account)

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

    async def verify_domain(self, app: App) -> DomainView:
        """Raises RateLimited, NameTaken, and NotFound if the app has no domain."""
        _require_domain(app)
        await LOOKUPS.count(self._store, app.account, app.id)
        try:
            problem = await self.find_problem(app)
        except CallFailed as error:
            problem = f"{error} Try again in a minute."
        if not problem:
            app = await self._verify(app)
        return await self._view(app, problem)

    async def _verify(self, app: App) -> App:
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
        await self._store.client.delete(domain_check_key(partition_tag(app.account), app.id))
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

    async def _view(self, app: App, problem: str | None = None) -> DomainView:
        """`problem` is what the DNS has just said; None if it was not asked."""
        domain, tag = app.customDomain or "", partition_tag(app.account)
        async with self._store.client.pipeline(transaction=False) as pipe:
            pipe.hmget(certificate_key(tag, app.id), ["domain", "expiresAt", "issuer"])
            pipe.hmget(domain_check_key(tag, app.id), ["domain", "missingSince"])
            (certified, expires, issuer), (checked, missing) = await pipe.execute()
        proof = DnsRecord("TXT", record_name(domain), verification_token(app, domain))
        pointer = DnsRecord("CNAME", domain, f"{app.name}.{apps_host(self._settings)}")
        view = DomainView(domain, app.customDomainVerified, [proof, pointer])
        if app.customDomainVerified and certified == domain and expires:
            view.certificate = DomainCertificate(issuer or None, now_iso(int(expires) / 1000))
        if problem is None and app.customDomainProven and checked == domain and missing:
            ends = now_iso(int(missing) / 1000 + MISSING_SECONDS)
            problem = f"The TXT record at {proof.name} is missing. Restore it, or the domain is lost at {ends}."
        view.problem = problem or msgspec.UNSET
        return view


def _require_domain(app: App) -> None:
    if app.customDomain is None:
        raise NotFound("This app has no custom domain; set one first.")


def _replace(app: App, domain: str | None, *, verified: bool = False) -> App:
    return msgspec.structs.replace(app, customDomain=domain, customDomainVerified=verified, customDomainProven=verified)

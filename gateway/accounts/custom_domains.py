"""The custom domains that account holders set, and prove to own with a TXT record.

    none ──set──▶ unverified ──the TXT record is there──▶ verified
                       ▲                                      │
                       ╰─────the record is missing for 7 days─╯

An app has at most `MAX_DOMAINS`. The first one of its record is the primary: visitors of the others are led there, once
both are verified (`gateway/deploys/addresses.py`).

Several apps may have the same unverified domain. The first one that is verified claims it (`domain_claims.py`), and the
others are refused until the claim ends. Only a verified domain is served and may call inference.

A monitor asks for the record of each such domain every day. A domain that an operator has verified needs no record, and
is not asked for.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from gateway.accounts.app_changes import CHANGES
from gateway.accounts.domain_claims import DOMAIN_TAKEN
from gateway.accounts.domain_names import (
    apps_host,
    check_own_domain,
    normalize_domain,
    record_name,
    verification_token,
)
from gateway.accounts.domain_observations import Certificate, read_certificates, read_missing, write_missing
from gateway.accounts.records import App, Domain
from gateway.accounts.registry import Registry
from gateway.errors import DomainLimitReached, NameTaken, NotFound
from gateway.ids import Time, new_id, now_iso
from gateway.keys import certificate_key, domain_check_key, domain_lookups_key, partition_tag
from gateway.loops import Allowance
from gateway.outbound.addresses import CallFailed
from gateway.outbound.dns import Resolver
from gateway.settings import Settings

LOOKUPS = Allowance(domain_lookups_key, 10, 60, "An app's domains can be verified {limit} times per minute")
MAX_DOMAINS = 5  # of an app
MISSING_SECONDS = 7 * 86_400  # after which a domain without its record is no longer verified
NO_DOMAIN = "This app does not have this domain; add it first."


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
    primary: bool
    verified: bool
    records: list[DnsRecord]  # the proof of ownership, and where the domain points
    certificate: DomainCertificate | msgspec.UnsetType = msgspec.UNSET
    problem: str | msgspec.UnsetType = msgspec.UNSET  # what is wrong with the TXT record, when it was last asked for


class CustomDomains:
    """Domains are named as people write them, except where a method has an app's own `Domain`."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry, self._store = settings, registry, registry.store
        self._resolver = Resolver(settings.dns)

    async def list_domains(self, app: App) -> list[DomainView]:
        """Returns the app's domains, the primary first."""
        tag = partition_tag(app.account)
        async with self._store.client.pipeline(transaction=False) as pipe:
            pipe.hgetall(certificate_key(tag, app.id))
            pipe.hgetall(domain_check_key(tag, app.id))
            certified, checked = await pipe.execute()
        certificates, missing = read_certificates(certified), read_missing(checked)
        return [
            self._view(app, domain, certificates.get(domain.name), missing.get(domain.name)) for domain in app.domains
        ]

    async def put_domain(self, app: App, text: str, *, primary: bool) -> DomainView:
        """Adds an unverified domain, unless the app has it already, and makes it the primary if `primary`.

        Raises RequestMalformed, RateLimited, NameTaken, DomainLimitReached and NotFound.
        """
        name = await self._admit(app, text)

        def change(domains: Sequence[Domain]) -> Sequence[Domain]:
            own = _find(domains, name)
            if own is None and len(domains) >= MAX_DOMAINS:
                raise DomainLimitReached
            if own is not None and not primary:
                return domains
            others = [domain for domain in domains if domain != own]
            return [own or Domain(name), *others] if primary else [*others, Domain(name)]

        return await self._show(await self._registry.change_domains(app, change), name)

    async def set_primary(self, app: App, text: str) -> DomainView:
        """Makes a domain the primary: one that the app has already, or a new one in place of the present primary.

        Raises RequestMalformed, RateLimited, NameTaken and NotFound.
        """
        name = await self._admit(app, text)

        def change(domains: Sequence[Domain]) -> Sequence[Domain]:
            if (own := _find(domains, name)) is not None:
                return [own, *(domain for domain in domains if domain != own)]
            return [Domain(name), *domains[1:]]

        return await self._show(await self._registry.change_domains(app, change), name)

    async def _admit(self, app: App, text: str) -> str:
        """Returns the name of a domain that the app may set."""
        name = check_own_domain(text, self._settings)
        await CHANGES.count(self._store, app.account)
        owner = await self._registry.domains.find_owner(name)
        if owner is not None and owner.id != app.id:
            raise NameTaken(DOMAIN_TAKEN)
        return name

    async def show_primary(self, app: App) -> DomainView:
        """Raises NotFound if the app has no domain."""
        return await self._show(app, find_primary(app))

    async def remove_domain(self, app: App, text: str) -> None:
        """The next one becomes the primary, if this is it. Raises RateLimited, and NotFound without the domain."""
        name = _require_domain(app, text).name
        await CHANGES.count(self._store, app.account)

        def change(domains: Sequence[Domain]) -> Sequence[Domain]:
            if _find(domains, name) is None:
                raise NotFound
            return [domain for domain in domains if domain.name != name]

        await self._registry.change_domains(app, change)

    async def find_problem(self, app: App, domain: Domain) -> str:
        """Asks the DNS for the record of the app's domain. Returns what is wrong with it, or ''. Raises CallFailed."""
        name = record_name(domain.name)
        texts = await self._resolver.find_txt(name)
        if not texts:
            return f"There is no TXT record at {name}."
        if verification_token(app, domain.name) not in [text.strip() for text in texts]:
            return f"The TXT record at {name} has another value."
        return ""

    async def verify_domain(self, app: App, text: str) -> DomainView:
        """Raises RateLimited, NameTaken, and NotFound if the app does not have the domain."""
        domain = _require_domain(app, text)
        await LOOKUPS.count(self._store, app.account, app.id)
        try:
            problem = await self.find_problem(app, domain)
        except CallFailed as error:
            problem = f"{error} Try again in a minute."
        if not problem:
            app = await self._verify(app, domain)
        view = await self._show(app, domain.name)
        view.problem = problem or msgspec.UNSET
        return view

    async def _verify(self, app: App, domain: Domain) -> App:
        """Claims a domain whose record is there. Raises NameTaken and NotFound.

        The claim comes first, so that of several apps with their records, one gets the domain.
        """
        await self._registry.domains.claim(app, domain.name)

        def change(domains: Sequence[Domain]) -> Sequence[Domain]:
            present = _find(domains, domain.name)
            if present is None:
                raise NotFound
            proven = present if present.verified else Domain(domain.name, verified=True, proven=True)
            return [proven if each is present else each for each in domains]

        try:
            verified = await self._registry.change_domains(app, change)
        except NotFound:  # the app was deleted, or its domain removed, since it was read
            await self._registry.domains.release(app, [domain.name])
            raise
        await self._forget_missing(app, domain)
        return verified

    async def _forget_missing(self, app: App, domain: Domain) -> None:
        """The new version makes Redis refuse the observation of a check that is under way."""
        key = domain_check_key(partition_tag(app.account), app.id)
        missing = read_missing(await self._store.client.hgetall(key))
        if missing.pop(domain.name, None) is not None:
            await self._store.client.hset(key, mapping={**write_missing(missing), "version": new_id("ver")})

    async def withdraw(self, app: App, names: Collection[str]) -> set[str]:
        """Makes domains unverified, unless they have changed since. Returns those that it did."""
        withdrawn: set[str] = set()

        def change(domains: Sequence[Domain]) -> Sequence[Domain]:
            nonlocal withdrawn
            withdrawn = {each.name for each in domains if each.proven and each.name in names}
            return [Domain(each.name) if each.name in withdrawn else each for each in domains]

        with suppress(NotFound):
            await self._registry.change_domains(app, change)
        return withdrawn

    async def _show(self, app: App, name: str) -> DomainView:
        """Raises NotFound if the app does not have the domain."""
        for view in await self.list_domains(app):
            if view.domain == name:
                return view
        raise NotFound(NO_DOMAIN)

    def _view(self, app: App, domain: Domain, certificate: Certificate | None, missing: int | None) -> DomainView:
        """`missing`: since when its TXT record is, in ms."""
        proof = DnsRecord("TXT", record_name(domain.name), verification_token(app, domain.name))
        pointer = DnsRecord("CNAME", domain.name, f"{app.name}.{apps_host(self._settings)}")
        view = DomainView(domain.name, domain is app.domains[0], domain.verified, [proof, pointer])
        if domain.verified and certificate is not None:
            view.certificate = DomainCertificate(certificate.issuer or None, now_iso(certificate.expires / 1000))
        if domain.proven and missing is not None:
            ends = now_iso(missing / 1000 + MISSING_SECONDS)
            view.problem = f"The TXT record at {proof.name} is missing. Restore it, or the domain is lost at {ends}."
        return view


def find_primary(app: App) -> str:
    """Returns the name of the app's primary domain. Raises NotFound if the app has no domain."""
    if not app.domains:
        raise NotFound("This app has no custom domain; set one first.")
    return app.domains[0].name


def _require_domain(app: App, text: str) -> Domain:
    domain = _find(app.domains, normalize_domain(text, "domain"))
    if domain is None:
        raise NotFound(NO_DOMAIN)
    return domain


def _find(domains: Sequence[Domain], name: str) -> Domain | None:
    return next((domain for domain in domains if domain.name == name), None)

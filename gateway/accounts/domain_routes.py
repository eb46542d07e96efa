"""The account API: an app's custom domain."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import delete, get, post, put
from litestar.params import FromPath, JSONBody

from gateway.accounts.custom_domains import MISSING_SECONDS
from gateway.accounts.domain_names import apps_host, check_own_domain, record_name, verification_token
from gateway.accounts.keys import domain_lookups_key
from gateway.accounts.pacing import UNPACED
from gateway.accounts.records import App
from gateway.bounds import Host
from gateway.deploys.addresses import host
from gateway.deploys.routes import require_own_app
from gateway.errors import NameTaken, NotFound, RateLimited, RequestMalformed
from gateway.http.authentication import Caller, account_router
from gateway.ids import Time, now_iso
from gateway.monitors.keys import certificate_key, domain_check_key
from gateway.outbound.addresses import CallFailed
from gateway.process import Gateway, Injected
from gateway.redis.partitions import partition_tag
from gateway.settings import Settings

LOOKUPS_PER_MINUTE = 10  # of an app


class NewDomain(msgspec.Struct, forbid_unknown_fields=True):
    domain: Host


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


@put("/apps/{app:str}/domain", errors=[RequestMalformed, NotFound, NameTaken, RateLimited])
async def set_domain(account: Caller, app: FromPath[str], data: JSONBody[NewDomain], gateway: Injected) -> DomainView:
    """Set an app's custom domain.

    Another domain than before is not verified: create the records in its DNS, then verify it.
    """
    found = await require_own_app(app, account, gateway)
    domain = check_own_domain(data.domain, gateway.settings)
    await gateway.app_changes.count_change(account.id)
    return await view_domain(await gateway.custom_domains.set_domain(found, domain), gateway)


@get("/apps/{app:str}/domain", errors=[NotFound])
async def show_domain(account: Caller, app: FromPath[str], gateway: Injected) -> DomainView:
    """Show an app's custom domain, and the records that it needs."""
    return await view_domain(await require_domain(app, account, gateway), gateway)


@post(
    "/apps/{app:str}/domain/verify",
    status_code=200,
    errors=[NotFound, NameTaken, RateLimited],
    opt={UNPACED: True},  # a slow DNS must not delay the account's other requests
)
async def verify_domain(account: Caller, app: FromPath[str], gateway: Injected) -> DomainView:
    """Ask the DNS now whether the app's account owns the custom domain.

    10 times per minute. If the TXT record is there, the domain is verified; otherwise `problem` says what is wrong.
    """
    found = await require_domain(app, account, gateway)
    await count_lookup(found, gateway)
    try:
        problem = await gateway.custom_domains.find_problem(found)
    except CallFailed as error:
        problem = f"{error} Try again in a minute."
    if not problem:
        found = await gateway.custom_domains.verify(found)
    return await view_domain(found, gateway, problem)


@delete("/apps/{app:str}/domain", errors=[NotFound, RateLimited])
async def clear_domain(account: Caller, app: FromPath[str], gateway: Injected) -> None:
    """Remove an app's custom domain."""
    found = await require_domain(app, account, gateway)
    await gateway.app_changes.count_change(account.id)
    await gateway.custom_domains.clear_domain(found)


async def require_domain(app: str, account: Caller, gateway: Gateway) -> App:
    """Returns the account's app, which has a custom domain. Raises NotFound."""
    found: App = await require_own_app(app, account, gateway)
    if found.customDomain is None:
        raise NotFound("This app has no custom domain; set one first.")
    return found


async def count_lookup(app: App, gateway: Gateway) -> None:
    """Raises RateLimited."""
    asked, wait = await gateway.store.increment(domain_lookups_key(app.account, app.id), 60)
    if asked > LOOKUPS_PER_MINUTE:
        message = f"An app's domain can be verified {LOOKUPS_PER_MINUTE} times per minute; "
        raise RateLimited(f"{message}try again after the time in Retry-After.", retry_after=wait)


async def view_domain(app: App, gateway: Gateway, problem: str | None = None) -> DomainView:
    """Returns the view of an app with a domain. `problem` is what the DNS has just said; None if it was not asked."""
    domain, tag = app.customDomain or "", partition_tag(app.account)
    async with gateway.store.client.pipeline(transaction=False) as pipe:
        pipe.hmget(certificate_key(tag, app.id), ["domain", "expiresAt", "issuer"])
        pipe.hmget(domain_check_key(tag, app.id), ["domain", "missingSince"])
        (certified, expires, issuer), (checked, missing) = await pipe.execute()
    view = DomainView(domain, app.customDomainVerified, list_records(app, domain, gateway.settings))
    if app.customDomainVerified and certified == domain and expires:
        view.certificate = DomainCertificate(issuer or None, now_iso(int(expires) / 1000))
    if problem is None and app.customDomainProven and checked == domain and missing:
        ends = now_iso(int(missing) / 1000 + MISSING_SECONDS)
        problem = f"The TXT record at {record_name(domain)} is missing. Restore it, or the domain is lost at {ends}."
    view.problem = problem or msgspec.UNSET
    return view


def list_records(app: App, domain: str, settings: Settings) -> list[DnsRecord]:
    return [
        DnsRecord("TXT", record_name(domain), verification_token(app, domain)),
        DnsRecord("CNAME", domain, host(app.name, "live", None, apps_host(settings))),
    ]


ROUTES = [account_router(set_domain, show_domain, verify_domain, clear_domain)]

"""The account API: the account's apps, their settings, limits and domains, and what their owners see of them."""

from typing import Annotated, Any

import msgspec
from litestar import Request, delete, get, patch, post, put
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody, QueryParameter

from gateway.accounts.app_limits import LimitsChange
from gateway.accounts.custom_domains import CustomDomains, DomainView, find_primary
from gateway.accounts.pacing import UNPACED
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.api.authentication import account_router
from gateway.api.bodies import decode_body
from gateway.api.resources import Caller, CallerAccess, OwnApp
from gateway.errors import (
    AppLimitReached,
    AppSuspended,
    BackboneUnavailable,
    DomainLimitReached,
    NameTaken,
    NotFound,
    RateLimited,
    RequestMalformed,
    TokensLimited,
)
from gateway.events.catalog import Finding
from gateway.ids import Time, now_iso
from gateway.inference.auth.trial_tokens import sign_test_token
from gateway.inference.auth.users import TokenCheck
from gateway.inference.spend.limits import AppSpend, LimitsView
from gateway.monitors.crashes import Crash, Crashes
from gateway.monitors.findings import MAX_OPEN, Findings
from gateway.operations.apps import AccountApp, AppChange, AppDetails, Apps, AppSettings, ChangedSettings, NewApp
from gateway.services import Injected
from gateway.validation import Host, UserToken

# -- apps and their settings ------------------------------------------------------------------------------------


@get("/apps", summary="List the account's apps, with their health")
async def list_apps(access: CallerAccess, apps: Injected[Apps]) -> list[AccountApp]:
    return await apps.list(access)


@post("/apps", errors=[RequestMalformed, NameTaken, AppLimitReached, RateLimited])
async def create_app(account: Caller, data: JSONBody[NewApp], apps: Injected[Apps]) -> AccountApp:
    """Create an app.

    Its name is the first part of its address. The plan limits the number of apps.
    """
    return await apps.create(account, data.name)


@get("/apps/{app:str}/settings", summary="Show the settings of an app", errors=[NotFound])
async def show_settings(account: Caller, own_app: OwnApp) -> AppSettings:
    return AppSettings.of(own_app)


@patch(
    "/apps/{app:str}",
    errors=[RequestMalformed, NotFound, RateLimited],
    opt={UNPACED: True},  # a slow backend must not delay the account's other requests
)
async def change_app(
    account: Caller, own_app: OwnApp, data: JSONBody[AppChange], apps: Injected[Apps]
) -> ChangedSettings:
    """Change an app's token verification, repository and build.

    A field that is left out stays as it is; null resets it. Repository and build apply from the next deploy on. A new
    `auth` is saved in any case, and checked with one call that takes at most five seconds: `authCheck` has the result.
    """
    return await apps.change(own_app, data)


class PresentedToken(msgspec.Struct, forbid_unknown_fields=True):
    token: UserToken


@post(
    "/apps/{app:str}/token-check",
    status_code=200,
    summary="Check a token of an app's user",
    errors=[RequestMalformed, NotFound, RateLimited, TokensLimited],
    opt={UNPACED: True},
)
async def check_token(
    account: Caller, own_app: OwnApp, data: JSONBody[PresentedToken], apps: Injected[Apps]
) -> TokenCheck:
    """Check a token like a request of the app's user, and explain why it would be refused.

    Nothing of the token is kept. An account can check 10 tokens per minute.
    """
    return await apps.check_token(own_app, data.token)


@delete("/apps/{app:str}", errors=[AppSuspended, NotFound, RateLimited])
async def delete_app(account: Caller, own_app: OwnApp, apps: Injected[Apps]) -> None:
    """Delete an app.

    This also deletes its hooks, variables, sources and queued deploys, and cannot be undone. A suspended app stays
    until an operator lifts its suspension, because otherwise its name could be used again at once.
    """
    await apps.delete(own_app)


@get("/apps/{app:str}", errors=[NotFound])
async def show_app(account: Caller, own_app: OwnApp, apps: Injected[Apps]) -> AppDetails:
    """Show an app, with its certificate and the history of its health."""
    return await apps.show(account, own_app)


@get("/apps/{app:str}/findings", errors=[RequestMalformed, NotFound])
async def list_findings(
    account: Caller,
    own_app: OwnApp,
    findings: Injected[Findings],
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_OPEN)] = 100,
) -> list[Finding]:
    """List an app's open security findings, most urgent first.

    Red findings come first, then those with the nearest deadline.
    """
    return (await findings.find_open(own_app))[:limit]


@get("/apps/{app:str}/crashes", errors=[NotFound])
async def list_crashes(account: Caller, own_app: OwnApp, crashes: Injected[Crashes]) -> list[Crash]:
    """List an app's last 20 crashes of 30 days, newest first."""
    return await crashes.list(own_app)


# -- limits and spend ------------------------------------------------------------------------------------------


@get("/apps/{app:str}/limits", summary="Show the limits of an app and its users", errors=[NotFound])
async def show_limits(account: Caller, own_app: OwnApp) -> LimitsView:
    return LimitsView.of(own_app.limits)


@put("/apps/{app:str}/limits", errors=[RequestMalformed, NotFound, BackboneUnavailable])
async def change_limits(
    account: Caller, own_app: OwnApp, data: JSONBody[LimitsChange], apps: Injected[Apps]
) -> LimitsView:
    """Change an app's limits.

    They narrow the account's limits, and apply within a second in every process.
    """
    return await apps.change_limits(account, own_app, data)


@get("/apps/{app:str}/spend", summary="Show an app's spend of today", errors=[NotFound])
async def show_spend(account: Caller, own_app: OwnApp, apps: Injected[Apps]) -> AppSpend:
    return await apps.read_spend(account, own_app)


# -- custom domains --------------------------------------------------------------------------------------------


class DomainChange(msgspec.Struct, forbid_unknown_fields=True):
    primary: bool = False


DOMAIN_CHANGE = {
    "application/json": {
        "schema": {"type": "object", "properties": {"primary": {"type": "boolean"}}, "additionalProperties": False}
    }
}


@get("/apps/{app:str}/domains", errors=[NotFound])
async def list_domains(account: Caller, own_app: OwnApp, custom_domains: Injected[CustomDomains]) -> list[DomainView]:
    """List an app's custom domains with the records that they need, the primary first."""
    return await custom_domains.list_domains(own_app)


@put(
    "/apps/{app:str}/domains/{domain:str}",
    body=DOMAIN_CHANGE,
    body_required=False,
    errors=[RequestMalformed, NotFound, NameTaken, DomainLimitReached, RateLimited],
)
async def put_domain(
    account: Caller,
    request: Request[Any, Any, State],
    own_app: OwnApp,
    domain: FromPath[str],
    custom_domains: Injected[CustomDomains],
) -> DomainView:
    """Add a custom domain to an app, or make it the primary.

    A new domain is not verified: create the records in its DNS, then verify it. An app has at most five domains. The
    first one is the primary until another one is. Once both are verified, GET and HEAD requests of the other domains
    are redirected to the primary with 308.
    """
    body = await request.body()
    change = decode_body(body, DomainChange) if body else DomainChange()
    return await custom_domains.put_domain(own_app, domain, primary=change.primary)


@post(
    "/apps/{app:str}/domains/{domain:str}/verify",
    status_code=200,
    errors=[RequestMalformed, NotFound, NameTaken, RateLimited],
    opt={UNPACED: True},  # a slow DNS must not delay the account's other requests
)
async def prove_domain(
    account: Caller, own_app: OwnApp, domain: FromPath[str], custom_domains: Injected[CustomDomains]
) -> DomainView:
    """Ask the DNS now whether the app's account owns a custom domain.

    10 times per minute. If the TXT record is there, the domain is verified; otherwise `problem` says what is wrong.
    """
    return await custom_domains.verify_domain(own_app, domain)


@delete("/apps/{app:str}/domains/{domain:str}", errors=[RequestMalformed, NotFound, RateLimited])
async def remove_domain(
    account: Caller, own_app: OwnApp, domain: FromPath[str], custom_domains: Injected[CustomDomains]
) -> None:
    """Remove a custom domain of an app.

    If it is the primary, the next one becomes the primary.
    """
    await custom_domains.remove_domain(own_app, domain)


# -- the primary domain ----------------------------------------------------------------------------------------


class NewDomain(msgspec.Struct, forbid_unknown_fields=True):
    domain: Host


@put("/apps/{app:str}/domain", errors=[RequestMalformed, NotFound, NameTaken, RateLimited])
async def set_domain(
    account: Caller, own_app: OwnApp, data: JSONBody[NewDomain], custom_domains: Injected[CustomDomains]
) -> DomainView:
    """Set an app's primary domain.

    A domain that the app does not have yet takes the place of the present primary. It is not verified: create the
    records in its DNS, then verify it.
    """
    return await custom_domains.set_primary(own_app, data.domain)


@get("/apps/{app:str}/domain", errors=[NotFound])
async def show_domain(account: Caller, own_app: OwnApp, custom_domains: Injected[CustomDomains]) -> DomainView:
    """Show an app's primary domain, and the records that it needs."""
    return await custom_domains.show_primary(own_app)


@post(
    "/apps/{app:str}/domain/verify",
    status_code=200,
    errors=[NotFound, NameTaken, RateLimited],
    opt={UNPACED: True},  # a slow DNS must not delay the account's other requests
)
async def verify_domain(account: Caller, own_app: OwnApp, custom_domains: Injected[CustomDomains]) -> DomainView:
    """Ask the DNS now whether the app's account owns the primary domain.

    10 times per minute. If the TXT record is there, the domain is verified; otherwise `problem` says what is wrong.
    """
    return await custom_domains.verify_domain(own_app, find_primary(own_app))


@delete("/apps/{app:str}/domain", errors=[NotFound, RateLimited])
async def clear_domain(account: Caller, own_app: OwnApp, custom_domains: Injected[CustomDomains]) -> None:
    """Remove an app's primary domain. The next one becomes the primary."""
    await custom_domains.remove_domain(own_app, find_primary(own_app))


# -- test tokens -----------------------------------------------------------------------------------------------


class IssuedToken(msgspec.Struct):
    token: str
    expiresAt: Time


@post("/apps/{app:str}/test-token", status_code=200, errors=[RequestMalformed, NotFound])
async def create_test_token(account: Caller, own_app: OwnApp, vault: Injected[Vault]) -> IssuedToken:
    """Create a test token.

    The app's inference accepts it for 10 minutes as a token of the user `owner`, without asking the app's backend. Its
    requests are limited and charged like those of any user.
    """
    try:
        created = sign_test_token(vault, own_app)
    except NoEncryptionKey as error:
        raise RequestMalformed(f"The operator of this service must {error}.") from None
    return IssuedToken(created.token, now_iso(created.expires_at))


ROUTES = [
    account_router(
        list_apps,
        create_app,
        show_settings,
        change_app,
        check_token,
        delete_app,
        show_app,
        list_findings,
        list_crashes,
        show_limits,
        change_limits,
        show_spend,
        list_domains,
        put_domain,
        prove_domain,
        remove_domain,
        set_domain,
        show_domain,
        verify_domain,
        clear_domain,
        create_test_token,
    )
]

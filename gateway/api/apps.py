"""The account API: the account's apps, their settings, limits and domains, and what their owners see of them."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from litestar import delete, get, patch, post, put
from litestar.params import FromPath, JSONBody, QueryParameter

from gateway.accounts.access import Access
from gateway.accounts.app_changes import AppChanges
from gateway.accounts.app_fields import NewAuth, check_auth, check_build, check_name
from gateway.accounts.custom_domains import MISSING_SECONDS, CustomDomains
from gateway.accounts.domain_names import (
    apps_host,
    check_own_domain,
    record_name,
    service_hosts,
    verification_token,
)
from gateway.accounts.pacing import UNPACED
from gateway.accounts.records import (
    BRANCH,
    PREVIEW,
    Account,
    App,
    AppLimits,
    Auth,
    Build,
    JwksAuth,
    Repository,
    Suspension,
    find_suspension,
    set_fields,
    to_nano_euro,
)
from gateway.accounts.registry import Registry
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.api.account import Spend
from gateway.api.authentication import account_router
from gateway.api.resources import Caller, CallerAccess, OwnApp, require_own_app
from gateway.deploys.addresses import host, live_url
from gateway.deploys.states import Deploys
from gateway.errors import (
    AppLimitReached,
    AppSuspended,
    BackboneUnavailable,
    NameTaken,
    NotFound,
    RateLimited,
    RequestMalformed,
    TokensLimited,
)
from gateway.events.catalog import Finding
from gateway.ids import Time, new_id, now_iso
from gateway.inference.auth.auth_checks import AuthCheck
from gateway.inference.auth.auth_checks import check_auth as check_verification
from gateway.inference.auth.trial_tokens import sign_test_token
from gateway.inference.auth.users import TokenCheck, Users
from gateway.inference.spend.limits import allowed_limits, limits_of
from gateway.keys import (
    app_spend_fields,
    certificate_key,
    domain_check_key,
    domain_lookups_key,
    partition_tag,
    spend_key,
)
from gateway.loops import Allowance
from gateway.monitors import health, history
from gateway.monitors.crashes import Crash, Crashes
from gateway.monitors.findings import MAX_OPEN, Findings
from gateway.monitors.health import MonitoredApp
from gateway.monitors.history import HealthDay
from gateway.operations.removal import Removal
from gateway.outbound import addresses
from gateway.outbound.addresses import CallFailed
from gateway.redis.client import Store
from gateway.services import Injected
from gateway.settings import NANO, Settings
from gateway.validation import Euro, Host, Rate, UserToken


class AccountApp(MonitoredApp, kw_only=True):
    """An app as its account sees it."""

    url: str
    customDomain: str | None
    customDomainVerified: bool
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET  # of the app, or else of its account


@get("/apps", summary="List the account's apps, with their health")
async def list_apps(
    access: CallerAccess, settings: Injected[Settings], store: Injected[Store], registry: Injected[Registry]
) -> list[AccountApp]:
    owned = [app for app in await registry.list_apps(access.account.id) if access.reaches(app.id)]
    return await view_apps(access.account, owned, settings, store)


async def view_apps(account: Account, apps: Sequence[App], settings: Settings, store: Store) -> list[AccountApp]:
    """Returns the apps as their account sees them, in the same order."""
    monitored = await health.read_monitored_apps(store, [(app, account) for app in apps])
    return [
        AccountApp(
            **msgspec.structs.asdict(state),
            url=live_url(app.name, settings),
            customDomain=app.customDomain,
            customDomainVerified=app.customDomainVerified,
            suspension=find_suspension(app, account) or msgspec.UNSET,
        )
        for app, state in zip(apps, monitored, strict=True)
    ]


class RepositoryView(msgspec.Struct):
    url: str
    branch: str


def view_repository(app: App) -> RepositoryView | None:
    return None if app.repository is None else RepositoryView(app.repository.url, app.repository.branch)


def view_auth(auth: Auth) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(auth).items() if name != "secret"}


def check_new_name(name: str) -> None:
    """Raises RequestMalformed for a name that is reserved for previews."""
    if PREVIEW.fullmatch(name):
        raise RequestMalformed("name: names that end in -preview are addresses of previews; choose another.")


def check_repository(repository: Repository | None, settings: Settings, vault: Vault) -> Repository | None:
    """Returns the repository to store, with user name and password encrypted and outside the URL.

    Raises RequestMalformed.
    """
    if repository is None:
        return None
    if not BRANCH.fullmatch(repository.branch):
        raise RequestMalformed("repository.branch: git does not accept this branch name; use one such as main.")
    if repository.credentials:
        raise RequestMalformed("repository: put user name and password into the URL: https://user:password@…")
    scheme, _, rest = repository.url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, _, host = authority.rpartition("@")
    url = f"{scheme}://{host}{slash}{path}"
    allow_private = settings.allow_private_addresses
    try:
        if not (allow_private and url.startswith("file:///")):
            addresses.check_url(url, allow_private=allow_private)
        sealed = vault.seal(credentials) if credentials else ""
    except (addresses.BlockedAddress, ValueError, NoEncryptionKey) as error:
        raise RequestMalformed(f"repository.url: {error}") from None
    return msgspec.structs.replace(repository, url=url, credentials=sealed)


# -- settings --------------------------------------------------------------------------------------------------


class NewApp(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]


class AppChange(msgspec.Struct, forbid_unknown_fields=True):
    """A field that is left out stays as it is; null resets it."""

    auth: NewAuth | msgspec.UnsetType | None = msgspec.UNSET
    repository: Repository | msgspec.UnsetType | None = msgspec.UNSET
    build: Build | msgspec.UnsetType | None = msgspec.UNSET


class OwnRepository(RepositoryView):
    hasCredentials: bool


class AppSettings(msgspec.Struct):
    """The account holder's settings of an app, without the auth secret and the repository's credentials."""

    auth: dict[str, Any]
    repository: OwnRepository | None
    build: Build | None


class ChangedSettings(AppSettings):
    authCheck: AuthCheck | msgspec.UnsetType = msgspec.UNSET  # if the request has `auth`


class PresentedToken(msgspec.Struct, forbid_unknown_fields=True):
    token: UserToken


def view_settings(app: App) -> AppSettings:
    view = None
    if (repository := app.repository) is not None:
        view = OwnRepository(repository.url, repository.branch, hasCredentials=bool(repository.credentials))
    return AppSettings(auth=view_auth(app.auth), repository=view, build=app.build)


@post("/apps", errors=[RequestMalformed, NameTaken, AppLimitReached, RateLimited])
async def create_app(
    account: Caller,
    data: JSONBody[NewApp],
    settings: Injected[Settings],
    store: Injected[Store],
    app_changes: Injected[AppChanges],
) -> AccountApp:
    """Create an app.

    Its name is the first part of its address. The plan limits the number of apps.
    """
    return await register_app(account, data.name, settings, store, app_changes)


async def register_app(
    account: Account, name: str, settings: Settings, store: Store, app_changes: AppChanges
) -> AccountApp:
    check_name(name)
    check_new_name(name)
    check_service_host(name, settings)
    # Unlike an operators' app, it has an id of its own: the next app with this name inherits nothing.
    app_id = new_id("app").replace("_", "-")
    app = App(id=app_id, name=name, account=account.id, createdAt=now_iso())
    await app_changes.create_app(app, settings.app_limits[account.plan])
    (view,) = await view_apps(account, [app], settings, store)
    return view


def check_service_host(name: str, settings: Settings) -> None:
    """Raises RequestMalformed for the name whose address would be the service's own."""
    if f"{name}.{apps_host(settings)}" in service_hosts(settings):
        raise RequestMalformed("name: this is the service's own address; choose another name.")


@get("/apps/{app:str}/settings", summary="Show the settings of an app", errors=[NotFound])
async def show_settings(account: Caller, own_app: OwnApp) -> AppSettings:
    return view_settings(own_app)


@patch(
    "/apps/{app:str}",
    errors=[RequestMalformed, NotFound, RateLimited],
    opt={UNPACED: True},  # a slow backend must not delay the account's other requests
)
async def change_app(
    account: Caller,
    own_app: OwnApp,
    data: JSONBody[AppChange],
    settings: Injected[Settings],
    vault: Injected[Vault],
    registry: Injected[Registry],
    app_changes: Injected[AppChanges],
    users: Injected[Users],
) -> ChangedSettings:
    """Change an app's token verification, repository and build.

    A field that is left out stays as it is; null resets it. Repository and build apply from the next deploy on. A new
    `auth` is saved in any case, and checked with one call that takes at most five seconds: `authCheck` has the result.
    """
    return await apply_change(account, own_app, data, settings, vault, registry, app_changes, users)


async def apply_change(
    account: Account,
    app: App,
    data: AppChange,
    settings: Settings,
    vault: Vault,
    registry: Registry,
    app_changes: AppChanges,
    users: Users,
) -> ChangedSettings:
    await app_changes.count_change(account.id)
    changes: dict[str, Any] = {}
    if data.auth is not msgspec.UNSET:
        allow_private = settings.allow_private_addresses
        changes["auth"] = check_auth(data.auth or JwksAuth(), vault, allow_private=allow_private, save_internal=True)
    if data.repository is not msgspec.UNSET:
        repository = check_repository(data.repository, settings, vault)
        changes["repository"] = keep_credentials(repository, app.repository)
    if data.build is not msgspec.UNSET:
        changes["build"] = check_build(data.build)
    if changes:
        app = await registry.change_app(app, lambda record: set_fields(record, changes))
    answer = ChangedSettings(**msgspec.structs.asdict(view_settings(app)))
    if data.auth is not msgspec.UNSET:
        allow_private = settings.allow_private_addresses
        answer.authCheck = await check_verification(users, app, allow_private=allow_private)
    return answer


@post(
    "/apps/{app:str}/token-check",
    status_code=200,
    summary="Check a token of an app's user",
    errors=[RequestMalformed, NotFound, RateLimited, TokensLimited],
    opt={UNPACED: True},
)
async def check_token(
    account: Caller,
    own_app: OwnApp,
    data: JSONBody[PresentedToken],
    app_changes: Injected[AppChanges],
    users: Injected[Users],
) -> TokenCheck:
    """Check a token like a request of the app's user, and explain why it would be refused.

    Nothing of the token is kept. An account can check 10 tokens per minute.
    """
    await app_changes.count_token_check(account.id)
    return await users.check(own_app, data.token.strip().encode())


def keep_credentials(repository: Repository | None, before: Repository | None) -> Repository | None:
    """Keeps the credentials of a repository whose URL stays the same, unless new ones are given.

    No response shows them, so a client cannot send them again.
    """
    if repository is None or before is None or repository.credentials or repository.url != before.url:
        return repository
    return msgspec.structs.replace(repository, credentials=before.credentials)


@delete("/apps/{app:str}", errors=[AppSuspended, NotFound, RateLimited])
async def delete_app(
    account: Caller,
    own_app: OwnApp,
    app_changes: Injected[AppChanges],
    removal: Injected[Removal],
) -> None:
    """Delete an app.

    This also deletes its hooks, variables, sources and queued deploys, and cannot be undone. A suspended app stays
    until an operator lifts its suspension, because otherwise its name could be used again at once.
    """
    await delete_own_app(own_app, app_changes, removal)


async def delete_own_app(app: App, app_changes: AppChanges, removal: Removal) -> None:
    if app.suspension is not None:
        raise AppSuspended("A suspended app can't be deleted; ask the operator to lift the suspension first.")
    await app_changes.count_change(app.account)
    await removal.remove(app)


# -- details ---------------------------------------------------------------------------------------------------


class CertificateView(msgspec.Struct):
    """The certificate of the custom domain at its last inspection."""

    domain: str
    expiresAt: Time
    issuer: str | None


class AppDetails(AccountApp, kw_only=True):
    """An app of the list, with further details."""

    createdAt: Time
    liveDeploy: str | None  # id of the deploy that the app serves
    repository: RepositoryView | None
    build: Build | None
    certificate: CertificateView | None
    healthDays: list[HealthDay]  # of 90 days, oldest first; the last one is today, in UTC


async def view_app_details(
    account: Account, app: App, settings: Settings, store: Store, deploys: Deploys
) -> AppDetails:
    [listed] = await view_apps(account, [app], settings, store)
    return AppDetails(
        **msgspec.structs.asdict(listed),
        createdAt=app.createdAt,
        liveDeploy=await deploys.find_live_id(app),
        repository=view_repository(app),
        build=app.build,
        certificate=await _read_certificate(app, store),
        healthDays=await history.read_history(store, account.id, app.id),
    )


async def _read_certificate(app: App, store: Store) -> CertificateView | None:
    key = certificate_key(partition_tag(app.account), app.id)
    domain, expires, issuer = await store.client.hmget(key, ["domain", "expiresAt", "issuer"])
    return CertificateView(domain, now_iso(int(expires) / 1000), issuer or None) if expires else None


@get("/apps/{app:str}", errors=[NotFound])
async def show_app(
    account: Caller,
    own_app: OwnApp,
    settings: Injected[Settings],
    store: Injected[Store],
    deploys: Injected[Deploys],
) -> AppDetails:
    """Show an app, with its certificate and the history of its health."""
    return await view_app_details(account, own_app, settings, store, deploys)


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


EURO = re.compile(r"(?:0|[1-9]\d{0,6})(?:\.\d{1,9})?", re.ASCII)


class LimitsView(msgspec.Struct):
    """The limits of an app and of its users; null for none. Money is in euro per UTC day."""

    dailyEuro: str | None
    userDailyEuro: str | None
    requestsPerMinute: int | None
    userRequestsPerMinute: int | None


class LimitsChange(msgspec.Struct, forbid_unknown_fields=True):
    """Null clears a limit; a limit that is left out stays. 0 refuses all requests."""

    dailyEuro: Euro | msgspec.UnsetType | None = msgspec.UNSET
    userDailyEuro: Euro | msgspec.UnsetType | None = msgspec.UNSET
    requestsPerMinute: Rate | msgspec.UnsetType | None = msgspec.UNSET
    userRequestsPerMinute: Rate | msgspec.UnsetType | None = msgspec.UNSET


class WidestLimits(msgspec.Struct):
    """The widest limits that can be set."""

    dailyEuro: str
    userDailyEuro: str
    requestsPerMinute: int
    userRequestsPerMinute: int


class AppSpend(Spend):
    """Nano-euro of a UTC day."""

    # `cap` is the narrower of the app's and the account's.
    widest: WidestLimits


@get("/apps/{app:str}/limits", summary="Show the limits of an app and its users", errors=[NotFound])
async def show_limits(account: Caller, own_app: OwnApp) -> LimitsView:
    return view_limits(own_app)


@put("/apps/{app:str}/limits", errors=[RequestMalformed, NotFound, BackboneUnavailable])
async def change_limits(
    account: Caller,
    own_app: OwnApp,
    data: JSONBody[LimitsChange],
    settings: Injected[Settings],
    registry: Injected[Registry],
) -> LimitsView:
    """Change an app's limits.

    They narrow the account's limits, and apply within a second in every process.
    """
    return await apply_limits(account, own_app, data, settings, registry)


async def apply_limits(
    account: Account, app: App, data: LimitsChange, settings: Settings, registry: Registry
) -> LimitsView:
    changes = {name: value for name, value in msgspec.structs.asdict(data).items() if value is not msgspec.UNSET}
    whose = "the plan" if account.own_cap is None else "the account"
    _check_limits(changes, _find_widest(app, account, settings), whose)
    return _view(await registry.change_limits(app, lambda limits: msgspec.structs.replace(limits, **changes)))


@get("/apps/{app:str}/spend", summary="Show an app's spend of today", errors=[NotFound])
async def show_spend(
    account: Caller,
    own_app: OwnApp,
    settings: Injected[Settings],
    store: Injected[Store],
) -> AppSpend:
    return await read_spend(account, own_app, settings, store)


async def read_spend(account: Account, app: App, settings: Settings, store: Store) -> AppSpend:
    day, fields = await store.today(), app_spend_fields(app.id)
    settled, reserved = await store.client.hmget(spend_key(account.id, day), fields)
    limits = limits_of(app, account.plan, settings, account.own_cap)
    cap = limits.cap if limits.app_cap is None else min(limits.cap, limits.app_cap)
    return AppSpend(day, int(settled or 0), int(reserved or 0), cap, _find_widest(app, account, settings))


def view_limits(app: App) -> LimitsView:
    return _view(app.limits or AppLimits())


def _view(limits: AppLimits) -> LimitsView:
    return LimitsView(**msgspec.structs.asdict(limits))


def _find_widest(app: App, account: Account, settings: Settings) -> WidestLimits:
    allowed = allowed_limits(app.allowedRates, account.plan, settings, account.own_cap)
    cap = format_euro(allowed.cap)
    return WidestLimits(cap, cap, allowed.requests, allowed.user_requests)


def _check_limits(changes: dict[str, str | int | None], widest: WidestLimits, whose: str) -> None:
    """Raises RequestMalformed, whose message names the widest limit."""
    for name, value in changes.items():
        limit = getattr(widest, name)
        if isinstance(value, str):
            check_euro(value, name, limit, whose)
        elif value is not None and not 0 <= value <= limit:
            raise RequestMalformed(f"{name}: from 0 to {limit} requests per minute.")


def check_euro(value: str, name: str, limit: str, whose: str) -> None:
    """Raises RequestMalformed unless the value is an amount in euro up to the limit."""
    if not EURO.fullmatch(value):
        raise RequestMalformed(f'{name}: an amount in euro as text, such as "0.02", with at most nine decimals.')
    if to_nano_euro(value) > to_nano_euro(limit):
        raise RequestMalformed(f"{name}: {whose} allows at most {limit} euro per day.")


def format_euro(nano: int) -> str:
    whole, fraction = divmod(nano, NANO)
    return f"{whole}.{f'{fraction:09d}'.rstrip('0').ljust(2, '0')}"


# -- the custom domain -----------------------------------------------------------------------------------------


LOOKUPS = Allowance(domain_lookups_key, 10, 60, "An app's domain can be verified {limit} times per minute")


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
async def set_domain(
    account: Caller,
    own_app: OwnApp,
    data: JSONBody[NewDomain],
    settings: Injected[Settings],
    store: Injected[Store],
    app_changes: Injected[AppChanges],
    custom_domains: Injected[CustomDomains],
) -> DomainView:
    """Set an app's custom domain.

    Another domain than before is not verified: create the records in its DNS, then verify it.
    """
    domain = check_own_domain(data.domain, settings)
    await app_changes.count_change(account.id)
    return await view_domain(await custom_domains.set_domain(own_app, domain), settings, store)


@get("/apps/{app:str}/domain", errors=[NotFound])
async def show_domain(
    access: CallerAccess,
    app: FromPath[str],
    settings: Injected[Settings],
    store: Injected[Store],
    registry: Injected[Registry],
) -> DomainView:
    """Show an app's custom domain, and the records that it needs."""
    return await view_domain(await require_domain(app, access, registry), settings, store)


@post(
    "/apps/{app:str}/domain/verify",
    status_code=200,
    errors=[NotFound, NameTaken, RateLimited],
    opt={UNPACED: True},  # a slow DNS must not delay the account's other requests
)
async def verify_domain(
    access: CallerAccess,
    app: FromPath[str],
    settings: Injected[Settings],
    store: Injected[Store],
    registry: Injected[Registry],
    custom_domains: Injected[CustomDomains],
) -> DomainView:
    """Ask the DNS now whether the app's account owns the custom domain.

    10 times per minute. If the TXT record is there, the domain is verified; otherwise `problem` says what is wrong.
    """
    found = await require_domain(app, access, registry)
    await LOOKUPS.count(store, found.account, found.id)
    try:
        problem = await custom_domains.find_problem(found)
    except CallFailed as error:
        problem = f"{error} Try again in a minute."
    if not problem:
        found = await custom_domains.verify(found)
    return await view_domain(found, settings, store, problem)


@delete("/apps/{app:str}/domain", errors=[NotFound, RateLimited])
async def clear_domain(
    access: CallerAccess,
    app: FromPath[str],
    registry: Injected[Registry],
    app_changes: Injected[AppChanges],
    custom_domains: Injected[CustomDomains],
) -> None:
    """Remove an app's custom domain."""
    found = await require_domain(app, access, registry)
    await app_changes.count_change(found.account)
    await custom_domains.clear_domain(found)


async def require_domain(app: str, access: Access, registry: Registry) -> App:
    """Returns the account's app, which has a custom domain. Raises NotFound."""
    found: App = await require_own_app(app, access, registry)
    if found.customDomain is None:
        raise NotFound("This app has no custom domain; set one first.")
    return found


async def view_domain(app: App, settings: Settings, store: Store, problem: str | None = None) -> DomainView:
    """Returns the view of an app with a domain. `problem` is what the DNS has just said; None if it was not asked."""
    domain, tag = app.customDomain or "", partition_tag(app.account)
    async with store.client.pipeline(transaction=False) as pipe:
        pipe.hmget(certificate_key(tag, app.id), ["domain", "expiresAt", "issuer"])
        pipe.hmget(domain_check_key(tag, app.id), ["domain", "missingSince"])
        (certified, expires, issuer), (checked, missing) = await pipe.execute()
    view = DomainView(domain, app.customDomainVerified, list_records(app, domain, settings))
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
        set_domain,
        show_domain,
        verify_domain,
        clear_domain,
        create_test_token,
    )
]

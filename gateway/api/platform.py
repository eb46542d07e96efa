"""The operators' API: accounts and apps, reports about them, suspensions, deploys, and the inference switch.

A suspension is part of the record, so that every process refuses requests within a second. Replacing an app's record
keeps it. The list for the hosts is written before (`suspended.py`), and deploys in progress are canceled after. Each
request can be repeated after an interruption.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from litestar import Request, delete, get, patch, post, put
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from gateway.accounts.api_keys import ListedKey
from gateway.accounts.app_fields import (
    NewAuth,
    NewRepository,
    check_auth,
    check_build,
    check_name,
    check_new_name,
    check_repository,
)
from gateway.accounts.domain_names import normalize_domain
from gateway.accounts.members import MemberView
from gateway.accounts.records import (
    Account,
    AllowedRates,
    App,
    Build,
    Domain,
    JwksAuth,
    Suspension,
    replace_domains,
)
from gateway.accounts.registry import Registry
from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.accounts.vault import Vault
from gateway.api.account import DeletionTime, NewKey
from gateway.api.audit import REPORTS, list_audit, note_before
from gateway.api.authentication import STREAMED, operator_router, stream_body
from gateway.api.bodies import SOURCE, declared_size
from gateway.api.deploys import PUBLISH_ERRORS, QueuedDeployId
from gateway.api.events import EventId
from gateway.api.resources import AnyAccount, AnyApp, require_app
from gateway.deploys.addresses import Branch, live_url
from gateway.deploys.environment import Environments
from gateway.deploys.records import Origin
from gateway.deploys.sources import read_format
from gateway.deploys.states import Deploys
from gateway.deploys.views import DeployView
from gateway.errors import (
    AppSuspended,
    DeployQuotaReached,
    NameTaken,
    NoDeployYet,
    NotFound,
    RequestMalformed,
    StorageUnavailable,
    TarballGone,
)
from gateway.events.catalog import AppCrashed, Kind
from gateway.ids import Time, now_iso
from gateway.inference.availability import InferenceState
from gateway.inference.providers import Providers, ProviderState
from gateway.inference.spend.limits import cap_of, check_euro
from gateway.keys import account_apps_key, spend_key
from gateway.monitors import health, scans
from gateway.monitors.crashes import Crashes
from gateway.monitors.findings import Findings, ScanCounts
from gateway.monitors.health import MonitoredApp
from gateway.operations.apps import AppDomain, RepositoryView, view_auth, view_domains, view_repository
from gateway.operations.directory import Directory, OwnedApp, Sort
from gateway.operations.leaving import Leaving
from gateway.operations.needs_attention import list_failed_deploys, list_unhealthy_apps
from gateway.operations.removal import Removal
from gateway.redis.client import Store
from gateway.services import Injected
from gateway.settings import Plan, Settings
from gateway.validation import Euro, ExitCode, Host, Id, read_name

R = TypeVar("R", App, Account)
OPERATOR = Origin(by="operator")
MAX_DAILY_EURO = "1000000"  # of an account
SCAN_BYTES = 16_777_216  # of one security scan
SCAN_BODY = {
    "application/json": {
        "schema": {"type": "object"},
        "example": {
            "findings": [
                {"cve": "CVE-2026-0001", "component": "example@1.0.0", "severity": "critical", "fixedIn": "1.0.1"}
            ]
        },
    }
}


# -- accounts ------------------------------------------------------------------------------------------------


class NewAccount(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    plan: Plan = "free"


class AccountChange(msgspec.Struct, forbid_unknown_fields=True):
    """A field that is left out stays as it is."""

    plan: Plan | msgspec.UnsetType = msgspec.UNSET
    dailyEuro: Euro | msgspec.UnsetType | None = msgspec.UNSET  # a cap in place of the plan's; null: the plan's


@post("/accounts", errors=[RequestMalformed])
async def create_account(data: JSONBody[NewAccount], registry: Injected[Registry]) -> NewKey:
    """Create an account."""
    account, api_key = await registry.create_account(read_name(data.name), data.plan)
    return NewKey(account.id, api_key)


@patch("/accounts/{account_id:str}", errors=[RequestMalformed, NotFound])
async def change_account(
    account_id: FromPath[str],
    data: JSONBody[AccountChange],
    request: Request[Any, Any, State],
    registry: Injected[Registry],
) -> Account:
    """Change an account's plan, or its daily cap.

    `dailyEuro` replaces the plan's cap, and stays when the plan changes. 0 refuses all requests; null means the plan's.
    """
    changes = {name: value for name, value in msgspec.structs.asdict(data).items() if value is not msgspec.UNSET}
    if isinstance(data.dailyEuro, str):
        check_euro(data.dailyEuro, "dailyEuro", MAX_DAILY_EURO, "the service")
    before, after = await registry.change_account(account_id, lambda record: msgspec.structs.replace(record, **changes))
    note_before(request, **{name: getattr(before, name) for name in changes})
    return after


# -- reports about an app ------------------------------------------------------------------------------------


class CrashReport(msgspec.Struct, forbid_unknown_fields=True):
    reason: Literal["exit", "oom"]
    exitCode: ExitCode | None = None


@post("/apps/{app:str}/crashes", status_code=202, opt=REPORTS, errors=[RequestMalformed, NotFound])
async def report_crash(
    app: FromPath[str], data: JSONBody[CrashReport], registry: Injected[Registry], crashes: Injected[Crashes]
) -> EventId:
    """Report a crash.

    For a watchdog that saw the app exit or run out of memory.
    """
    crash = AppCrashed(reason=data.reason, exitCode=data.exitCode, at=now_iso())
    return EventId(await crashes.report(await require_app(app, registry), crash))


@post(
    "/apps/{app:str}/findings",
    status_code=200,
    opt=REPORTS,
    request_max_body_size=SCAN_BYTES,
    body=SCAN_BODY,
    errors=[RequestMalformed, NotFound],
)
async def report_scan(any_app: AnyApp, request: Request[Any, Any, State], findings: Injected[Findings]) -> ScanCounts:
    """Report a complete security scan.

    Accepts four formats. Open findings that the scan does not name are closed.
    """
    return await findings.record_scan(any_app, scans.read_scan(await request.body()))


# -- sources and deploys -------------------------------------------------------------------------------------


class NewDeploy(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    branch: Branch | None = None


@put(
    "/apps/{app:str}/source",
    status_code=202,
    request_max_body_size=None,
    body=SOURCE,
    opt={STREAMED: True},
    errors=PUBLISH_ERRORS,
)
async def publish_source(
    any_app: AnyApp, request: Request[Any, Any, State], deploys: Injected[Deploys]
) -> QueuedDeployId:
    """Publish an app.

    The body is the app's source: a tar.gz, a zip, or one page, which becomes `index.html`. The service stores it and
    queues a live deploy. Without a Content-Type, the first bytes decide.
    """
    declared = read_format(request.headers.get("content-type", ""))
    return QueuedDeployId(
        await deploys.publish(
            any_app, stream_body(request), "operator", OPERATOR, size=declared_size(request), declared=declared
        )
    )


@delete("/apps/{app:str}/source", errors=[NotFound, StorageUnavailable])
async def clean_up_source(any_app: AnyApp, deploys: Injected[Deploys]) -> None:
    """Delete an app's stored sources."""
    await deploys.forget_sources(any_app)


@post(
    "/apps/{app:str}/deploys",
    status_code=202,
    errors=[RequestMalformed, AppSuspended, NotFound, NoDeployYet, TarballGone, DeployQuotaReached],
)
async def deploy_app(any_app: AnyApp, data: JSONBody[NewDeploy], deploys: Injected[Deploys]) -> QueuedDeployId:
    """Queue a deploy.

    Each branch has a preview of its own. Without a repository, it is built from the stored source.
    """
    if data.branch is not None and data.kind == "live":
        raise RequestMalformed("branch: only previews have a branch.")
    origin = msgspec.structs.replace(OPERATOR, branch=data.branch)
    return QueuedDeployId(await deploys.queue(any_app, "operator", origin, kind=data.kind))


# -- the inference switch ------------------------------------------------------------------------------------


class InferenceReport(InferenceState):
    providers: list[ProviderState]  # the preferred one first


class InferenceSwitch(msgspec.Struct, forbid_unknown_fields=True):
    enabled: bool | msgspec.UnsetType = msgspec.UNSET
    approved: bool | msgspec.UnsetType = msgspec.UNSET


@put("/inference", errors=[RequestMalformed])
async def switch_inference(
    data: JSONBody[InferenceSwitch], request: Request[Any, Any, State], providers: Injected[Providers]
) -> InferenceReport:
    """Set the inference switch and the approval.

    A field that is left out stays as it is.
    """
    changes = {name: value for name, value in msgspec.structs.asdict(data).items() if value is not msgspec.UNSET}
    before = providers.availability.describe(providers.availability.status())
    note_before(request, **{name: getattr(before, name) for name in changes})
    await providers.availability.change_switch(**changes)
    return await _report(providers)


@get("/inference")
async def show_inference(providers: Injected[Providers], request: Request[Any, Any, State]) -> InferenceReport:
    """Show the inference switch, the approval, the resulting status, and the providers in the order of preference."""
    return await _report(providers)


async def _report(providers: Providers) -> InferenceReport:
    state = providers.availability.describe(providers.availability.status())
    rows = await providers.describe(await providers.read_shares())
    return InferenceReport(**msgspec.structs.asdict(state), providers=rows)


class ProviderSwitch(msgspec.Struct, forbid_unknown_fields=True):
    enabled: bool


@put("/providers/{provider:str}", errors=[RequestMalformed, NotFound])
async def switch_provider(
    provider: FromPath[str],
    data: JSONBody[ProviderSwitch],
    request: Request[Any, Any, State],
    providers: Injected[Providers],
) -> ProviderState:
    """Let requests go to a provider, or keep new ones from it.

    Running streams go on. While all providers are disabled, inference is off.
    """
    if providers.find(provider) is None:
        raise NotFound("There is no provider with this name. GET /platform/inference lists them.")
    note_before(request, enabled=providers.availability.is_enabled(provider))
    await providers.availability.change_switch(providers={provider: data.enabled})
    rows = await providers.describe(await providers.read_shares())
    return next(row for row in rows if row.name == provider)


Search = Annotated[str, QueryParameter(max_length=200)]
Limit = Annotated[int, QueryParameter(ge=1, le=100)]
Cursor = Annotated[str | None, QueryParameter(min_length=1, max_length=100)]


# -- the directory ---------------------------------------------------------------------------------------------


class ListedAccount(msgspec.Struct, kw_only=True):
    id: str
    name: str
    plan: Plan
    createdAt: Time
    apps: int
    settled: int  # nano-euro today
    reserved: int
    cap: int
    dailyEuro: str | None  # the account's own cap, in place of the plan's
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET
    deletesAt: Time | msgspec.UnsetType = msgspec.UNSET  # of an account that is being deleted


class AccountPage(msgspec.Struct):
    accounts: list[ListedAccount]
    next: str | None  # the `before` of the next page; null: this is the last page


class OperatorsApp(MonitoredApp, kw_only=True):
    account: str
    accountName: str
    url: str
    createdAt: Time
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET  # of the app itself
    accountSuspension: Suspension | msgspec.UnsetType = msgspec.UNSET


class AppPage(msgspec.Struct):
    apps: list[OperatorsApp]
    next: str | None  # the `after` of the next page; null: this is the last page


class AccountDetails(ListedAccount, kw_only=True):
    deploysToday: int
    deploysPerDay: int
    appList: list[OperatorsApp]
    keys: list[ListedKey]
    members: list[MemberView]  # and those who are invited; empty without sign-in


class FailedDeploy(DeployView, kw_only=True):
    account: str


@get("/accounts", errors=[RequestMalformed])
async def list_accounts(
    settings: Injected[Settings],
    store: Injected[Store],
    directory: Injected[Directory],
    search: Search = "",
    limit: Limit = 50,
    before: Cursor = None,
    plan: FromQuery[Plan | None] = None,
    suspended: FromQuery[bool | None] = None,
    sort: FromQuery[Sort] = "newest",
) -> AccountPage:
    """List all accounts, newest first.

    `search` is part of a name or an id; `plan` and `suspended` filter too. A search or a filter reads 2,000 accounts at
    a time; `next` continues with the others. `sort=spend` lists only the accounts that spent something today, the
    highest spend first.
    """
    page = await directory.list_accounts(search.strip(), limit, before, plan=plan, suspended=suspended, sort=sort)
    return AccountPage(await _list_accounts(page.rows, await store.today(), settings, store), page.next)


@get("/accounts/{account_id:str}", errors=[NotFound])
async def show_account(
    account_id: FromPath[str],
    settings: Injected[Settings],
    store: Injected[Store],
    registry: Injected[Registry],
    deploys: Injected[Deploys],
) -> AccountDetails:
    """Show an account: its plan, spend, apps, API keys and members."""
    account = await registry.account(account_id)
    if account is None:
        raise NotFound
    day = await store.today()
    (listed,) = await _list_accounts([account], day, settings, store)
    apps = [(app, account) for app in await registry.list_apps(account_id)]
    return AccountDetails(
        **msgspec.structs.asdict(listed),
        deploysToday=await deploys.count_today(account_id, day),
        deploysPerDay=settings.deploy_quotas[account.plan],
        appList=await _list_apps(apps, settings, store),
        keys=await registry.list_keys(account_id),
        members=await registry.members.list_members(account_id),
    )


@get("/apps", errors=[RequestMalformed])
async def list_apps(
    settings: Injected[Settings],
    store: Injected[Store],
    registry: Injected[Registry],
    directory: Injected[Directory],
    search: Search = "",
    limit: Limit = 50,
    after: Cursor = None,
    only: Annotated[Literal["unhealthy"] | None, QueryParameter(name="health")] = None,
) -> AppPage:
    """List all apps, by id.

    `search` is part of a name, an id, a custom domain, or the account's name or id. A search reads 2,000 apps at a
    time; `next` continues with the others. `health=unhealthy` lists the apps that have been unhealthy the longest.
    """
    if only == "unhealthy":
        return AppPage(await _list_apps(await list_unhealthy_apps(registry, limit), settings, store), None)
    page = await directory.list_apps(search.strip(), limit, after)
    return AppPage(await _list_apps(page.rows, settings, store), page.next)


@get("/deploys/failed", errors=[RequestMalformed])
async def list_failed(store: Injected[Store], limit: Limit = 50) -> list[FailedDeploy]:
    """List the deploys of all accounts that failed in the last 24 hours, newest first.

    At most 100 from each of the 16 partitions.
    """
    failed = await list_failed_deploys(store, limit)
    return [FailedDeploy.of(deploy, account=deploy.account) for deploy in failed]


async def _list_accounts(
    accounts: Sequence[Account], day: str, settings: Settings, store: Store
) -> list[ListedAccount]:
    async with store.client.pipeline(transaction=False) as pipe:
        for account in accounts:
            pipe.scard(account_apps_key(account.id))
            pipe.hmget(spend_key(account.id, day), ["settled", "reserved"])
        answers = await pipe.execute() if accounts else []
    return [
        ListedAccount(
            id=account.id,
            name=account.name,
            plan=account.plan,
            createdAt=account.createdAt,
            apps=apps,
            settled=int(settled or 0),
            reserved=int(reserved or 0),
            cap=cap_of(account, settings),
            dailyEuro=account.dailyEuro,
            suspension=account.operators_suspension or msgspec.UNSET,
            deletesAt=account.deletion.deletesAt if account.deletion else msgspec.UNSET,
        )
        for account, apps, (settled, reserved) in zip(accounts, answers[::2], answers[1::2], strict=True)
    ]


async def _list_apps(apps: Sequence[OwnedApp], settings: Settings, store: Store) -> list[OperatorsApp]:
    monitored = await health.read_monitored_apps(store, apps)
    return [
        OperatorsApp(
            **msgspec.structs.asdict(state),
            account=account.id,
            accountName=account.name,
            url=live_url(app.name, settings),
            createdAt=app.createdAt,
            suspension=app.suspension or msgspec.UNSET,
            accountSuspension=account.operators_suspension or msgspec.UNSET,
        )
        for (app, account), state in zip(apps, monitored, strict=True)
    ]


# -- apps ------------------------------------------------------------------------------------------------------


class AppFields(msgspec.Struct, forbid_unknown_fields=True):
    """A complete record: fields that are left out are reset."""

    account: Id
    name: Id | None = None
    auth: NewAuth = JwksAuth()
    customDomain: Host | None = None
    customDomainVerified: bool = False
    repository: NewRepository | None = None
    build: Build | None = None
    limits: AllowedRates | None = None


class AppView(msgspec.Struct):
    """An app as operators see it, without the auth secret and the repository's credentials."""

    id: str
    name: str
    account: str
    auth: dict[str, Any]
    customDomain: str | None
    customDomainVerified: bool
    domains: list[AppDomain]
    repository: RepositoryView | None
    build: Build | None
    limits: AllowedRates | None
    createdAt: Time
    url: str
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET  # of the app itself


def view_app(app: App, settings: Settings) -> AppView:
    return AppView(
        id=app.id,
        name=app.name,
        account=app.account,
        auth=view_auth(app.auth),
        customDomain=app.customDomain,
        customDomainVerified=app.customDomainVerified,
        domains=view_domains(app),
        repository=view_repository(app),
        build=app.build,
        limits=app.allowedRates,
        createdAt=app.createdAt,
        url=live_url(app.name, settings),
        suspension=app.suspension or msgspec.UNSET,
    )


@put("/apps/{app:str}", errors=[RequestMalformed, NameTaken])
async def put_app(
    app: FromPath[str],
    data: JSONBody[AppFields],
    settings: Injected[Settings],
    vault: Injected[Vault],
    registry: Injected[Registry],
    environments: Injected[Environments],
) -> AppView:
    """Create or replace an app.

    `limits` replace the service's limits for this app, and can be wider. `customDomain` is the primary domain; without
    it, the app has no domain. The account holder's limits and other domains stay, and so does a suspension.
    """
    before = await registry.find_app(app)
    name = data.name or (before.name if before else app)
    await check_names(app, name, data.account, before, registry)
    record = App(
        id=before.id if before else app,
        name=name,
        account=data.account,
        auth=check_auth(data.auth, vault, allow_private=settings.allow_private_addresses),
        repository=check_repository(data.repository, vault, allow_private=settings.allow_private_addresses),
        build=check_build(data.build),
        allowedRates=None if data.limits == AllowedRates() else data.limits,
        createdAt=before.createdAt if before else now_iso(),
    )
    record = await registry.put_app(replace_domains(record, find_domains(data, before)), before)
    if before is not None and before.account != record.account:
        await environments.forget_variables(before)
    return view_app(record, settings)


async def check_names(app: str, name: str, account: str, before: App | None, registry: Registry) -> None:
    """Raises RequestMalformed for an invalid name or an unknown account, and NameTaken."""
    check_name(app)
    check_name(name)
    for new in {app, name} - ({before.id, before.name} if before else set()):
        check_new_name(new)
    if await registry.account(account) is None:
        raise RequestMalformed("account: there is no such account.")
    taken = await registry.find_app(name)
    if taken is not None and (before is None or taken.id != before.id):
        raise NameTaken


def find_domains(data: AppFields, before: App | None) -> list[Domain]:
    """Returns the app's domains: the operator's primary, and the account's others. Raises RequestMalformed."""
    if data.customDomain is None:
        return []
    name = normalize_domain(data.customDomain, "customDomain")
    former = before.domains if before is not None and before.account == data.account else ()
    # A put that repeats what the account holder has proven leaves it so: the TXT record stays necessary.
    proven = data.customDomainVerified and Domain(name, verified=True, proven=True) in former
    others = [domain for domain in former if domain.name != name]
    if len(others) == len(former):  # a new primary takes the place of the former one
        others = others[1:]
    return [Domain(name, data.customDomainVerified, proven), *others]


@get("/apps/{app:str}", errors=[NotFound])
async def get_app(any_app: AnyApp, settings: Injected[Settings]) -> AppView:
    """Show an app."""
    return view_app(any_app, settings)


@delete("/apps/{app:str}", errors=[NotFound])
async def delete_app(any_app: AnyApp, removal: Injected[Removal]) -> None:
    """Delete an app."""
    await removal.remove(any_app)


# -- suspensions -----------------------------------------------------------------------------------------------


REASON_LENGTH = 500  # characters
CANCELED = "the app was suspended"


class NewSuspension(msgspec.Struct, forbid_unknown_fields=True):
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=REASON_LENGTH)]


@put("/apps/{app:str}/suspension", errors=[RequestMalformed, NotFound])
async def suspend_app(
    app: FromPath[str],
    data: JSONBody[NewSuspension],
    request: Request[Any, Any, State],
    store: Injected[Store],
    registry: Injected[Registry],
    deploys: Injected[Deploys],
) -> Suspension:
    """Suspend an app.

    Its requests are refused within a second, its pages answer 503, and nothing of it runs or is deployed. Only its
    account and operators see the reason.
    """
    suspension = make_suspension(data)
    found = await require_app(app, registry)
    _note_before(request, found.suspension)
    await list_suspended(store, found.account, found.id)
    await registry.change_app(found, _with_suspension(suspension))
    await deploys.cancel_unfinished(found.account, found.id, CANCELED)
    return suspension


@delete("/apps/{app:str}/suspension", errors=[NotFound])
async def resume_app(
    any_app: AnyApp, request: Request[Any, Any, State], store: Injected[Store], registry: Injected[Registry]
) -> None:
    """Lift the suspension of an app.

    The app stays suspended while its account is.
    """
    _note_before(request, any_app.suspension)
    await registry.change_app(any_app, _with_suspension(None))
    await unlist_suspended(store, any_app.account, any_app.id)


@put("/accounts/{account_id:str}/suspension", errors=[RequestMalformed, NotFound])
async def suspend_account(
    any_account: AnyAccount,
    data: JSONBody[NewSuspension],
    request: Request[Any, Any, State],
    store: Injected[Store],
    registry: Injected[Registry],
    deploys: Injected[Deploys],
) -> Suspension:
    """Suspend an account.

    This suspends all its apps, including future ones. It can still read and change settings, but publishes nothing.
    """
    suspension = make_suspension(data)
    _note_before(request, any_account.operators_suspension)
    await list_suspended(store, any_account.id)
    await registry.change_account(any_account.id, _with_suspension(suspension))
    await deploys.cancel_unfinished(any_account.id, None, CANCELED)
    return suspension


@delete("/accounts/{account_id:str}", status_code=202, errors=[RequestMalformed, NotFound])
async def delete_account(
    account_id: FromPath[str], leaving: Injected[Leaving], now: FromQuery[bool] = False
) -> DeletionTime:
    """Delete an account, after the grace or now.

    Until `deletesAt`, its holder can keep it.
    """
    return DeletionTime(await leaving.begin(account_id, now=now))


@delete("/accounts/{account_id:str}/suspension", errors=[NotFound])
async def resume_account(
    any_account: AnyAccount, request: Request[Any, Any, State], store: Injected[Store], registry: Injected[Registry]
) -> None:
    """Lift the suspension of an account.

    Apps that are suspended themselves stay suspended.
    """
    _note_before(request, any_account.operators_suspension)
    _, account = await registry.change_account(any_account.id, _with_suspension(None))
    if account.deletion is None:
        await unlist_suspended(store, any_account.id)


def make_suspension(data: NewSuspension) -> Suspension:
    """Returns the suspension with the present time. Raises RequestMalformed for a blank reason."""
    if not (reason := data.reason.strip()):
        raise RequestMalformed(f"reason: 1 to {REASON_LENGTH} characters, which the owner sees.")
    return Suspension(reason, now_iso())


def _with_suspension(suspension: Suspension | None) -> Callable[[R], R]:
    """Returns the change that gives the record of an app or an account this suspension."""
    return partial(msgspec.structs.replace, suspension=suspension)


def _note_before(request: Request[Any, Any, State], suspension: Suspension | None) -> None:
    if suspension is not None:
        note_before(request, reason=suspension.reason)


ROUTES = [
    operator_router(
        create_account,
        change_account,
        report_crash,
        report_scan,
        publish_source,
        clean_up_source,
        deploy_app,
        switch_inference,
        show_inference,
        switch_provider,
        list_audit,
        list_accounts,
        show_account,
        list_apps,
        list_failed,
        put_app,
        get_app,
        delete_app,
        suspend_app,
        resume_app,
        suspend_account,
        resume_account,
        delete_account,
    )
]

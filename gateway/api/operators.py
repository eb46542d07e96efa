"""The operators' API: accounts, apps, and the inference switch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, delete, get, patch, post, put
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody
from litestar.router import Router

from gateway.accounts.records import (
    DOMAIN,
    SLUG,
    Account,
    App,
    Auth,
    BackendAuth,
    Build,
    JwksAuth,
    Repository,
    SecretAuth,
)
from gateway.accounts.vault import NoEncryptionKey
from gateway.api.account import NewKey
from gateway.api.authentication import OPERATOR_SECURITY, operators_only
from gateway.api.bodies import TARBALL
from gateway.api.deploys import QueuedDeployId
from gateway.api.webhooks import EventId
from gateway.errors import (
    DeployQuotaReached,
    NoDeployYet,
    NotFound,
    RequestMalformed,
    RequestTooLarge,
    TarballGone,
)
from gateway.events.catalogue import AppCrashed, Kind, Time
from gateway.ids import now_iso
from gateway.inference.availability import InferenceState
from gateway.monitors import scans
from gateway.monitors.findings import Counts
from gateway.outbound import addresses
from gateway.process import Gateway, Injected
from gateway.settings import Plan

SECRET_BYTES = 32
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


class PlanChange(msgspec.Struct, forbid_unknown_fields=True):
    plan: Plan


@post("/accounts", errors=[RequestMalformed])
async def create_account(data: JSONBody[NewAccount], gateway: Injected) -> NewKey:
    """Create an account."""
    account, api_key = await gateway.registry.create_account(data.name, data.plan)
    return NewKey(account.id, api_key)


@patch("/accounts/{account_id:str}", errors=[RequestMalformed, NotFound])
async def change_account(account_id: FromPath[str], data: JSONBody[PlanChange], gateway: Injected) -> Account:
    """Change an account's plan."""
    return await gateway.registry.change_plan(account_id, data.plan)


# -- apps ----------------------------------------------------------------------------------------------------


class AppFields(msgspec.Struct, forbid_unknown_fields=True):
    """The whole record: fields that are left out are reset."""

    account: str
    name: str | None = None
    auth: Auth = JwksAuth()
    customDomain: str | None = None
    customDomainVerified: bool = False
    repository: Repository | None = None
    build: Build | None = None


class RepositoryView(msgspec.Struct):
    url: str
    branch: str


class AppView(msgspec.Struct):
    """An app as operators see it: the auth secret and the repository's credentials are left out."""

    id: str
    name: str
    account: str
    auth: dict[str, Any]
    customDomain: str | None
    customDomainVerified: bool
    repository: RepositoryView | None
    build: Build | None
    createdAt: Time
    url: str


def app_view(app: App, gateway: Gateway) -> AppView:
    repository = app.repository
    return AppView(
        id=app.id,
        name=app.name,
        account=app.account,
        auth={name: value for name, value in msgspec.to_builtins(app.auth).items() if name != "secret"},
        customDomain=app.customDomain,
        customDomainVerified=app.customDomainVerified,
        repository=None if repository is None else RepositoryView(repository.url, repository.branch),
        build=app.build,
        createdAt=app.createdAt,
        url=f"https://{app.name}.{gateway.settings.apps_domain}",
    )


async def require_app(app: str, gateway: Gateway) -> App:
    """Raises NotFound."""
    record: App | None = await gateway.registry.find(app)
    if record is None:
        raise NotFound
    return record


@put("/apps/{app:str}", errors=[RequestMalformed])
async def put_app(app: FromPath[str], data: JSONBody[AppFields], gateway: Injected) -> AppView:
    """Create or replace an app."""
    registry = gateway.registry
    before = await registry.find(app)
    name = data.name or (before.name if before else app)
    if not SLUG.fullmatch(app) or not SLUG.fullmatch(name):
        raise RequestMalformed(
            "name: an app's name is a DNS label: 1 to 63 of a-z, 0-9 and single hyphens, none at the ends."
        )
    if await registry.account(data.account) is None:
        raise RequestMalformed("account: there is no such account.")
    taken = await registry.find(name)
    if taken is not None and (before is None or taken.id != before.id):
        raise RequestMalformed("name: another app has this name.")
    record = App(
        id=before.id if before else app,
        name=name,
        account=data.account,
        auth=check_auth(data.auth, gateway),
        customDomain=check_domain(data.customDomain),
        customDomainVerified=data.customDomainVerified,
        repository=check_repository(data.repository, gateway),
        build=data.build,
        createdAt=before.createdAt if before else now_iso(),
    )
    await registry.put_app(record, before)
    return app_view(record, gateway)


def check_auth(auth: Auth, gateway: Gateway) -> Auth:
    """Returns the record to store, with its secret sealed. Raises RequestMalformed."""
    if isinstance(auth, SecretAuth):
        if len(auth.secret.encode()) < SECRET_BYTES:
            raise RequestMalformed(f"auth.secret: at least {SECRET_BYTES} bytes.")
        try:
            return msgspec.structs.replace(auth, secret=gateway.vault.seal(auth.secret))
        except NoEncryptionKey as error:
            raise RequestMalformed(f"auth.secret: {error}.") from None
    if isinstance(auth, BackendAuth) or auth.url:
        try:
            addresses.check_url(auth.url, allow_private=gateway.settings.allow_private_addresses)
        except (addresses.BlockedAddress, ValueError) as error:
            raise RequestMalformed(f"auth.url: {error}") from None
    return auth


def check_repository(repository: Repository | None, gateway: Gateway) -> Repository | None:
    """Returns the record to store: user name and password leave the URL and are sealed. Raises RequestMalformed."""
    if repository is None:
        return None
    if repository.credentials:
        raise RequestMalformed("repository: put user name and password into the url: https://user:password@…")
    scheme, _, rest = repository.url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, _, host = authority.rpartition("@")
    url = f"{scheme}://{host}{slash}{path}"
    allow_private = gateway.settings.allow_private_addresses
    try:
        if not (allow_private and url.startswith("file:///")):
            addresses.check_url(url, allow_private=allow_private)
        sealed = gateway.vault.seal(credentials) if credentials else ""
    except (addresses.BlockedAddress, ValueError, NoEncryptionKey) as error:
        raise RequestMalformed(f"repository.url: {error}") from None
    return msgspec.structs.replace(repository, url=url, credentials=sealed)


def check_domain(domain: str | None) -> str | None:
    """Returns the domain in lower case without a final dot. Raises RequestMalformed."""
    if domain is None:
        return None
    if not DOMAIN.fullmatch(domain := domain.lower().rstrip(".")):
        raise RequestMalformed("customDomain: a host name such as app.example.com, without scheme or port.")
    return domain


@get("/apps/{app:str}", errors=[NotFound])
async def get_app(app: FromPath[str], gateway: Injected) -> AppView:
    """Show an app."""
    return app_view(await require_app(app, gateway), gateway)


@delete("/apps/{app:str}", errors=[NotFound])
async def delete_app(app: FromPath[str], gateway: Injected) -> None:
    """Delete an app."""
    record = await require_app(app, gateway)
    await gateway.registry.delete_app(record)
    await gateway.deploys.forget(record)


# -- reports about an app ------------------------------------------------------------------------------------


class Crash(msgspec.Struct, forbid_unknown_fields=True):
    reason: Literal["exit", "oom"]
    exitCode: int | None = None


@post("/apps/{app:str}/crashes", status_code=202, errors=[RequestMalformed, NotFound])
async def report_crash(app: FromPath[str], data: JSONBody[Crash], gateway: Injected) -> EventId:
    """Report a crash.

    For a watchdog that saw the app end, or run out of memory.
    """
    crash = AppCrashed(reason=data.reason, exitCode=data.exitCode, at=now_iso())
    return EventId(await gateway.webhooks.emit(await require_app(app, gateway), crash))


@post(
    "/apps/{app:str}/findings",
    status_code=200,
    request_max_body_size=SCAN_BYTES,
    body=SCAN_BODY,
    errors=[RequestMalformed, NotFound],
)
async def take_in_scan(app: FromPath[str], request: Request[Any, Any, State], gateway: Injected) -> Counts:
    """Report a complete security scan.

    Takes one of four formats. Open findings that the scan does not name are closed.
    """
    return await gateway.findings.take_in(await require_app(app, gateway), scans.read(await request.body()))


# -- sources and deploys -------------------------------------------------------------------------------------


class NewDeploy(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    branch: Annotated[str, msgspec.Meta(min_length=1, max_length=250)] | None = None


@put(
    "/apps/{app:str}/source",
    status_code=202,
    request_max_body_size=None,
    body=TARBALL,
    errors=[RequestMalformed, NotFound, RequestTooLarge, DeployQuotaReached],
)
async def publish_source(app: FromPath[str], request: Request[Any, Any, State], gateway: Injected) -> QueuedDeployId:
    """Publish an app.

    The body is a tar.gz of the app's source. The service stores it and queues a live deploy.
    """
    record = await require_app(app, gateway)
    return QueuedDeployId(await gateway.deploys.publish(record, request.stream(), "operator"))


@delete("/apps/{app:str}/source", errors=[NotFound])
async def clean_up_source(app: FromPath[str], gateway: Injected) -> None:
    """Delete an app's stored sources."""
    await gateway.deploys.forget_sources(await require_app(app, gateway))


@post(
    "/apps/{app:str}/deploys",
    status_code=202,
    errors=[RequestMalformed, NotFound, NoDeployYet, TarballGone, DeployQuotaReached],
)
async def deploy_app(app: FromPath[str], data: JSONBody[NewDeploy], gateway: Injected) -> QueuedDeployId:
    """Queue a deploy."""
    record = await require_app(app, gateway)
    if data.branch is not None and (data.kind == "live" or record.repository is None):
        raise RequestMalformed("branch: only previews of apps with a repository have a branch.")
    return QueuedDeployId(await gateway.deploys.queue(record, "operator", kind=data.kind, branch=data.branch))


# -- the inference switch ------------------------------------------------------------------------------------


class InferenceSwitch(msgspec.Struct, forbid_unknown_fields=True):
    enabled: bool | None = None
    approved: bool | None = None


@put("/inference", errors=[RequestMalformed])
async def switch_inference(data: JSONBody[InferenceSwitch], gateway: Injected) -> InferenceState:
    """Set the inference switch and the approval."""
    status = await gateway.availability.set(enabled=data.enabled, approved=data.approved)
    return gateway.availability.describe(status)


@get("/inference")
async def show_inference(gateway: Injected, request: Request[Any, Any, State]) -> InferenceState:
    """The inference switch, the approval, and the resulting status."""
    return gateway.availability.describe(gateway.availability.status())


ROUTES = [
    Router(
        path="/platform",
        route_handlers=[
            create_account,
            change_account,
            put_app,
            get_app,
            delete_app,
            report_crash,
            take_in_scan,
            publish_source,
            clean_up_source,
            deploy_app,
            switch_inference,
            show_inference,
        ],
        guards=[operators_only],
        tags=["Platform"],
        security=OPERATOR_SECURITY,
    )
]

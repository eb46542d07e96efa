"""The operators' surface: accounts, apps, and the inference switch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, delete, get, patch, post, put
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.response import File
from litestar.router import Router

from gateway.accounts.credentials import digest
from gateway.accounts.records import DOMAIN, SLUG, App, Auth, BackendAuth, Build, JwksAuth, Repository, SecretAuth
from gateway.accounts.sessions import OPERATOR
from gateway.accounts.vault import NoEncryptionKey
from gateway.api.account import bearer, is_operator
from gateway.deploys.states import StaleDeploy
from gateway.errors import NotFound, RequestMalformed, Unauthorized
from gateway.events.catalogue import AppCrashed, Kind, Phase
from gateway.ids import now_iso
from gateway.monitors import scans
from gateway.monitors.findings import Counts
from gateway.outbound import addresses
from gateway.process import Gateway, Injected

Plan = Literal["free", "starter", "maker", "max"]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
SECRET_BYTES = 32
SCAN_BYTES = 16_777_216  # of one security scan


async def operators_only(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """The operator token, or a session that was opened with it."""
    gateway = connection.app.dependencies["gateway"].dependency()  # type: ignore[union-attr]
    if "authorization" in connection.headers:
        allowed = is_operator(gateway, bearer(connection))  # type: ignore[arg-type]
    else:
        subject = await gateway.sessions.subject_of(connection, OPERATOR)
        allowed = subject is not None and subject == operator_subject(gateway)
    if not allowed:
        raise Unauthorized


def operator_subject(gateway: Gateway) -> str:
    """Whom a session at /ops stands for: it ends with the token that it was opened with."""
    return f"operator:{digest(gateway.settings.operator_token)[:32]}"


class NewAccount(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    plan: Plan = "free"


class PlanChange(msgspec.Struct, forbid_unknown_fields=True):
    plan: Plan


class AppFields(msgspec.Struct, forbid_unknown_fields=True):
    """The whole record: what is left out is unset."""

    account: str
    name: str | None = None
    auth: Auth = JwksAuth()
    customDomain: str | None = None
    customDomainVerified: bool = False
    repository: Repository | None = None
    build: Build | None = None


class Crash(msgspec.Struct, forbid_unknown_fields=True):
    reason: Literal["exit", "oom"]
    exitCode: int | None = None


class NewDeploy(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    branch: Annotated[str, msgspec.Meta(min_length=1, max_length=250)] | None = None


class PhaseReport(msgspec.Struct, forbid_unknown_fields=True):
    phase: Phase
    ok: bool
    reason: str | None = None


class InferenceSwitch(msgspec.Struct, forbid_unknown_fields=True):
    enabled: bool | None = None
    approved: bool | None = None


@post("/accounts")
async def create_account(data: JSONBody[NewAccount], gateway: Injected) -> dict[str, str]:
    account, api_key = await gateway.registry.create_account(data.name, data.plan)
    return {"id": account.id, "apiKey": api_key}


@patch("/accounts/{account_id:str}")
async def change_account(account_id: FromPath[str], data: JSONBody[PlanChange], gateway: Injected) -> dict[str, Any]:
    changed: dict[str, Any] = msgspec.to_builtins(await gateway.registry.change_plan(account_id, data.plan))
    return changed


@put("/apps/{app:str}")
async def put_app(app: FromPath[str], data: JSONBody[AppFields], gateway: Injected) -> dict[str, Any]:
    registry = gateway.registry
    before: App | None = await registry.find(app)
    name = data.name or (before.name if before else app)
    if not SLUG.fullmatch(app) or not SLUG.fullmatch(name):
        raise RequestMalformed(
            "name: an app's name is a DNS label: 1 to 63 of a-z, 0-9 and single hyphens, none at the ends."
        )
    if await registry.account(data.account) is None:
        raise RequestMalformed("account: there is no such account.")
    taken: App | None = await registry.find(name)
    if taken is not None and (before is None or taken.id != before.id):
        raise RequestMalformed("name: another app has this name.")
    record = App(
        id=before.id if before else app,
        name=name,
        account=data.account,
        auth=_checked_auth(data.auth, gateway),
        customDomain=_checked_domain(data.customDomain),
        customDomainVerified=data.customDomainVerified,
        repository=_checked_repository(data.repository, gateway),
        build=data.build,
        createdAt=before.createdAt if before else now_iso(),
    )
    await registry.put_app(record, before)
    return shown(record, gateway)


def _checked_auth(auth: Auth, gateway: Gateway) -> Auth:
    allow_private = gateway.settings.allow_private_addresses
    if isinstance(auth, SecretAuth):
        if len(auth.secret.encode()) < SECRET_BYTES:
            raise RequestMalformed(f"auth.secret: at least {SECRET_BYTES} bytes.")
        try:
            return msgspec.structs.replace(auth, secret=gateway.vault.seal(auth.secret))
        except NoEncryptionKey as error:
            raise RequestMalformed(f"auth.secret: {error}.") from None
    if isinstance(auth, BackendAuth) or auth.url:
        try:
            addresses.check_url(auth.url, allow_private=allow_private)
        except (addresses.BlockedAddress, ValueError) as error:
            raise RequestMalformed(f"auth.url: {error}") from None
    return auth


def _checked_repository(repository: Repository | None, gateway: Gateway) -> Repository | None:
    """Its user name and password are kept apart, and sealed."""
    if repository is None:
        return None
    if repository.credentials:
        raise RequestMalformed("repository: user name and password belong into the url: https://user:password@…")
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


def _checked_domain(domain: str | None) -> str | None:
    if domain is None:
        return None
    if not DOMAIN.fullmatch(domain := domain.lower().rstrip(".")):
        raise RequestMalformed("customDomain: a host name such as app.example.com, without scheme or port.")
    return domain


def shown(app: App, gateway: Gateway) -> dict[str, Any]:
    """The record without what must not be readable."""
    record: dict[str, Any] = msgspec.to_builtins(app)
    fields = {f: record.get(f) for f in App.__struct_fields__}
    if app.repository is not None:
        fields["repository"] = {"url": app.repository.url, "branch": app.repository.branch}
    fields["auth"] = {k: v for k, v in msgspec.to_builtins(app.auth).items() if k != "secret"}
    fields["customDomainVerified"] = app.customDomainVerified
    fields["url"] = f"https://{app.name}.{gateway.settings.apps_domain}"
    return fields


async def _existing(app: str, gateway: Gateway) -> App:
    record: App | None = await gateway.registry.find(app)
    if record is None:
        raise NotFound
    return record


@get("/apps/{app:str}")
async def get_app(app: FromPath[str], gateway: Injected) -> dict[str, Any]:
    return shown(await _existing(app, gateway), gateway)


@delete("/apps/{app:str}")
async def delete_app(app: FromPath[str], gateway: Injected) -> None:
    record = await _existing(app, gateway)
    await gateway.registry.delete_app(record)
    await gateway.deploys.forget_app(record)


@post("/apps/{app:str}/crashes", status_code=202)
async def report_crash(app: FromPath[str], data: JSONBody[Crash], gateway: Injected) -> dict[str, str]:
    """A watchdog saw an app end, or run out of memory."""
    crash = AppCrashed(reason=data.reason, exitCode=data.exitCode, at=now_iso())
    return {"id": await gateway.webhooks.emit(await _existing(app, gateway), crash)}


@post("/apps/{app:str}/findings", status_code=200, request_max_body_size=SCAN_BYTES)
async def take_in_scan(app: FromPath[str], request: Request[Any, Any, State], gateway: Injected) -> Counts:
    """A whole security scan of the app, in one of four formats; what it does not name is closed."""
    return await gateway.findings.take_in(await _existing(app, gateway), scans.read(await request.body()))


@put("/apps/{app:str}/source", status_code=202, request_max_body_size=None)
async def publish_source(app: FromPath[str], request: Request[Any, Any, State], gateway: Injected) -> dict[str, str]:
    """A tar.gz of the app's source: it is stored, and a live deploy of it is queued."""
    return {"deployId": await gateway.deploys.publish(await _existing(app, gateway), request.stream(), "operator")}


@delete("/apps/{app:str}/source")
async def clean_up_source(app: FromPath[str], gateway: Injected) -> None:
    await gateway.deploys.forget_sources(await _existing(app, gateway))


@post("/apps/{app:str}/deploys", status_code=202)
async def deploy_app(app: FromPath[str], data: JSONBody[NewDeploy], gateway: Injected) -> dict[str, str]:
    record = await _existing(app, gateway)
    if data.branch is not None and (data.kind == "live" or record.repository is None):
        raise RequestMalformed("branch: only a preview of an app with a repository is of a branch.")
    return {"deployId": await gateway.deploys.queue(record, "operator", kind=data.kind, branch=data.branch)}


@get("/deploys")
async def list_queued(
    gateway: Injected, queued: Annotated[Literal["queued"], QueryParameter(name="state")] = "queued"
) -> list[dict[str, Any]]:
    """For an outside engine: the deploys that wait, with what it needs to build them."""
    shown = []
    for deploy in await gateway.deploys.list_queued():
        app = await gateway.registry.find(deploy.appId)
        build: dict[str, Any] = {}
        if app is not None and app.account == deploy.account:
            repository = app.repository
            build = {
                "repository": repository and {"url": repository.clone_url(gateway.vault), "branch": repository.branch},
                "build": app.build,
            }
        url = f"{gateway.settings.base_url}/platform/deploys/{deploy.id}/source" if deploy.source else None
        more = {"appId": deploy.appId, "branch": deploy.branch, "source": url, **msgspec.to_builtins(build)}
        shown.append({**deploy.shown(), **more})
    return shown


@get("/deploys/{deploy_id:str}/source", media_type="application/gzip")
async def fetch_source(deploy_id: FromPath[str], gateway: Injected) -> File:
    """The tar.gz that a deploy is built from, when it is not from a repository."""
    deploy = await gateway.deploys.find(deploy_id)
    if deploy is None or not deploy.source or not (path := gateway.deploys.source_path(deploy)).exists():
        raise NotFound
    return File(path, filename="source.tar.gz", media_type="application/gzip")


@post("/deploys/{deploy_id:str}/phases", status_code=200)
async def report_phase(deploy_id: FromPath[str], data: JSONBody[PhaseReport], gateway: Injected) -> dict[str, Any]:
    """An outside engine ended a phase of a deploy; the record after it."""
    if gateway.settings.deploy_engine != "external":
        raise RequestMalformed("Deploys are built here; set GATEWAY_DEPLOY_ENGINE=external to report their phases.")
    deploy = await gateway.deploys.find(deploy_id)
    if deploy is None:
        raise NotFound
    try:
        after = await gateway.deploys.advance(deploy, data.phase, data.ok, data.reason or "")
    except StaleDeploy:
        raise RequestMalformed("phase: the deploy has moved on; read its state and go on from there.") from None
    return after.shown()


@put("/inference")
async def switch_inference(data: JSONBody[InferenceSwitch], gateway: Injected) -> dict[str, Any]:
    status = await gateway.availability.set(enabled=data.enabled, approved=data.approved)
    return gateway.availability.describe(status)


@get("/inference")
async def show_inference(gateway: Injected, request: Request[Any, Any, State]) -> dict[str, Any]:
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
            list_queued,
            fetch_source,
            report_phase,
            switch_inference,
            show_inference,
        ],
        guards=[operators_only],
    )
]

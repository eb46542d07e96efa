"""The operators' API: accounts, reports about apps, their sources and deploys, and the inference switch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, delete, get, patch, post, put
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.accounts.limit_routes import check_euro
from gateway.accounts.operator_routes import require_app
from gateway.accounts.records import Account
from gateway.accounts.routes import NewKey
from gateway.bounds import Euro, ExitCode
from gateway.deploys.routes import PUBLISH_ERRORS, QueuedDeployId
from gateway.deploys.sources import read_format
from gateway.errors import (
    AppSuspended,
    DeployQuotaReached,
    NoDeployYet,
    NotFound,
    RequestMalformed,
    StorageUnavailable,
    TarballGone,
)
from gateway.events.catalog import AppCrashed, Kind
from gateway.events.routes import EventId
from gateway.http.audit import REPORTS, list_audit, note_before
from gateway.http.authentication import operator_router
from gateway.http.bodies import SOURCE, declared_size
from gateway.ids import now_iso
from gateway.inference.availability import InferenceState
from gateway.monitors import scans
from gateway.monitors.findings import ScanCounts
from gateway.operations import directory_routes, usage_routes
from gateway.process import Injected
from gateway.settings import Plan

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
async def create_account(data: JSONBody[NewAccount], gateway: Injected) -> NewKey:
    """Create an account."""
    account, api_key = await gateway.registry.create_account(data.name, data.plan)
    return NewKey(account.id, api_key)


@patch("/accounts/{account_id:str}", errors=[RequestMalformed, NotFound])
async def change_account(
    account_id: FromPath[str], data: JSONBody[AccountChange], request: Request[Any, Any, State], gateway: Injected
) -> Account:
    """Change an account's plan, or its daily cap.

    `dailyEuro` replaces the plan's cap, and stays when the plan changes. 0 refuses all requests; null means the plan's.
    """
    changes = {name: value for name, value in msgspec.structs.asdict(data).items() if value is not msgspec.UNSET}
    if isinstance(data.dailyEuro, str):
        check_euro(data.dailyEuro, "dailyEuro", MAX_DAILY_EURO, "the service")
    before, after = await gateway.registry.change_account(
        account_id, lambda record: msgspec.structs.replace(record, **changes)
    )
    note_before(request, **{name: getattr(before, name) for name in changes})
    return after


# -- reports about an app ------------------------------------------------------------------------------------


class CrashReport(msgspec.Struct, forbid_unknown_fields=True):
    reason: Literal["exit", "oom"]
    exitCode: ExitCode | None = None


@post("/apps/{app:str}/crashes", status_code=202, opt=REPORTS, errors=[RequestMalformed, NotFound])
async def report_crash(app: FromPath[str], data: JSONBody[CrashReport], gateway: Injected) -> EventId:
    """Report a crash.

    For a watchdog that saw the app exit or run out of memory.
    """
    crash = AppCrashed(reason=data.reason, exitCode=data.exitCode, at=now_iso())
    return EventId(await gateway.crashes.report(await require_app(app, gateway), crash))


@post(
    "/apps/{app:str}/findings",
    status_code=200,
    opt=REPORTS,
    request_max_body_size=SCAN_BYTES,
    body=SCAN_BODY,
    errors=[RequestMalformed, NotFound],
)
async def report_scan(app: FromPath[str], request: Request[Any, Any, State], gateway: Injected) -> ScanCounts:
    """Report a complete security scan.

    Accepts four formats. Open findings that the scan does not name are closed.
    """
    return await gateway.findings.record_scan(await require_app(app, gateway), scans.read_scan(await request.body()))


# -- sources and deploys -------------------------------------------------------------------------------------


class NewDeploy(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    # No option for git, and no control characters. With other invalid names, the deploy fails.
    branch: Annotated[str, msgspec.Meta(max_length=250, pattern=r"^(?![\s\S]*[\x00-\x1f\x7f])[^-]")] | None = None


@put(
    "/apps/{app:str}/source",
    status_code=202,
    request_max_body_size=None,
    body=SOURCE,
    errors=PUBLISH_ERRORS,
)
async def publish_source(app: FromPath[str], request: Request[Any, Any, State], gateway: Injected) -> QueuedDeployId:
    """Publish an app.

    The body is the app's source: a tar.gz, a zip, or one page, which becomes `index.html`. The service stores it and
    queues a live deploy. Without a Content-Type, the first bytes decide.
    """
    record = await require_app(app, gateway)
    declared = read_format(request.headers.get("content-type", ""))
    return QueuedDeployId(
        await gateway.deploys.publish(
            record, request.stream(), "operator", size=declared_size(request), declared=declared
        )
    )


@delete("/apps/{app:str}/source", errors=[NotFound, StorageUnavailable])
async def clean_up_source(app: FromPath[str], gateway: Injected) -> None:
    """Delete an app's stored sources."""
    await gateway.deploys.forget_sources(await require_app(app, gateway))


@post(
    "/apps/{app:str}/deploys",
    status_code=202,
    errors=[RequestMalformed, AppSuspended, NotFound, NoDeployYet, TarballGone, DeployQuotaReached],
)
async def deploy_app(app: FromPath[str], data: JSONBody[NewDeploy], gateway: Injected) -> QueuedDeployId:
    """Queue a deploy.

    Each branch has a preview of its own. Without a repository, it is built from the stored source.
    """
    record = await require_app(app, gateway)
    if data.branch is not None and data.kind == "live":
        raise RequestMalformed("branch: only previews have a branch.")
    return QueuedDeployId(await gateway.deploys.queue(record, "operator", kind=data.kind, branch=data.branch))


# -- the inference switch ------------------------------------------------------------------------------------


class InferenceSwitch(msgspec.Struct, forbid_unknown_fields=True):
    enabled: bool | msgspec.UnsetType = msgspec.UNSET
    approved: bool | msgspec.UnsetType = msgspec.UNSET


@put("/inference", errors=[RequestMalformed])
async def switch_inference(
    data: JSONBody[InferenceSwitch], request: Request[Any, Any, State], gateway: Injected
) -> InferenceState:
    """Set the inference switch and the approval.

    A field that is left out stays as it is.
    """
    changes = {name: value for name, value in msgspec.structs.asdict(data).items() if value is not msgspec.UNSET}
    before = gateway.availability.describe(gateway.availability.status())
    note_before(request, **{name: getattr(before, name) for name in changes})
    status = await gateway.availability.change_switch(**changes)
    return gateway.availability.describe(status)


@get("/inference")
async def show_inference(gateway: Injected, request: Request[Any, Any, State]) -> InferenceState:
    """Show the inference switch, the approval, and the resulting status."""
    return gateway.availability.describe(gateway.availability.status())


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
        list_audit,
        *directory_routes.HANDLERS,
        *usage_routes.HANDLERS,
    )
]

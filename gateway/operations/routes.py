"""The operators' API: accounts, reports about apps, their sources and deploys, and the inference switch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, delete, get, patch, post, put
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody

from gateway.accounts.operator_routes import require_app
from gateway.accounts.records import Account
from gateway.accounts.routes import NewKey
from gateway.bounds import ExitCode
from gateway.deploys.routes import QueuedDeployId
from gateway.errors import (
    DeployQuotaReached,
    NoDeployYet,
    NotFound,
    RateLimited,
    RequestMalformed,
    RequestTooLarge,
    StorageUnavailable,
    TarballGone,
)
from gateway.events.catalog import AppCrashed, Kind
from gateway.events.routes import EventId
from gateway.http.audit import REPORTS, list_audit, note_before
from gateway.http.authentication import operator_router
from gateway.http.bodies import TARBALL, declared_size
from gateway.ids import now_iso
from gateway.inference.availability import InferenceState
from gateway.monitors import scans
from gateway.monitors.findings import ScanCounts
from gateway.operations import directory_routes
from gateway.process import Injected
from gateway.settings import Plan

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
async def change_account(
    account_id: FromPath[str], data: JSONBody[PlanChange], request: Request[Any, Any, State], gateway: Injected
) -> Account:
    """Change an account's plan."""
    if (before := await gateway.registry.account(account_id)) is not None:
        note_before(request, plan=before.plan)
    return await gateway.registry.change_plan(account_id, data.plan)


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
    body=TARBALL,
    errors=[RequestMalformed, NotFound, RequestTooLarge, RateLimited, DeployQuotaReached, StorageUnavailable],
)
async def publish_source(app: FromPath[str], request: Request[Any, Any, State], gateway: Injected) -> QueuedDeployId:
    """Publish an app.

    The body is a tar.gz of the app's source. The service stores it and queues a live deploy.
    """
    record = await require_app(app, gateway)
    return QueuedDeployId(
        await gateway.deploys.publish(record, request.stream(), "operator", size=declared_size(request))
    )


@delete("/apps/{app:str}/source", errors=[NotFound, StorageUnavailable])
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
    )
]

"""The account API: deploy hooks, deploys, and the URL that triggers a hook."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated, Any, Self

import msgspec
from litestar import Request, delete, get, post, put
from litestar.datastructures import State
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.types import ControllerRouterHandler

from gateway.accounts.pacing import UNPACED
from gateway.accounts.records import Account, App
from gateway.deploys.hooks import CreatedHook, ListedHook
from gateway.deploys.logs import split_times
from gateway.deploys.phases import PhaseView, list_phases
from gateway.deploys.sources import read_format
from gateway.deploys.states import Deploy, Trigger
from gateway.deploys.states import State as DeployState
from gateway.errors import (
    AppSuspended,
    BackboneUnavailable,
    DeployQuotaReached,
    HookRateLimited,
    MediaTypeUnsupported,
    NoDeployYet,
    NotFound,
    RateLimited,
    RequestMalformed,
    RequestTooLarge,
    StorageUnavailable,
    TarballGone,
)
from gateway.events.catalog import Kind
from gateway.http.authentication import Caller, account_router
from gateway.http.bodies import SOURCE, declared_size
from gateway.ids import Time
from gateway.process import Gateway, Injected

PUBLISH_ERRORS = [
    RequestMalformed,
    AppSuspended,
    NotFound,
    RequestTooLarge,
    MediaTypeUnsupported,
    RateLimited,
    DeployQuotaReached,
    StorageUnavailable,
]


class DeployView(msgspec.Struct, kw_only=True):
    """A deploy as its account sees it."""

    id: str
    app: str
    kind: Kind
    state: DeployState
    trigger: Trigger
    createdAt: Time
    current: bool | msgspec.UnsetType = msgspec.UNSET  # the app serves its release
    branch: str | msgspec.UnsetType | None = msgspec.UNSET
    commit: str | msgspec.UnsetType = msgspec.UNSET
    finishedAt: Time | msgspec.UnsetType = msgspec.UNSET
    durationMs: int | msgspec.UnsetType = msgspec.UNSET
    url: str | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET
    release: str | msgspec.UnsetType = msgspec.UNSET  # the deploy whose release this one serves again
    dataAt: Time | msgspec.UnsetType = msgspec.UNSET  # the time of the data that a host has taken over from a dead one
    # Only for queued deploys.
    position: int | msgspec.UnsetType = msgspec.UNSET  # 1 is next
    waitsFor: str | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, deploy: Deploy, **more: Any) -> Self:
        """Leaves out the fields that have no value yet. `more` are the fields of a subclass."""
        fields = {name: getattr(deploy, name, None) for name in DeployView.__struct_fields__}
        return cls(**{**{name: value for name, value in fields.items() if value is not None}, **more})


class DeployWithLog(DeployView, kw_only=True):
    phases: list[PhaseView]
    log: str
    logTimes: list[int | None]  # of each line of the log: ms after `createdAt`, or null


class QueuedDeployId(msgspec.Struct):
    deployId: str


class TriggeredDeploy(QueuedDeployId):
    app: str


class NewHook(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


async def require_own_app(app: str, account: Account, gateway: Gateway) -> App:
    """Returns the account's app with this id or name. Raises NotFound."""
    found: App | None = await gateway.registry.find_app(app)
    if found is None or found.account != account.id:
        raise NotFound("There is no such app in this account.")
    return found


async def require_deploy(deploy_id: str, account: Account, gateway: Gateway) -> Deploy:
    """Returns the account's deploy with this id. Raises NotFound."""
    deploy = await gateway.deploys.get(deploy_id, account.id)
    if deploy is None or deploy.account != account.id:
        raise NotFound("There is no such deploy in this account.")
    return deploy


async def view_deploys(deploys: Sequence[Deploy], gateway: Gateway) -> list[DeployView]:
    """Returns deploys of one account as it sees them, the queued ones with their positions."""
    more = await _read_more(deploys, gateway)
    return [DeployView.of(deploy, **fields) for deploy, fields in zip(deploys, more, strict=True)]


async def view_with_log(deploy: Deploy, gateway: Gateway) -> DeployWithLog:
    [fields] = await _read_more([deploy], gateway)
    log, times = split_times(await gateway.deploys.read_log(deploy))
    queued = int(datetime.datetime.fromisoformat(deploy.createdAt).timestamp() * 1000)
    after = [None if time is None else max(0, time - queued) for time in times]
    return DeployWithLog.of(deploy, phases=list_phases(deploy), log=log, logTimes=after, **fields)


async def _read_more(deploys: Sequence[Deploy], gateway: Gateway) -> list[dict[str, Any]]:
    """Returns the fields of each deploy that are not in its record."""
    if not deploys:
        return []
    waits = await gateway.deploys.find_positions(deploys)
    live = await gateway.deploys.find_live_ids(deploys[0].account, {deploy.appId for deploy in deploys})
    return [{"current": deploy.id in live, **waits.get(deploy.id, {})} for deploy in deploys]


@post("/apps/{app:str}/hooks", errors=[RequestMalformed, NotFound])
async def create_hook(account: Caller, app: FromPath[str], data: JSONBody[NewHook], gateway: Injected) -> CreatedHook:
    """Create a deploy hook.

    The response has the hook's secret URL, which is shown only here.
    """
    return await gateway.hooks.create(account.id, app, data.name)


@get("/hooks", summary="List the account's deploy hooks")
async def list_hooks(account: Caller, gateway: Injected) -> list[ListedHook]:
    return await gateway.hooks.list(account.id)


@delete("/hooks/{hook_id:str}", errors=[NotFound])
async def revoke_hook(account: Caller, hook_id: FromPath[str], gateway: Injected) -> None:
    """Revoke a deploy hook.

    Its URL answers 404 from the next call on.
    """
    await gateway.hooks.revoke(account.id, hook_id)


@get("/deploys", errors=[RequestMalformed])
async def list_deploys(
    account: Caller,
    gateway: Injected,
    app: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 50,
    before: FromQuery[str] = "",
) -> list[DeployView]:
    """List the account's deploys, newest first.

    The list keeps the last 1,000 deploys for 90 days. `before` is the `id` of the last row of the previous page.
    """
    return await view_deploys(await gateway.deploys.list(account.id, app, limit, before), gateway)


@get("/deploys/{deploy_id:str}", summary="Show a deploy, with its log", errors=[NotFound])
async def show_deploy(account: Caller, deploy_id: FromPath[str], gateway: Injected) -> DeployWithLog:
    return await view_with_log(await require_deploy(deploy_id, account, gateway), gateway)


@put(
    "/apps/{app:str}/source",
    status_code=202,
    request_max_body_size=None,
    body=SOURCE,
    opt={UNPACED: True},  # an upload takes long, and uploads have a limit of their own
    errors=PUBLISH_ERRORS,
)
async def publish(
    account: Caller, request: Request[Any, Any, State], app: FromPath[str], gateway: Injected
) -> QueuedDeployId:
    """Publish an app.

    The body is the app's source: a tar.gz, a zip, or one page, which becomes `index.html`. The service stores it and
    queues a live deploy. Without a Content-Type, the first bytes decide.
    """
    found = await require_own_app(app, account, gateway)
    declared = read_format(request.headers.get("content-type", ""))
    return QueuedDeployId(
        await gateway.deploys.publish(found, request.stream(), "upload", size=declared_size(request), declared=declared)
    )


@post(
    "/hooks/deploy/{token:str}",
    status_code=202,
    tags=["Deploy hooks"],
    errors=[AppSuspended, HookRateLimited, NoDeployYet, TarballGone, DeployQuotaReached, BackboneUnavailable],
)
async def trigger_hook(token: FromPath[str], gateway: Injected) -> TriggeredDeploy:
    """Trigger a deploy.

    The URL's token is the credential. The request's body is ignored.
    """
    hook = await gateway.hooks.find_by_token(token)
    app = await gateway.registry.find_app(hook.appId) if hook is not None else None
    if hook is None or app is None or app.account != hook.account:
        raise NotFoundException
    return TriggeredDeploy(await gateway.deploys.queue(app, "hook", hook=hook), app.name)


ROUTES: list[ControllerRouterHandler] = [
    trigger_hook,
    account_router(create_hook, list_hooks, revoke_hook, list_deploys, show_deploy, publish),
]

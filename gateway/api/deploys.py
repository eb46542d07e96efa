"""The account API: deploys, their hooks and the URLs that trigger these, variables and runtime logs."""

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, Response, delete, get, post, put
from litestar.datastructures import State
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.response import Stream
from litestar.types import ControllerRouterHandler

from gateway.accounts.changes import COMMENT_SECONDS
from gateway.accounts.pacing import UNPACED
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.viewers import Viewers
from gateway.api.authentication import STREAMED, account_router, end_with_right, stream_body
from gateway.api.bodies import SOURCE, declared_size, decode_body, decode_map
from gateway.api.resources import Caller, CallerAccess, OwnApp, OwnDeploy, require_own_app
from gateway.deploys.actions import DeployActions
from gateway.deploys.addresses import BRANCH, BRANCH_LENGTH, Branch, address_url
from gateway.deploys.environment import Environments, VariableView
from gateway.deploys.hooks import CreatedHook, Hooks, ListedHook
from gateway.deploys.logs import DeployLogs
from gateway.deploys.records import MESSAGE_LENGTH, DeployRecords, Origin
from gateway.deploys.runtime_log import RuntimeLog
from gateway.deploys.sources import read_format
from gateway.deploys.states import Deploys
from gateway.deploys.views import DeployView, DeployWithLog, view_deploys, view_with_log
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
    StorageFull,
    StorageUnavailable,
    TarballGone,
    ViewersLimited,
)
from gateway.events.catalog import Kind
from gateway.ids import ALWAYS, TimeSpan
from gateway.services import Injected, ProcessState
from gateway.settings import Settings
from gateway.settings.text_files import decode_text, read_variables
from gateway.validation import END, ONE_LINE, Id, declare_pattern, parse_span

PUBLISH_ERRORS = [
    RequestMalformed,
    AppSuspended,
    NotFound,
    RequestTooLarge,
    MediaTypeUnsupported,
    RateLimited,
    DeployQuotaReached,
    StorageUnavailable,
    StorageFull,
]


COMMIT = declare_pattern(r"^[0-9a-f]{7,64}" + END, "must be 7 to 64 characters of 0-9 and a-f")


class QueuedDeployId(msgspec.Struct):
    deployId: str


class PublishedDeploy(QueuedDeployId):
    url: str  # where its release will be served


class TriggeredDeploy(QueuedDeployId):
    app: str


class NewHook(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


# -- hooks and deploys -----------------------------------------------------------------------------------------


@post("/apps/{app:str}/hooks", errors=[RequestMalformed, NotFound])
async def create_hook(
    account: Caller, app: FromPath[str], data: JSONBody[NewHook], hooks: Injected[Hooks]
) -> CreatedHook:
    """Create a deploy hook.

    The response has the hook's secret URL, which is shown only here.
    """
    return await hooks.create(account.id, app, data.name)


@get("/hooks", summary="List the account's deploy hooks")
async def list_hooks(access: CallerAccess, hooks: Injected[Hooks]) -> list[ListedHook]:
    return await hooks.list(access)


@delete("/hooks/{hook_id:str}", errors=[NotFound])
async def revoke_hook(account: Caller, hook_id: FromPath[str], hooks: Injected[Hooks]) -> None:
    """Revoke a deploy hook.

    Its URL answers 404 from the next call on.
    """
    await hooks.revoke(account.id, hook_id)


@get("/deploys", errors=[RequestMalformed])
async def list_deploys(
    account: Caller,
    deploy_records: Injected[DeployRecords],
    app: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 50,
    before: FromQuery[str] = "",
) -> list[DeployView]:
    """List the account's deploys, newest first.

    The list keeps the last 1,000 deploys for 90 days. `before` is the `id` of the last row of the previous page.
    """
    return await view_deploys(await deploy_records.list(account.id, app, limit, before), deploy_records)


@get("/deploys/{deploy_id:str}", errors=[RequestMalformed, NotFound])
async def show_deploy(
    account: Caller,
    own_deploy: OwnDeploy,
    deploy_records: Injected[DeployRecords],
    deploy_logs: Injected[DeployLogs],
    log_after: Annotated[int, QueryParameter(name="logAfter", ge=0)] = 0,
) -> DeployWithLog:
    """Show a deploy, with its log.

    A log keeps its first 64 KiB and its last 192 KiB. A line between them says how many lines are missing. To follow a
    log, send the `logLines` of each response as `logAfter` of the next request: `log` then has only the lines after it.
    """
    return await view_with_log(own_deploy, deploy_records, deploy_logs, log_after)


@put(
    "/apps/{app:str}/source",
    status_code=202,
    request_max_body_size=None,
    body=SOURCE,
    opt={UNPACED: True, STREAMED: True},  # an upload takes long, and uploads have a limit of their own
    errors=PUBLISH_ERRORS,
)
async def publish(
    account: Caller,
    request: Request[Any, Any, State],
    own_app: OwnApp,
    access: CallerAccess,
    deploys: Injected[Deploys],
    settings: Injected[Settings],
    preview: Annotated[str | None, QueryParameter(max_length=BRANCH_LENGTH, pattern=BRANCH)] = None,
    message: Annotated[str | None, QueryParameter(max_length=MESSAGE_LENGTH, pattern=ONE_LINE)] = None,
    commit: Annotated[str | None, QueryParameter(pattern=COMMIT)] = None,
    branch: Annotated[str | None, QueryParameter(max_length=BRANCH_LENGTH, pattern=BRANCH)] = None,
    dirty: FromQuery[bool | None] = None,
) -> PublishedDeploy:
    """Publish an app.

    The body is the app's source: a tar.gz, a zip, or one page, which becomes `index.html`. The service stores it and
    queues a live deploy, or with `preview` a preview of this branch. Without a Content-Type, the first bytes decide.
    The deploy's row shows `message`, and where the source is a git repository, its `commit`, its `branch`, and whether
    it is `dirty`: whether it has changes that are not in the commit.
    """
    declared = read_format(request.headers.get("content-type", ""))
    origin = Origin(by=access.name, message=message, commit=commit, branch=preview or branch, dirty=dirty)
    kind: Kind = "live" if preview is None else "preview"
    size = declared_size(request)
    queued = await deploys.publish(
        own_app, stream_body(request), "upload", origin, kind=kind, size=size, declared=declared
    )
    return PublishedDeploy(queued, address_url(own_app.name, kind, preview, settings))


class NewPreview(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["preview"]
    branch: Branch


@post(
    "/apps/{app:str}/deploys",
    status_code=202,
    errors=[RequestMalformed, AppSuspended, NotFound, NoDeployYet, DeployQuotaReached],
)
async def publish_branch(
    account: Caller,
    own_app: OwnApp,
    data: JSONBody[NewPreview],
    access: CallerAccess,
    deploy_actions: Injected[DeployActions],
    settings: Injected[Settings],
) -> PublishedDeploy:
    """Publish a branch of an app's repository as a preview.

    Each branch has an address of its own, at which the live address and the app's data stay as they are. When the
    account has more previews than its plan allows, the one that was not visited for longest ends.
    """
    queued = await deploy_actions.publish_branch(own_app, data.branch, access.name)
    return PublishedDeploy(queued, address_url(own_app.name, "preview", data.branch, settings))


@delete("/apps/{app:str}/previews/{slug:str}", errors=[NotFound])
async def end_preview(
    account: Caller, own_app: OwnApp, slug: FromPath[str], deploy_actions: Injected[DeployActions]
) -> None:
    """End a preview.

    Its address answers 404. `slug` is the part of its host name between `--p-` and the first dot.
    """
    await deploy_actions.end_preview(own_app, slug)


@post(
    "/hooks/deploy/{token:str}",
    status_code=202,
    tags=["Deploy hooks"],
    errors=[AppSuspended, HookRateLimited, NoDeployYet, TarballGone, DeployQuotaReached, BackboneUnavailable],
)
async def trigger_hook(
    token: FromPath[str], registry: Injected[Registry], hooks: Injected[Hooks], deploys: Injected[Deploys]
) -> TriggeredDeploy:
    """Trigger a deploy.

    The URL's token is the credential. The request's body is ignored.
    """
    hook = await hooks.find_by_token(token)
    app = await registry.find_app(hook.appId) if hook is not None else None
    if hook is None or app is None or app.account != hook.account:
        raise NotFoundException
    return TriggeredDeploy(await deploys.queue(app, "hook", Origin(by=hook.name), hook=hook), app.name)


# -- deploys of a release or a source that was deployed before -------------------------------------------------


REUSE_ERRORS = [RequestMalformed, NotFound, AppSuspended, NoDeployYet, TarballGone, DeployQuotaReached]


class Rollback(msgspec.Struct, forbid_unknown_fields=True):
    deployId: Id | None = None


ROLLBACK = {
    "application/json": {
        "schema": {"type": "object", "properties": {"deployId": {"type": "string"}}, "additionalProperties": False}
    }
}


@post("/apps/{app:str}/rollback", status_code=202, body=ROLLBACK, body_required=False, errors=REUSE_ERRORS)
async def roll_back(
    account: Caller,
    request: Request[Any, Any, State],
    own_app: OwnApp,
    access: CallerAccess,
    deploy_actions: Injected[DeployActions],
) -> QueuedDeployId:
    """Roll back to an earlier release.

    Queues a live deploy of a release that is still kept, without building it again. With an empty body, this is the
    release before the live one.
    """
    body = await request.body()
    rollback = decode_body(body, Rollback) if body else Rollback()
    return QueuedDeployId(await deploy_actions.roll_back(own_app, rollback.deployId, access.name))


@post("/deploys/{deploy_id:str}/promote", status_code=202, errors=REUSE_ERRORS)
async def promote(
    access: CallerAccess,
    own_deploy: OwnDeploy,
    registry: Injected[Registry],
    deploy_actions: Injected[DeployActions],
) -> QueuedDeployId:
    """Make a preview live.

    Queues a live deploy of the preview's release, without building it again.
    """
    app = await require_own_app(own_deploy.appId, access, registry)
    return QueuedDeployId(await deploy_actions.promote(own_deploy, app, access.name))


@post("/deploys/{deploy_id:str}/redeploy", status_code=202, errors=REUSE_ERRORS)
async def redeploy(
    access: CallerAccess,
    own_deploy: OwnDeploy,
    registry: Injected[Registry],
    deploy_actions: Injected[DeployActions],
) -> QueuedDeployId:
    """Build again.

    Queues a deploy of the same source at the same address. With a repository, this is the latest commit of the branch.
    """
    app = await require_own_app(own_deploy.appId, access, registry)
    return QueuedDeployId(await deploy_actions.redeploy(own_deploy, app, access.name))


@post("/deploys/{deploy_id:str}/cancel", status_code=202, errors=[RequestMalformed, NotFound])
async def cancel(account: Caller, own_deploy: OwnDeploy, deploy_actions: Injected[DeployActions]) -> DeployView:
    """Cancel a deploy that is queued or building.

    It ends as `canceled`, and no event is sent.
    """
    return DeployView.of(await deploy_actions.cancel(own_deploy))


@post("/apps/{app:str}/build-cache/clear", status_code=204, errors=[NotFound])
async def clear_build_cache(account: Caller, own_app: OwnApp, deploys: Injected[Deploys]) -> None:
    """Clear an app's build cache.

    The app's next build downloads all packages again.
    """
    await deploys.clear_build_cache(own_app)


# -- variables and output --------------------------------------------------------------------------------------


BODY_BYTES = 524_288  # JSON may encode a byte as six
DEFAULT_TAIL = 200  # lines
MAX_TAIL = 10_000
STREAM_SECONDS = 3_600.0

VALUES: dict[Kind, Any] = {"live": str | None, "preview": str | bool | None}
VARIABLES = {
    "application/json": {
        "schema": {"type": "object", "additionalProperties": {"type": ["string", "boolean", "null"]}},
        "example": {"DATABASE_URL": "postgres://…", "OLD_NAME": None},
    },
    "text/plain": {"schema": {"type": "string"}, "example": "DATABASE_URL=postgres://…\n"},
}


@get(
    "/apps/{app:str}/env",
    summary="List the names of an app's environment variables",
    errors=[RequestMalformed, NotFound],
)
async def list_variables(
    account: Caller, own_app: OwnApp, environments: Injected[Environments], kind: FromQuery[Kind] = "live"
) -> list[VariableView]:
    """The names, and when each value was set.

    With `kind=preview`, `inPreviews` says which value previews have: the `same` as the app, an `other`, or `none`.
    """
    return await environments.list_variables(own_app, kind)


@put(
    "/apps/{app:str}/env",
    request_max_body_size=BODY_BYTES,
    body=VARIABLES,
    errors=[RequestMalformed, NotFound, RequestTooLarge],
)
async def change_variables(
    account: Caller,
    request: Request[Any, Any, State],
    own_app: OwnApp,
    environments: Injected[Environments],
    kind: FromQuery[Kind] = "live",
) -> list[VariableView]:
    """Change an app's environment variables.

    They apply to builds and start commands from the next deploy on. `null` removes a variable; variables that are not
    named stay. Values are never shown again. A body of type `text/plain` is a file with lines `NAME=value`.

    With `kind=preview`, the values apply to previews alone. `false` keeps a variable out of previews, and `null` gives
    previews the app's value again.
    """
    body = await request.body()
    text = request.content_type[0] == "text/plain"
    changes = _read_variables(body) if text else decode_map(body, VALUES[kind])
    await environments.change_variables(own_app, changes, kind)
    return await environments.list_variables(own_app, kind)


def _read_variables(body: bytes) -> dict[str, str]:
    try:
        return read_variables(decode_text(body, "strict"))
    except UnicodeDecodeError:
        raise RequestMalformed("The file is not a text.") from None
    except ValueError as error:
        raise RequestMalformed(f"{error}.") from None


@get("/apps/{app:str}/logs", media_type="text/plain", errors=[RequestMalformed, NotFound, ViewersLimited])
async def read_logs(
    access: CallerAccess,
    request: Request[Any, Any, State],
    own_app: OwnApp,
    deploy_records: Injected[DeployRecords],
    runtime_log: Injected[RuntimeLog],
    log_viewers: Injected[Viewers],
    process: Injected[ProcessState],
    tail: Annotated[int | None, QueryParameter(ge=1, le=MAX_TAIL)] = None,
    since: FromQuery[str | None] = None,
    until: FromQuery[str | None] = None,
) -> Response[str] | Stream:
    """Show the output of an app's start command.

    The last lines, as text: 200, or with `since` or `until` up to 10,000, unless `tail` says how many. `since` is
    inclusive and `until` exclusive; both are times in the format of `GET /account/usage`. With `Accept:
    text/event-stream`, each new line follows as an event. At most 1 MiB is kept.
    """
    span = parse_span(since, until)
    count = tail or (DEFAULT_TAIL if span == ALWAYS else MAX_TAIL)
    live = await deploy_records.find_live_id(own_app)
    if not await runtime_log.has_start_command(own_app, live):
        raise NotFound("This app has no start command, so it has no output; its visitors get files.")
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff", "x-accel-buffering": "no"}
    if "text/event-stream" in request.headers.get("accept", ""):
        if until is not None:
            raise RequestMalformed("until: a stream of new lines takes no end.")
        events = end_with_right(request, _events(own_app, deploy_records, runtime_log, process, count, span))
        events = log_viewers.open(access.account.id, access.who, events)
        # Without this, the stream would get the route's media type, which is that of the text.
        headers["content-type"] = "text/event-stream"
        return Stream(events, headers=headers)
    lines = [] if live is None else await runtime_log.tail(live, count, span)
    text = "".join(line + "\n" for line in lines)
    return Response(text, media_type="text/plain", headers=headers)


async def _events(
    app: App,
    deploy_records: DeployRecords,
    runtime_log: RuntimeLog,
    process: ProcessState,
    tail: int,
    span: TimeSpan,
) -> AsyncGenerator[bytes]:
    ends, spoke = time.monotonic() + STREAM_SECONDS, time.monotonic()
    lines = runtime_log.follow(
        lambda: deploy_records.find_live_id(app),
        tail,
        lambda: process.draining or time.monotonic() > ends,
        span,
    )
    async with contextlib.aclosing(lines):
        async for new in lines:
            if new:
                yield "".join(f"data: {line}\n\n" for line in new).replace("\r", "").encode()
            elif time.monotonic() - spoke > COMMENT_SECONDS:
                yield b": waiting\n\n"
            else:
                continue
            spoke = time.monotonic()


ROUTES: list[ControllerRouterHandler] = [
    trigger_hook,
    account_router(
        create_hook,
        list_hooks,
        revoke_hook,
        list_deploys,
        show_deploy,
        publish,
        publish_branch,
        end_preview,
        roll_back,
        promote,
        redeploy,
        clear_build_cache,
        cancel,
        list_variables,
        change_variables,
        read_logs,
    ),
]

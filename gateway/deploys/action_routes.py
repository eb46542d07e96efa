"""The account API: rolls back to a release, promotes a preview, builds again, cancels a deploy."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, post
from litestar.datastructures import State
from litestar.params import FromPath

from gateway.bounds import Id
from gateway.deploys.routes import DeployView, QueuedDeployId, require_deploy, require_own_app
from gateway.errors import AppSuspended, DeployQuotaReached, NoDeployYet, NotFound, RequestMalformed, TarballGone
from gateway.http.authentication import Caller, account_router
from gateway.http.bodies import decode_body
from gateway.process import Injected

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
    account: Caller, request: Request[Any, Any, State], app: FromPath[str], gateway: Injected
) -> QueuedDeployId:
    """Roll back to an earlier release.

    Queues a live deploy of a release that is still kept, without building it again. With an empty body, this is the
    release before the live one.
    """
    found = await require_own_app(app, account, gateway)
    body = await request.body()
    rollback = decode_body(body, Rollback) if body else Rollback()
    return QueuedDeployId(await gateway.deploy_actions.roll_back(found, rollback.deployId))


@post("/deploys/{deploy_id:str}/promote", status_code=202, errors=REUSE_ERRORS)
async def promote(account: Caller, deploy_id: FromPath[str], gateway: Injected) -> QueuedDeployId:
    """Make a preview live.

    Queues a live deploy of the preview's release, without building it again.
    """
    deploy = await require_deploy(deploy_id, account, gateway)
    app = await require_own_app(deploy.appId, account, gateway)
    return QueuedDeployId(await gateway.deploy_actions.promote(deploy, app))


@post("/deploys/{deploy_id:str}/redeploy", status_code=202, errors=REUSE_ERRORS)
async def redeploy(account: Caller, deploy_id: FromPath[str], gateway: Injected) -> QueuedDeployId:
    """Build again.

    Queues a deploy of the same source at the same address. With a repository, this is the latest commit of the branch.
    """
    deploy = await require_deploy(deploy_id, account, gateway)
    app = await require_own_app(deploy.appId, account, gateway)
    return QueuedDeployId(await gateway.deploy_actions.redeploy(deploy, app))


@post("/deploys/{deploy_id:str}/cancel", status_code=202, errors=[RequestMalformed, NotFound])
async def cancel(account: Caller, deploy_id: FromPath[str], gateway: Injected) -> DeployView:
    """Cancel a deploy that is queued or building.

    It ends as `canceled`, and no event is sent.
    """
    deploy = await require_deploy(deploy_id, account, gateway)
    return DeployView.of(await gateway.deploy_actions.cancel(deploy))


ROUTES = [account_router(roll_back, promote, redeploy, cancel)]

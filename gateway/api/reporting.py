"""The operators' API for an external deploy engine, which builds deploys in place of the service's own workers.

The engine lists the queued deploys, fetches their sources, and reports the end of each phase.
"""

from typing import Annotated, Literal

import msgspec
import structlog
from litestar import get, post
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.response import Stream

from gateway.accounts.records import App, Build
from gateway.accounts.registry import Registry
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.api.audit import REPORTS
from gateway.api.authentication import operator_router
from gateway.deploys.records import Deploy, DeployRecords
from gateway.deploys.states import Deploys, StaleDeploy
from gateway.deploys.views import DeployView
from gateway.errors import NotFound, RequestMalformed, StorageUnavailable
from gateway.events.catalog import Phase
from gateway.operations.apps import RepositoryView, view_repository
from gateway.services import Injected
from gateway.settings import Settings
from gateway.validation import Text

logger = structlog.get_logger()

GZIP = "application/gzip"


class QueuedDeploy(DeployView, kw_only=True):
    """A deploy with everything that an engine needs to build it."""

    appId: str
    branch: str | None
    source: str | None  # URL of the source's tar.gz; null: build the repository
    # These two are left out when the app no longer exists.
    repository: RepositoryView | msgspec.UnsetType | None = msgspec.UNSET  # its URL includes the credentials
    problem: str | msgspec.UnsetType = msgspec.UNSET  # prevents the build: report it as failed
    build: Build | msgspec.UnsetType | None = msgspec.UNSET


@get("/deploys", errors=[RequestMalformed])
async def list_queued(
    settings: Injected[Settings],
    vault: Injected[Vault],
    registry: Injected[Registry],
    deploy_records: Injected[DeployRecords],
    queued: Annotated[Literal["queued"], QueryParameter(name="state")] = "queued",
) -> list[QueuedDeploy]:
    """List the queued deploys, with everything that an engine needs to build them."""
    return [
        _queued_deploy(deploy, await registry.find_app(deploy.appId), settings, vault)
        for deploy in await deploy_records.list_queued()
    ]


def _queued_deploy(deploy: Deploy, app: App | None, settings: Settings, vault: Vault) -> QueuedDeploy:
    source = f"{settings.base_url}/platform/deploys/{deploy.id}/source" if deploy.source else None
    queued = QueuedDeploy.of(deploy, appId=deploy.appId, branch=deploy.branch, source=source)
    if app is not None and app.account == deploy.account:
        queued.build, queued.repository = app.build, view_repository(app)
        if app.repository is not None and queued.repository is not None:
            try:
                queued.repository.url = app.repository.clone_url(vault)
            except NoEncryptionKey as error:  # of one app: the deploys of others continue
                logger.error("engine.sealed", app=app.id, error=str(error))
                queued.problem = "the repository's password cannot be decrypted; connect the repository again"
    return queued


@get("/deploys/{deploy_id:str}/source", media_type=GZIP, errors=[NotFound, StorageUnavailable])
async def fetch_source(
    deploy_id: FromPath[str], deploys: Injected[Deploys], deploy_records: Injected[DeployRecords]
) -> Stream:
    """Download the stored source of a deploy.

    A tar.gz. Deploys of a repository have no stored source.
    """
    deploy = await deploy_records.find(deploy_id)
    source = None if deploy is None else await deploys.open_source(deploy)
    if source is None:
        raise NotFound
    headers = {"Content-Length": str(source.size), "Content-Disposition": 'attachment; filename="source.tar.gz"'}
    return Stream(source.chunks, media_type=GZIP, headers=headers)


class PhaseReport(msgspec.Struct, forbid_unknown_fields=True):
    phase: Phase
    ok: bool
    reason: Text | None = None


@post("/deploys/{deploy_id:str}/phases", status_code=200, opt=REPORTS, errors=[RequestMalformed, NotFound])
async def report_phase(
    deploy_id: FromPath[str],
    data: JSONBody[PhaseReport],
    settings: Injected[Settings],
    deploys: Injected[Deploys],
    deploy_records: Injected[DeployRecords],
) -> DeployView:
    """Report the end of a deploy's phase.

    The response is the deploy in its new state.
    """
    if settings.deploy_engine != "external":
        raise RequestMalformed(
            "This service builds deploys itself; set GATEWAY_DEPLOY_ENGINE=external to report phases."
        )
    deploy = await deploy_records.find(deploy_id)
    if deploy is None:
        raise NotFound
    try:
        after = await deploys.advance(deploy, data.phase, data.ok, data.reason or "")
    except StaleDeploy:
        raise RequestMalformed("phase: the deploy's state has changed; read it again before reporting.") from None
    return DeployView.of(after)


ROUTES = [operator_router(list_queued, fetch_source, report_phase)]

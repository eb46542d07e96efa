"""The account API: one app with the details of its page, its security findings, and its crashes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import get
from litestar.params import FromPath, QueryParameter

from gateway.accounts.operator_routes import RepositoryView, view_repository
from gateway.accounts.records import Account, App, Build
from gateway.accounts.routes import AccountApp, view_apps
from gateway.deploys.routes import require_own_app
from gateway.errors import NotFound, RequestMalformed
from gateway.events.catalog import Finding
from gateway.http.authentication import Caller
from gateway.ids import Time, now_iso
from gateway.monitors import history
from gateway.monitors.crashes import Crash
from gateway.monitors.findings import MAX_OPEN
from gateway.monitors.history import HealthDay
from gateway.monitors.keys import certificate_key
from gateway.process import Gateway, Injected
from gateway.redis.partitions import partition_tag


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


async def view_app_details(account: Account, app: App, gateway: Gateway) -> AppDetails:
    [listed] = await view_apps(account, [app], gateway)
    return AppDetails(
        **msgspec.structs.asdict(listed),
        createdAt=app.createdAt,
        liveDeploy=await gateway.deploys.find_live_id(app),
        repository=view_repository(app),
        build=app.build,
        certificate=await _read_certificate(app, gateway),
        healthDays=await history.read_history(gateway.store, account.id, app.id),
    )


async def _read_certificate(app: App, gateway: Gateway) -> CertificateView | None:
    key = certificate_key(partition_tag(app.account), app.id)
    domain, expires, issuer = await gateway.store.client.hmget(key, ["domain", "expiresAt", "issuer"])
    return CertificateView(domain, now_iso(int(expires) / 1000), issuer or None) if expires else None


@get("/apps/{app:str}", errors=[NotFound])
async def show_app(account: Caller, app: FromPath[str], gateway: Injected) -> AppDetails:
    """Show an app, with its certificate and the history of its health."""
    return await view_app_details(account, await require_own_app(app, account, gateway), gateway)


@get("/apps/{app:str}/findings", errors=[RequestMalformed, NotFound])
async def list_findings(
    account: Caller,
    app: FromPath[str],
    gateway: Injected,
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_OPEN)] = 100,
) -> list[Finding]:
    """List an app's open security findings, most urgent first.

    Red findings come first, then those with the nearest deadline.
    """
    return (await gateway.findings.find_open(await require_own_app(app, account, gateway)))[:limit]


@get("/apps/{app:str}/crashes", errors=[NotFound])
async def list_crashes(account: Caller, app: FromPath[str], gateway: Injected) -> list[Crash]:
    """List an app's last 20 crashes of 30 days, newest first."""
    return await gateway.crashes.list(await require_own_app(app, account, gateway))


HANDLERS = [show_app, list_findings, list_crashes]  # for the router in `app_routes.py`

"""Answers the Caddy of this host, which asks for which names it may get certificates.

Anybody can connect to Caddy with any name. So a name must be served, and an account's number of new names is
limited: an authority limits the certificates of a domain, and those of all apps' addresses count together.

Failure policy: closed. Without Redis, and beyond the limit, no certificate is requested.
"""

import ipaddress
import time
from typing import Annotated, Any

import structlog
from litestar import get
from litestar.connection import ASGIConnection
from litestar.exceptions import NotFoundException
from litestar.handlers import BaseRouteHandler
from litestar.params import FromQuery, QueryParameter

from gateway.accounts.domain_names import apps_host, service_hosts
from gateway.accounts.records import SLUG, App
from gateway.accounts.registry import Registry
from gateway.deploys.records import PREVIEW_FIELD
from gateway.errors import BackboneUnavailable, NotFound, RequestMalformed
from gateway.keys import certified_names_key, site_key
from gateway.redis.client import Store
from gateway.services import Injected
from gateway.settings import Settings

logger = structlog.get_logger()

NEW_NAMES = 20  # of an account in 7 days, beside one for each app of its plan
WEEK_SECONDS = 7 * 86_400
KEPT_SECONDS = 90 * 86_400  # the life of a certificate; later, a name counts as new again
FORWARDING = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")


def this_host_only(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Guards routes for the processes of this host. Raises NotFoundException, as for an unknown path.

    A proxy of this host connects from it too, and adds headers for the client that it forwards.
    """
    if any(name in connection.headers for name in FORWARDING) or not is_local(connection):
        raise NotFoundException


def is_local(connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
    """Returns whether the client connected by a Unix socket, or from a loopback address."""
    if connection.scope["server"] is None:
        return True
    try:
        address = ipaddress.ip_address(connection.client.host if connection.client else "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@get(
    "/platform/tls/allow",
    guards=[this_host_only],
    tags=["Platform"],
    errors=[RequestMalformed, NotFound, BackboneUnavailable],
)
async def allow_certificate(
    settings: Injected[Settings],
    store: Injected[Store],
    registry: Injected[Registry],
    domain: Annotated[FromQuery[str], QueryParameter(max_length=254)],
) -> None:
    """Check that a name is served, and may get a certificate.

    Only for the Caddy of the same host. 404 for any other name.
    """
    name = domain.lower().removesuffix(".")
    if name in service_hosts(settings):
        return
    app = await find_served_app(name, settings, store, registry)
    if app is None or not await admit_name(app, name, settings, store, registry):
        raise NotFound


async def find_served_app(name: str, settings: Settings, store: Store, registry: Registry) -> App | None:
    """Returns the app that is served at a host name."""
    label = name.removesuffix(f".{apps_host(settings)}")
    if label == name:
        owner: App | None = await registry.domains.find_owner(name)
        return owner
    if SLUG.fullmatch(label) and (app := await registry.app(label)) is not None:
        return app
    owner_name, mark, slug = label.partition("--p-")
    owner_name, address = (owner_name, f"p-{slug}") if mark else (label.removesuffix("-preview"), "preview")
    app = await registry.app(owner_name) if SLUG.fullmatch(owner_name) and owner_name != label else None
    if app is None:
        return None
    exists = await store.client.hexists(site_key(app.account, app.id), PREVIEW_FIELD + address)
    return app if exists else None


async def admit_name(app: App, name: str, settings: Settings, store: Store, registry: Registry) -> bool:
    """Returns whether the app's account may have a certificate for the name, and counts a new name."""
    account = await registry.account_of(app)
    if account is None:
        return False
    key, now = certified_names_key(account.id), time.time()
    async with store.client.pipeline(transaction=True) as pipe:
        pipe.zremrangebyscore(key, "-inf", now - KEPT_SECONDS)
        pipe.zadd(key, {name: now}, nx=True)
        pipe.zcount(key, now - WEEK_SECONDS, "+inf")
        pipe.expire(key, KEPT_SECONDS)
        _, added, recent, _ = await pipe.execute()
    if not added or recent <= settings.app_limits[account.plan] + NEW_NAMES:
        return True
    await store.client.zrem(key, name)
    logger.warning("certificate.refused", account=account.id, app=app.id, domain=name)
    return False


ROUTES = [allow_certificate]

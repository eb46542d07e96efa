"""The account API: the account, its apps, and the service's capabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, get, patch, post
from litestar.datastructures import State
from litestar.params import JSONBody
from litestar.types import ControllerRouterHandler

from gateway.accounts.records import Account, App, Suspension, find_suspension
from gateway.deploys.addresses import live_url
from gateway.errors import BackboneUnavailable, CsrfRefused, RegistrationsClosed, RequestMalformed
from gateway.events.catalog import SAMPLES
from gateway.events.deliveries import SHARE_BYTES, count_stored_bytes
from gateway.http.authentication import Caller, account_router, is_operator_token, read_bearer, require_account
from gateway.ids import Time
from gateway.inference.availability import InferenceStatus
from gateway.inference.keys import spend_key
from gateway.inference.request import BODY_BYTES
from gateway.inference.spend.limits import cap_of
from gateway.inference.spend.prices import DEFAULT_MODEL, MAX_OUTPUT_TOKENS, PRICES
from gateway.monitors import health
from gateway.monitors.health import OpenFindings
from gateway.process import Gateway, Injected
from gateway.settings import Plan


class ServiceLimits(msgspec.Struct):
    requestsPerMinutePerApp: int
    requestsPerMinutePerUser: int
    maxRequestBytes: int
    maxOutputTokens: int
    deploysPerDay: int | msgspec.UnsetType = msgspec.UNSET  # left out for operators


def view_limits(gateway: Gateway, plan: Plan | None) -> ServiceLimits:
    settings = gateway.settings
    return ServiceLimits(
        requestsPerMinutePerApp=settings.rate_limits.app,
        requestsPerMinutePerUser=settings.rate_limits.user,
        maxRequestBytes=BODY_BYTES,
        maxOutputTokens=MAX_OUTPUT_TOKENS,
        deploysPerDay=msgspec.UNSET if plan is None else settings.deploy_quotas[plan],
    )


class Features(msgspec.Struct):
    managedInference: bool


class Platform(msgspec.Struct):
    features: Features


class Capabilities(msgspec.Struct):
    platform: Platform
    managedInferenceStatus: InferenceStatus
    models: list[str]
    defaultModel: str
    eventTypes: list[str]  # that webhooks receive
    limits: ServiceLimits


@get("/capabilities", tags=["Account"], security=[{"apiKey": []}, {"operatorToken": []}])
async def capabilities(request: Request[Any, Any, State], gateway: Injected) -> Capabilities:
    """Show what the service can do now.

    Takes an account's API key or an operator token.
    """
    plan = None
    if not is_operator_token(gateway, read_bearer(request)):
        account = await require_account(request, gateway)
        await gateway.pacing.admit(account.id, request.scope["state"])
        plan = account.plan
    status = gateway.availability.status()
    return Capabilities(
        platform=Platform(Features(managedInference=status.available)),
        managedInferenceStatus=status,
        models=list(PRICES),
        defaultModel=DEFAULT_MODEL,
        eventTypes=list(SAMPLES),
        limits=view_limits(gateway, plan),
    )


class Spend(msgspec.Struct):
    """Nano-euro of a UTC day."""

    day: str
    settled: int
    reserved: int
    cap: int


class StorageUse(msgspec.Struct):
    """The bytes of the account's delivery log and of the data of its events."""

    bytes: int
    limit: int  # above it, the oldest deliveries are removed; an event that still does not fit is dropped


class AccountName(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class AccountView(msgspec.Struct):
    id: str
    name: str
    plan: Plan
    limits: ServiceLimits
    spend: Spend
    deploysToday: int
    storage: StorageUse
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET  # by an operator; left out when there is none


@get("/", summary="Show the account, its limits, and its spend of today")
async def show_account(account: Caller, gateway: Injected) -> AccountView:
    return await view_account(account, gateway)


async def view_account(account: Account, gateway: Gateway) -> AccountView:
    day = await gateway.store.today()
    settled, reserved = await gateway.store.client.hmget(spend_key(account.id, day), ["settled", "reserved"])
    return AccountView(
        id=account.id,
        name=account.name,
        plan=account.plan,
        limits=view_limits(gateway, account.plan),
        spend=Spend(day, int(settled or 0), int(reserved or 0), cap_of(account, gateway.settings)),
        deploysToday=await gateway.deploys.count_today(account.id, day),
        storage=StorageUse(await count_stored_bytes(gateway.store, account.id), SHARE_BYTES),
        suspension=account.suspension or msgspec.UNSET,
    )


@patch("/", errors=[RequestMalformed])
async def rename_account(account: Caller, data: JSONBody[AccountName], gateway: Injected) -> AccountView:
    """Rename the account."""
    rename = partial(msgspec.structs.replace, name=data.name)
    _, account = await gateway.registry.change_account(account.id, rename)
    return await view_account(account, gateway)


class AccountApp(msgspec.Struct):
    """An app as its account sees it, with the fields of MonitoredApp."""

    id: str
    name: str
    url: str
    customDomain: str | None
    customDomainVerified: bool
    status: Literal["live", "never-live"]
    health: Literal["healthy", "unhealthy", "unknown"]
    healthSince: Time | None
    certificateExpiresAt: Time | None
    openFindings: OpenFindings
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET  # of the app, or else of its account


@get("/apps", summary="List the account's apps, with their health")
async def list_apps(account: Caller, gateway: Injected) -> list[AccountApp]:
    return await view_apps(account, await gateway.registry.list_apps(account.id), gateway)


async def view_apps(account: Account, apps: Sequence[App], gateway: Gateway) -> list[AccountApp]:
    """Returns the apps as their account sees them, in the same order."""
    monitored = await health.read_monitored_apps(gateway.store, [(app, account) for app in apps])
    return [
        AccountApp(
            id=app.id,
            name=app.name,
            url=live_url(app.name, gateway.settings),
            customDomain=app.customDomain,
            customDomainVerified=app.customDomainVerified,
            suspension=find_suspension(app, account) or msgspec.UNSET,
            **msgspec.structs.asdict(state),
        )
        for app, state in zip(apps, monitored, strict=True)
    ]


class NewKey(msgspec.Struct):
    id: str
    apiKey: str  # shown only here


@post("/register", tags=["Account"], errors=[RequestMalformed, CsrfRefused, RegistrationsClosed, BackboneUnavailable])
async def register(request: Request[Any, Any, State], data: JSONBody[AccountName], gateway: Injected) -> NewKey:
    """Create an account on the free plan.

    The response has its API key, which is shown only here.
    """
    if "origin" in request.headers:  # another site's page must not use up the day's registrations
        gateway.sessions.require_own_origin(request)
    per_day = gateway.settings.registrations_per_day
    await gateway.sessions.count_registration(request, per_day)
    account, api_key = await gateway.registry.register_account(data.name, per_day)
    return NewKey(account.id, api_key)


ROUTES: list[ControllerRouterHandler] = [
    capabilities,
    register,
    account_router(show_account, rename_account),
]

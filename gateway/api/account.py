"""The account API: the account and its API keys, the service's capabilities, and the stream of changes."""

from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Request, delete, get, patch, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.response import Stream
from litestar.types import ControllerRouterHandler

from gateway.accounts.access import Right, Scope
from gateway.accounts.api_keys import MAX_KEYS_BY_OPERATORS, NAME_LENGTH, CreatedKey, ListedKey
from gateway.accounts.changes import Changes
from gateway.accounts.operators import Operators
from gateway.accounts.pacing import Pacing
from gateway.accounts.records import Account, Suspension
from gateway.accounts.registry import Registry
from gateway.accounts.sessions import Sessions
from gateway.accounts.trail import AccountTrail, TrailEntry, TrailFilter
from gateway.accounts.viewers import Viewers
from gateway.api.audit import Before, Chosen, find_operator, note
from gateway.api.authentication import (
    account_router,
    end_with_right,
    is_operator_token,
    operator_router,
    read_bearer,
    require_access,
)
from gateway.api.resources import Caller, CallerAccess, require_own_app
from gateway.deploys.states import Deploys
from gateway.errors import (
    BackboneUnavailable,
    CsrfRefused,
    LastKey,
    NotFound,
    RegistrationsClosed,
    RequestMalformed,
    ViewersLimited,
)
from gateway.events.catalog import SAMPLES
from gateway.events.deliveries import SHARE_BYTES, count_stored_bytes
from gateway.ids import Time
from gateway.inference.availability import Availability, InferenceStatus
from gateway.inference.request import BODY_BYTES
from gateway.inference.spend.limits import Spend, cap_of, read_spend
from gateway.operations.leaving import Leaving
from gateway.redis.client import Store
from gateway.services import Injected, ProcessState
from gateway.settings import Plan, Settings
from gateway.settings.prices import DEFAULT_MODEL, MAX_OUTPUT_TOKENS
from gateway.validation import read_name


class ServiceLimits(msgspec.Struct):
    requestsPerMinutePerApp: int
    requestsPerMinutePerUser: int
    maxRequestBytes: int
    maxOutputTokens: int
    deploysPerDay: int | msgspec.UnsetType = msgspec.UNSET  # left out for operators


def view_limits(settings: Settings, plan: Plan | None) -> ServiceLimits:
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
async def capabilities(
    request: Request[Any, Any, State],
    settings: Injected[Settings],
    registry: Injected[Registry],
    sessions: Injected[Sessions],
    operators: Injected[Operators],
    pacing: Injected[Pacing],
    availability: Injected[Availability],
) -> Capabilities:
    """Show what the service can do now.

    Takes an account's API key or an operator token.
    """
    plan = None
    if not is_operator_token(operators, read_bearer(request)):
        access = await require_access(request, registry, sessions)
        await pacing.meter(access.account.id, access.who, request.scope["state"]).enter()
        plan = access.account.plan
    status = availability.status()
    return Capabilities(
        platform=Platform(Features(managedInference=status.available)),
        managedInferenceStatus=status,
        models=list(settings.models),
        defaultModel=DEFAULT_MODEL,
        eventTypes=list(SAMPLES),
        limits=view_limits(settings, plan),
    )


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
    deletesAt: Time | msgspec.UnsetType = msgspec.UNSET  # while the account is being deleted
    notices: bool | msgspec.UnsetType = msgspec.UNSET  # true if you can choose notices by e-mail


@get("/", summary="Show the account, its limits, and its spend of today")
async def show_account(
    access: CallerAccess, settings: Injected[Settings], store: Injected[Store], deploys: Injected[Deploys]
) -> AccountView:
    view = await view_account(access.account, settings, store, deploys)
    if settings.sends_notices and access.email and access.role in Right.DEVELOP.roles:
        view.notices = True
    return view


async def view_account(account: Account, settings: Settings, store: Store, deploys: Deploys) -> AccountView:
    spend = await read_spend(store, account.id, ["settled", "reserved"], cap_of(account, settings))
    return AccountView(
        id=account.id,
        name=account.name,
        plan=account.plan,
        limits=view_limits(settings, account.plan),
        spend=spend,
        deploysToday=await deploys.count_today(account.id, spend.day),
        storage=StorageUse(await count_stored_bytes(store, account.id), SHARE_BYTES),
        suspension=account.operators_suspension or msgspec.UNSET,
        deletesAt=account.deletion.deletesAt if account.deletion else msgspec.UNSET,
    )


@patch("/", errors=[RequestMalformed])
async def rename_account(
    account: Caller,
    data: JSONBody[AccountName],
    settings: Injected[Settings],
    store: Injected[Store],
    registry: Injected[Registry],
    deploys: Injected[Deploys],
) -> AccountView:
    """Rename the account."""
    rename = partial(msgspec.structs.replace, name=read_name(data.name))
    _, account = await registry.change_account(account.id, rename)
    return await view_account(account, settings, store, deploys)


class DeletionTime(msgspec.Struct):
    deletesAt: Time


@post("/deletion", status_code=202, errors=[RequestMalformed])
async def leave(account: Caller, data: JSONBody[AccountName], leaving: Injected[Leaving]) -> DeletionTime:
    """Delete the account, after a grace.

    `name` is the account's name, as a confirmation. Until `deletesAt`, everything of the account is stopped and can be
    brought back. Then its apps, data, keys and logs are removed.
    """
    if data.name != account.name:
        raise RequestMalformed("name: repeat the name of the account exactly.")
    return DeletionTime(await leaving.begin(account.id))


@delete("/deletion", errors=[NotFound])
async def keep_account(account: Caller, leaving: Injected[Leaving]) -> None:
    """Keep an account that is being deleted.

    Everything is as it was.
    """
    await leaving.cancel(account.id)


class NewKey(msgspec.Struct):
    id: str
    apiKey: str  # shown only here


@post("/register", tags=["Account"], errors=[RequestMalformed, CsrfRefused, RegistrationsClosed, BackboneUnavailable])
async def register(
    request: Request[Any, Any, State],
    data: JSONBody[AccountName],
    settings: Injected[Settings],
    registry: Injected[Registry],
    sessions: Injected[Sessions],
) -> NewKey:
    """Create an account on the free plan.

    The response has its API key, which is shown only here. Where people can sign in, at most half of a day's
    registrations are made this way.
    """
    name = read_name(data.name)
    if "origin" in request.headers:  # another site's page must not use up the day's registrations
        sessions.require_own_origin(request, "Register on the service's own page, or without an Origin header.")
    per_day = settings.registrations_per_day
    await sessions.count_registration(request, per_day, anonymous=True)
    account, api_key = await registry.register_account(name, per_day, settings.anonymous_registrations_per_day)
    return NewKey(account.id, api_key)


# -- API keys --------------------------------------------------------------------------------------------------


class KeyName(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH)]


class NewScopedKey(KeyName, forbid_unknown_fields=True):
    scope: Scope = "full"
    app: Annotated[str, msgspec.Meta(min_length=1, max_length=63)] | None = None  # the only app that the key is for


@post("/keys", errors=[RequestMalformed, NotFound])
async def create_key(access: CallerAccess, data: JSONBody[NewScopedKey], registry: Injected[Registry]) -> CreatedKey:
    """Create an API key.

    The response has the key, which is shown only here. A key with the scope `deploy` publishes apps, and steers and
    reads deploys with their logs. One with the scope `read` reads. With `app`, both are for this app only.
    """
    app = None if data.app is None else await require_own_app(data.app, access, registry)
    return await registry.api_keys.create(access.account.id, data.name, data.scope, app, by=access.who)


@get("/keys")
async def list_keys(account: Caller, registry: Injected[Registry]) -> list[ListedKey]:
    """List the account's API keys, newest first.

    The time of the last use lags by up to a minute.
    """
    return await registry.list_keys(account.id)


@delete("/keys/{key_id:str}", errors=[NotFound, LastKey])
async def revoke_key(account: Caller, key_id: FromPath[str], registry: Injected[Registry]) -> None:
    """Revoke an API key.

    The key and its sessions are refused from the next request on, and its open invitations end. The account's only key
    with full access cannot be revoked.
    """
    await registry.revoke_key(account.id, key_id)


@post("/accounts/{account_id:str}/keys", errors=[RequestMalformed, NotFound])
async def create_key_for(
    account_id: FromPath[str], data: JSONBody[KeyName], request: Request[Any, Any, State], registry: Injected[Registry]
) -> CreatedKey:
    """Create an API key for an account.

    For an account holder who lost theirs. The response has the key, which is shown only here.
    """
    if await registry.account(account_id) is None:
        raise NotFound
    return await registry.api_keys.create(account_id, data.name, by=find_operator(request), limit=MAX_KEYS_BY_OPERATORS)


@get("/accounts/{account_id:str}/keys", errors=[NotFound])
async def list_keys_of(account_id: FromPath[str], registry: Injected[Registry]) -> list[ListedKey]:
    """List the API keys of an account, newest first."""
    if await registry.account(account_id) is None:
        raise NotFound
    return await registry.list_keys(account_id)


@delete("/accounts/{account_id:str}/keys/{key:str}", errors=[NotFound])
async def revoke_key_of(
    account_id: FromPath[str], key: FromPath[str], request: Request[Any, Any, State], registry: Injected[Registry]
) -> None:
    """Revoke an API key of an account, even its only one.

    The key and its sessions are refused from the next request on, and its open invitations end.
    """
    note(request, key=key)
    await registry.revoke_key(account_id, key, even_last=True)


@get("/audit", errors=[RequestMalformed])
async def list_changes(
    account: Caller,
    account_trail: Injected[AccountTrail],
    limit: Annotated[int, QueryParameter(ge=1, le=200)] = 50,
    before: Before = None,
    actor: Chosen = "",
    action: Chosen = "",
) -> list[TrailEntry]:
    """List the changes of the account, newest first.

    Each has who made it: an API key, a session with the key that opened it, or an operator. Equal changes within a
    minute are one row with their `count`. Changes are kept for 90 days, without values: the last 5,000 of keys,
    members, webhook and deletion, the last 5,000 by operators, and the last 5,000 others. One actor has at most a fifth
    of each. `before` is the id of a change. `actor` and `action` choose changes with exactly these values; `actor` may
    also be the id of an API key.
    """
    return await account_trail.list(account.id, limit, before, TrailFilter(actor, action))


@get("/changes", media_type="text/event-stream", errors=[ViewersLimited])
async def stream_changes(
    access: CallerAccess,
    request: Request[Any, Any, State],
    changes: Injected[Changes],
    change_viewers: Injected[Viewers],
    process: Injected[ProcessState],
) -> Stream:
    """Stream the names of what changed in the account.

    The response is a stream of server-sent events without content. `ready` is the first: later changes are reported,
    usually within a second. Then each event is named after a topic that changed: `apps`, `data`, `deliveries`,
    `deploys`, `hooks`, `keys`, `members`, `requests`, `service` (the status of managed inference) or `usage`. The
    health, findings, crashes and data of apps are checked every five seconds. The stream ends after ten minutes, and
    when the service restarts or cannot reach its database: read everything again once `ready` arrives on the next one.
    """
    events = changes.stream_events(access.account.id, lambda: process.draining)
    events = change_viewers.open(access.account.id, access.who, end_with_right(request, events))
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff", "x-accel-buffering": "no"}
    return Stream(events, media_type="text/event-stream", headers=headers)


ROUTES: list[ControllerRouterHandler] = [
    capabilities,
    register,
    account_router(
        show_account,
        rename_account,
        leave,
        keep_account,
        create_key,
        list_keys,
        revoke_key,
        list_changes,
        stream_changes,
    ),
    operator_router(create_key_for, list_keys_of, revoke_key_of),
]

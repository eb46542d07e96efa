"""What an account holder sees: the account, its apps, and what the service can do."""

from __future__ import annotations

import hmac
import time
from typing import Annotated, Any

import msgspec
from litestar import Request, delete, get, post, put
from litestar.datastructures import State
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from gateway.accounts.records import Account
from gateway.accounts.sessions import ACCOUNT
from gateway.errors import NotFound, Unauthorized
from gateway.events.catalogue import SAMPLES
from gateway.events.receivers import LOGGED
from gateway.inference.call import BODY_LIMIT
from gateway.inference.prices import DEFAULT_MODEL, MAX_OUTPUT_TOKENS, PRICES
from gateway.monitors import health
from gateway.process import Gateway, Injected
from gateway.store import keys
from gateway.store.client import backbone


def bearer(request: Request[Any, Any, State]) -> str:
    found = request.headers.getall("authorization", [])
    scheme, _, credential = found[0].partition(" ") if len(found) == 1 else ("", "", "")
    return credential.strip() if scheme.lower() == "bearer" else ""


def is_operator(gateway: Gateway, credential: str) -> bool:
    token = gateway.settings.operator_token
    return bool(token) and hmac.compare_digest(credential.encode(), token.encode())


async def holder(request: Request[Any, Any, State], gateway: Gateway) -> Account:
    """The account of the request's API key, or else of its dashboard session. Raises Unauthorized, CsrfRefused."""
    if "authorization" in request.headers:
        credential = bearer(request)
        account = await gateway.registry.account_by_key(credential) if credential else None
    else:
        subject = await gateway.sessions.subject_of(request, ACCOUNT)
        account = await gateway.registry.account(subject) if subject else None
    if account is None:
        raise Unauthorized
    found: Account = account
    return found


def limits(gateway: Gateway, plan: str | None) -> dict[str, int]:
    settings = gateway.settings
    told = {
        "requestsPerMinutePerApp": settings.rate_limits.app,
        "requestsPerMinutePerUser": settings.rate_limits.user,
        "maxRequestBytes": BODY_LIMIT,
        "maxOutputTokens": MAX_OUTPUT_TOKENS,
    }
    return told if plan is None else {**told, "deploysPerDay": settings.deploy_quotas[plan]}


@get("/capabilities")
async def capabilities(request: Request[Any, Any, State], gateway: Injected) -> dict[str, Any]:
    """What the service can do now. For an account's API key or the operator token."""
    plan = None
    if not is_operator(gateway, bearer(request)):
        plan = (await holder(request, gateway)).plan
    status = gateway.availability.status()
    return {
        "platform": {"features": {"managedInference": status.available}},
        "managedInferenceStatus": status,
        "models": list(PRICES),
        "defaultModel": DEFAULT_MODEL,
        "limits": limits(gateway, plan),
    }


@get("/account")
async def show_account(request: Request[Any, Any, State], gateway: Injected) -> dict[str, Any]:
    """The account, its limits, and what it spent today (nano-euro)."""
    account = await holder(request, gateway)
    with backbone():
        day = time.strftime("%Y-%m-%d", time.gmtime((await gateway.store.client.time())[0]))
        settled, reserved = await gateway.store.client.hmget(keys.spend_key(account.id, day), ["settled", "reserved"])
    return {
        "id": account.id,
        "name": account.name,
        "plan": account.plan,
        "limits": limits(gateway, account.plan),
        "spend": {
            "day": day,
            "settled": int(settled or 0),
            "reserved": int(reserved or 0),
            "cap": gateway.settings.daily_caps[account.plan],
        },
        "deploysToday": await gateway.deploys.count_today(account.id, day),
    }


@get("/account/usage")
async def show_usage(request: Request[Any, Any, State], gateway: Injected) -> list[dict[str, Any]]:
    """Requests and tokens by the hour: 24 of them, oldest first; the last is the present one."""
    account = await holder(request, gateway)
    return await gateway.counters.usage(account.id)


@get("/account/apps")
async def list_apps(request: Request[Any, Any, State], gateway: Injected) -> list[dict[str, Any]]:
    """Its apps, with what the monitors see of them."""
    account = await holder(request, gateway)
    domain = gateway.settings.apps_domain
    apps = await gateway.registry.apps_of(account.id)
    return [
        {
            "id": app.id,
            "name": app.name,
            "url": f"https://{app.name}.{domain}",
            "customDomain": app.customDomain,
            "customDomainVerified": app.customDomainVerified,
            **seen,
        }
        for app, seen in zip(apps, await health.of_apps(gateway.store, account, apps), strict=True)
    ]


# -- the webhook ---------------------------------------------------------------------------------------------


class ReceiverUrl(msgspec.Struct, forbid_unknown_fields=True):
    url: Annotated[str, msgspec.Meta(min_length=1, extra_json_schema={"format": "uri"})]


class EventType(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(SAMPLES)})]


@get("/account/webhook")
async def show_webhook(request: Request[Any, Any, State], gateway: Injected) -> dict[str, str]:
    account = await holder(request, gateway)
    receiver = await gateway.webhooks.receiver(account.id)
    if receiver is None:
        raise NotFound("No webhook is set; PUT {url} here to set one.")
    return {"url": receiver.url, "createdAt": receiver.createdAt}


@put("/account/webhook")
async def set_webhook(
    request: Request[Any, Any, State], data: JSONBody[ReceiverUrl], gateway: Injected
) -> dict[str, str]:
    """Where every event of the account goes. Another URL has another secret, which shows only here."""
    account = await holder(request, gateway)
    receiver, secret = await gateway.webhooks.set(account.id, data.url)
    shown = {"url": receiver.url, "createdAt": receiver.createdAt}
    return shown if secret is None else {**shown, "secret": secret}


@delete("/account/webhook")
async def clear_webhook(request: Request[Any, Any, State], gateway: Injected) -> None:
    account = await holder(request, gateway)
    await gateway.webhooks.clear(account.id)


@post("/account/webhook/test", status_code=202)
async def test_webhook(
    request: Request[Any, Any, State], data: JSONBody[EventType], gateway: Injected
) -> dict[str, str]:
    """Queues a sample of an event, with `"sample": true` in its data."""
    account = await holder(request, gateway)
    apps = await gateway.registry.apps_of(account.id)
    return {"id": await gateway.webhooks.test(account.id, data.type, apps[0] if apps else None)}


@get("/account/deliveries")
async def list_deliveries(
    request: Request[Any, Any, State],
    gateway: Injected,
    limit: Annotated[int, QueryParameter(ge=1, le=LOGGED)] = 50,
) -> list[dict[str, Any]]:
    """The outcomes of deliveries, newest first; the last 1,000 of 30 days are kept."""
    account = await holder(request, gateway)
    return await gateway.webhooks.deliveries(account.id, limit)


@post("/account/deliveries/{delivery_id:str}/redeliver", status_code=202)
async def redeliver(request: Request[Any, Any, State], delivery_id: FromPath[str], gateway: Injected) -> dict[str, str]:
    """Sends an event again: the same id, a fresh timestamp and signature."""
    account = await holder(request, gateway)
    await gateway.webhooks.redeliver(account.id, delivery_id)
    return {"id": delivery_id}


# -- deploy hooks and deploys --------------------------------------------------------------------------------


class NewHook(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


class Registration(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


@post("/account/apps/{app:str}/hooks")
async def create_hook(
    request: Request[Any, Any, State], app: FromPath[str], data: JSONBody[NewHook], gateway: Injected
) -> dict[str, Any]:
    """A secret URL that queues a rebuild of the app. It shows only here."""
    account = await holder(request, gateway)
    return await gateway.hooks.create(account.id, app, data.name)


@get("/account/hooks")
async def list_hooks(request: Request[Any, Any, State], gateway: Injected) -> list[dict[str, Any]]:
    account = await holder(request, gateway)
    return await gateway.hooks.list(account.id)


@delete("/account/hooks/{hook_id:str}")
async def revoke_hook(request: Request[Any, Any, State], hook_id: FromPath[str], gateway: Injected) -> None:
    """The very next call of its URL is a 404."""
    account = await holder(request, gateway)
    await gateway.hooks.revoke(account.id, hook_id)


@get("/account/deploys")
async def list_deploys(
    request: Request[Any, Any, State],
    gateway: Injected,
    app: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 50,
) -> list[dict[str, Any]]:
    """Newest first; the last 1,000 of 90 days are kept."""
    account = await holder(request, gateway)
    return [deploy.shown() for deploy in await gateway.deploys.list(account.id, app, limit)]


@get("/account/deploys/{deploy_id:str}")
async def show_deploy(request: Request[Any, Any, State], deploy_id: FromPath[str], gateway: Injected) -> dict[str, Any]:
    account = await holder(request, gateway)
    deploy = await gateway.deploys.get(deploy_id, account.id)
    if deploy is None or deploy.account != account.id:
        raise NotFound("There is no such deploy in this account.")
    return {**deploy.shown(), "log": await gateway.deploys.read_log(deploy)}


@put("/account/apps/{app:str}/source", status_code=202, request_max_body_size=None)
async def publish(request: Request[Any, Any, State], app: FromPath[str], gateway: Injected) -> dict[str, str]:
    """A tar.gz of the app's source: it is stored, and a live deploy of it is queued."""
    account = await holder(request, gateway)
    found = await gateway.registry.find(app)
    if found is None or found.account != account.id:
        raise NotFound("There is no such app in this account.")
    return {"deployId": await gateway.deploys.publish(found, request.stream(), "upload")}


@post("/register")
async def register(data: JSONBody[Registration], gateway: Injected) -> dict[str, str]:
    """A new account on the free plan, and its API key, which shows only here."""
    account, api_key = await gateway.registry.register(data.name, gateway.settings.registrations_per_day)
    return {"id": account.id, "apiKey": api_key}


@post("/hooks/deploy/{token:str}", status_code=202)
async def trigger_hook(token: FromPath[str], gateway: Injected) -> dict[str, str]:
    """The token is the credential. The body is ignored, and no path of this kind is ever logged."""
    hook = await gateway.hooks.find_by_token(token)
    app = await gateway.registry.find(hook.appId) if hook is not None else None
    if hook is None or app is None or app.account != hook.account:
        raise NotFoundException
    return {"deployId": await gateway.deploys.queue(app, "hook", hook=hook), "app": app.name}


ROUTES = [
    create_hook,
    list_hooks,
    revoke_hook,
    list_deploys,
    show_deploy,
    publish,
    register,
    trigger_hook,
    capabilities,
    show_account,
    show_usage,
    list_apps,
    show_webhook,
    set_webhook,
    clear_webhook,
    test_webhook,
    list_deliveries,
    redeliver,
]

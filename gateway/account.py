"""What an account holder sees: the account, its apps, and what the service can do."""

from __future__ import annotations

import hmac
import time
from typing import Any

from litestar import Request, get
from litestar.datastructures import State

from . import store as s
from .errors import Unauthorized
from .inference import BODY_LIMIT
from .prices import DEFAULT_MODEL, MAX_OUTPUT_TOKENS, PRICES
from .process import Gateway
from .registry import Account


def bearer(request: Request[Any, Any, State]) -> str:
    found = request.headers.getall("authorization", [])
    scheme, _, credential = found[0].partition(" ") if len(found) == 1 else ("", "", "")
    return credential.strip() if scheme.lower() == "bearer" else ""


def is_operator(gateway: Gateway, credential: str) -> bool:
    token = gateway.settings.operator_token
    return bool(token) and hmac.compare_digest(credential.encode(), token.encode())


async def holder(request: Request[Any, Any, State], gateway: Gateway) -> Account:
    """The account of the request's API key. Raises Unauthorized."""
    credential = bearer(request)
    account = await gateway.registry.holder(credential) if credential else None
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
async def capabilities(request: Request[Any, Any, State], gateway: Gateway) -> dict[str, Any]:
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
async def show_account(request: Request[Any, Any, State], gateway: Gateway) -> dict[str, Any]:
    """The account, its limits, and what it spent today (nano-euro)."""
    account = await holder(request, gateway)
    with s.backbone():
        day = time.strftime("%Y-%m-%d", time.gmtime((await gateway.store.client.time())[0]))
        settled, reserved = await gateway.store.client.hmget(s.spend_key(account.id, day), ["settled", "reserved"])
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
        "deploysToday": 0,
    }


@get("/account/apps")
async def list_apps(request: Request[Any, Any, State], gateway: Gateway) -> list[dict[str, Any]]:
    account = await holder(request, gateway)
    domain = gateway.settings.apps_domain
    return [
        {
            "id": app.id,
            "name": app.name,
            "url": f"https://{app.name}.{domain}",
            "customDomain": app.customDomain,
            "customDomainVerified": app.customDomainVerified,
        }
        for app in await gateway.registry.apps_of(account.id)
    ]


ROUTES = [capabilities, show_account, list_apps]

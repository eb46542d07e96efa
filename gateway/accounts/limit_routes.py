"""The account API: the limits of an app and of its users, and the app's spend of today."""

from __future__ import annotations

import re

import msgspec
from litestar import get, put
from litestar.params import FromPath, JSONBody

from gateway.accounts.records import Account, App, AppLimits, to_nano_euro
from gateway.accounts.routes import Spend
from gateway.bounds import Euro, Rate
from gateway.deploys.routes import require_own_app
from gateway.errors import BackboneUnavailable, NotFound, RequestMalformed
from gateway.http.authentication import Caller, account_router
from gateway.inference.keys import app_spend_fields, spend_key
from gateway.inference.spend.limits import allowed_limits, limits_of
from gateway.process import Gateway, Injected
from gateway.settings import NANO

EURO = re.compile(r"(?:0|[1-9]\d{0,6})(?:\.\d{1,9})?", re.ASCII)


class LimitsView(msgspec.Struct):
    """The limits of an app and of its users; null for none. Money is in euro per UTC day."""

    dailyEuro: str | None
    userDailyEuro: str | None
    requestsPerMinute: int | None
    userRequestsPerMinute: int | None


class LimitsChange(msgspec.Struct, forbid_unknown_fields=True):
    """Null clears a limit; a limit that is left out stays. 0 refuses all requests."""

    dailyEuro: Euro | msgspec.UnsetType | None = msgspec.UNSET
    userDailyEuro: Euro | msgspec.UnsetType | None = msgspec.UNSET
    requestsPerMinute: Rate | msgspec.UnsetType | None = msgspec.UNSET
    userRequestsPerMinute: Rate | msgspec.UnsetType | None = msgspec.UNSET


class WidestLimits(msgspec.Struct):
    """The widest limits that can be set."""

    dailyEuro: str
    userDailyEuro: str
    requestsPerMinute: int
    userRequestsPerMinute: int


class AppSpend(Spend):
    """Nano-euro of a UTC day."""

    # `cap` is the narrower of the app's and the account's.
    widest: WidestLimits


@get("/apps/{app:str}/limits", summary="Show the limits of an app and its users", errors=[NotFound])
async def show_limits(account: Caller, app: FromPath[str], gateway: Injected) -> LimitsView:
    return _view((await require_own_app(app, account, gateway)).limits or AppLimits())


@put("/apps/{app:str}/limits", errors=[RequestMalformed, NotFound, BackboneUnavailable])
async def change_limits(
    account: Caller, app: FromPath[str], data: JSONBody[LimitsChange], gateway: Injected
) -> LimitsView:
    """Change an app's limits.

    They narrow the account's limits, and apply within a second in every process.
    """
    found = await require_own_app(app, account, gateway)
    changes = {name: value for name, value in msgspec.structs.asdict(data).items() if value is not msgspec.UNSET}
    whose = "the plan" if account.own_cap is None else "the account"
    _check_limits(changes, _find_widest(found, account, gateway), whose)
    return _view(await gateway.registry.change_limits(found, lambda limits: msgspec.structs.replace(limits, **changes)))


@get("/apps/{app:str}/spend", summary="Show an app's spend of today", errors=[NotFound])
async def show_spend(account: Caller, app: FromPath[str], gateway: Injected) -> AppSpend:
    found = await require_own_app(app, account, gateway)
    day, fields = await gateway.store.today(), app_spend_fields(found.id)
    settled, reserved = await gateway.store.client.hmget(spend_key(account.id, day), fields)
    limits = limits_of(found, account.plan, gateway.settings, account.own_cap)
    cap = limits.cap if limits.app_cap is None else min(limits.cap, limits.app_cap)
    return AppSpend(day, int(settled or 0), int(reserved or 0), cap, _find_widest(found, account, gateway))


def _view(limits: AppLimits) -> LimitsView:
    return LimitsView(**msgspec.structs.asdict(limits))


def _find_widest(app: App, account: Account, gateway: Gateway) -> WidestLimits:
    allowed = allowed_limits(app.allowedRates, account.plan, gateway.settings, account.own_cap)
    cap = format_euro(allowed.cap)
    return WidestLimits(cap, cap, allowed.requests, allowed.user_requests)


def _check_limits(changes: dict[str, str | int | None], widest: WidestLimits, whose: str) -> None:
    """Raises RequestMalformed, whose message names the widest limit."""
    for name, value in changes.items():
        limit = getattr(widest, name)
        if isinstance(value, str):
            check_euro(value, name, limit, whose)
        elif value is not None and not 0 <= value <= limit:
            raise RequestMalformed(f"{name}: from 0 to {limit} requests per minute.")


def check_euro(value: str, name: str, limit: str, whose: str) -> None:
    """Raises RequestMalformed unless the value is an amount in euro up to the limit."""
    if not EURO.fullmatch(value):
        raise RequestMalformed(f'{name}: an amount in euro as text, such as "0.02", with at most nine decimals.')
    if to_nano_euro(value) > to_nano_euro(limit):
        raise RequestMalformed(f"{name}: {whose} allows at most {limit} euro per day.")


def format_euro(nano: int) -> str:
    whole, fraction = divmod(nano, NANO)
    return f"{whole}.{f'{fraction:09d}'.rstrip('0').ljust(2, '0')}"


ROUTES = [account_router(show_limits, change_limits, show_spend)]

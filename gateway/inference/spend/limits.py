"""The limits of an app's requests: what the plan and the operators allow, narrowed by the account holder."""

import re
from collections.abc import Sequence
from typing import Self

import msgspec

from gateway.accounts.records import Account, App, AppLimits, to_nano_euro
from gateway.errors import RequestMalformed
from gateway.keys import spend_key
from gateway.redis.client import Store
from gateway.settings import NANO, Settings

EURO = re.compile(r"(?:0|[1-9]\d{0,6})(?:\.\d{1,9})?", re.ASCII)


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Limits of one app: rates in requests per 60 seconds, caps in nano-euro per UTC day."""

    requests: int
    user_requests: int
    cap: int  # the account's, shared by all its apps
    app_cap: int | None = None
    user_cap: int | None = None


def cap_of(account: Account, settings: Settings) -> int:
    """Returns the account's daily cap in nano-euro."""
    return settings.daily_caps[account.plan] if account.own_cap is None else account.own_cap


def allowed_limits(app: App, account: Account, settings: Settings) -> Limits:
    """Returns the widest limits that an account holder can set."""
    requests, user_requests = settings.rate_limits.app, settings.rate_limits.user
    if (rates := app.allowedRates) is not None:
        requests = requests if rates.requestsPerMinute is None else rates.requestsPerMinute
        user_requests = user_requests if rates.userRequestsPerMinute is None else rates.userRequestsPerMinute
    return Limits(requests, user_requests, cap_of(account, settings))


def limits_of(app: App, account: Account, settings: Settings) -> Limits:
    """Returns the limits in force."""
    allowed, own = allowed_limits(app, account, settings), app.limits
    if own is None:
        return allowed
    return Limits(
        _narrower(allowed.requests, own.requestsPerMinute),
        _narrower(allowed.user_requests, own.userRequestsPerMinute),
        allowed.cap,
        own.cap,
        own.user_cap,
    )


def _narrower(allowed: int, own: int | None) -> int:
    return allowed if own is None else min(allowed, own)


# -- as the account holder sees and changes them -----------------------------------------------------------------


class LimitsView(msgspec.Struct):
    """The limits of an app and of its users; null for none. Money is in euro per UTC day."""

    dailyEuro: str | None
    userDailyEuro: str | None
    requestsPerMinute: int | None
    userRequestsPerMinute: int | None

    @classmethod
    def of(cls, limits: AppLimits | None) -> Self:
        return cls(**msgspec.structs.asdict(limits or AppLimits()))


class WidestLimits(msgspec.Struct):
    """The widest limits that can be set."""

    dailyEuro: str
    userDailyEuro: str
    requestsPerMinute: int
    userRequestsPerMinute: int


class Spend(msgspec.Struct):
    """Nano-euro of a UTC day."""

    day: str
    settled: int
    reserved: int
    cap: int


class AppSpend(Spend):
    """Nano-euro of a UTC day."""

    # `cap` is the narrower of the app's and the account's.
    widest: WidestLimits


async def read_spend(store: Store, account_id: str, fields: Sequence[str], cap: int) -> Spend:
    """Returns today's spend. `fields` hold the settled and the reserved money, of the account or of one app."""
    day = await store.today()
    settled, reserved = await store.client.hmget(spend_key(account_id, day), fields)
    return Spend(day, int(settled or 0), int(reserved or 0), cap)


def find_widest(app: App, account: Account, settings: Settings) -> WidestLimits:
    allowed = allowed_limits(app, account, settings)
    cap = format_euro(allowed.cap)
    return WidestLimits(cap, cap, allowed.requests, allowed.user_requests)


def check_limits(changes: dict[str, str | int | None], widest: WidestLimits, account: Account) -> None:
    """Raises RequestMalformed, whose message names the widest limit."""
    for name, value in changes.items():
        limit = getattr(widest, name)
        if isinstance(value, str):
            check_euro(value, name, limit, "the plan" if account.own_cap is None else "the account")
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

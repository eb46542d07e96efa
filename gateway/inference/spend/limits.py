"""The limits of an app's requests: what the plan and the operators allow, narrowed by the account holder."""

import msgspec

from gateway.accounts.records import Account, AllowedRates, App
from gateway.settings import Plan, Settings


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Limits of one app: rates in requests per 60 seconds, caps in nano-euro per UTC day."""

    requests: int
    user_requests: int
    cap: int  # the account's, shared by all its apps
    app_cap: int | None = None
    user_cap: int | None = None


def allowed_limits(rates: AllowedRates | None, plan: Plan, settings: Settings, own_cap: int | None = None) -> Limits:
    """Returns the widest limits that an account holder can set. `own_cap` is the account's, in place of the plan's."""
    requests, user_requests = settings.rate_limits.app, settings.rate_limits.user
    if rates is not None:
        requests = requests if rates.requestsPerMinute is None else rates.requestsPerMinute
        user_requests = user_requests if rates.userRequestsPerMinute is None else rates.userRequestsPerMinute
    return Limits(requests, user_requests, settings.daily_caps[plan] if own_cap is None else own_cap)


def cap_of(account: Account, settings: Settings) -> int:
    """Returns the account's daily cap in nano-euro."""
    return settings.daily_caps[account.plan] if account.own_cap is None else account.own_cap


def limits_of(app: App, plan: Plan, settings: Settings, own_cap: int | None = None) -> Limits:
    """Returns the limits in force."""
    allowed, own = allowed_limits(app.allowedRates, plan, settings, own_cap), app.limits
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

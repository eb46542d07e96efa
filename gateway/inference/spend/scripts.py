"""Functions for the scripts that reserve and settle money."""

import msgspec

from gateway.errors import NotReplicated
from gateway.inference.spend.limits import Limits
from gateway.inference.spend.reservations import Decision, ReservationRecord, Settlement, Window
from gateway.keys import (
    account_spend_prefix,
    app_window_key,
    partition_tag,
    reservation_keys,
    settled_key,
    spend_prefix,
    user_hash,
    user_spend_prefix,
    user_window_key,
)
from gateway.redis.client import Script, Store

_ADMIT = Script("inference/admit")
_SETTLE = Script("inference/settle")
_LIST_EXPIRED_RESERVATIONS = Script("inference/list_expired_reservations")


async def admit(
    store: Store,
    account: str,
    app: str,
    user: str,
    limits: Limits,
    max_cost: int,
    *,
    reservation: str,
    life: int,
    deadline: int,
) -> Decision:
    """Decides on a request of an app's user, and reserves `max_cost` nano-euro; 0 reserves nothing.

    `life` is in milliseconds. A call that reaches Redis at `deadline` (its clock, milliseconds; 0: none) or later
    reserves nothing. Raises NotReplicated if too few replicas have the reservation.
    """
    tag, replicated = partition_tag(account), max_cost > 0 and store.replicas > 0
    hashed = user_hash(user)
    windows = (app_window_key(tag, app), user_window_key(tag, app, hashed))
    script_keys = [*windows, account_spend_prefix(account), *reservation_keys(tag)]
    rates, app_cap = (limits.requests, limits.user_requests), limits.app_cap
    args: tuple[str | int, ...] = (*rates, max_cost, limits.cap, reservation, account, life, deadline, app)
    if limits.user_cap is not None:
        script_keys.append(user_spend_prefix(account, app, hashed))
        args = (*args, "" if app_cap is None else app_cap, hashed, limits.user_cap)
    elif app_cap is not None:
        args = (*args, app_cap)
    reply = await store.run_script(_ADMIT, script_keys, *args, replicated=replicated)
    if replicated:
        reply, replicas = reply
        if replicas < store.replicas and reply[0] == "ok":
            raise NotReplicated
    verdict, day, app_count, app_frees, user_count, user_frees, now, settled, used, app_used, user_used = reply
    app_window, user_window = Window(app_count, int(app_frees)), Window(user_count, int(user_frees))
    spent = (int(used), int(app_used), int(user_used))
    return Decision(verdict, day, app_window, user_window, int(now), int(settled), spent)


async def settle(
    store: Store, tag: str, reservation: str, cost: int | None, record: ReservationRecord | None = None
) -> Settlement:
    """Ends a reservation of the partition `tag` at `cost` nano-euro, at most its maximum cost; None means that maximum.

    The call may be repeated. If Redis has lost the reservation, the settlement is booked from `record`.
    """
    script_keys = [*reservation_keys(tag), spend_prefix(tag), settled_key(tag, reservation)]
    known = () if record is None else msgspec.structs.astuple(record)
    amount = "max_cost" if cost is None else cost
    return Settlement(*await store.run_script(_SETTLE, script_keys, reservation, amount, *known))


async def list_expired_reservations(store: Store, tag: str, limit: int) -> list[str]:
    """Returns at most `limit` ids of expired reservations, the longest expired first."""
    _, expiries = reservation_keys(tag)
    reservations: list[str] = await store.run_script(_LIST_EXPIRED_RESERVATIONS, [expiries], limit)
    return reservations

"""Ends reservations whose gateway has died, by settling them at their bound once their lease is over.

Any number of workers may do this: settling the same reservation twice has no effect.
"""

from __future__ import annotations

import asyncio

import structlog

from gateway.cancellation import end_if_cancelled
from gateway.inference.admission import WHOLE
from gateway.store import keys
from gateway.store.client import FAULTS, Store
from gateway.store.scripts import Script

logger = structlog.get_logger()

INTERVAL = 10.0  # seconds
BATCH = 500  # reservations per partition and interval


async def keep_settling_leases(store: Store) -> None:
    overdue, settle = Script("overdue"), Script("settle")
    while True:
        end_if_cancelled()
        await settle_overdue(store, overdue, settle)
        await asyncio.sleep(INTERVAL)


async def settle_overdue(store: Store, overdue: Script, settle: Script) -> int:
    """Settles what is overdue in every partition. Returns the number of reservations that it ended."""
    ended = 0
    for tag in keys.partition_tags():
        reservations, leases = keys.reservation_keys(tag)
        script_keys = [reservations, leases, keys.spend_prefix(tag)]
        try:
            for reservation in await overdue(store.client, [leases], BATCH):
                settled = int(await settle(store.client, script_keys, reservation, WHOLE))
                if settled >= 0:
                    ended += 1
                    logger.warning("lease.over", reservation=reservation, nano_euro=settled)
        except FAULTS as error:  # the other partitions may be on another node
            logger.warning("leases.postponed", partition=tag, error=type(error).__name__)
    return ended

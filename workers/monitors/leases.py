"""Ends reservations whose gateway has died, by settling them at their bound once their lease is over.

Any number of workers may do this: settling the same reservation twice has no effect.
"""

from __future__ import annotations

import asyncio

import structlog

from gateway.cancellation import end_if_cancelled
from gateway.errors import BackboneUnavailable
from gateway.store import keys, scripts
from gateway.store.client import Store

logger = structlog.get_logger()

INTERVAL = 10.0  # seconds
BATCH = 500  # reservations per partition and interval


async def keep_settling_leases(store: Store) -> None:
    while True:
        end_if_cancelled()
        await settle_overdue(store)
        await asyncio.sleep(INTERVAL)


async def settle_overdue(store: Store) -> int:
    """Settles what is overdue in every partition. Returns the number of reservations that it ended."""
    ended = 0
    for tag in keys.partition_tags():
        try:
            for reservation in await scripts.overdue(store, tag, BATCH):
                settled = await scripts.settle(store, tag, reservation, None)
                if settled is not None:
                    ended += 1
                    logger.warning("lease.over", reservation=reservation, nano_euro=settled)
        except BackboneUnavailable as error:  # the other partitions may be on another node
            logger.warning("leases.postponed", partition=tag, error=type(error.__cause__).__name__)
    return ended

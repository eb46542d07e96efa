"""Settles the reservations of dead gateways at their maximum cost, once their lease is over.

Any number of workers may do this, because settling the same reservation twice has no effect.
"""

import asyncio

import structlog

from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneRefused, BackboneUnavailable
from gateway.inference.spend import scripts
from gateway.keys import PARTITION_TAGS
from gateway.redis.client import Store
from gateway.redis.faults import code_of, concerns_every_write

logger = structlog.get_logger()

SETTLE_SECONDS = 10.0  # between searches for overdue reservations
BATCH_RESERVATIONS = 500  # per partition and search


async def keep_settling_leases(store: Store) -> None:
    while True:
        await settle_overdue(store)
        end_if_canceled()
        await asyncio.sleep(SETTLE_SECONDS)


async def settle_overdue(store: Store) -> int:
    """Settles the overdue reservations of every partition. Returns their number."""
    ended, postponed = 0, False
    for tag in PARTITION_TAGS:
        try:
            for reservation in await scripts.list_expired_reservations(store, tag, BATCH_RESERVATIONS):
                ended += await _settle(store, tag, reservation)
        except BackboneUnavailable as error:  # the other partitions may be on another node
            if not postponed:
                logger.warning("leases.postponed", partition=tag, error=code_of(error.__cause__))
            postponed = True
    return ended


async def _settle(store: Store, tag: str, reservation: str) -> bool:
    try:
        settlement = await scripts.settle(store, tag, reservation, None)
    except BackboneRefused as error:
        if concerns_every_write(error.__cause__):
            raise
        # A broken record must not prevent the settlement of the others.
        logger.error("lease.broken", reservation=reservation, error=str(error.__cause__))
        return False
    if settlement.outcome == "settled":
        logger.warning("lease.over", reservation=reservation, nano_euro=settlement.nano_euro)
    return settlement.outcome == "settled"

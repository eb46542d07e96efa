"""What has to happen although nobody asks for it: reservations whose gateway died are settled at their bound.

Any number of these may run: a settlement is idempotent by its reservation's id.
"""

from __future__ import annotations

import asyncio

import structlog

from gateway import store as s
from gateway.admission import WHOLE
from gateway.settings import Settings

logger = structlog.get_logger()

LEASE_INTERVAL = 10.0  # seconds between looks at the leases
BATCH = 500  # reservations of a partition in one look


async def run(settings: Settings) -> None:
    store = s.Store(settings.redis_url)
    overdue, settle = s.Script("overdue"), s.Script("settle")
    try:
        while True:
            await settle_overdue(store, overdue, settle)
            await asyncio.sleep(LEASE_INTERVAL)
    finally:
        await store.close()


async def settle_overdue(store: s.Store, overdue: s.Script, settle: s.Script) -> int:
    """One look at every partition; how many reservations it ended."""
    ended = 0
    for tag in s.partition_tags():
        keys = [f"{tag}:reservations", f"{tag}:leases", f"{tag}:spend"]
        try:
            for reservation in await overdue(store.client, [f"{tag}:leases"], BATCH):
                settled = int(await settle(store.client, keys, reservation, WHOLE))
                if settled >= 0:
                    ended += 1
                    logger.warning("lease.over", reservation=reservation, nano_euro=settled)
        except s.FAULTS as error:  # the other partitions may be on another node
            logger.warning("leases.postponed", partition=tag, error=type(error).__name__)
    return ended

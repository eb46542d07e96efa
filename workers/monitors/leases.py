"""What has to happen although nobody asks for it: probes, looks at certificates, and the end of reservations whose
gateway died, which are settled at their bound.

Any number of these may run: a settlement is idempotent by its reservation's id, and `rounds` shares the looks.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.cancellation import end_if_cancelled
from gateway.deploys.states import Deploys
from gateway.errors import BackboneUnavailable
from gateway.settings import Settings
from gateway.store import keys, scripts
from gateway.store.client import Store
from workers.heartbeat import keep_heartbeat
from workers.monitors.certificates import Certificates
from workers.monitors.uptime import Uptime

logger = structlog.get_logger()

ENGINE_INTERVAL = 60.0  # seconds between looks at an outside engine's deploys
LEASE_INTERVAL = 10.0  # seconds between looks at the leases
BATCH = 500  # reservations of a partition in one look


async def run(settings: Settings) -> None:
    store = Store(settings.redis_url)
    registry = Registry(store, Vault(settings.encryption_key))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_heartbeat(store, "monitors"))
            group.create_task(keep_settling(store))
            group.create_task(Uptime(settings, registry).run())
            group.create_task(Certificates(settings, registry).run())
            if settings.deploy_engine == "external":
                group.create_task(keep_failing_unreported(Deploys(settings, registry)))
    finally:
        await store.close()


async def keep_settling(store: Store) -> None:
    while True:
        end_if_cancelled()
        await settle_overdue(store)
        await asyncio.sleep(LEASE_INTERVAL)


async def keep_failing_unreported(deploys: Deploys) -> None:
    """An outside engine that died says nothing; its deploys are not to stay under way for ever."""
    while True:
        end_if_cancelled()
        with contextlib.suppress(BackboneUnavailable):
            if failed := await deploys.fail_unreported():
                logger.warning("deploys.unreported", failed=failed)
        await asyncio.sleep(ENGINE_INTERVAL)


async def settle_overdue(store: Store) -> int:
    """One look at every partition; how many reservations it ended."""
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

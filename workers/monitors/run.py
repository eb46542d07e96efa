"""Starts the background work of the monitors. Any number of these workers may run.

Also settles the reservations of dead gateways at their maximum cost, once they have expired. Settling the same
reservation twice has no effect.
"""

import asyncio
from functools import partial

import structlog

from gateway.accounts.app_changes import AppChanges
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.data.commands import DataCommands
from gateway.data.records import DataRecords
from gateway.deploys.environment import Environments
from gateway.deploys.hooks import Hooks
from gateway.deploys.records import DeployRecords
from gateway.deploys.states import Deploys
from gateway.errors import BackboneRefused, BackboneUnavailable
from gateway.inference.spend import scripts
from gateway.keys import PARTITION_TAGS
from gateway.loops import every
from gateway.operations.leaving import Leaving, list_due
from gateway.operations.removal import Removal
from gateway.redis.client import Store
from gateway.redis.errors import code_of, concerns_every_write
from gateway.settings import Settings
from gateway.storage import open_storage
from workers.heartbeat import keep_heartbeat
from workers.monitors.certificates import Certificates
from workers.monitors.domains import Domains
from workers.monitors.uptime import Uptime

SETTLE_SECONDS = 10.0  # between searches for overdue reservations
BATCH_RESERVATIONS = 500  # per partition and search


async def settle_overdue(store: Store, at_most: int = BATCH_RESERVATIONS) -> int:
    """Settles overdue reservations, `at_most` of each partition. Returns their number."""
    ended, postponed = 0, False
    for tag in PARTITION_TAGS:
        try:
            for reservation in await scripts.list_expired_reservations(store, tag, at_most):
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


logger = structlog.get_logger()

EXTERNAL_CHECK_SECONDS = 60.0  # between checks for deploys that an external engine does not report


async def run_monitors(settings: Settings) -> None:
    store = Store(settings.redis_url, ca_file=settings.ca_file)
    registry = Registry(store, Vault(settings.encryption_key))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_heartbeat(store, "monitors"))
            group.create_task(every(SETTLE_SECONDS, partial(settle_overdue, store)))
            group.create_task(Uptime(settings, registry).run())
            group.create_task(Certificates(settings, registry).run())
            group.create_task(Domains(settings, registry).run())
            group.create_task(keep_deleting_accounts(settings, registry))
            if settings.deploy_engine == "external":
                deploys = Deploys(settings, registry, DeployRecords(settings, registry))
                group.create_task(keep_failing_unreported(deploys))
    finally:
        await store.close()


DELETION_SECONDS = 2.0  # between two searches for accounts to delete


def make_leaving(settings: Settings, registry: Registry) -> Leaving:
    store = registry.store
    deploy_records, records, commands = DeployRecords(settings, registry), DataRecords(store), DataCommands(store)
    deploys = Deploys(settings, registry, deploy_records)
    environments = Environments(store, registry.vault)
    removal = Removal(
        AppChanges(registry), Hooks(settings, registry), environments, commands, records, deploys, deploy_records
    )
    return Leaving(registry, deploys, deploy_records, removal, open_storage(settings), records, commands, settings)


async def keep_deleting_accounts(settings: Settings, registry: Registry) -> None:
    leaving: Leaving | None = None  # opens the storage, whose library takes much memory, when it is needed

    async def delete_due() -> None:
        nonlocal leaving
        if await list_due(registry.store):
            leaving = leaving or make_leaving(settings, registry)
            await leaving.delete_due()

    await every(DELETION_SECONDS, delete_due, "account.undeletable")


async def keep_failing_unreported(deploys: Deploys) -> None:
    """Fails the deploys of an external engine that has died. Otherwise they would stay in progress forever."""

    async def fail_unreported() -> None:
        if failed := await deploys.fail_unreported():
            logger.warning("deploys.unreported", failed=failed)

    await every(EXTERNAL_CHECK_SECONDS, fail_unreported, "deploys.unreadable")

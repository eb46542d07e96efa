"""Starts the background work of the monitors. Any number of these workers may run."""

import asyncio

import structlog

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.cancellation import end_if_canceled
from gateway.deploys.states import Deploys
from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store
from gateway.settings import Settings
from workers.heartbeat import keep_heartbeat
from workers.monitors.certificates import Certificates
from workers.monitors.domains import Domains
from workers.monitors.leases import keep_settling_leases
from workers.monitors.uptime import Uptime

logger = structlog.get_logger()

ENGINE_CHECK_SECONDS = 60.0  # between checks for deploys that an external engine does not report


async def run_monitors(settings: Settings) -> None:
    store = Store(settings.redis_url, ca_file=settings.ca_file)
    registry = Registry(store, Vault(settings.encryption_key))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_heartbeat(store, "monitors"))
            group.create_task(keep_settling_leases(store))
            group.create_task(Uptime(settings, registry).run())
            group.create_task(Certificates(settings, registry).run())
            group.create_task(Domains(settings, registry).run())
            if settings.deploy_engine == "external":
                group.create_task(keep_failing_unreported(Deploys(settings, registry)))
    finally:
        await store.close()


async def keep_failing_unreported(deploys: Deploys) -> None:
    """Fails the deploys of an external engine that has died. Otherwise they would stay in progress forever."""
    while True:
        try:
            if failed := await deploys.fail_unreported():
                logger.warning("deploys.unreported", failed=failed)
        except BackboneUnavailable:
            pass
        except Exception as error:  # a broken record must not stop the other monitors
            logger.error("deploys.unreadable", exc_info=error)
        end_if_canceled()
        await asyncio.sleep(ENGINE_CHECK_SECONDS)

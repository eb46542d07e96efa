"""The worker `sites` for apps on Kubernetes: one of them follows the serving records, and the others stand by.

To those who wait for answers, the cluster is one host. The present worker holds a lease in Redis. When it dies, the
next one continues after the lease has ended, and the cluster serves meanwhile.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial

import structlog

from gateway.accounts.suspended import SuspendedList
from gateway.cancellation import end_if_canceled, run_in_background
from gateway.deploys import scripts
from gateway.deploys.serving import Records
from gateway.errors import BackboneUnavailable
from gateway.loops import every
from gateway.redis.client import Store, until_redis_answers
from gateway.settings import Settings
from workers.heartbeat import keep_heartbeat
from workers.hosting.data_packer import find_data_limit
from workers.hosting.host_agent import HostAgent
from workers.hosting.serving import find_app, follow_changes
from workers.hosting.sites import CrashReporter
from workers.hosting.sleep_limits import SleepLimits
from workers.kubernetes.activator import Activator, find_own_address
from workers.kubernetes.applier import KubernetesApplier
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.data_agent import ClusterDataAgent
from workers.kubernetes.objects import describe_policy
from workers.kubernetes.pod_report import keep_reporting

logger = structlog.get_logger()

HOST = "kubernetes"  # the id of the cluster among hosts
SUSPENSION_SECONDS = 1.0  # between reads of the lists of suspended apps
LEASE_SECONDS, RENEWAL_SECONDS = 15.0, 3.0


class TakenOver(Exception):
    """Another worker has taken over, because this one stood still."""


@asynccontextmanager
async def _hold_lease(store: Store) -> AsyncIterator[asyncio.Task[object]]:
    """Waits for the lease. Yields a task that renews it, and fails when another worker has it."""
    worker, lifetime = secrets.token_hex(8), round(LEASE_SECONDS * 1000)
    waiting = False
    while not await until_redis_answers(lambda: scripts.hold_engine(store, worker, lifetime)):
        if not waiting:
            logger.info("worker.standing_by", lock="kubernetes")
        waiting = True
        await asyncio.sleep(RENEWAL_SECONDS)

    async def renew() -> None:
        while True:
            await asyncio.sleep(RENEWAL_SECONDS)
            end_if_canceled()
            with suppress(BackboneUnavailable):  # nobody else can take it meanwhile
                if not await scripts.hold_engine(store, worker, lifetime):
                    raise TakenOver("another worker changes what the cluster serves")

    try:
        async with run_in_background(renew()) as renewing:
            yield renewing
    finally:
        with suppress(BackboneUnavailable):
            await scripts.hold_engine(store, worker, 0)


async def run(settings: Settings) -> None:
    async with AsyncExitStack() as stack:
        reporter = await stack.enter_async_context(aclosing(CrashReporter(settings)))
        await stack.enter_async_context(run_in_background(keep_heartbeat(reporter.store, "sites")))
        cluster = await stack.enter_async_context(Cluster(settings.kubernetes_namespace))
        lost = await stack.enter_async_context(_hold_lease(reporter.store))
        suspended, find_address = SuspendedList(reporter.store), partial(find_app, reporter.registry)
        find_limit = partial(find_data_limit, settings, reporter.registry)
        applier = KubernetesApplier(
            settings, cluster, find_address, suspended, reporter.report, find_limit, find_own_address()
        )
        await stack.enter_async_context(aclosing(applier))
        agent = HostAgent(Records(reporter.store), HOST, applier, find_address, settings.canary)
        parts = [lost, await stack.enter_async_context(run_in_background(cluster.run()))]
        await cluster.until_synced()
        await cluster.apply(describe_policy())
        with suppress(BackboneUnavailable):
            await suspended.read_changes()
        await stack.enter_async_context(aclosing(agent))
        await agent.catch_up()
        changes = follow_changes(reporter.store, applier.follow_app)
        activator = Activator(applier, SleepLimits(reporter.registry, settings.app_sleep))
        data = ClusterDataAgent(settings, reporter.registry, cluster, applier, find_limit)
        suspensions = every(SUSPENSION_SECONDS, applier.follow_suspensions, "sites.suspensions_not_marked")
        reports = keep_reporting(reporter.store, cluster)
        for part in (agent.run(), suspensions, changes, data.run(), activator.run(), reports):
            parts += [await stack.enter_async_context(run_in_background(part))]
        logger.info("sites.serving", address=HOST, domain=settings.apps_domain)
        end_if_canceled()
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

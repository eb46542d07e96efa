"""The worker `sites` for apps on Kubernetes: one of them follows the serving records, and the others stand by.

The present worker is the engine that serves the apps (`workers/hosting/hold_engine.py`). When it dies, the next
one continues seconds later, and the cluster serves meanwhile.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial

import structlog

from gateway.accounts.suspended import SuspendedList
from gateway.cancellation import end_if_canceled, run_in_background
from gateway.deploys.previews import Previews
from gateway.deploys.serving import Holder, Records
from gateway.errors import BackboneUnavailable
from gateway.loops import every, freeze_heap
from gateway.redis.client import patient
from gateway.settings import Settings
from workers.engine.data import DataAgent
from workers.engine.names import find_app, find_apps, find_plan, follow_changes
from workers.engine.reconciler import Reconciler
from workers.engine.steps import ReleaseSteps
from workers.engine.visits import keep_noting_visits
from workers.heartbeat import keep_heartbeat
from workers.hosting.hold_engine import RENEWAL_SECONDS
from workers.hosting.sites import CrashReporter
from workers.hosting.sleep_limits import SleepLimits
from workers.kubernetes.activator import ACTIVATOR_PORT, Activator, find_own_address
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.data import ClusterData
from workers.kubernetes.driver import ClusterDriver
from workers.kubernetes.objects import describe_policy
from workers.kubernetes.pod_report import keep_reporting
from workers.kubernetes.sleep import Sleep

logger = structlog.get_logger()

SUSPENSION_SECONDS = 0.2  # between reads of the versions of the lists of suspended apps


class TakenOver(Exception):
    """Another worker has taken over, because this one stood still."""


@asynccontextmanager
async def _hold_engine(
    records: Records, namespace: str, *, renewal_seconds: float = RENEWAL_SECONDS
) -> AsyncIterator[asyncio.Task[object]]:
    """Waits until it is the engine. Yields a task that keeps it so, and fails when another one has taken over."""
    worker, waiting = Holder(secrets.token_hex(8), f"a Kubernetes cluster (namespace {namespace})"), False
    while (holder := await patient(records).hold_engine(worker)) != worker:
        if not waiting:
            logger.info("worker.standing_by", lock="kubernetes", holder=holder and holder.name)
        waiting = True
        await asyncio.sleep(renewal_seconds)

    async def renew() -> None:  # while Redis is unavailable, nobody else can take it
        if await records.hold_engine(worker) != worker:
            raise TakenOver("another engine serves the apps")

    try:
        async with run_in_background(every(renewal_seconds, renew, first=renewal_seconds)) as renewing:
            yield renewing
    finally:
        with suppress(BackboneUnavailable):
            await records.leave_engine(worker)


async def run(settings: Settings) -> None:
    async with AsyncExitStack() as stack:
        reporter = await stack.enter_async_context(aclosing(CrashReporter(settings)))
        await stack.enter_async_context(run_in_background(keep_heartbeat(reporter.store, "sites")))
        cluster = await stack.enter_async_context(Cluster(settings.kubernetes_namespace))
        records = Records(reporter.store)
        lost = await stack.enter_async_context(_hold_engine(records, settings.kubernetes_namespace))
        suspended, find_address = SuspendedList(reporter.store), partial(find_app, reporter.registry)
        driver = ClusterDriver(
            settings,
            cluster,
            find_address,
            suspended,
            reporter.report,
            partial(find_plan, reporter.registry),
            (find_own_address(), ACTIVATOR_PORT),
        )
        await stack.enter_async_context(aclosing(driver))
        steps = ReleaseSteps(driver, find_address, partial(find_apps, reporter.registry), settings)
        reconciler = Reconciler(records, steps, find_address, settings.canary)
        sleep = await stack.enter_async_context(aclosing(Sleep(cluster, driver, suspended)))
        parts = [lost, await stack.enter_async_context(run_in_background(cluster.run()))]
        await cluster.until_synced()
        await cluster.apply(describe_policy(settings, cluster.own_namespace))
        with suppress(BackboneUnavailable):
            await suspended.read_changes()
        await stack.enter_async_context(aclosing(reconciler))
        await reconciler.catch_up()
        activator = Activator(sleep, SleepLimits(reporter.registry, settings.app_sleep))
        volumes = ClusterData(settings, reporter.registry, cluster, driver)
        data = DataAgent(reporter.registry, volumes)
        followers = steps.names.follow_app, volumes.follow_app
        changes = follow_changes(reporter.store, *followers, on_step=reconciler.look_soon)
        suspensions = every(SUSPENSION_SECONDS, sleep.follow_suspensions, "sites.suspensions_not_marked")
        reports = keep_reporting(reporter.store, cluster)
        visits = keep_noting_visits(Previews(reporter.store, records), driver)
        for part in (reconciler.run(), suspensions, changes, data.run(), activator.run(), reports, visits):
            parts += [await stack.enter_async_context(run_in_background(part))]
        freeze_heap()  # thousands of objects, which a collection would visit again and again
        logger.info("sites.serving", address="kubernetes", domain=settings.apps_domain)
        end_if_canceled()
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

"""An app that sleeps has no pod, and its address leads to the activator (`activator.py`), which wakes it."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import structlog

from gateway.accounts.suspended import SuspendedList
from gateway.cancellation import RunningTasks, cancel
from gateway.deploys.states import AppGone, DeployError
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.driver import ClusterDriver, SleepState
from workers.kubernetes.pod import WEB_PORT
from workers.kubernetes.pod_quota import Address
from workers.kubernetes.pod_relay import ask_relay
from workers.kubernetes.pod_status import has_ended, is_ready

logger = structlog.get_logger()

WAKE_SECONDS = 180.0  # in which an app must be ready that is woken
ENDING_SECONDS = 20.0  # in which the cluster begins to end the pod of an app that sleeps


class Sleep:
    def __init__(self, cluster: Cluster, driver: ClusterDriver, suspended: SuspendedList) -> None:
        self._cluster, self._driver, self._suspended = cluster, driver, suspended
        self._changes = -1  # of the list of suspended apps, that have been followed
        self._stopped: set[Address] = set()  # because they are suspended
        self._waking_soon = RunningTasks()
        self._waking: dict[Address, asyncio.Task[tuple[str, int]]] = {}
        self._lock = asyncio.Lock()  # held while pods begin and end

    async def aclose(self) -> None:
        await cancel(*self._waking.values(), *self._waking_soon.values())

    def is_asleep(self, app_id: str, address: str) -> bool:
        return self._driver.places.is_asleep(app_id, address)

    # -- suspension ------------------------------------------------------------------------------------------

    def is_suspended(self, address: Address) -> bool:
        return self._driver.state(address) is SleepState.SUSPENDED

    async def follow_suspensions(self) -> None:
        """Ends the apps that were suspended since the last call, and starts those that no longer are.

        Raises BackboneUnavailable.
        """
        await self._suspended.read_changes()
        if self._changes == self._suspended.changes:
            return
        self._changes = self._suspended.changes
        present = {address for address in self._driver.records if self.is_suspended(address)}
        began, over = present - self._stopped, (self._stopped - present) & self._driver.records.keys()
        self._stopped = present
        for address in over:
            self.wake_soon(address)
        await asyncio.gather(*map(self._suspend, began))

    async def _suspend(self, address: Address) -> None:
        target = await self._driver.find_target(address)
        try:
            await asyncio.gather(
                self._driver.kill_pods(address), *([self._driver.lead(target, asleep=True)] if target else [])
            )
        except DeployError as error:
            logger.error("sites.suspensions_not_marked", app=address[0], reason=str(error))

    # -- falling asleep --------------------------------------------------------------------------------------

    def take_changed(self) -> set[Address]:
        """Returns the addresses of which `may_sleep` may have become true since the last call."""
        changed, self._driver.changed = self._driver.changed, set()
        return changed

    def may_sleep(self, address: Address) -> bool:
        """Returns whether the start command of an address runs and may sleep: no deploy is in progress."""
        wanted = self._driver.records.get(address)
        return (
            wanted is not None
            and wanted.step in ("live", "undo")
            and (release := wanted.releases.get(wanted.serves)) is not None
            and release.runs
            and self._driver.routed(wanted) == wanted.serves
            and not self._driver.places.is_asleep(*address)
        )

    async def let_sleep(self, address: Address, seconds: float) -> float:
        """Ends the pod of an app that nobody has asked for so many seconds. Requests come to the activator from now on.

        Returns the seconds that are left if somebody has asked.
        """
        left, wanted = await self._read_seconds_left(address, seconds), self._driver.records[address]
        if left > 0:
            return left
        try:
            if (target := await self._driver.find_target(address)) is not None:
                await self._driver.lead(target, asleep=True)
            await asyncio.sleep(self._driver.activator_seconds)  # until nobody asks the pod any more
            async with self._lock:
                left = await self._read_seconds_left(address, seconds)
                is_same = self._driver.records.get(address) is wanted
                if left <= 0 and is_same and self._driver.state(address) is SleepState.ASLEEP:
                    await self._end(address)
                    return seconds
            await self.wake(address)
        except DeployError as error:
            logger.error("sites.sleep_failed", app=address[0], reason=str(error))
        return max(left, seconds)

    async def _end(self, address: Address) -> None:
        if (target := await self._driver.find_target(address)) is None:
            return
        self._driver.states[address] = SleepState.ENDING
        try:
            await self._driver.start(target)
            # Its pods must not count when the app is woken.
            await self._cluster.until(lambda: not self._list_pods(target.deploy), ENDING_SECONDS)
        finally:
            self._driver.end_state(address, SleepState.ENDING)
        logger.info("app.asleep", app=address[0], address=address[1])

    def _list_pods(self, deploy: str) -> list[Any]:
        """Returns the pods of a release that do not end."""
        return [pod for pod in self._cluster.select("Pod", deploy=deploy) if not has_ended(pod)]

    async def _read_seconds_left(self, address: Address, seconds: float) -> float:
        """Asks the pod how long it has been idle. If it does not answer, it is not."""
        pods = self._list_pods(self._driver.routed(self._driver.records[address]))
        left = seconds
        for pod in [pod for pod in pods if is_ready(pod)][:1]:
            with suppress(OSError, ValueError):
                idle = (await ask_relay(pod.status.podIP)).idle_seconds
                left = seconds - idle
                self._driver.note_visit(address, idle)
        return left

    # -- waking up -------------------------------------------------------------------------------------------

    def account_of(self, address: Address) -> str:
        return self._driver.records[address].account

    def find_address(self, host: str) -> Address | None:
        """Returns the address that a host name leads to."""
        found = [(place.app, place.address) for place in self._driver.places.places_at(host)]
        return next((address for address in found if address in self._driver.records), None)

    async def wake(self, address: Address) -> tuple[str, int]:
        """Starts an app that sleeps. Returns where its pod answers. Raises DeployError."""
        if self.is_suspended(address):
            raise DeployError("the app is suspended")
        while self._driver.state(address) is SleepState.HELD or self._driver.gives_way(self._driver.records[address]):
            await self._cluster.next_change(1.0)  # its next release starts it
        if (waking := self._waking.get(address)) is None:
            self._waking[address] = waking = asyncio.create_task(self._wake(address))
            waking.add_done_callback(lambda ended: (self._waking.pop(address), ended.cancelled() or ended.exception()))
        return await asyncio.shield(waking)

    def wake_soon(self, address: Address) -> None:
        """Begins to start an app that sleeps, and waits for nothing."""

        async def wake() -> None:
            try:
                await self.wake(address)
            except DeployError as error:
                logger.warning("sites.not_awake", app=address[0], reason=str(error))

        self._waking_soon.start(wake(), address)

    async def _wake(self, address: Address) -> tuple[str, int]:
        began = time.monotonic()
        self._driver.note_visit(address, 0.0)
        async with self._lock:
            if (target := await self._driver.find_target(address)) is None:
                raise AppGone
            if self._driver.state(address) is SleepState.ASLEEP:
                self._driver.states[address] = SleepState.WAKING
            await self._driver.start(target)
        try:
            pod = await self._driver.startup.until_pod(target.deploy, WAKE_SECONDS, is_ready)
            again = await self._driver.find_target(address)
            if again is not None and self._driver.state(address) not in (SleepState.HELD, SleepState.SUSPENDED):
                await self._driver.lead(again, asleep=False)
        finally:
            self._driver.end_state(address, SleepState.WAKING)
        logger.info("app.awake", app=address[0], address=address[1], seconds=time.monotonic() - began)
        return pod.status.podIP, WEB_PORT

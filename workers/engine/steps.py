"""The steps of a release: check → swap → canary → live, and what undoes them (`gateway/deploys/serving.py`).

Each step is one function, for every driver (`driver.py`). A worker may be killed at any time: each step can be repeated
from its beginning, and visitors always get a release that has passed its checks.
"""

import asyncio
from contextlib import suppress

from gateway.accounts.domain_names import apps_host
from gateway.deploys.states import DeployError
from gateway.settings import Settings
from workers.engine.driver import Driver, Target
from workers.engine.names import FindApp, FindApps, Names

DRAIN_SECONDS = 2.0  # for requests in progress, before a replaced release is stopped


class ReleaseSteps:
    """Every step may raise DeployError."""

    def __init__(
        self,
        driver: Driver,
        find_app: FindApp,
        find_apps: FindApps,
        settings: Settings,
        *,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self.driver, self.names = driver, Names(driver.places, find_app, find_apps, apps_host(settings))
        self._drain_seconds = drain_seconds
        self._checked: set[str] = set()  # deploys whose releases have passed the check, and have not ended

    async def check(self, target: Target) -> None:
        """Starts the release, and waits until it answers. Visitors still get the one before, or wait."""
        await self.driver.place(target)
        await self._check_placed(target)

    async def _check_placed(self, target: Target) -> None:
        await self._stop_first(target, self.driver.routed(target.wanted))
        await self.driver.start(target)
        if self.driver.is_suspended(target) and not target.is_new:
            return  # it runs once the suspension is lifted
        try:
            await self.driver.until_answers(target)
        finally:
            target.output.extend(await self.driver.read_output(target))
        self._checked.add(target.deploy)

    async def serve(self, target: Target) -> None:
        """Gives visitors the release. If it does not answer, a canary fails; other steps serve it anyway."""
        if self.driver.routed(target.wanted) == target.deploy:
            if self.driver.gives_way(target.wanted):
                return
            await self.driver.start(target)
        else:
            await self.driver.place(target)
            try:
                if target.deploy not in self._checked:
                    await self._check_placed(target)
                elif not self.driver.runs(target.deploy):  # a suspension has ended it since
                    await self.driver.start(target)
                    if not self.driver.is_suspended(target):
                        await self.driver.until_answers(target)
            except DeployError:
                if target.is_new:
                    raise
        async with self.names.reserved(target) as hosts:
            await self.driver.route(target, hosts)

    async def probe(self, target: Target) -> None:
        """Raises DeployError unless the release is up for visitors, and its start command keeps running."""
        failure: DeployError | None = None
        try:
            await self.driver.visit(target)
        except DeployError as error:
            failure = error
        if exits := self.driver.count_exits(target):
            target.output.extend(await self.driver.read_output(target))
            raise DeployError(f"the start command exited {exits} time{'' if exits == 1 else 's'}")
        if failure is not None:
            raise failure

    async def finish(self, target: Target) -> None:
        """Ends the canary, and stops and removes what the release has replaced."""
        self._checked.discard(target.deploy)
        others = self.driver.list_others(target)
        if others:
            await asyncio.sleep(self._drain_seconds)
        await self.driver.retire(target, others)

    async def resume(self, target: Target) -> None:
        """Gives visitors the release again that this one has stopped or replaced."""
        self._checked.discard(target.deploy)
        was_routed = self.driver.routed(target.wanted) == target.deploy
        if former := self.driver.find_former(target):
            again = Target(target.wanted, target.app, former, target.output)
            await self._stop_first(again, target.deploy)
            await self.driver.start(again)
            with suppress(DeployError, TimeoutError):
                async with asyncio.timeout(self.driver.return_seconds):
                    await self.driver.until_answers(again)
            await self.driver.route(again, None)
        elif was_routed:
            async with self.names.lock:
                await self.driver.unroute(target)
        if was_routed:
            await asyncio.sleep(self._drain_seconds)

    async def remove(self, target: Target) -> None:
        """Gives visitors the release before again, and removes this one."""
        if target.wanted.ends:
            self._checked.discard(target.deploy)
            async with self.names.lock:
                return await self.driver.end(target)
        await self.resume(target)
        await self.driver.remove(target)

    async def _stop_first(self, target: Target, former: str) -> None:
        """Stops a release if the two must not run side by side. Its visitors wait."""
        if former not in ("", target.deploy) and self.driver.excludes(target, former):
            await self.driver.hold(target, former)
            await self.driver.stop(target, former)

"""Follows the serving records (`gateway/deploys/serving.py`), applies their steps, and answers them.

For each address of each app, a task applies the newest step of its record (`applier.py`). One agent at a time follows
the records, under a lease (`engine_lease.py`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from gateway.accounts.records import App
from gateway.cancellation import end_if_canceled, finish_despite_cancellation, run_in_background, run_in_thread
from gateway.deploys.serving import Records, StepAnswer, Wanted
from gateway.deploys.states import AppGone, DeployError
from gateway.errors import BackboneUnavailable
from gateway.redis.client import until_redis_answers
from workers.hosting.applier import Applier, ReleaseMissing, Target

logger = structlog.get_logger()

POLL_SECONDS, QUICK_POLL_SECONDS = 0.2, 0.05  # between reads of the changed records; while a deploy is in progress
QUICK_SECONDS = 5.0  # after a new record, in which the next one may follow soon
RESYNC_SECONDS = 60.0  # between reads of all records, which also repeat failed steps
TIDY_SECONDS = 15.0  # between rounds of tidying
CATCH_UP_SECONDS = 30.0  # plus one per app, after which the others follow
NEXT_STEP_SECONDS = 15.0  # after a check, in which the next step follows, unless the builder is dead


class HostAgent:
    def __init__(
        self,
        records: Records,
        applier: Applier,
        find_app: Callable[[str], Awaitable[App | None]],
        canary: float,
    ) -> None:
        """`canary`: its seconds."""
        self._records, self._applier, self._find_app = records, applier, find_app
        self._canary_pause = min(1.0, canary / 10)
        self._wanted: dict[tuple[str, str], Wanted] = {}  # by app and address
        self._deploys: set[str] = set()  # of these records
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._answered: set[str] = set()  # tokens of steps that are applied
        self._checking: set[str] = set()  # tokens of steps whose release is checked, while another one is served
        self._failed: set[str] = set()  # tokens of steps to repeat
        self._lacking: set[str] = set()  # tokens of records whose release was not here when last looked for
        self._seen: dict[str, float] = {}  # the version of each partition
        self._quick_until = 0.0  # until when the records are read more often
        self.is_synced = False  # whether all records have been read once

    async def catch_up(self) -> None:
        """Applies the records. Returns early if Redis or the storage is unavailable."""
        with suppress(BackboneUnavailable):
            await self._sync()
            await self._until_applied()

    async def run(self) -> None:
        """Runs until canceled."""
        resync = time.monotonic() + RESYNC_SECONDS
        async with run_in_background(self._tidy_regularly()):
            while True:
                end_if_canceled()
                now = time.monotonic()
                if now >= resync:
                    resync, self._seen = now + RESYNC_SECONDS, {}
                with suppress(BackboneUnavailable):
                    await self._sync()
                quick = time.monotonic() < self._quick_until
                await asyncio.sleep(QUICK_POLL_SECONDS if quick else POLL_SECONDS)

    async def aclose(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _tidy_regularly(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            if not self.is_synced:  # the releases to keep are not known yet
                continue
            try:
                await self._applier.tidy(self._deploys)
            except Exception as error:  # one tenant's files must not affect the others
                logger.error("sites.not_tidied", exc_info=error)

    # -- following the records -------------------------------------------------------------------------------

    async def _sync(self) -> None:
        """Starts a task for each new record. Raises BackboneUnavailable."""
        async for changed in self._records.read_changes(self._seen):
            for wanted in changed:
                key = (wanted.app, wanted.address)
                known = self._wanted.get(key)
                if known is None or known.token != wanted.token or wanted.token in self._failed:
                    former = {wanted.token, known.token if known else ""}
                    self._failed -= former
                    self._answered -= former
                    self._checking -= former
                    self._wanted[key] = wanted
                    self._deploys.add(wanted.deploy)
                    if known is not None and known.deploy != wanted.deploy:
                        self._deploys.discard(known.deploy)
                    self._applier.note(wanted)
                    self._quick_until = time.monotonic() + QUICK_SECONDS
                    self._start_step(key)
        self.is_synced = True

    async def find_missing(self) -> list[Wanted]:
        """Returns the records whose release should be served and was lacking at the last call too.

        The next reading of all records repeats their steps. Steps in progress count only then. Raises
        BackboneUnavailable.
        """
        missing = []
        steps = [(self._wanted[key], task) for key, task in self._tasks.items()]
        applied = [wanted for wanted, task in steps if task.done() or wanted.token in self._lacking]
        for wanted in await run_in_thread(lambda: list(filter(self._applier.lacks, applied))):
            present = await self._records.read(wanted.account, wanted.app)  # the app may have been deleted
            if wanted.address in present and present[wanted.address][1].token == wanted.token:
                self._failed.add(wanted.token)
                missing.append(wanted)
        before, self._lacking = self._lacking, {wanted.token for wanted in missing}
        return [wanted for wanted in missing if wanted.token in before]

    def _start_step(self, key: tuple[str, str]) -> None:
        self._tasks[key] = asyncio.create_task(self._follow(self._wanted[key], self._tasks.get(key)))

    async def _until_applied(self) -> None:
        """Waits until all steps are applied or have failed, so that visitors get what they should. Not for checks."""
        ends = time.monotonic() + CATCH_UP_SECONDS + len(self._wanted)
        async with run_in_background(self._applier.outage.wait()) as outage:
            while time.monotonic() < ends and not outage.done():
                applied = self._answered | self._checking
                if all(task.done() or self._wanted[key].token in applied for key, task in self._tasks.items()):
                    return
                await asyncio.wait([outage], timeout=POLL_SECONDS / 2)

    async def _follow(self, wanted: Wanted, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            former.cancel()
            await finish_despite_cancellation(asyncio.wait([former]))
        output: list[str] = []
        try:
            app = await self._find_app(wanted.app)
            if app is None or app.account != wanted.account:
                raise AppGone
            await self._apply(Target(wanted, app, wanted.deploy, output))
        except DeployError as error:
            step, why = wanted.step, str(error)
            # Of a release that is served already, `host_watch.py` logs the loss.
            if step in ("check", "canary") or not isinstance(error, ReleaseMissing):
                logger.warning("sites.step_failed", app=wanted.app, deploy=wanted.deploy, step=step, why=why)
            self._failed.add(wanted.token)
            served = wanted.token in self._answered
            await self._answer(wanted, StepAnswer(wanted.token, False, why, served, output=output))
            if step == "canary" and app is not None:  # the builder may be dead
                await self._applier.resume(Target(wanted, app, wanted.deploy, output))
        except Exception as error:  # a bug, or a full disk
            logger.error("sites.step_failed", app=wanted.app, deploy=wanted.deploy, step=wanted.step, exc_info=error)
            self._failed.add(wanted.token)
            reason = "an internal error occurred in what serves the apps; deploy again"
            await self._answer(wanted, StepAnswer(wanted.token, False, reason))

    async def _answer(self, wanted: Wanted, answer: StepAnswer) -> None:
        await until_redis_answers(lambda: self._records.write_answer(wanted, answer))

    # -- one step --------------------------------------------------------------------------------------------

    async def _apply(self, target: Target) -> None:
        """Applies the step and answers it. Raises DeployError."""
        wanted = target.wanted
        await self._applier.prepare(target)
        if wanted.step == "undo":
            await self._applier.remove(target)
        if wanted.serves:
            try:
                await self._applier.serve(Target(wanted, target.app, wanted.serves, target.output))
            except DeployError as error:
                if wanted.step != "check":
                    raise
                # A problem with the served release must not prevent a new release from replacing it.
                logger.warning("sites.step_failed", app=wanted.app, deploy=wanted.serves, step="serve", why=str(error))
        if wanted.step == "check":
            self._checking.add(wanted.token)
            await self._applier.fetch(target)
            await self._applier.check(target)
        await self._answer(wanted, StepAnswer(wanted.token, True, output=target.output))
        self._answered.add(wanted.token)
        if wanted.step == "live":
            await self._applier.finish(target)
        elif wanted.step == "canary":
            await self._watch_canary(target)
        elif wanted.step == "check":
            await asyncio.sleep(NEXT_STEP_SECONDS)
            await self._applier.resume(target)

    async def _watch_canary(self, target: Target) -> None:
        wanted, good_probes = target.wanted, 0
        while True:
            await self._applier.probe(target)
            good_probes += 1
            await self._answer(wanted, StepAnswer(wanted.token, True, good_probes=good_probes))
            await asyncio.sleep(self._canary_pause)

"""Follows the serving records (`gateway/deploys/serving.py`), applies their steps to this host, and answers them.

For each address of each app, a task applies the newest step of its record (`applier.py`). The start command of a live
address runs on one host only (`ownership.py`). That host checks it, and the others just fetch the release.

A host counts while it sends heartbeats. After a pause, other hosts may have continued without it. Caddy then answers
503 until the host has caught up, unless Redis is unavailable. Caddy itself keeps serving while this worker is stopped:
only the next worker learns whether its host was left out. One host without shared storage has no others, so it serves
at once, and catches up meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from gateway.accounts.records import App
from gateway.cancellation import end_if_canceled, finish_despite_cancellation, run_in_background, run_in_thread
from gateway.deploys.serving import ELSEWHERE, HostAnswer, Records, Wanted
from gateway.deploys.states import AppGone, DeployError
from gateway.errors import BackboneUnavailable
from gateway.redis.client import until_redis_answers
from workers.hosting.applier import Applier, ReleaseMissing, Target

logger = structlog.get_logger()

POLL_SECONDS, QUICK_POLL_SECONDS = 0.2, 0.05  # between reads of the changed records; while a deploy is in progress
QUICK_SECONDS = 5.0  # after a new record, in which the next one may follow soon
RENEWAL_SECONDS = 3.0  # between heartbeats
RESYNC_SECONDS = 60.0  # between reads of all records, which also repeat failed steps
TIDY_SECONDS = 15.0  # between rounds of tidying
PAUSED_SECONDS = 10.0  # without a check, after which this host may not count; less than the lifetime of a heartbeat
CATCH_UP_SECONDS = 30.0  # plus one per app, after which a host serves its present releases
REDIS_FAILURES = 3  # in a row, after which a host that was paused serves its present releases
NEXT_STEP_SECONDS = 15.0  # after a check, in which the next step follows, unless the builder is dead
LEAVE_SECONDS = 2.0  # in which a host that stops ends its heartbeat


class HostAgent:
    def __init__(
        self,
        records: Records,
        host: str,
        applier: Applier,
        find_app: Callable[[str], Awaitable[App | None]],
        canary: float,
    ) -> None:
        """`host`: this host's id. `canary`: its seconds."""
        self._records, self._host, self._applier, self._find_app = records, host, applier, find_app
        self._canary_pause = min(1.0, canary / 10)
        self._wanted: dict[tuple[str, str], Wanted] = {}  # by app and address
        self._deploys: set[str] = set()  # of these records
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._answered: set[str] = set()  # tokens of steps that are applied
        self._checking: set[str] = set()  # tokens of steps whose release is checked, while another one is served
        self._failed: set[str] = set()  # tokens of steps to repeat
        self._lacking: set[str] = set()  # tokens of records whose release was not here when last looked for
        self._seen: dict[str, float] = {}  # the version of each partition
        self._checked = self._renewed = time.monotonic()  # of the last check for a pause, of the last heartbeat
        self._pauses = 0  # how often this worker stood still
        self._current: bool | None = None  # whether it has applied the steps that it may have missed
        self._quick_until = 0.0  # until when the records are read more often
        self.is_elsewhere = False  # whether the apps are in another data folder
        self._synced = False  # whether all records have been read once

    def is_current(self) -> bool:
        """Returns False if other hosts may already have replaced the releases that this host serves."""
        return self._current is True and time.monotonic() - self._checked < PAUSED_SECONDS

    def is_ready(self) -> bool:
        """Returns whether this host is current and knows all records."""
        return self._synced and self.is_current()

    async def catch_up(self) -> None:
        """Applies the records. Returns early if Redis or the storage is unavailable."""
        with suppress(BackboneUnavailable):
            if self._host not in (await self._records.list_hosts() or []):
                self._set_current(False)
            await self._sync()
            await self._until_applied()
        self._checked = time.monotonic()
        self._set_current(True)

    async def run(self) -> None:
        """Runs until canceled."""
        resync, renewal, failures = time.monotonic() + RESYNC_SECONDS, 0.0, 0
        async with run_in_background(self._tidy_regularly()):
            while True:
                end_if_canceled()
                self._detect_pause()
                now, pauses = self._checked, self._pauses
                try:
                    if now >= resync:
                        resync, self._seen = now + RESYNC_SECONDS, {}
                    await self._sync()
                    if now - self._renewed > PAUSED_SECONDS:  # the others may have continued without this host
                        self._set_current(False)
                    if not self._current:
                        await self._until_applied()
                    if now >= renewal and self._pauses == pauses:
                        self._note_place(await self._records.send_heartbeat(self._host))
                        self._renewed, renewal = time.monotonic(), now + RENEWAL_SECONDS
                    failures = 0
                except BackboneUnavailable:
                    failures, renewal = failures + 1, 0.0
                self._detect_pause()
                # After a pause, pending requests fail once even if Redis is available.
                if self._pauses == pauses and (failures == 0 or failures >= REDIS_FAILURES):
                    self._set_current(True)
                quick = time.monotonic() < self._quick_until
                await asyncio.sleep(QUICK_POLL_SECONDS if quick else POLL_SECONDS)

    def _detect_pause(self) -> None:
        now = time.monotonic()
        if now - self._checked > PAUSED_SECONDS:
            logger.warning("sites.was_paused", seconds=round(now - self._checked))
            self._pauses += 1
            self._set_current(False)
        self._checked = now

    def _set_current(self, current: bool) -> None:
        if current is not self._current:
            self._current = current
            self._applier.set_current(current)

    def _note_place(self, here: bool) -> None:
        """Notes whether the apps are in this host's data folder. If not, this host follows no records."""
        if here is self.is_elsewhere:
            self.is_elsewhere = not here
            if not here:
                logger.warning("sites.elsewhere", action=ELSEWHERE)

    async def aclose(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        with suppress(BackboneUnavailable, TimeoutError):
            await asyncio.wait_for(self._records.leave(self._host), LEAVE_SECONDS)

    async def _tidy_regularly(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            if not self._synced:  # the releases to keep are not known yet
                continue
            try:
                await self._applier.tidy(self._deploys)
            except Exception as error:  # one tenant's files must not affect the others
                logger.error("sites.not_tidied", exc_info=error)

    # -- following the records -------------------------------------------------------------------------------

    async def _sync(self) -> None:
        """Starts a task for each new record. Raises BackboneUnavailable."""
        if not self._synced or self.is_elsewhere:
            self._note_place(await self._records.list_hosts() is not None)
        if self.is_elsewhere:
            return
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
        self._synced = True

    async def find_missing(self) -> list[Wanted]:
        """Returns the records whose release this host should serve and lacked at the last call too.

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

    def repeat_step(self, app_id: str) -> None:
        """Applies the present step of the app's live address again, because the app came here or left."""
        if (app_id, "live") in self._wanted:
            self._start_step((app_id, "live"))

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
                self._detect_pause()

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
            served, here = wanted.token in self._answered, self._applier.runs(wanted)
            await self._answer(wanted, HostAnswer(wanted.token, False, why, served, output=output, runs=here))
            if step == "canary" and app is not None:  # the builder may be dead
                await self._applier.resume(Target(wanted, app, wanted.deploy, output))
        except Exception as error:  # a bug, or a full disk
            logger.error("sites.step_failed", app=wanted.app, deploy=wanted.deploy, step=wanted.step, exc_info=error)
            self._failed.add(wanted.token)
            reason = "an internal error occurred on a host that serves apps; deploy again"
            await self._answer(wanted, HostAnswer(wanted.token, False, reason))

    async def _answer(self, wanted: Wanted, answer: HostAnswer) -> None:
        await until_redis_answers(lambda: self._records.write_answer(wanted, self._host, answer))

    # -- one step --------------------------------------------------------------------------------------------

    async def _apply(self, target: Target) -> None:
        """Applies the step and answers it. Raises DeployError."""
        wanted = target.wanted
        await self._applier.prepare(target)
        here = self._applier.runs(wanted)
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
        await self._answer(wanted, HostAnswer(wanted.token, True, output=target.output, runs=here))
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
        here = self._applier.runs(wanted)
        if wanted.runs and wanted.releases[wanted.deploy].runs and not here:  # another host probes the app
            return await self._answer(wanted, HostAnswer(wanted.token, True, good_probes=1))
        while True:
            if self.is_current():  # otherwise this host answers with 503 until it has caught up
                await self._applier.probe(target)
                good_probes += 1
                await self._answer(wanted, HostAnswer(wanted.token, True, good_probes=good_probes, runs=here))
            await asyncio.sleep(self._canary_pause)

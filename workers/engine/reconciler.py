"""Follows the serving records (`gateway/deploys/serving.py`), applies their steps, and answers them.

For each address of each app, a task applies the newest step of its record (`steps.py`). One engine at a time follows
the records (`workers/hosting/hold_engine.py`).
"""

import asyncio
import enum
import time
from contextlib import suppress

import structlog

from gateway.cancellation import cancel, end_if_canceled, finish_despite_cancellation, run_in_background, run_in_thread
from gateway.deploys.serving import Records, StepAnswer, Wanted
from gateway.deploys.states import AppGone, DeployError, StorageFailed
from gateway.errors import BackboneUnavailable
from gateway.loops import every, until_set
from gateway.redis.client import patient
from gateway.storage import is_full
from workers.engine.driver import ReleaseMissing, Target
from workers.engine.names import FindApp
from workers.engine.steps import ReleaseSteps

logger = structlog.get_logger()

POLL_SECONDS = 1.0  # between reads of the changed records, in case their announcement was lost
RESYNC_SECONDS = 60.0  # between reads of all records, which also repeat failed steps
TIDY_SECONDS = 15.0  # between rounds of tidying
CATCH_UP_SECONDS = 30.0  # plus one per app, after which the others follow
CATCH_UP_POLL_SECONDS = 0.05
NEXT_STEP_SECONDS = 15.0  # after a check, in which the next step follows, unless the builder is dead


class State(enum.Enum):
    """What became of a step."""

    APPLYING = enum.auto()
    CHECKING = enum.auto()  # visitors get what they should; another release is checked
    APPLIED = enum.auto()
    FAILED = enum.auto()  # it is repeated


class Step:
    """The newest step of an address, and the task that applies it."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.state = wanted, State.APPLYING
        self.task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()


class Reconciler:
    def __init__(
        self,
        records: Records,
        steps: ReleaseSteps,
        find_app: FindApp,
        canary: float,
        *,
        poll_seconds: float = POLL_SECONDS,
        resync_seconds: float = RESYNC_SECONDS,
        tidy_seconds: float = TIDY_SECONDS,
        next_step_seconds: float = NEXT_STEP_SECONDS,
    ) -> None:
        """`canary`: its seconds."""
        self._records, self._answers = records, patient(records)
        self._do, self._driver, self._find_app = steps, steps.driver, find_app
        self._canary_pause = min(1.0, canary / 10)
        self._poll_seconds, self._next_step_seconds = poll_seconds, next_step_seconds
        self._resync_seconds, self._tidy_seconds = resync_seconds, tidy_seconds
        self._steps: dict[tuple[str, str], Step] = {}  # by app and address
        self._deploys: set[str] = set()  # of these steps
        self._lacking: set[str] = set()  # tokens of records whose release was missing when last looked for
        self._seen: dict[str, float] = {}  # the version of each partition
        self._announced = asyncio.Event()
        self.is_synced = False  # whether all records have been read once

    async def catch_up(self) -> None:
        """Applies the records. Returns early if Redis or the storage is unavailable."""
        with suppress(BackboneUnavailable):
            await self._sync()
            await self._until_applied()

    def look_soon(self) -> None:
        """Reads the changed records at once. Whoever hears of a change calls this."""
        self._announced.set()

    async def run(self) -> None:
        """Runs until canceled."""
        resync = time.monotonic() + self._resync_seconds
        tidying = every(self._tidy_seconds, self._tidy, "sites.not_tidied", first=self._tidy_seconds)
        async with run_in_background(tidying):
            while True:
                end_if_canceled()
                self._announced.clear()
                now = time.monotonic()
                if now >= resync:
                    resync, self._seen = now + self._resync_seconds, {}
                with suppress(BackboneUnavailable):
                    await self._sync()
                await until_set(self._announced, self._poll_seconds)

    async def aclose(self) -> None:
        await cancel(*[step.task for step in self._steps.values() if step.task is not None])

    async def _tidy(self) -> None:
        if self.is_synced:  # otherwise the releases to keep are not known yet
            await self._do.names.follow_some()
            await self._driver.tidy(self._do.names.gone, self._deploys)

    # -- following the records -------------------------------------------------------------------------------

    async def _sync(self) -> None:
        """Starts a task for each new record. Raises BackboneUnavailable."""
        async for changed in self._records.read_changes(self._seen):
            for wanted in changed:
                known = self._steps.get((wanted.app, wanted.address))
                if known is None or known.wanted.token != wanted.token or known.state is State.FAILED:
                    self._begin(wanted, known)
        self.is_synced = True

    def _begin(self, wanted: Wanted, former: Step | None) -> None:
        if former is not None:
            self._deploys.discard(former.wanted.deploy)
        self._deploys.add(wanted.deploy)
        self._steps[wanted.app, wanted.address] = step = Step(wanted)
        self._driver.note(wanted)
        step.task = asyncio.create_task(self._follow(step, former))

    def _forget(self, step: Step) -> None:
        """Forgets a step whose record is gone, unless a newer one has replaced it."""
        key = step.wanted.app, step.wanted.address
        if self._steps.get(key) is step:
            del self._steps[key]
            self._deploys.discard(step.wanted.deploy)

    async def find_missing(self) -> list[Wanted]:
        """Returns the records whose release should be served and was lacking at the last call too.

        The next reading of all records repeats their steps. Steps in progress count only then. Raises
        BackboneUnavailable.
        """
        missing = []
        steps = self._steps.values()
        applied = [step.wanted for step in steps if step.is_over or step.wanted.token in self._lacking]
        for wanted in await run_in_thread(lambda: list(filter(self._driver.lacks, applied))):
            present = await self._records.read(wanted.account, wanted.app)  # the app may have been deleted
            step = self._steps[wanted.app, wanted.address]  # which may have been repeated meanwhile
            if wanted.address in present and present[wanted.address][1].token == wanted.token == step.wanted.token:
                step.state = State.FAILED
                missing.append(wanted)
        before, self._lacking = self._lacking, {wanted.token for wanted in missing}
        return [wanted for wanted in missing if wanted.token in before]

    async def _until_applied(self) -> None:
        """Waits until all steps are applied or have failed, so that visitors get what they should. Not for checks."""
        ends = time.monotonic() + CATCH_UP_SECONDS + len(self._steps)
        async with run_in_background(self._driver.outage.wait()) as outage:
            while time.monotonic() < ends and not outage.done():
                if all(step.is_over or step.state is not State.APPLYING for step in self._steps.values()):
                    return
                await asyncio.wait([outage], timeout=CATCH_UP_POLL_SECONDS)

    async def _follow(self, step: Step, former: Step | None) -> None:
        if former is not None and former.task is not None:
            former.task.cancel()
            await finish_despite_cancellation(asyncio.wait([former.task]))
        wanted, output = step.wanted, list[str]()
        try:
            app = await self._find_app(wanted.app)
            if app is None or app.account != wanted.account:
                raise AppGone
            await self._apply(step, Target(wanted, app, wanted.deploy, output))
        except DeployError as error:
            why, was_applied = str(error), step.state is State.APPLIED
            # Of a release that is served already, `host_watch.py` logs the loss.
            if wanted.step in ("check", "canary") or not isinstance(error, ReleaseMissing):
                logger.warning("sites.step_failed", app=wanted.app, deploy=wanted.deploy, step=wanted.step, why=why)
            step.state = State.FAILED
            answer = StepAnswer(wanted.token, False, why, was_applied, output=output, service_fault=error.service_fault)
            await self._answers.write_answer(wanted, answer)
            if wanted.step == "canary" and app is not None:  # the builder may be dead
                await self._do.resume(Target(wanted, app, wanted.deploy, output))
        except Exception as error:  # a bug, or a full disk
            logger.error("sites.step_failed", app=wanted.app, deploy=wanted.deploy, step=wanted.step, exc_info=error)
            step.state = State.FAILED
            reason = "an internal error occurred in what serves the apps; deploy again"
            if is_full(error):
                reason = str(StorageFailed(error))
            await self._answers.write_answer(wanted, StepAnswer(wanted.token, False, reason, service_fault=True))

    # -- one step --------------------------------------------------------------------------------------------

    async def _apply(self, step: Step, target: Target) -> None:
        """Applies the step and answers it. Raises DeployError."""
        wanted = step.wanted
        await self._driver.prepare(target)
        if wanted.step == "undo":
            await self._do.remove(target)
        if wanted.serves:
            try:
                await self._do.serve(Target(wanted, target.app, wanted.serves, target.output))
            except DeployError as error:
                if wanted.step != "check":
                    raise
                # A problem with the served release must not prevent a new release from replacing it.
                logger.warning("sites.step_failed", app=wanted.app, deploy=wanted.serves, step="serve", why=str(error))
        if wanted.step == "check":
            step.state = State.CHECKING
            await self._do.check(target)
        await self._answers.write_answer(wanted, StepAnswer(wanted.token, True, output=target.output))
        step.state = State.APPLIED
        if wanted.ends:
            await self._answers.forget(wanted)
            self._forget(step)
        elif wanted.step == "live":
            await self._do.finish(target)
        elif wanted.step == "canary":
            await self._watch_canary(target)
        elif wanted.step == "check":
            await asyncio.sleep(self._next_step_seconds)
            await self._do.resume(target)

    async def _watch_canary(self, target: Target) -> None:
        wanted, good_probes = target.wanted, 0
        while True:
            await self._do.probe(target)
            good_probes += 1
            await self._answers.write_answer(wanted, StepAnswer(wanted.token, True, good_probes=good_probes))
            await asyncio.sleep(self._canary_pause)

"""Takes queued deploys from their streams and rolls them out: in order per app, apps in parallel.

A deploy's state is in its record (`gateway/deploys/states.py`). Every state change is a compare-and-set there, so a
deploy ends once. A stream entry stays pending until its deploy has ended. Therefore:

- A worker that is stopped undoes its deploys and queues them again.
- When a worker is killed, the worker that claims its entries undoes the deploys on disk and fails them. It does not
  retry them, because the build may have killed the worker.
- When a deploy is canceled, its state changes. The worker that builds it checks the state regularly, and ends the
  build.
- If two workers have the same entry, only one of them can change the state. The other one gets `StaleDeploy` and stops.

A data folder has one active builder, and others stand by. Without GATEWAY_STORAGE_URL all apps are in one data folder,
so builders with another folder stand by too (`rollout.py`). Redis decides which deploy is next, for the builders of all
hosts (`schedule.py`).
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Self, TypeVar

import structlog

from gateway.accounts.records import App, find_suspension
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.cancellation import RunningTasks, cancel, end_if_canceled, finish_despite_cancellation
from gateway.data.commands import Action, DataAnswer, DataCommands, DataUnavailable
from gateway.data.records import DataRecords
from gateway.deploys.environment import Environments
from gateway.deploys.line_times import stamp_line
from gateway.deploys.logs import FIRST_BYTES, LAST_BYTES, DeployLogs, shorten
from gateway.deploys.manifest import Manifest, apply_manifest, undo_manifest
from gateway.deploys.positions import write_positions
from gateway.deploys.previews import Previews
from gateway.deploys.records import FINAL, GROUP, STREAM, Deploy, DeployRecords, State
from gateway.deploys.serving import Records
from gateway.deploys.states import AppGone, DeployError, Deploys, StaleDeploy, StorageFailed
from gateway.errors import BackboneUnavailable, NotFound
from gateway.events.catalog import Phase
from gateway.inference.availability import is_offered
from gateway.keys import partition_tag
from gateway.loops import every, until, until_set
from gateway.redis.client import COMMAND_SECONDS, Store, patient
from gateway.settings import Settings
from gateway.storage import is_full, open_storage
from gateway.telemetry import tracing
from gateway.telemetry.spans import NULL_TRACE, Kind, Trace
from workers.builds.compiler import Job
from workers.builds.rollout import Rollout
from workers.builds.schedule import Schedule
from workers.stream import Consumer, Entry, require_partition

FLUSH_SECONDS = 0.5  # between flushes
FLUSH_BYTES_PER_SECOND = 131_072  # of a build that prints without end; what it prints meanwhile is shortened
RESOLUTION_MS = 100  # between two times in the log
# Escape sequences in a build's output could move the cursor of a terminal that follows the log.
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


class DeployLog:
    """Collects lines in memory and flushes them regularly. Lines wait in memory while Redis is unavailable."""

    def __init__(self, logs: DeployLogs, deploy: Deploy, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        """`logs` waits for Redis."""
        self._logs, self._deploy, self._flush_seconds = logs, deploy, flush_seconds
        self._lines: list[str] = []
        self._sending = ""
        self._stamped = 0  # time of the last line that has a time, ms
        self._size = 0  # bytes of the lines that wait
        self._next = 0.0  # when to flush again
        self._lock = asyncio.Lock()

    def write_line(self, line: str) -> None:
        line = self._stamp(CONTROL.sub("", line))
        self._lines.append(line)
        self._size += len(line.encode())
        if self._size > 2 * (FIRST_BYTES + LAST_BYTES):
            self._lines = [shorten("".join(self._lines))]
            self._size = len(self._lines[0].encode())

    def _stamp(self, line: str) -> str:
        """Adds a time to the line. Lines that arrive together share the time of the first, which saves space."""
        now = int(time.time() * 1000)
        if now - self._stamped < RESOLUTION_MS:
            return line + "\n"
        self._stamped = now
        return stamp_line(line, now)

    async def flush(self) -> None:
        async with self._lock:
            while self._sending or self._lines:
                if not self._sending:
                    self._sending, self._lines, self._size = shorten("".join(self._lines)), [], 0
                await self._logs.append(self._deploy, self._sending)
                self._next = time.monotonic() + len(self._sending) / FLUSH_BYTES_PER_SECOND
                self._sending = ""

    async def _flush_in_time(self) -> None:
        if time.monotonic() >= self._next:
            await self.flush()

    async def __aenter__(self) -> Self:
        pause = self._flush_seconds
        self._flushing = asyncio.create_task(every(pause, self._flush_in_time, first=pause))
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(TimeoutError):  # a flush that is canceled could write its lines twice
            await finish_despite_cancellation(asyncio.wait_for(self.flush(), COMMAND_SECONDS))
        await cancel(self._flushing)


logger = structlog.get_logger()

T = TypeVar("T")

PARALLEL_BUILDS = 2  # and one more, for an account without a running build
MAX_ENTRIES = 1_000  # in the memory of one worker
TIDY_SECONDS = 15.0  # between rounds of tidying
RETRY_SECONDS = 1.0  # before a state change is repeated
POSITIONS_SECONDS = 5.0  # between writes of the positions, if nothing changes
POSITIONS_PAUSE_SECONDS = 0.2  # at least, between writes of the positions
CANCEL_CHECK_SECONDS = 0.5  # between checks of the state of a deploy that is being built
RENAMES = 5  # of an app, while its record is changed
FIRST_DATA_SECONDS = 10.0  # while no host has reported data of the app
DATA_UNDO_SECONDS = 60.0  # in which the host must bring back the data from before a restore
DATA_SECONDS = 1_800.0  # in which the host of an app's data must make a snapshot
REQUEUE_SECONDS = 20.0  # for each deploy when the worker stops


async def run(settings: Settings) -> None:
    if settings.deploy_engine == "external":
        logger.info("deploys.external", action="an external engine builds the deploys")
        await asyncio.Event().wait()
    await Builder(settings).run()


class Builder:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = Store(settings.redis_url, ca_file=settings.ca_file, replicas=settings.redis_wait)
        vault = Vault(settings.encryption_key)
        registry = Registry(self._store, vault)
        deploy_records = DeployRecords(settings, registry)
        # The changes of a deploy's state are repeated by `_change_state`, which must know that an answer was lost.
        self._changes = Deploys(settings, registry, deploy_records)
        self._registry, self._deploys = patient(registry), patient(self._changes)
        self._deploy_records = patient(deploy_records)
        self._deploy_logs = patient(DeployLogs(self._store, open_storage(settings)))
        find_variables = patient(Environments(self._store, vault)).open_variables
        find = (self._registry.find_app, self._find_ai_url, find_variables, self._deploys.find_cache_clearing)
        self._rollout = Rollout(settings, self._store, *find)
        self._previews = patient(Previews(self._store, Records(self._store)))
        self._schedule = Schedule(
            self._store, PARALLEL_BUILDS, lambda entry: self._running.start(self._process_entry(entry))
        )
        self._consumer = Consumer(
            self._store, STREAM, GROUP, settings.webhook_claim_idle, self._accept, self._wait_for_space
        )
        self._records, self._data = patient(DataRecords(self._store)), DataCommands(self._store)
        self._snapshots: dict[str, str] = {}  # by deploy in progress: the snapshot of the data from before it
        self._running = RunningTasks()
        self._in_progress: set[str] = set()  # deploy ids
        self._entry_done = asyncio.Event()

    async def run(self) -> None:
        """Runs until canceled. Then undoes the deploys in progress and queues them again."""
        try:
            async with self._rollout.open() as folder_id:
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._schedule.run(folder_id, self._consumer))
                        tidy = partial(self._rollout.tidy, self._in_progress)
                        group.create_task(every(TIDY_SECONDS, tidy, "deploys.not_tidied"))
                        group.create_task(every(POSITIONS_PAUSE_SECONDS, self._write_positions))
                        group.create_task(self._consumer.run())
                finally:
                    await finish_despite_cancellation(self._stop(folder_id))
        finally:
            await self._store.close()

    async def _stop(self, folder_id: str) -> None:
        await self._running.cancel()
        with contextlib.suppress(BackboneUnavailable, TimeoutError):
            async with asyncio.timeout(COMMAND_SECONDS):
                await self._consumer.release_entries()
                await self._schedule.leave_queue(folder_id)

    # -- entries of the stream -------------------------------------------------------------------------------

    async def _wait_for_space(self) -> None:
        while self._consumer.held_count >= MAX_ENTRIES:
            self._entry_done.clear()
            await self._entry_done.wait()

    def _accept(self, entry: Entry) -> None:
        """Accepts an entry from the stream. Raises KeyError or ValueError if it is not a deploy."""
        _ = entry.fields["id"], entry.fields["app"]
        require_partition(entry)
        self._schedule.add_entry(entry)

    async def _process_entry(self, entry: Entry) -> None:
        deploy_id = entry.fields["id"]
        self._in_progress.add(deploy_id)
        try:
            await self._process(entry)
        except Exception as error:
            # A bug. The entry stays pending. When it is claimed again, its deploy counts as abandoned.
            logger.error("deploy.postponed", deploy=deploy_id, exc_info=error)
            with contextlib.suppress(BackboneUnavailable):
                await self._consumer.fail_entry(entry, error)
        finally:
            self._in_progress.discard(deploy_id)
            self._snapshots.pop(deploy_id, None)
            self._consumer.forget_entry(entry)
            self._schedule.end_deploy(deploy_id)
            self._entry_done.set()

    async def _process(self, entry: Entry) -> None:
        fields = entry.fields
        deploy = await self._deploy_records.get(fields["id"], fields["account"])
        if deploy is not None:
            if not await self._bring_to_end(deploy):
                return
            await self._deploy_logs.store(deploy)
        await patient(self._consumer).acknowledge_entry(entry)

    async def _bring_to_end(self, deploy: Deploy) -> bool:
        """Brings the deploy to its end. Returns False if another worker continues it."""
        try:
            if deploy.state == "queued":
                await self._deploy(deploy)
            elif deploy.state == "canceled":
                await self._clean_up_canceled(deploy)
            elif deploy.state not in FINAL:
                await self._fail_abandoned(deploy)
        except StaleDeploy:
            now = await self._deploy_records.get(deploy.id, deploy.account)
            if now is not None and now.state == "canceled":
                await self._clean_up_canceled(now)
                return True
            logger.warning("deploy.moved", deploy=deploy.id, action="another worker continues this deploy")
            await self._rollout.undo(deploy)
            if now is None or now.state == "failed":
                await self._undo_manifest(deploy)
            return False
        return True

    async def _clean_up_canceled(self, deploy: Deploy) -> None:
        if deploy.startedAt is not None:
            await self._undo(deploy)

    async def _fail_abandoned(self, deploy: Deploy) -> None:
        logger.warning("deploy.abandoned", deploy=deploy.id, state=deploy.state)
        await self._undo(deploy)
        failed = await self._change_state(deploy, ("failed",), lambda: self._changes.fail_abandoned(deploy))
        async with DeployLog(self._deploy_logs, failed) as log:
            log.write_line(f"Failed: {failed.error}")

    async def _write_positions(self) -> None:
        """Writes the positions once they have changed, or some seconds later."""
        await until_set(self._schedule.moved, POSITIONS_SECONDS)
        self._schedule.moved.clear()
        await write_positions(self._store, await self._schedule.positions())

    # -- one deploy, from top to bottom ----------------------------------------------------------------------

    async def _deploy(self, deploy: Deploy) -> None:
        """Makes the deploy, and logs and traces it. Raises StaleDeploy."""
        trace = _begin_trace(deploy, self._schedule.added_at(deploy.id))
        try:
            async with DeployLog(self._deploy_logs, deploy) as log:
                try:
                    await self._run_phases(deploy, log, trace)
                except asyncio.CancelledError:
                    log.write_line("The worker is stopping; this deploy will start again")
                    await finish_despite_cancellation(self._requeue(deploy))
                    raise
        except BaseException as error:
            # A deploy that was canceled, or that another worker continues, did not fail.
            trace.fail(type(error).__name__, failed=not isinstance(error, StaleDeploy | asyncio.CancelledError))
            raise
        finally:
            trace.finish()

    async def _run_phases(self, deploy: Deploy, log: DeployLog, trace: Trace) -> None:
        phase: Phase = "build"
        try:
            trace.enter(phase)
            await self._consumer.confirm_name()
            app = await self._registry.find_app(deploy.appId)
            queued = deploy
            deploy = await self._change_state(queued, ("building",), lambda: self._changes.start(queued))
            if app is None or app.account != deploy.account:
                raise AppGone
            await self._end_if_suspended(deploy)
            recorders = partial(self._deploys.record_commit, deploy), partial(self._deploys.record, deploy)
            job = Job(deploy, app, log.write_line, *recorders)
            manifest = await self._build(deploy, log, job)
            deploy = await self._finish_phase(deploy, phase)
            phase = "health"
            trace.enter(phase)
            await self._prepare_data(job)
            await self._until_moved(deploy, log, self._rollout.check_health(job))
            await self._apply_manifest(deploy, manifest)
            served = await self._rollout.swap(job)
            log.write_line("The health check passed; the new release is now served")
            deploy = await self._finish_phase(deploy, phase)
            if deploy.state == "canary":
                phase = "canary"
                trace.enter(phase)
                await self._until_moved(deploy, log, self._rollout.watch_canary(job, served))
                log.write_line("The canary passed")
                await log.flush()
                deploy = await self._finish_phase(deploy, phase)
            trace.enter("finish")
            trace.describe({"capsule.outcome": "live"})
            await self._make_room(deploy)
            await self._rollout.finish(job)
            if deploy.restores is not None:
                await self._command_data(deploy, "confirm", DATA_UNDO_SECONDS)
        except (DeployError, OSError) as error:
            if deploy.state in FINAL:  # the deploy is live, and only the clean-up of the former release failed
                raise
            await self._end_if_suspended(deploy)
            trace.fail(type(error).__name__)
            trace.describe({"capsule.outcome": "failed"})
            await self._fail_phase(deploy, phase, error, log)

    async def _make_room(self, deploy: Deploy) -> None:
        """Ends the previews that the account has no room for, now that this deploy is live."""
        account = await self._registry.account(deploy.account) if deploy.kind == "preview" else None
        if account is not None:
            await self._previews.make_room(account.id, self._settings.previews[account.plan])

    async def _build(self, deploy: Deploy, log: DeployLog, job: Job) -> Manifest | None:
        """Builds the deploy. Ends the build and raises StaleDeploy if the deploy is canceled."""
        try:
            return await self._until_moved(deploy, log, self._rollout.build(job))
        finally:
            self._schedule.free_slot(deploy.id)

    async def _until_moved(self, deploy: Deploy, log: DeployLog, work: Coroutine[Any, Any, T]) -> T:
        """Does the work of a phase. Ends it and raises StaleDeploy if the deploy is canceled."""
        working = asyncio.create_task(work)
        moving = asyncio.create_task(until(partial(self._has_moved, deploy), CANCEL_CHECK_SECONDS))
        try:
            await asyncio.wait([working, moving], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                log.write_line("The deploy was canceled")
                raise StaleDeploy
            return working.result()
        finally:
            await finish_despite_cancellation(cancel(working, moving))

    async def _end_if_suspended(self, deploy: Deploy) -> None:
        """Cancels the deploy and raises StaleDeploy if its app is suspended: such a deploy does not fail."""
        owned = await self._registry.read_apps([deploy.appId])
        if deploy.appId in owned and find_suspension(*owned[deploy.appId]) is not None:
            await self._deploys.end_as_canceled(deploy, "the app was suspended")
            raise StaleDeploy

    async def _has_moved(self, deploy: Deploy) -> bool:
        """Returns whether the deploy is no longer in the state that this worker set."""
        now = await self._deploy_records.get(deploy.id, deploy.account)
        return now is None or now.state != deploy.state

    async def _fail_phase(self, deploy: Deploy, phase: Phase, error: DeployError | OSError, log: DeployLog) -> None:
        reason, service_fault = str(error), not isinstance(error, DeployError) or error.service_fault
        if not isinstance(error, DeployError):
            logger.error("deploy.broken", deploy=deploy.id, exc_info=error)
            reason = str(StorageFailed(error)) if is_full(error) else "an internal error occurred; deploy again"
        if (snapshot := self._snapshots.get(deploy.id)) is not None:
            reason = f"{reason}; the data from before this deploy are kept as the snapshot {snapshot}"
        log.write_line(f"Failed: {reason}")
        await log.flush()
        await self._undo(deploy)
        await self._finish_phase(deploy, phase, reason, service_fault=service_fault)

    async def _finish_phase(
        self, deploy: Deploy, phase: Phase, failure: str = "", *, service_fault: bool = False
    ) -> Deploy:
        """Records the phase's result. Raises StaleDeploy."""
        after: tuple[State, ...] = ("failed",) if failure else ("checking", "canary", "live")
        advance = partial(self._changes.advance, deploy, phase, not failure, failure, service_fault=service_fault)
        return await self._change_state(deploy, after, advance)

    async def _change_state(
        self, deploy: Deploy, after: tuple[State, ...], change: Callable[[], Awaitable[Deploy]]
    ) -> Deploy:
        """Repeats the change until Redis answers.

        Raises StaleDeploy, unless an earlier attempt made this change and its reply was lost.
        """
        answer_lost = False
        while True:
            try:
                changed = await change()
            except BackboneUnavailable:
                answer_lost = True
                await asyncio.sleep(RETRY_SECONDS)
            except StaleDeploy:
                if not answer_lost:
                    raise
                # The server that made the change may have been superseded, and its successor may not have the change.
                await patient(self._store).confirm_writes(partition_tag(deploy.account))
                now = await self._deploy_records.get(deploy.id, deploy.account)
                if now is None or now.state != deploy.state:
                    if now is not None and now.state in after:
                        return now
                    raise
            else:
                end_if_canceled()
                return changed

    async def _requeue(self, deploy: Deploy) -> None:
        """Queues the deploy again unless it has ended.

        Without Redis it stays as it is, and the worker that claims its entry fails it as abandoned.
        """
        with contextlib.suppress(StaleDeploy, TimeoutError):
            async with asyncio.timeout(REQUEUE_SECONDS):
                now = await self._deploy_records.get(deploy.id, deploy.account)
                if now is not None and now.state not in (*FINAL, "queued"):
                    await self._undo(now, 0)  # the host of the data may be stopping too
                    await self._deploys.requeue(now)

    # -- the app's data --------------------------------------------------------------------------------------

    async def _prepare_data(self, job: Job) -> None:
        """Keeps the app's data as a snapshot before the new release can change them, and restores a snapshot.

        Raises DeployError.
        """
        deploy, seconds = job.deploy, await self._find_data_seconds(job)
        if not seconds:
            return
        answer = await self._command_data(deploy, "restore" if deploy.restores else "snapshot", seconds)
        if answer is None and seconds < DATA_SECONDS:
            return
        if answer is None:
            reason = "the host with the app's data does not answer; is the `sites` worker running?"
            raise DeployError(reason, service_fault=True)
        if answer.error:
            raise DeployError(answer.error, service_fault=answer.service_fault)
        for note in answer.notes:
            job.write_line(f"Snapshot: {note}")
        if answer.snapshot is not None:
            self._snapshots[deploy.id] = answer.snapshot.id
            job.write_line(f"The data from before this deploy are kept as the snapshot {answer.snapshot.id}")

    async def _find_data_seconds(self, job: Job) -> float:
        """Returns how long to wait for the host of the app's data; 0 if the app has none.

        The host reports the data of an app that has just started within seconds.
        """
        deploy, app = job.deploy, job.app
        if deploy.kind != "live":
            return 0
        if deploy.restores or await self._records.has_data(deploy.account, deploy.appId):
            return DATA_SECONDS
        if app.build is None or app.build.start is None:
            return 0
        return FIRST_DATA_SECONDS if await self._deploy_records.find_live_id(app) else 0

    async def _command_data(self, deploy: Deploy, action: Action, seconds: float = DATA_SECONDS) -> DataAnswer | None:
        """Sends a command to the host of the app's data. Returns None if it does not answer."""
        try:
            return await self._data.run_for_deploy(
                deploy.account, deploy.appId, action, seconds, deploy=deploy.id, source=deploy.restores or ""
            )
        except DataUnavailable:
            if seconds:
                logger.error("deploy.data_unanswered", deploy=deploy.id, command=action)
            return None

    # -- the app's record ------------------------------------------------------------------------------------

    async def _apply_manifest(self, deploy: Deploy, manifest: Manifest | None) -> None:
        """Changes the app's record with the swap, so that visitors of the new release find its settings.

        Raises StaleDeploy.
        """
        if await self._has_moved(deploy):
            raise StaleDeploy
        if manifest is not None and deploy.kind == "live":
            await self._change_app(deploy, lambda app: apply_manifest(app, deploy.id, manifest))

    async def _undo(self, deploy: Deploy, data_seconds: float = DATA_UNDO_SECONDS) -> None:
        await self._rollout.undo(deploy)
        if deploy.restores is not None:
            await self._command_data(deploy, "undo", data_seconds)
        await self._undo_manifest(deploy)

    async def _undo_manifest(self, deploy: Deploy) -> None:
        await self._change_app(deploy, lambda app: undo_manifest(app, deploy.id))

    async def _change_app(self, deploy: Deploy, change: Callable[[App], App]) -> None:
        """Changes the app's record, unless another account has the app."""
        for _ in range(RENAMES):
            app = await self._registry.find_app(deploy.appId)
            if app is None or app.account != deploy.account or change(app) == app:
                return
            with contextlib.suppress(NotFound):  # it was renamed or deleted meanwhile
                await self._registry.change_app(app, change)
                return

    # -- data for the rollout --------------------------------------------------------------------------------

    async def _find_ai_url(self, app: App) -> str | None:
        offered = await is_offered(self._settings, patient(self._store))
        return f"{self._settings.base_url}/capsule/{app.name}/ai" if offered else None


def _begin_trace(deploy: Deploy, began: float | None) -> Trace:
    """Begins the trace of a deploy that has waited since `began`."""
    tracer = tracing.tracer()
    trace = NULL_TRACE if tracer is None else tracer.begin("deploy", Kind.CONSUMER, began)
    trace.describe(
        {
            "capsule.deploy": deploy.id,
            "capsule.account": deploy.account,
            "capsule.app": deploy.app,
            "capsule.deploy.kind": deploy.kind,
            "capsule.deploy.trigger": deploy.trigger,
        }
    )
    trace.enter("wait")
    if trace.recorded:
        trace.stages[0].began = trace.root.began
    return trace

"""Takes queued deploys from their streams and has an engine make them, one of an app at a time, in order.

A deploy's state is in its record (`gateway/deploys.py`) and every move is a compare-and-set there, so that a deploy
ends once. An entry of the stream stays pending until its deploy is over. What that means for

- a worker that is told to stop: its deploys are undone and wait again;
- a worker that is killed: whoever finds its entries undoes what is left on disk and fails those deploys, with the
  reason. It does not try them again: what killed the worker may have been the build;
- two workers that believe an entry theirs: one of them moves the state, the other finds it moved and lets go.

The engine works on this machine's disk, so one worker of a data folder works at a time and another stands by.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

import structlog

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.cancellation import end_if_cancelled, undisturbed
from gateway.deploys.states import GROUP, LOG_BYTES, STREAM, Deploy, Deploys, Moved, State
from gateway.errors import BackboneUnavailable
from gateway.events.catalogue import Phase
from gateway.inference.availability import Availability
from gateway.inference.provider import Provider
from gateway.settings import Settings
from gateway.store import keys
from gateway.store.client import ATTEMPT, FAULTS, Store, backbone
from workers.deploys.engine import Engine, Job, LocalEngine
from workers.deploys.source import Failed
from workers.sites import sites
from workers.stream import Consumer, Entry

T = TypeVar("T")
logger = structlog.get_logger()

BUILDS = 2  # at a time; checks and canaries beside them cost little
HELD = 1_000  # entries of one worker in memory
LOG_INTERVAL = 0.5  # seconds between two writes of a deploy's log
TIDY_INTERVAL = 15.0  # seconds
PLACE_LIFE = 15  # seconds
GIVING_BACK = 20.0  # seconds
OVER: tuple[State, ...] = ("live", "failed")
# What a build prints for a terminal could move the cursor of the one that follows it.
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


async def run(settings: Settings) -> None:
    if settings.deploy_engine == "external":
        logger.info("deploys.external", action="an outside engine takes the deploys")
        await asyncio.Event().wait()
    # Where no process of its own serves the apps, this one does.
    async with asyncio.TaskGroup() as group:
        group.create_task(sites.run(settings))
        group.create_task(Builder(settings).run())


class Builder:
    def __init__(self, settings: Settings, engine: Engine | None = None) -> None:
        self._settings = settings
        self._store = Store(settings.redis_url)
        self._registry = Registry(self._store, Vault(settings.encryption_key))
        self._deploys = Deploys(settings, self._registry)
        provider = Provider(settings)
        self._availability = Availability(settings, self._registry, provider.is_configured, provider.probe)
        self._engine: Engine = engine or LocalEngine(settings, self._find, self._ai_url)
        self._consumer = Consumer(self._store, STREAM, GROUP, settings.webhook_claim_idle, self._accept, self._room)
        self._waiting: dict[str, deque[Entry]] = {}  # app id → its entries after the one under way
        self._running: set[asyncio.Task[None]] = set()
        self._under_way: set[str] = set()  # deploy ids
        self._building = asyncio.Semaphore(BUILDS)
        self._less = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled; then what is under way is undone and given back."""
        looking = asyncio.create_task(self._store.keep_looking())
        try:
            async with self._engine.opened() as place:
                await self._take_place(place)
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._keep_place(place))
                        group.create_task(self._keep_tidy())
                        group.create_task(self._consumer.run())
                finally:
                    await undisturbed(self._stop(place))
        finally:
            looking.cancel()
            await self._store.close()

    async def _take_place(self, place: str) -> None:
        """What is served stands in one place: a builder of another would tell of apps that nobody sees."""
        waiting = False
        while not await _patiently(lambda: self._has_place(place)):
            if not waiting:
                logger.warning("deploys.elsewhere", action="another data folder is built in; this worker stands by")
            waiting = True
            await asyncio.sleep(1)

    async def _has_place(self, place: str) -> bool:
        with backbone():
            holder = await self._store.client.set(keys.BUILDER, place, nx=True, get=True, ex=PLACE_LIFE)
            if holder == place:
                await self._store.client.expire(keys.BUILDER, PLACE_LIFE)
        return holder in (None, place)

    async def _keep_place(self, place: str) -> None:
        while True:
            if not await _patiently(lambda: self._has_place(place)):
                raise RuntimeError("another data folder is built in")
            await asyncio.sleep(PLACE_LIFE / 3)

    async def _stop(self, place: str) -> None:
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        with contextlib.suppress(*FAULTS):
            async with asyncio.timeout(ATTEMPT):
                await self._consumer.release()
        with contextlib.suppress(BackboneUnavailable):
            await self._store.change(keys.BUILDER, "", expected=place)

    async def _keep_tidy(self) -> None:
        while True:
            try:
                await self._engine.tidy(self._under_way)
            except (BackboneUnavailable, OSError) as error:
                logger.warning("deploys.not_tidied", error=f"{type(error).__name__}: {error}")
            end_if_cancelled()
            await asyncio.sleep(TIDY_INTERVAL)

    # -- turns -----------------------------------------------------------------------------------------------

    async def _room(self) -> None:
        while self._consumer.holding >= HELD:
            self._less.clear()
            await self._less.wait()

    def _accept(self, entry: Entry) -> None:
        app = entry.fields["app"]
        if app in self._waiting:
            self._waiting[app].append(entry)
            return
        self._waiting[app] = deque([entry])
        task = asyncio.create_task(self._take_turns(app))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _take_turns(self, app: str) -> None:
        while entries := self._waiting.get(app):
            entry = entries.popleft()
            self._under_way.add(entry.fields["id"])
            try:
                await self._take(entry)
            except Exception as error:
                # A fault of ours: it stays pending, is claimed again, and counts as left half done then.
                logger.error("deploy.postponed", deploy=entry.fields["id"], exc_info=error)
            finally:
                self._under_way.discard(entry.fields["id"])
                self._consumer.done(entry)
                self._less.set()
        self._waiting.pop(app, None)

    async def _take(self, entry: Entry) -> None:
        fields = entry.fields
        deploy = await _patiently(lambda: self._deploys.get(fields["id"], fields["account"]))
        if deploy is not None and deploy.state not in OVER:
            try:
                if deploy.state == "queued":
                    await self._make(deploy)
                else:
                    await self._end_abandoned(deploy)
            except Moved:
                logger.warning("deploy.moved", deploy=deploy.id, action="another worker goes on with it")
                await self._engine.undo(deploy)
                return
        await _patiently(lambda: self._acknowledge(entry))

    async def _end_abandoned(self, deploy: Deploy) -> None:
        logger.warning("deploy.abandoned", deploy=deploy.id, state=deploy.state)
        await self._engine.undo(deploy)
        await self._move(deploy, ("failed",), lambda: self._deploys.fail_abandoned(deploy))

    async def _acknowledge(self, entry: Entry) -> None:
        with backbone():
            await self._store.client.xack(self._consumer.key(entry.tag), GROUP, entry.id)
            await self._store.client.xdel(self._consumer.key(entry.tag), entry.id)

    # -- one deploy, from top to bottom ----------------------------------------------------------------------

    async def _make(self, deploy: Deploy) -> None:
        """Raises Moved."""
        async with Log(self._deploys, deploy) as log:
            try:
                await self._go_through(deploy, log)
            except asyncio.CancelledError:
                log.tell("The worker was stopped; this deploy starts again.")
                await undisturbed(self._give_back(deploy))
                raise

    async def _go_through(self, deploy: Deploy, log: Log) -> None:
        phase: Phase = "build"
        try:
            async with self._building:
                await self._consumer.sure()
                app = await self._find(deploy.appId)
                queued = deploy
                deploy = await self._move(queued, ("building",), lambda: self._deploys.start(queued))
                if app is None or app.account != deploy.account:
                    raise Failed("the app was deleted, or is another account's now")
                job = Job(deploy=deploy, app=app, tell=log.tell, committed=self._committed(deploy))
                await self._engine.build(job)
            deploy = await self._over(deploy, phase)
            phase = "health"
            await self._engine.check(job)
            await self._engine.swap(job)
            log.tell("Checked, and swapped in")
            deploy = await self._over(deploy, phase)
            if deploy.state == "canary":
                phase = "canary"
                await self._engine.canary(job)
                log.tell("The canary closed cleanly")
                await log.write()
                deploy = await self._over(deploy, phase)
            await self._engine.settle(job)
        except (Failed, OSError) as failure:
            if deploy.state in OVER:  # it is live, and only what it replaced is left over
                raise
            reason = str(failure)
            if not isinstance(failure, Failed):
                logger.error("deploy.broken", deploy=deploy.id, exc_info=failure)
                reason = "a fault of the service's own; deploy again"
            log.tell(f"Failed: {reason}")
            await log.write()
            await self._engine.undo(deploy)
            await self._over(deploy, phase, reason)

    async def _over(self, deploy: Deploy, phase: Phase, failure: str = "") -> Deploy:
        """The phase is. Raises Moved."""
        after: tuple[State, ...] = ("failed",) if failure else ("checking", "canary", "live")
        return await self._move(deploy, after, lambda: self._deploys.advance(deploy, phase, not failure, failure))

    async def _move(self, deploy: Deploy, after: tuple[State, ...], move: Callable[[], Awaitable[Deploy]]) -> Deploy:
        """Raises Moved; not when it was a try of this very move whose answer was lost."""
        lost = False
        while True:
            try:
                moved = await move()
            except BackboneUnavailable:
                lost = True
                await asyncio.sleep(1)
            except Moved:
                now = await _patiently(lambda: self._deploys.get(deploy.id, deploy.account))
                if lost and now is not None and now.state != deploy.state and now.state in after:
                    return now
                raise
            else:
                end_if_cancelled()
                return moved

    def _committed(self, deploy: Deploy) -> Callable[[str], Awaitable[None]]:
        async def note(commit: str) -> None:
            await _patiently(lambda: self._deploys.note(deploy, commit=commit))

        return note

    async def _give_back(self, deploy: Deploy) -> None:
        """It waits again, unless it is over. Without Redis it is left as it is, and fails as abandoned later."""
        with contextlib.suppress(Moved, TimeoutError):
            async with asyncio.timeout(GIVING_BACK):
                now = await _patiently(lambda: self._deploys.get(deploy.id, deploy.account))
                if now is not None and now.state not in (*OVER, "queued"):
                    await self._engine.undo(now)
                    await _patiently(lambda: self._deploys.give_back(now))

    # -- what the engine asks --------------------------------------------------------------------------------

    async def _find(self, app: str) -> App | None:
        found: App | None = await _patiently(lambda: self._registry.find(app))
        return found

    async def _ai_url(self, app: App) -> str | None:
        await _patiently(self._availability.reload)
        available = self._availability.status().available
        return f"{self._settings.base_url}/capsule/{app.name}/ai" if available else None


class Log:
    """Lines are gathered, and written now and then; what Redis does not take at once waits for it."""

    def __init__(self, deploys: Deploys, deploy: Deploy) -> None:
        self._deploys, self._deploy = deploys, deploy
        self._lines: list[str] = []
        self._size = 0  # all that was told, in bytes: what is beyond the bound is not even gathered
        self._lock = asyncio.Lock()

    def tell(self, line: str) -> None:
        if self._size <= LOG_BYTES:
            line = CONTROL.sub("", line) + "\n"
            self._size += len(line.encode())
            self._lines.append(line)

    async def write(self) -> None:
        async with self._lock:
            while self._lines:
                count = len(self._lines)
                text = "".join(self._lines[:count])
                await _patiently(lambda text=text: self._deploys.log(self._deploy, text))  # type: ignore[misc]
                del self._lines[:count]

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(LOG_INTERVAL)
            await self.write()

    async def __aenter__(self) -> Self:
        self._writing = asyncio.create_task(self._keep_writing())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await undisturbed(asyncio.wait_for(self.write(), ATTEMPT))


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Again and again, for as long as Redis is away."""
    while True:
        try:
            result = await work()
        except BackboneUnavailable:
            await asyncio.sleep(1)
        else:
            end_if_cancelled()
            return result

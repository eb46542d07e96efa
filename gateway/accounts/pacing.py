"""Limits the account API per account and process: two requests at a time, and a fifth of the process's time.

A process also serves the streams of other accounts. Requests beyond the limits wait in order, and are refused after
`WAIT_SECONDS`. An account saves up to `SAVED_SECONDS` of unused time, so only accounts that send hundreds of requests
per second have to wait.

The callers of an account, such as its API keys and members, take turns, and none has more than the account's share of
time. So no caller locks out another one. Requests that take rights away have a lane of their own: however busy the
account is, a key can be revoked. A request takes its place when its body is complete. Until then it has one of its
caller's few places for bodies.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from gateway.errors import RateLimited

MAX_RUNNING = 2  # requests of an account whose responses have not begun
MAX_WAITING, WAIT_SECONDS = 500, 10.0  # requests of a caller
MAX_BODIES = 8  # of a caller, that are being received or wait for a place
SMALL_BODY_BYTES, MAX_LARGE_BODIES = 65_536, 8  # larger ones of an account, which would fill the memory together
TIME_SHARE, SAVED_SECONDS = 0.2, 0.3  # of the process's time
OVERHEAD_SECONDS = 0.001  # charged per request for HTTP and the answers of Redis, which no step of it includes
MAX_LANES = 10_000  # before idle ones are dropped
METER, LEAVE = "meter", "leave_lane"  # in a request's state
UNPACED = "unpaced"  # an option of routes


class Allotment:
    """The share of the process's time that an account, or one of its callers, has."""

    def __init__(self) -> None:
        self._spent = 0.0  # seconds of the process
        self._at = asyncio.get_running_loop().time()  # of this figure

    def charge(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        self._spent = max(0.0, self._spent - TIME_SHARE * (now - self._at)) + seconds
        self._at = now

    def pause(self) -> float:
        """Returns the seconds until the next request may start."""
        return max(0.0, (self._spent - SAVED_SECONDS) / TIME_SHARE - (asyncio.get_running_loop().time() - self._at))


class Caller(Allotment):
    """One caller's requests that wait, and the bodies that it is sending."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.bodies, self.sending = asyncio.Semaphore(MAX_BODIES), 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.sending and self.pause() == 0


class AccountLane(Allotment):
    """The running requests of one account, and its callers."""

    def __init__(self) -> None:
        super().__init__()
        self._running = 0
        self.large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)
        self._callers: OrderedDict[str, Caller] = OrderedDict()  # the first one's turn is next
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return not self._running and self.pause() == 0 and all(each.is_idle for each in self._callers.values())

    def find_caller(self, name: str) -> Caller:
        if name not in self._callers:
            for idle in [each for each, caller in self._callers.items() if caller.is_idle]:
                del self._callers[idle]
            self._callers[name] = Caller()
        return self._callers[name]

    async def enter(self, caller: Caller) -> Callable[[], None]:
        """Waits for a place. The caller frees it by calling the returned function once. Raises RateLimited."""
        if any(each.waiting for each in self._callers.values()) or self._running >= MAX_RUNNING or self._pause(caller):
            await self._wait(caller)
        else:
            self._start()
        return self._leave

    def _pause(self, caller: Caller) -> float:
        return max(self.pause(), caller.pause())

    def _start(self) -> None:
        self._running += 1
        self.charge(OVERHEAD_SECONDS)  # a request that is refused costs its caller alone

    async def _wait(self, caller: Caller) -> None:
        if len(caller.waiting) >= MAX_WAITING:
            raise self._build_refusal(caller)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        caller.waiting.append(waiter)
        self._serve()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._leave()
            elif waiter in caller.waiting:
                caller.waiting.remove(waiter)
            if isinstance(error, TimeoutError):
                raise self._build_refusal(caller) from None
            raise

    def _build_refusal(self, caller: Caller) -> RateLimited:
        message = "The account has too many requests in progress; try again after the time in Retry-After."
        return RateLimited(message, retry_after=max(1.0, self._pause(caller)))

    def _leave(self) -> None:
        self._running -= 1
        self._serve()

    def _serve(self) -> None:
        """Starts waiting requests, of each caller in turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._running < MAX_RUNNING:
            waiting = [(name, caller) for name, caller in self._callers.items() if caller.waiting]
            if not waiting:
                return
            ready = next(((name, caller) for name, caller in waiting if not self._pause(caller)), None)
            if ready is None:
                pause = min(self._pause(caller) for _, caller in waiting)
                self._timer = asyncio.get_running_loop().call_later(pause, self._serve)
                return
            name, caller = ready
            self._callers.move_to_end(name)
            waiter = caller.waiting.popleft()
            if not waiter.done():
                self._start()
                waiter.set_result(None)


class Meter:
    """One request in the lane of its account."""

    def __init__(self, lane: AccountLane, caller: Caller, state: dict[str, Any]) -> None:
        self._lane, self._caller, self._state = lane, caller, state
        caller.charge(OVERHEAD_SECONDS)

    def charge(self, seconds: float) -> None:
        self._lane.charge(seconds)
        self._caller.charge(seconds)

    @asynccontextmanager
    async def receiving(self, size: int | None) -> AsyncGenerator[None]:
        """Wraps the wait for the request's body, and for a place. Raises RateLimited beyond a limit.

        `size` is what the request declares, or None.
        """
        is_large = size is None or size > SMALL_BODY_BYTES
        self._caller.sending += 1
        try:
            async with AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(WAIT_SECONDS):
                        await held.enter_async_context(self._caller.bodies)
                        if is_large:
                            await held.enter_async_context(self._lane.large_bodies)
                except TimeoutError:
                    message = f"You are sending {MAX_BODIES} requests already; complete their bodies, then try again."
                    if not self._caller.bodies.locked():
                        message = f"The account is sending {MAX_LARGE_BODIES} large requests already; try again later."
                    raise RateLimited(message, retry_after=1.0) from None
                yield
        finally:
            self._caller.sending -= 1

    async def enter(self, *, paced: bool = True) -> None:
        """Waits until the request may run. Raises RateLimited.

        A request that is not `paced`, because it may take long, frees its place at once.
        """
        leave = await self._lane.enter(self._caller)
        if paced:
            self._state[LEAVE] = leave
        else:
            leave()


class Pacing:
    def __init__(self) -> None:
        self._lanes: OrderedDict[tuple[str, bool], AccountLane] = OrderedDict()

    def meter(self, account: str, caller: str, state: dict[str, Any], *, takes_rights: bool = False) -> Meter:
        """Returns the meter of the request with this state. All that the request does is charged to it."""
        key = account, takes_rights
        lane = self._lanes.setdefault(key, AccountLane())
        self._lanes.move_to_end(key)
        if len(self._lanes) > MAX_LANES:
            self._lanes = OrderedDict((id, each) for id, each in self._lanes.items() if not each.is_idle)
            self._lanes[key] = lane
        meter = Meter(lane, lane.find_caller(caller), state)
        state[METER] = meter
        return meter


def leave_lane(state: dict[str, Any]) -> None:
    """Frees the place of a request, if it has one. Called when its response begins, or when it ends."""
    if (leave := state.pop(LEAVE, None)) is not None:
        leave()


class RequestMeter:
    """Runs a request, and charges the time of each of its steps to its account."""

    def __init__(
        self,
        running: Coroutine[Any, Any, None],
        state: dict[str, Any],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._running, self._state, self._clock = running, state, clock

    def __await__(self) -> Generator[Any, None, None]:
        error: BaseException | None = None
        try:
            while True:
                began = self._clock()
                try:
                    waits_for = self._running.send(None) if error is None else self._running.throw(error)
                except StopIteration:
                    return
                finally:
                    if (meter := self._state.get(METER)) is not None:
                        meter.charge(self._clock() - began)
                error = None
                try:
                    yield waits_for
                except BaseException as raised:
                    error = raised
        finally:
            self._running.close()
            leave_lane(self._state)

"""Limits the account API per account and process: two requests at a time, and a fifth of the process's time.

A process also serves the streams of other accounts. Requests beyond the limits wait in order, and are refused after
`WAIT_SECONDS`. An account saves up to `SAVED_SECONDS` of unused time, so only accounts that send hundreds of requests
per second have to wait.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from gateway.errors import RateLimited

MAX_RUNNING = 2  # requests of an account whose responses have not begun
MAX_WAITING, WAIT_SECONDS = 500, 10.0  # requests of an account
TIME_SHARE, SAVED_SECONDS = 0.2, 0.3  # of the process's time
OVERHEAD_SECONDS = 0.001  # charged per request for HTTP and the answers of Redis, which no step of it includes
MAX_LANES = 10_000  # before idle ones are dropped
LANE, LEAVE = "lane", "leave_lane"  # in a request's state
UNPACED = "unpaced"  # an option of routes


class AccountLane:
    """The running and waiting requests of one account."""

    def __init__(self) -> None:
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._spent, self._at = 0.0, time.monotonic()  # seconds of the process, and the time of this figure
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting and self._pause() == 0

    def charge(self, seconds: float) -> None:
        now = time.monotonic()
        self._spent = max(0.0, self._spent - TIME_SHARE * (now - self._at)) + seconds
        self._at = now

    def _pause(self) -> float:
        """Returns the seconds until the account's next request may start."""
        return max(0.0, (self._spent - SAVED_SECONDS) / TIME_SHARE - (time.monotonic() - self._at))

    async def enter(self) -> Callable[[], None]:
        """Waits for a slot. The caller frees it by calling the returned function once. Raises RateLimited."""
        if self._waiting or self._running >= MAX_RUNNING or self._pause():
            await self._wait()
        else:
            self._running += 1
        return self._leave

    async def _wait(self) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise self._build_refusal()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._serve()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._leave()
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            if isinstance(error, TimeoutError):
                raise self._build_refusal() from None
            raise

    def _build_refusal(self) -> RateLimited:
        message = "The account has too many requests in progress; try again after the time in Retry-After."
        return RateLimited(message, retry_after=max(1.0, self._pause()))

    def _leave(self) -> None:
        self._running -= 1
        self._serve()

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._running < MAX_RUNNING:
            if pause := self._pause():
                self._timer = asyncio.get_running_loop().call_later(pause, self._serve)
                return
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._running += 1
                waiter.set_result(None)


class Pacing:
    def __init__(self) -> None:
        self._lanes: OrderedDict[str, AccountLane] = OrderedDict()

    async def admit(self, account: str, state: dict[str, Any], *, paced: bool = True) -> None:
        """Waits until the request with this state may run, and charges its account. Raises RateLimited.

        A request that is not `paced`, because it may take long, frees its slot at once.
        """
        lane = self._lanes.setdefault(account, AccountLane())
        self._lanes.move_to_end(account)
        if len(self._lanes) > MAX_LANES:
            self._lanes = OrderedDict((id, each) for id, each in self._lanes.items() if not each.is_idle)
            self._lanes[account] = lane
        state[LANE] = lane
        lane.charge(OVERHEAD_SECONDS)
        leave = await lane.enter()
        if paced:
            state[LEAVE] = leave
        else:
            leave()


def leave_lane(state: dict[str, Any]) -> None:
    """Frees the slot of a request, if it has one. Called when its response begins, or when it ends."""
    if (leave := state.pop(LEAVE, None)) is not None:
        leave()


class RequestMeter:
    """Runs a request, and charges the time of each of its steps to its account."""

    def __init__(self, running: Coroutine[Any, Any, None], state: dict[str, Any]) -> None:
        self._running, self._state = running, state

    def __await__(self) -> Generator[Any, None, None]:
        error: BaseException | None = None
        try:
            while True:
                began = time.perf_counter()
                try:
                    waits_for = self._running.send(None) if error is None else self._running.throw(error)
                except StopIteration:
                    return
                finally:
                    if (lane := self._state.get(LANE)) is not None:
                        lane.charge(time.perf_counter() - began)
                error = None
                try:
                    yield waits_for
                except BaseException as raised:
                    error = raised
        finally:
            self._running.close()
            leave_lane(self._state)

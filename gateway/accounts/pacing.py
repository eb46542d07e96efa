"""What one account's API requests may take of a process, which others' streams share: two at a time, and a fifth of its
time.

Requests beyond that wait for a moment, in order, and are refused if it lasts. Nobody notices who does not ask hundreds
of times in a second: time that an account has not used is saved, up to 0.3 s.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from gateway.errors import RateLimited

AT_ONCE = 2  # requests of an account whose answers have not begun
WAITING, WAIT_SECONDS = 500, 10.0
SHARE, SAVED_SECONDS = 0.2, 0.3  # of the process's time
OVERHEAD = 0.001  # seconds of each request that no step of its own takes: HTTP, the answers of Redis
ACCOUNTS = 10_000  # remembered
LANE, LEAVE, UNPACED = "lane", "leave_lane", "unpaced"  # in a request's state, and an option of routes


class Lane:
    """The requests of one account."""

    def __init__(self) -> None:
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._spent, self._at = 0.0, time.monotonic()  # seconds of the process, and when that was so
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting and self._pause() == 0

    def charge(self, seconds: float) -> None:
        now = time.monotonic()
        self._spent = max(0.0, self._spent - SHARE * (now - self._at)) + seconds
        self._at = now

    def _pause(self) -> float:
        """Seconds until the account may go on."""
        return max(0.0, (self._spent - SAVED_SECONDS) / SHARE - (time.monotonic() - self._at))

    async def enter(self) -> Callable[[], None]:
        """Waits for a turn. The caller ends it by calling the returned function once. Raises RateLimited."""
        if self._waiting or self._running >= AT_ONCE or self._pause():
            await self._wait()
        else:
            self._running += 1
        return self._leave

    async def _wait(self) -> None:
        if len(self._waiting) >= WAITING:
            raise self._refusal()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._serve()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise

    def _refusal(self) -> RateLimited:
        message = "The account has too many requests under way; try again after the time in Retry-After."
        return RateLimited(message, retry_after=max(1.0, self._pause()))

    def _leave(self) -> None:
        self._running -= 1
        self._serve()

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._running < AT_ONCE:
            if pause := self._pause():
                self._timer = asyncio.get_running_loop().call_later(pause, self._serve)
                return
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)


class Pacing:
    def __init__(self) -> None:
        self._lanes: OrderedDict[str, Lane] = OrderedDict()

    async def admit(self, account: str, state: dict[str, Any], *, paced: bool = True) -> None:
        """Lets the request with this state wait for its turn, and charges its account. Raises RateLimited.

        One that is not `paced` ends its turn at once, because it may last.
        """
        lane = self._lanes.setdefault(account, Lane())
        self._lanes.move_to_end(account)
        if len(self._lanes) > ACCOUNTS:
            self._lanes = OrderedDict((id, each) for id, each in self._lanes.items() if not each.is_idle)
            self._lanes[account] = lane
        state[LANE] = lane
        lane.charge(OVERHEAD)
        end = await lane.enter()
        if paced:
            state[LEAVE] = end
        else:
            end()


def leave(state: dict[str, Any]) -> None:
    """Ends the turn of a request, if it has one: its answer begins, or it has ended."""
    if (end := state.pop(LEAVE, None)) is not None:
        end()


class RequestMeter:
    """Runs a request, and charges each of its steps to its account."""

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
            leave(self._state)

"""How often something may happen, who may do it, how to wait; a process's descriptors, memory, signals and loop."""

import asyncio
import gc
import itertools
import math
import resource
import secrets
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, TypeVar

import msgspec
import structlog

from gateway.cancellation import end_if_canceled, finish_despite_cancellation, run_in_background
from gateway.errors import BackboneUnavailable, RateLimited, ServiceError
from gateway.redis.client import Store
from gateway.redis.scripts import hold_key

logger = structlog.get_logger()

DESCRIPTORS = 65_536  # at most, per process; more would not help on one core
# New objects before a collection. Requests and deliveries leave hardly any cycles. With Python's default of 700,
# the collector would visit the objects of running requests all the time.
YOUNG_OBJECTS = 10_000
RENEWALS = 6  # of a key that is held, in the time for which it is held

T = TypeVar("T")


class Allowance(msgspec.Struct, frozen=True):
    """So many in so long, for each account, app or address. More are refused. docs/architecture.md lists all."""

    key: Callable[..., str]  # of the counter, by what it counts for
    limit: int
    seconds: int  # from the first one on
    message: str = ""  # the rule, with `{limit}`; "": the error's own message
    error: type[ServiceError] = RateLimited

    async def count(self, store: Store, *ids: str) -> None:
        """Counts one more. Raises the error, and BackboneUnavailable."""
        counted, wait = await store.increment(self.key(*ids), self.seconds)
        if counted > self.limit:
            rule = self.message.format(limit=self.limit)
            raise self.error(rule and f"{rule}; try again after the time in Retry-After.", retry_after=wait)

    async def take_back(self, store: Store, *ids: str) -> None:
        """Takes back a `count`."""
        await store.take_back(self.key(*ids), self.seconds)


async def every(
    seconds: float, work: Callable[[], Awaitable[object]], failure: str = "", *, first: float = 0.0
) -> NoReturn:
    """Does the work in rounds until canceled, after a pause of `first` seconds, and of `seconds` after each round.

    What a round could not do without Redis is left to the next one. Other errors are logged as the event `failure`;
    without it, they end the rounds.
    """
    await asyncio.sleep(first)
    while True:
        try:
            await work()
        except BackboneUnavailable:
            pass
        except Exception as error:  # one broken record, or a full disk, must not end the rounds
            if not failure:
                raise
            logger.error(failure, exc_info=error)
        end_if_canceled()
        await asyncio.sleep(seconds)


async def until(look: Callable[[], Awaitable[T]], poll: float, seconds: float = math.inf) -> T:
    """Looks every `poll` seconds until a look finds something, or `seconds` are over. Returns what the last one found.

    It looks at least once.
    """
    ends = time.monotonic() + seconds
    while not (found := await look()) and time.monotonic() < ends:
        end_if_canceled()
        await asyncio.sleep(poll)
    return found


async def until_set(event: asyncio.Event, seconds: float) -> bool:
    """Waits until the event is set, or `seconds` are over. Returns whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields the items in lists of `size`; the last one may be shorter."""
    remaining = iter(items)
    while batch := list(itertools.islice(remaining, size)):
        yield batch


def pauses(first: float, longest: float) -> Iterator[float]:
    """Yields the seconds to pause before each further attempt: each time twice as many, up to `longest`."""
    while True:
        yield first
        first = min(2 * first, longest)


@asynccontextmanager
async def held(store: Store, key: str, seconds: float, poll: float) -> AsyncGenerator[asyncio.Event]:
    """Waits until nobody else holds the key, and holds it: one at a time, of all processes.

    The key is renewed meanwhile. If this process dies, the key is free after `seconds`. Yields an event that is set as
    soon as somebody else may hold the key, because this process stood still or Redis was away. Looks whether the key is
    free every `poll` seconds. Raises BackboneUnavailable while it waits.
    """
    token, lifetime, ends, lost = secrets.token_hex(8), round(seconds * 1000), 0.0, asyncio.Event()

    async def hold() -> bool:
        nonlocal ends
        began = time.monotonic()
        is_held = await hold_key(store, key, token, lifetime) == token
        ends = began + seconds
        return is_held

    async def renew() -> None:
        is_held = True
        with suppress(TimeoutError):
            while is_held:
                async with asyncio.timeout(ends - time.monotonic()):
                    await asyncio.sleep(seconds / RENEWALS)
                    with suppress(BackboneUnavailable):
                        is_held = await hold()
        lost.set()

    async def release() -> None:
        with suppress(BackboneUnavailable):  # the key expires
            await hold_key(store, key, token, 0)

    try:
        await until(hold, poll)
        async with run_in_background(renew()):
            yield lost
    finally:
        await finish_despite_cancellation(release())


def raise_descriptor_limit() -> int:
    """Raises the soft limit, which is 1,024 on most systems, to the hard limit. Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # macOS allows less than it reports; the limit in force applies
    return soft


def freeze_heap() -> None:
    """Exempts all present objects from collection. Each process calls it once it has started."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def stop_at_hangup() -> None:
    """Lets SIGHUP stop this process as SIGTERM does. A closed terminal, logrotate and `systemctl reload` send it.

    It stays ignored in a process that nohup started. A forked child keeps this; any other calls it again.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def ignore_late_lookups() -> None:
    """Keeps lookups of names that fail after their caller's timeout out of the log, for the running event loop.

    uvloop cannot cancel a lookup. Its caller has reported the timeout, and each late failure would add a traceback.
    """
    asyncio.get_running_loop().set_exception_handler(_handle_loop_error)


def _handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    unread = str(context.get("message")).startswith("Future exception was never retrieved")
    if not (unread and isinstance(context.get("exception"), socket.gaierror)):
        loop.default_exception_handler(context)

"""How often something may happen, what is repeated, and a process's file descriptors, memory and event loop."""

import asyncio
import gc
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import msgspec
import structlog

from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneUnavailable, RateLimited, ServiceError
from gateway.redis.client import Store

logger = structlog.get_logger()

DESCRIPTORS = 65_536  # at most, per process; more would not help on one core
# New objects before a collection. Requests and deliveries leave hardly any cycles. With Python's default of 700,
# the collector would visit the objects of running requests all the time.
YOUNG_OBJECTS = 10_000


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


async def every(seconds: float, work: Callable[[], Awaitable[object]], failure: str) -> NoReturn:
    """Does the work in rounds until canceled, with a pause of `seconds` after each round.

    What a round could not do without Redis is left to the next one. Other errors are logged as the event `failure`.
    """
    while True:
        try:
            await work()
        except BackboneUnavailable:
            pass
        except Exception as error:  # one broken record, or a full disk, must not end the rounds
            logger.error(failure, exc_info=error)
        end_if_canceled()
        await asyncio.sleep(seconds)


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


def ignore_late_lookups() -> None:
    """Keeps lookups of names that fail after their caller's timeout out of the log, for the running event loop.

    uvloop cannot cancel a lookup. Its caller has reported the timeout, and each late failure would add a traceback.
    """
    asyncio.get_running_loop().set_exception_handler(_handle_loop_error)


def _handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    unread = str(context.get("message")).startswith("Future exception was never retrieved")
    if not (unread and isinstance(context.get("exception"), socket.gaierror)):
        loop.default_exception_handler(context)

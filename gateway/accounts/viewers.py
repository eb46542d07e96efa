"""Shares the open streams of a process among accounts, and among the callers of an account.

A stream stays open for minutes, so whoever comes first could keep out all others. Two rules leave room:

- Half of the process's streams are for accounts that have none. Of the rest, an account may open as many as
  `gateway/outbound/tenant_limiter.py` allows, up to its limit
- Half of an account's streams are for callers that have none: its other API keys and members. So one caller has at most
  half of them

Nothing waits: who is refused polls instead, and tries again later.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from gateway.errors import ViewersLimited
from gateway.outbound.tenant_limiter import may_hold_more

RETRY_SECONDS = 60


class Streams(NamedTuple):
    """A kind of streams, and how many of them one process has open."""

    kind: str
    limit: int
    limit_of_account: int


CHANGES = Streams("an account's changes", 500, 20)
LOGS = Streams("an app's output", 200, 10)
FIGURES = Streams("the service's figures", 50, 50)  # all are the operators', who are callers of one account


class Viewers:
    """The open streams of one kind."""

    def __init__(self, streams: Streams, report: Callable[[int], None] = lambda count: None) -> None:
        """`report` gets the number of open streams whenever it changes."""
        self._streams, self._report = streams, report
        self._accounts: Counter[str] = Counter()
        self._callers: Counter[tuple[str, str]] = Counter()

    @property
    def count(self) -> int:
        return self._accounts.total()

    def open(self, account: str, caller: str, stream: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Returns the stream, which counts for the caller while somebody reads it. Raises ViewersLimited."""
        kind, limit, limit_of_account = self._streams
        kept_free = limit_of_account // 2 if self._callers[account, caller] else 0
        if self._accounts[account] >= limit_of_account - kept_free:
            message = (
                f"Too many streams of {kind} are open. An account may have {limit_of_account}, of which half are for "
                "callers that have none; close one of them."
            )
            raise ViewersLimited(message, retry_after=RETRY_SECONDS)
        # An account that may have all streams shares them with nobody.
        reserved, free = limit // 2, limit - self.count
        if limit_of_account < limit and not may_hold_more(self._accounts[account], free, reserved):
            message = f"Too many streams of {kind} are open; poll instead, or try again later."
            raise ViewersLimited(message, retry_after=RETRY_SECONDS)
        return self._hold(account, caller, stream)

    async def _hold(self, account: str, caller: str, stream: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        self._add(account, caller, 1)
        try:
            async with aclosing(stream):
                async for part in stream:
                    yield part
        finally:
            self._add(account, caller, -1)

    def _add(self, account: str, caller: str, number: int) -> None:
        self._accounts[account] += number
        self._callers[account, caller] += number
        if not self._callers[account, caller]:
            del self._callers[account, caller]
        if not self._accounts[account]:
            del self._accounts[account]
        self._report(self.count)

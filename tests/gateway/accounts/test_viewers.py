"""The streams of a process are shared among accounts, and those of an account among its callers."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import pytest

from gateway.accounts.viewers import CHANGES, FIGURES, LOGS, Viewers
from gateway.errors import ViewersLimited


async def stream() -> AsyncGenerator[bytes]:
    while True:
        yield b""


class Crowd(AsyncExitStack):
    """Callers that keep their streams open."""

    def __init__(self, viewers: Viewers) -> None:
        super().__init__()
        self.viewers = viewers

    async def open(self, account: str, caller: str, number: int) -> int:
        """Returns how many of these streams were admitted."""
        for done in range(number):
            try:
                opened = self.viewers.open(account, caller, stream())
            except ViewersLimited:
                return done
            await self.enter_async_context(aclosing(opened))
            await anext(opened)
        return number


async def test_an_account_without_a_stream_gets_one() -> None:
    counts: list[int] = []
    async with Crowd(Viewers(CHANGES, counts.append)) as crowd:
        greedy = [
            await crowd.open(f"acc_{n}", "one", 100) + await crowd.open(f"acc_{n}", "two", 100) for n in range(100)
        ]
        assert greedy[0] == 11  # one caller has half, and the other the first of the other half
        assert min(greedy) >= 1
        assert [await crowd.open(f"acc_new_{n}", "one", 1) for n in range(150)] == [1] * 150
        assert crowd.viewers.count == counts[-1] <= CHANGES.limit
    assert crowd.viewers.count == counts[-1] == 0


async def test_one_caller_has_at_most_half_of_an_account_or_of_the_operators_streams() -> None:
    async with Crowd(Viewers(FIGURES)) as crowd:
        assert await crowd.open("", "ana", 100) == 25
        assert [await crowd.open("", f"operator {n}", 2) for n in range(25)] == [1] * 25
        assert await crowd.open("", "one more", 1) == 0
    async with Crowd(Viewers(CHANGES)) as crowd:
        half = CHANGES.limit_of_account // 2
        assert await crowd.open("acc_1", "thief", 100) == half
        assert [await crowd.open(account, "thief", 1) for account in ("acc_1", "acc_2")] == [0, 1]


async def test_all_together_have_a_limit() -> None:
    """A refusal says what to do. A stream that nobody reads is not counted."""
    async with Crowd(Viewers(LOGS)) as crowd:
        crowd.viewers.open("acc_1", "one", stream())
        assert crowd.viewers.count == 0
        opened = [await crowd.open(f"acc_more_{n}", "one", 1) for n in range(LOGS.limit + 5)]
        assert opened == [1] * LOGS.limit + [0] * 5
        with pytest.raises(ViewersLimited, match="poll instead") as refusal:
            crowd.viewers.open("acc_new", "one", stream())
        assert refusal.value.retry_after == 60

"""The sliding windows in real time. `tests/lua/inference/test_admit.py` tests their edges to the microsecond."""

import asyncio

import pytest
import redis

from gateway.inference.keys import app_window_key, user_hash, user_window_key
from gateway.redis.partitions import partition_tag
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECOND = 1_000_000  # Redis's clock counts microseconds
MINUTE = 60 * SECOND


class Windows:
    """The windows in Redis of an app and of its user ana."""

    def __init__(self, client: redis.Redis, app: App) -> None:
        tag = partition_tag(app.account.id)
        self.client = client
        self.keys = [app_window_key(tag, app.name), user_window_key(tag, app.name, user_hash("ana"))]

    def stamps(self) -> list[int]:
        """Returns the times at which requests passed, which must be the same in both windows."""
        by_app, by_user = (self.client.lrange(key, 0, -1) for key in self.keys)
        assert by_app == by_user
        return [int(stamp) for stamp in by_app]

    def now(self) -> int:
        seconds, microseconds = self.client.time()
        return seconds * SECOND + microseconds

    async def wait_for(self, moment: int) -> None:
        """Waits until Redis's clock shows this moment."""
        while (left := moment - self.now()) > 0:
            await asyncio.sleep(left / SECOND)

    def move_back(self, microseconds: int) -> None:
        """Moves all entries of the windows to an earlier time."""
        stamps = [stamp - microseconds for stamp in self.stamps()]
        for key in self.keys:
            expiry = self.client.pexpiretime(key) - microseconds // 1000
            self.client.pipeline().delete(key).rpush(key, *stamps).pexpireat(key, expiry).execute()


async def test_a_request_leaves_the_window_after_sixty_seconds(gw: Gateway, app: App) -> None:
    """`Retry-After` is exact, refusals do not count, and each request leaves the window at its own time."""
    with gw.redis.client() as client:
        windows = Windows(client, app)
        began, passed = windows.now(), []
        for pause in [0.0] * 10 + [2.0] + [0.0] * 9:
            await asyncio.sleep(pause)
            assert (await app.ask("x")).status_code == 200
            passed.append(windows.now())
        stamps = windows.stamps()
        for stamp, before, after in zip(stamps, [began, *passed], passed, strict=False):
            assert before <= stamp <= after, "a request counts from the moment in which it passes"
        windows.move_back(54 * SECOND)
        leaves = [stamp - 54 * SECOND + MINUTE for stamp in stamps]

        while windows.now() < leaves[0] - 2 * SECOND:
            response = await app.ask("x")
            refused(response, 429, "USER_RATE_LIMITED")
            retry = windows.now() + int(response.headers["Retry-After"]) * SECOND
            assert 0 <= retry - leaves[0] + 0.1 * SECOND <= 1.2 * SECOND, "in whole seconds"
            await asyncio.sleep(0.7)
        while (await app.ask("x")).status_code == 429:
            await asyncio.sleep(0.1)
        assert leaves[0] <= windows.stamps()[-1] <= leaves[0] + 1.5 * SECOND

        # The first ten have left; the other ten are younger by two seconds.
        await windows.wait_for(leaves[9])
        assert [(await app.ask("x")).status_code for _ in range(12)] == [200] * 9 + [429] * 3
        await windows.wait_for(leaves[10])
        assert (await app.ask("x")).status_code == 200

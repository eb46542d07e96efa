"""Several `Permits`, each as one process, and a provider that counts the requests it serves.

In virtual time, they share a `SimulatedRedis`, which runs the real script.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway.errors import BackboneUnavailable, ServiceError
from gateway.inference.concurrency.lease import Share, read_share
from gateway.inference.concurrency.permits import Permits
from gateway.inference.concurrency.quota import WINDOW_SECONDS
from gateway.inference.concurrency.waiting import Permit, Waiter
from gateway.inference.upstream import MIN_WAIT_SECONDS
from gateway.redis.client import COMMAND_SECONDS
from tests.lua.leases import MESSAGES, with_kept_messages
from tests.lua.scripts import CLOCK, SECOND, on_test_clock
from tests.support.background import cancel

LATENCY_SECONDS = 0.002  # of the simulated network, one way


def now() -> float:
    """Returns the time of the running loop, real or virtual, in seconds."""
    return asyncio.get_running_loop().time()


class Process(Permits):
    """The permits of one provider in one process, whose requests may wait for `max_wait` seconds."""

    def __init__(self, store: Any, *, max_wait: float = 10.0, **options: Any) -> None:
        super().__init__(store, **{"limit": 10, "clock": now, **options})
        self._longest = max_wait or MIN_WAIT_SECONDS

    def ask(self, account: str, app: str, weight: float, tokens: int = 0) -> Waiter:
        waiter = Waiter(account, app, weight, tokens, since=now())
        waiter.move([self])
        return waiter

    async def wait_for_permit(self, account: str, app: str, weight: float, tokens: int = 0) -> Permit:
        return await self.ask(account, app, weight, tokens).wait(self._longest)

    def fail_waiting(self, error: ServiceError) -> None:
        for waiter, *_ in self._queue.items():
            waiter.leave(error)


class Provider:
    """Counts the requests that are served at once."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self._busy = 0.0
        self._since = now()

    @property
    def busy(self) -> float:
        """Permit-seconds in use until now."""
        return self._busy + self.running * (now() - self._since)

    def _change(self, by: int) -> None:
        self._busy, self._since = self.busy, now()
        self.running += by
        self.most = max(self.most, self.running)

    async def request(self, permits: Process, account: str, seconds: float, app: str = "app") -> float:
        """Serves one request, and returns the seconds that it waited."""
        began = now()
        permit = permits.take_now(account) or await permits.wait_for_permit(account, app, 1)
        waited = now() - began
        self._change(1)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._change(-1)
            permits.release(permit)
        return waited


class Quota:
    """Counts the requests that start in any window, and the tokens that they use."""

    def __init__(self) -> None:
        self.starts: list[tuple[float, str]] = []
        self.uses: list[list[float]] = []  # time and tokens; the reserved ones until the request has ended

    def most(self) -> int:
        """Returns the requests of the fullest window."""
        times = [at for at, _ in self.starts]
        return max(sum(at <= each < at + WINDOW_SECONDS for each in times) for at in times)

    def most_tokens(self) -> float:
        return max(sum(n for at, n in self.uses if first <= at < first + WINDOW_SECONDS) for first, _ in self.uses)

    async def request(
        self, permits: Process, account: str, seconds: float = 0.01, tokens: int = 0, used: int = 0
    ) -> None:
        permit = permits.take_now(account, tokens) or await permits.wait_for_permit(account, "app", 1, tokens)
        self.starts.append((now(), account))
        use: list[float] = [now(), tokens]
        self.uses.append(use)
        permits.mark_sent(permit)
        await asyncio.sleep(seconds)
        use[1] = used
        permits.release(permit, tokens=used)


async def take(permits: Process, count: int, account: str = "acc") -> list[Permit]:
    return [permits.take_now(account) or await permits.wait_for_permit(account, "app", 1) for _ in range(count)]


async def settle_down() -> None:
    """Waits in virtual time until all processes have their spare permits."""
    await asyncio.sleep(1)


# -- a Redis in virtual time -------------------------------------------------------------------------------------


class SimulatedRedis:
    """Runs lease.lua on a real server, with the clock of the loop, behind a network that a test can disturb.

    Its processes are those that a test starts, kills and stops.

    The loop never waits for the server, so a call takes two `LATENCY_SECONDS` of virtual time.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.running: dict[Process, tuple[asyncio.Task[None], Any]] = {}
        self._sha = client.script_load(with_kept_messages(on_test_clock("inference/lease")))
        self.subscriptions: list[SimulatedSubscription] = []
        self.loses_messages = False
        self.calls: list[tuple[float, str]] = []  # time and process
        self._frozen_calls: list[Callable[[], None]] | None = None  # None unless the server is frozen

    def start(self, **options: Any) -> Process:
        store = SimulatedStore(self)
        permits = Process(store, **options)
        self.running[permits] = (asyncio.create_task(permits.run()), store)
        return permits

    async def kill(self, permits: Process) -> None:
        task, store = self.running.pop(permits)
        await cancel(task)
        await store.close()

    async def stop(self, permits: Process) -> None:
        task, _ = self.running[permits]
        await cancel(task)
        await permits.close()
        await self.kill(permits)

    async def share(self, permits: Process) -> Share:
        return await read_share(self.running[permits][1])

    @property
    def frozen(self) -> bool:
        return self._frozen_calls is not None

    def freeze(self) -> None:
        """Lets the server do nothing. Calls stay in its buffers."""
        self._frozen_calls = []

    def thaw(self) -> None:
        """Lets the server continue, with the calls in its buffers first."""
        calls, self._frozen_calls = self._frozen_calls or [], None
        for call in calls:
            call()

    async def call(self, keys: list[str], args: list[Any]) -> Any:
        """Runs the script as a client with a timeout does. Raises BackboneUnavailable."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def execute() -> None:
            reply = self._execute(keys, args)
            if not answer.done():
                answer.set_result(reply)

        await asyncio.sleep(LATENCY_SECONDS)
        if self._frozen_calls is None:
            execute()
        else:
            self._frozen_calls.append(execute)
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                reply = await answer
        except TimeoutError as error:
            raise BackboneUnavailable from error
        await asyncio.sleep(LATENCY_SECONDS)
        return reply

    def _execute(self, keys: list[str], args: list[Any]) -> Any:
        micro = round(now() * SECOND)
        self.calls.append((now(), args[0]))
        pipe = self.client.pipeline(transaction=False)
        pipe.delete(CLOCK, MESSAGES).rpush(CLOCK, micro // SECOND, micro % SECOND)
        pipe.evalsha(self._sha, len(keys), *keys, *args).lrange(MESSAGES, 0, -1)
        *_, reply, messages = pipe.execute()
        for channel, text in zip(messages[::2], messages[1::2], strict=True):
            if not self.loses_messages:
                asyncio.get_running_loop().call_later(LATENCY_SECONDS, self._publish, channel, text)
        return reply

    def _publish(self, channel: str, text: str) -> None:
        for subscription in self.subscriptions:
            if channel in subscription.channels:
                subscription.put("message", channel, text)

    async def hgetall(self, key: str) -> dict[str, str]:
        return self.client.hgetall(key)


class SimulatedSubscription:
    def __init__(self, redis: SimulatedRedis, channels: tuple[str, ...]) -> None:
        self._redis, self.channels = redis, channels
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def put(self, kind: str, channel: str = "", data: Any = "") -> None:
        self._messages.put_nowait({"type": kind, "channel": channel, "data": data})

    async def get_message(self, timeout: float) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(timeout):
                return await self._messages.get()
        except TimeoutError:
            return None

    async def ping(self) -> None:
        if not self._redis.frozen:
            self.put("pong")


class SimulatedStore:
    """One process's connections to a `SimulatedRedis`. A test may replace `call`."""

    command_seconds = COMMAND_SECONDS

    def __init__(self, redis: SimulatedRedis) -> None:
        self.client = self._redis = redis
        self.call: Callable[[list[str], list[Any]], Awaitable[Any]] = redis.call

    async def run_script(self, script: object, keys: list[str], *args: Any) -> Any:
        return await self.call(keys, [*args])

    @asynccontextmanager
    async def subscription(self, *channels: str) -> AsyncIterator[SimulatedSubscription]:
        subscription = SimulatedSubscription(self._redis, channels)
        self._redis.subscriptions.append(subscription)
        for number, channel in enumerate(channels, 1):
            subscription.put("subscribe", channel, number)
        try:
            yield subscription
        except TimeoutError as error:
            raise BackboneUnavailable from error
        finally:
            self._redis.subscriptions.remove(subscription)

    async def close(self) -> None: ...

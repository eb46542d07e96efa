"""The activator: lets apps sleep that nobody asks, and holds requests for them until they run again.

While an app sleeps, it has no pod, and its Service leads to the activator of the present worker, by Endpoints in place
of a selector. A request that comes there wakes the app, and gets its answer from the app's pod. Every connection is for
one request, so no other app's request can follow on it.
"""

import asyncio
import contextlib
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NoReturn

import structlog

from gateway.cancellation import RunningTasks, cancel, run_in_background
from gateway.deploys.states import DeployError
from gateway.loops import every
from workers.hosting import caddy
from workers.hosting.sleep_limits import SleepLimits
from workers.kubernetes.pod_quota import PodQuotaReached
from workers.kubernetes.sleep import Sleep
from workers.sandbox.network import Connection, connect_to_server, drop_rest, splice
from workers.sandbox.relay import FROM_MONITOR

logger = structlog.get_logger()

ACTIVATOR_PORT = 61083
LOOK_SECONDS = 5.0  # between looks for apps whose idleness is to be checked
CHECK_SECONDS = 300.0  # at most, between checks whether an app may sleep
READS = 200  # plans of apps that are read together, per look
CHECKS = 50  # at once
HEAD_BYTES, HEAD_SECONDS = 65_536, 10.0  # of a request
HELD, HELD_OF_APP = 2_000, 128  # requests; each account that has some may have an equal share of all
CONNECTIONS = 4_000  # at once; each may send a head of so many bytes
HOLD_SECONDS = 55.0  # that a request waits; usual ingress controllers wait for 60 seconds
IDLE_SECONDS = 300.0  # without a byte in either direction, after which a connection ends
REFUSE_SECONDS = 5.0  # in which a request that is refused must end
NO_APP = "404 Not Found", "There is no app at this address."
BUSY = "503 Service Unavailable", "The app has too many requests in progress."
UNASKED = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"  # to uptime probes, which wake no app
SUSPENDED = "503 Service Unavailable", "This app is suspended."
QUOTA_REACHED = "503 Service Unavailable", "As many apps of this account run as its plan allows; try again later."
NOT_AWAKE = "503 Service Unavailable", "The app is starting; try again shortly."


class Activator:
    """Listens at `port`. Holds at most `held` requests, `held_of_app` of them for one app, for `hold_seconds` each."""

    def __init__(
        self,
        sleep: Sleep,
        limits: SleepLimits,
        *,
        port: int = ACTIVATOR_PORT,
        held: int = HELD,
        held_of_app: int = HELD_OF_APP,
        hold_seconds: float = HOLD_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._sleep, self._limits, self._port = sleep, limits, port
        self._held_limit, self._held_of_app_limit, self._hold_seconds = held, held_of_app, hold_seconds
        self._look_seconds, self._check_seconds = look_seconds, check_seconds
        self._due: dict[tuple[str, str], float] = {}  # when the idleness of an app's address is checked next
        self._checking, self._answering = RunningTasks(), RunningTasks()
        self._held: Counter[str] = Counter()  # requests, by app
        self._held_of_account: Counter[str] = Counter()

    async def run(self) -> NoReturn:
        """Runs until canceled."""
        listener = caddy.open_listener("::", self._port)
        server = await asyncio.start_server(self._accept, sock=listener, limit=HEAD_BYTES)
        try:
            async with (
                server,
                run_in_background(every(self._look_seconds, self._look, "sites.sleep_failed")) as looking,
            ):
                await looking
            raise AssertionError
        finally:
            await cancel(*self._answering.values(), *self._checking.values())

    # -- falling asleep --------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Begins to check apps that are due. One that falls asleep or wakes slowly does not hold up the others."""
        now = time.monotonic()
        for key in self._sleep.take_changed():
            self._due.setdefault(key, now)
        due = [key for key, at in self._due.items() if at <= now and key not in self._checking][:READS]
        await self._limits.read(*{app_id for app_id, _ in due})
        for key in due:
            limit = self._limits.find_known(key[0], is_preview=key[1] != "live")
            if not self._sleep.may_sleep(key):
                del self._due[key]
            elif limit is None:
                self._due[key] = now + self._check_seconds
            elif len(self._checking) < CHECKS:
                self._checking.start(self._check(key, limit), key)

    async def _check(self, key: tuple[str, str], limit: float) -> None:
        """Lets an app sleep that nobody has asked for `limit` seconds."""
        left = self._check_seconds
        try:
            left = min(left, await self._sleep.let_sleep(key, limit))
        except Exception as error:  # one app must not stop the others
            logger.error("sites.sleep_failed", app=key[0], exc_info=error)
        self._due[key] = time.monotonic() + left

    # -- waking up -------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._answering) >= CONNECTIONS:
            return writer.transport.abort()
        self._answering.start(self._answer((reader, writer)))

    async def _answer(self, visitor: Connection) -> None:
        reader, writer = visitor
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            key = self._sleep.find_address(find_host(head))
            if key is None:
                return await refuse(visitor, *NO_APP)
            if self._sleep.is_suspended(key):
                return await refuse(visitor, *SUSPENDED)
            if FROM_MONITOR.search(head) and self._sleep.is_asleep(*key):
                return writer.write(UNASKED)
            account = self._sleep.account_of(key)
            if not self._has_room(key[0], account):
                self._sleep.wake_soon(key)  # others may hold all places, and the next attempt finds it awake
                return await refuse(visitor, *BUSY)
            try:
                with self._holding(key[0], account):
                    async with asyncio.timeout(self._hold_seconds):
                        app = await connect_to_server(*await self._sleep.wake(key))
            except (DeployError, OSError) as error:
                logger.warning("sites.not_awake", app=key[0], reason=str(error) or type(error).__name__)
                return await refuse(visitor, *(QUOTA_REACHED if isinstance(error, PodQuotaReached) else NOT_AWAKE))
            app[1].write(close_afterwards(head))
            with contextlib.closing(app[1]):
                await splice(visitor, app, IDLE_SECONDS)

    def _has_room(self, app: str, account: str) -> bool:
        accounts = len(self._held_of_account.keys() | {account})
        room = self._held_limit // accounts
        return self._held[app] < self._held_of_app_limit and self._held_of_account[account] < room

    @contextlib.contextmanager
    def _holding(self, app: str, account: str) -> Iterator[None]:
        counted = ((self._held, app), (self._held_of_account, account))
        for counter, name in counted:
            counter[name] += 1
        try:
            yield
        finally:
            for counter, name in counted:
                counter[name] -= 1
                if not counter[name]:
                    del counter[name]


def find_host(head: bytes) -> str:
    """Returns the host name that a request is for, without its port; '' if it names none, or several."""
    found = re.findall(rb"\r\nhost:[ \t]*([^\r\n]*?)[ \t]*(?=\r\n)", head, re.I)
    return found[0].decode("latin-1").lower().partition(":")[0] if len(found) == 1 else ""


def close_afterwards(head: bytes) -> bytes:
    """Asks the app to close the connection after its response, unless the connection becomes a WebSocket."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"keep-alive:"))]
    upgrade = b"Upgrade, " if any(line.lower().startswith(b"upgrade:") for line in kept) else b""
    return b"\r\n".join([first, *kept, b"Connection: " + upgrade + b"close", b"", b""])


async def refuse(visitor: Connection, status: str, text: str) -> None:
    """Answers the request, and drops it. Raises OSError."""
    reader, writer = visitor
    body = f"{text}\n"
    headers = [
        *("Content-Type: text/plain; charset=utf-8", f"Content-Length: {len(body)}"),
        *("Cache-Control: no-store", "Retry-After: 1", "Connection: close"),
    ]
    writer.write("\r\n".join([f"HTTP/1.1 {status}", *headers, "", body]).encode())
    writer.write_eof()
    await drop_rest(reader, REFUSE_SECONDS)


def find_own_address() -> str:
    """Returns this machine's address, as others in the cluster see it. Raises OSError."""
    targets: Sequence[tuple[socket.AddressFamily, str]] = (
        (socket.AF_INET, "192.0.2.1"),
        (socket.AF_INET6, "2001:db8::1"),
    )
    for family, target in targets:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            return str(probe.getsockname()[0])
    raise OSError("this machine has no address")

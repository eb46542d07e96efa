"""The relay between the visitors of an app and the app: it accepts connections from a Unix socket outside the namespace
and connects them to a port of 127.0.0.1 inside.

Each connection is a request, or a WebSocket. The relay bounds how many of them an app has in progress, so that an app
that hangs holds up no other. Requests that arrive while the app is starting wait until it listens.

A worker asks at the control socket whether the app has been idle for some seconds. If so, the relay accepts no more
connections and answers with its listener, where new connections wait while the worker stops the app. When the worker
closes its connection instead, or dies, the relay accepts again. The worker asks there too where the app listens.
"""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Container
from typing import NamedTuple

from workers.sandbox.listeners import find_listeners
from workers.sandbox.network import CHUNK_BYTES, Connection, abort, connect_to_server, drop_rest, splice
from workers.sandbox.trailers import ResponseReader

BACKLOG = 4_096  # connections that wait to be accepted
REQUESTS, WAITING = 384, 128  # of an app's visitors: in progress, and waiting to begin
WAIT_SECONDS = 5.0  # that they wait
IDLE_SECONDS = 300.0  # without a byte in either direction, after which a connection ends
GONE_SECONDS = 5.0  # after the visitor, in which an app must end a connection, which keeps it awake
START_SECONDS = 60.0  # in which an app that was started must listen
RETRY_SECONDS = 0.02  # between attempts to reach an app that is starting
NO_FILES_SECONDS = 1.0  # between attempts to accept while no descriptor is left
STOP_SECONDS = 30.0  # in which a worker must stop an idle app
MESSAGE_BYTES = 64  # of a message at the control socket
ASLEEP = b"asleep"
LISTENING = b"listening"  # the question where the app listens
MONITOR = "capsule-uptime"  # the User-Agent of requests that do not keep an app awake
FROM_MONITOR = re.compile(rb"\r\nuser-agent: *%b\r\n" % MONITOR.encode(), re.I)
BUSY = b"""HTTP/1.1 503 Service Unavailable\r
Retry-After: 1\r
Content-Type: text/plain; charset=utf-8\r
Content-Length: 44\r
Connection: close\r
\r
The app has too many requests in progress.\r
"""


class RelayLimits(NamedTuple):
    """Of an app. The constants above say what each of them limits."""

    requests: int = REQUESTS
    waiting: int = WAITING
    wait_seconds: float = WAIT_SECONDS
    idle_seconds: float = IDLE_SECONDS
    gone_seconds: float = GONE_SECONDS


LIMITS = RelayLimits()


async def relay(
    port: int,
    listener: socket.socket,
    control: socket.socket,
    *,
    limits: RelayLimits = LIMITS,
    ignored: Container[int] | None = None,
) -> None:
    """Connects the Unix socket to a port of this namespace. Runs until killed."""
    relaying = Relay(listener, port, limits, ignored)
    relaying.begin()
    try:
        await relaying.answer_workers(control)
    finally:
        relaying.pause()


class Relay:
    """`ignored` are ports at which others listen. None stands for a machine whose ports everybody shares."""

    def __init__(
        self,
        listener: socket.socket,
        port: int,
        limits: RelayLimits = LIMITS,
        ignored: Container[int] | None = None,
    ) -> None:
        self._loop, self._limits = asyncio.get_running_loop(), limits
        self._listener, self._port, self._ignored = listener, port, ignored
        listener.setblocking(False)
        self._connections = set[asyncio.Task[None]]()
        self._requests = set[asyncio.Task[None]]()  # the connections that keep the app awake
        self._room, self._waiting = (
            asyncio.Semaphore(limits.requests),
            0,
        )  # the second counts the requests that wait for room
        self._starting, self._has_listened = asyncio.Lock(), False
        self._began = self._used_at = self._loop.time()

    def begin(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def expect_start(self) -> None:
        """Lets requests wait until the app listens, because it is being started again."""
        self._has_listened, self._began = False, self._loop.time()

    def pause(self) -> None:
        self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        """Accepts the connections that wait."""
        try:
            for _ in range(BACKLOG):
                connection, _ = self._listener.accept()
                task = self._loop.create_task(self._serve(connection))
                for tasks in (self._connections, self._requests):
                    tasks.add(task)
                task.add_done_callback(self._end)
        except BlockingIOError:
            pass
        except OSError:  # no descriptor is left
            self.pause()
            self._loop.call_later(NO_FILES_SECONDS, self.begin)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        if task in self._requests:
            self._requests.discard(task)
            self._used_at = self._loop.time()

    async def _serve(self, connection: socket.socket) -> None:
        limits = self._limits
        visitor = reader, writer = await asyncio.open_unix_connection(sock=connection)
        if not await self._find_room():
            return await refuse(reader, writer, limits.wait_seconds)
        try:
            async with asyncio.timeout(limits.idle_seconds):
                first = await reader.read(CHUNK_BYTES)
            if FROM_MONITOR.search(first.partition(b"\r\n\r\n")[0] + b"\r\n"):
                self._requests.discard(asyncio.current_task())
            app = await self._reach_app(reader)
            app[1].write(first)
            await splice(
                visitor,
                app,
                limits.idle_seconds,
                end_seconds=limits.gone_seconds,
                filter_answer=ResponseReader().pass_on,
            )
        except OSError:
            abort(writer)
        finally:
            self._room.release()

    async def _find_room(self) -> bool:
        """Returns whether the request may begin, after waiting for room. `_room.release` makes room again."""
        if self._room.locked() and self._waiting >= self._limits.waiting:
            return False
        self._waiting += 1
        try:
            async with asyncio.timeout(self._limits.wait_seconds):
                await self._room.acquire()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    async def _reach_app(self, visitor: asyncio.StreamReader) -> Connection:
        """Connects to the app. If it has just started, waits until it listens or the visitor leaves. Raises OSError."""
        async with contextlib.nullcontext() if self._has_listened else self._starting:
            while True:
                try:
                    connection = await connect_to_server("127.0.0.1", self._port)
                except ConnectionRefusedError:
                    if self._has_listened or visitor.at_eof() or self._loop.time() > self._began + START_SECONDS:
                        raise
                    await asyncio.sleep(RETRY_SECONDS)
                else:
                    self._has_listened = True
                    return connection

    @property
    def idle_seconds(self) -> float:
        """For how long no visitor has used the app."""
        return 0.0 if self._requests or self._connections else self._loop.time() - self._used_at

    def describe_listening(self) -> bytes:
        """Says as JSON where the app should listen, whether it has been reached there, and where it listens."""
        addresses = [] if self._ignored is None else find_listeners(self._ignored)
        return json.dumps({"port": self._port, "reached": self._has_listened, "addresses": addresses}).encode()

    # -- sleep -----------------------------------------------------------------------------------------------

    async def answer_workers(self, control: socket.socket) -> None:
        control.setblocking(False)
        while True:
            worker, _ = await self._loop.sock_accept(control)
            with worker, contextlib.suppress(OSError, ValueError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._answer(worker)

    async def _answer(self, worker: socket.socket) -> None:
        """Answers how many seconds are left until the app has been idle for the seconds that the worker names."""
        question = await self._loop.sock_recv(worker, MESSAGE_BYTES)
        if question == LISTENING:
            return await self._loop.sock_sendall(worker, self.describe_listening())
        seconds = float(question)
        self._accept()
        idle = 0.0 if self._requests else self._loop.time() - self._used_at
        if self._connections or idle < seconds:
            return await self._loop.sock_sendall(worker, b"%f" % max(seconds - idle, 0.0))
        self.pause()
        try:
            socket.send_fds(worker, [ASLEEP], [self._listener.fileno()])
            await self._loop.sock_recv(worker, MESSAGE_BYTES)  # until the worker closes its connection
        finally:
            self.begin()


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Answers the request, and drops it."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            await reader.read(CHUNK_BYTES)
            writer.write(BUSY)
            writer.write_eof()
            await drop_rest(reader, seconds)
    writer.close()

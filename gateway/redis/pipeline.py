"""One connection to a single Redis server that the scripts of all requests share.

A call is sent at once if no other call waits for an answer. Otherwise the calls of one iteration of the event loop are
sent in one write. Redis answers in the order of the calls. Calls have no timers of their own: a check four times a
second closes the connection once the oldest call has waited too long, and every call on it fails. A call is sent once.
If its answer is lost, the caller must assume that it may have run.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.cancellation import cancel

MAX_PENDING_CALLS = 20_000
CHECK_SECONDS = 0.25
# redis-py's classes for the codes that callers distinguish. Their text keeps the code.
ERRORS: dict[str, type[RedisError]] = {
    "CLUSTERDOWN": ClusterDownError,
    "MASTERDOWN": MasterDownError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
}
NOT_PRIMARY_CODES = ("READONLY", "MASTERDOWN", "LOADING")  # codes of a server that cannot take writes now
FAILOVER_CODES = ("NOREPLICAS", *NOT_PRIMARY_CODES)  # codes of a server that may have been replaced

Notice = Callable[[], None]
# In hiredis's annotation, the parts of a command may only be of one type.
pack_command: Callable[[tuple[str | int | bytes, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]


def _ignore() -> None:
    pass


class _Connection(asyncio.Protocol):
    def __init__(self, timeout: float, request_check: Notice) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout, self._request_check = timeout, request_check
        self._reader = hiredis.Reader(encoding="utf-8", errors="replace")
        self._out: list[bytes] = []
        self._pending: deque[asyncio.Future[Any]] = deque()
        self._quiet_checks = 0  # checks in a row with calls pending and nothing received
        self._check: asyncio.TimerHandle | None = None
        self.closed = False
        self.retired = False  # to be closed once no call is pending
        self._transport: asyncio.Transport

    def call(self, command: bytes) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self.closed or len(self._pending) >= MAX_PENDING_CALLS:
            answer.set_exception(RedisConnectionError("the connection is lost, or too many calls wait for it"))
            return answer
        if self._pending:
            if not self._out:
                self._loop.call_soon(self._flush)
            self._out.append(command)
        else:
            self._quiet_checks = -1  # the next check may run at once
            self._transport.write(command)
        self._pending.append(answer)
        return answer

    def _flush(self) -> None:
        commands, self._out = self._out, []
        if not self.closed:
            self._transport.write(b"".join(commands))

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    def _check_progress(self) -> None:
        if self._pending:
            self._quiet_checks += 1
        if self._quiet_checks * CHECK_SECONDS >= self._timeout or (self.retired and not self._pending):
            self.close()
        else:
            self._check = self._loop.call_later(CHECK_SECONDS, self._check_progress)

    # -- asyncio's callbacks ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports do not inherit from asyncio's
        self._check = self._loop.call_later(CHECK_SECONDS, self._check_progress)

    def data_received(self, data: bytes) -> None:
        self._quiet_checks = -1
        reader, pending = self._reader, self._pending
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                answer = pending.popleft()
                if answer.done():  # the caller was canceled
                    continue
                if isinstance(reply, hiredis.ReplyError):
                    code = str(reply).partition(" ")[0]
                    answer.set_exception(ERRORS.get(code, ResponseError)(str(reply).removeprefix("ERR ")))
                    if code in FAILOVER_CODES:
                        self._request_check()
                    if code in NOT_PRIMARY_CODES:
                        self.close()  # the address may belong to the new primary now
                else:
                    answer.set_result(reply)
        except (hiredis.ProtocolError, IndexError):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._request_check()
        if self._check is not None:
            self._check.cancel()
        while self._pending:
            answer = self._pending.popleft()
            if not answer.done():
                answer.set_exception(RedisConnectionError("the connection is lost"))


Find = Callable[[], Awaitable[tuple[str, int]]]


class Pipeline:
    """A pipeline to the primary. `request_check` runs when that may be another server, `on_change` when it is."""

    address: tuple[str, int] = ("", 0)  # of the server, if `find` returned it

    def __init__(self, url: str, timeout: float, find: Find | None = None) -> None:
        """`timeout`: seconds to connect, and seconds without any answer while calls are pending.

        `find` returns the host and port for each new connection; without it, the URL names them.
        """
        self._options: dict[str, Any] = dict(parse_url(url))
        self._timeout = timeout
        self._find = find
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._retired = False
        self.run_id = self._last_run_id = ""  # of the server, new after each restart; '' while unknown
        self.request_check: Notice = _ignore
        self.on_change: Notice = _ignore

    def call(self, *command: str | int | bytes) -> Awaitable[Any]:
        """Sends a command. Awaiting the result raises redis-py's errors, OSError or TimeoutError."""
        connection = self._connection
        if connection is None or connection.closed:
            return self._connect_and_call(command)
        return connection.call(pack_command(command))

    async def _connect_and_call(self, command: tuple[str | int | bytes, ...]) -> Any:
        connection = await self._reconnect()
        return await connection.call(pack_command(command))

    async def call_asking(self, *command: str | int | bytes) -> Any:
        """Calls right after ASKING, for a slot that is migrating to this node of a cluster."""
        connection = await self._connected()
        _, answer = await asyncio.gather(
            connection.call(pack_command(("ASKING",))), connection.call(pack_command(command))
        )
        return answer

    async def _connected(self) -> _Connection:
        connection = self._connection
        return await self._reconnect() if connection is None or connection.closed else connection

    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    async def connect(self) -> None:
        """Connects, if there is no connection. Raises as a call does."""
        await self._connected()

    async def _reconnect(self) -> _Connection:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            # Read here too, because all its callers may have been canceled.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Connection:
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout):
                connection = await self._open()
                await self._log_in(connection)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        else:
            connection.retired = self._retired
            self._connection = connection
            self.request_check()
            return connection
        finally:
            self._connecting = None

    async def _open(self) -> _Connection:
        options, loop = self._options, asyncio.get_running_loop()

        def protocol() -> _Connection:
            return _Connection(self._timeout, self.request_check)

        if path := options.get("path"):
            _, connection = await loop.create_unix_connection(protocol, path)
        else:
            host, port = options.get("host", "localhost"), options.get("port", 6379)
            if self._find is not None:
                host, port = self.address = await self._find()
            _, connection = await loop.create_connection(protocol, host, port, ssl=_tls(options))
        return connection

    async def _log_in(self, connection: _Connection) -> None:
        if password := self._options.get("password"):
            # Sent with a user's name, as redis-py does: a server without a password then accepts any.
            user = self._options.get("username") or "default"
            await connection.call(pack_command(("AUTH", user, password)))
        if database := self._options.get("db"):
            await connection.call(pack_command(("SELECT", str(database))))
        self.run_id = ""
        connection.call(pack_command(("INFO", "server"))).add_done_callback(self._set_run_id)

    def _set_run_id(self, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled() or answer.exception() is not None:  # the user may not run INFO, or the connection is lost
            return
        before, self._last_run_id = self._last_run_id, parse_run_id(answer.result())
        self.run_id = self._last_run_id
        if before not in ("", self.run_id):
            self.on_change()

    def disconnect(self) -> bool:
        """Closes the connection and returns True, or returns False if there is none. The next call connects again."""
        if self._connection is None or self._connection.closed:
            return False
        self._connection.close()
        return True

    async def close(self) -> None:
        if self._connecting is not None:
            await cancel(self._connecting)
        if self._connection is not None:
            self._connection.close()
        await asyncio.sleep(0)  # the transport closes its socket in the loop's next iteration

    def close_when_idle(self) -> None:
        """Closes once all pending calls are answered. The caller makes no further calls."""
        self._retired = True
        if self._connection is not None:
            self._connection.retired = True

    def is_open(self) -> bool:
        return self._connecting is not None or self.is_connected()


def parse_run_id(info: str) -> str:
    """Returns the run id from the answer to INFO. A server has the same one from its start to its end."""
    return info.partition("run_id:")[2].partition("\r")[0]


def _tls(options: dict[str, Any]) -> ssl.SSLContext | None:
    """Returns the TLS context that redis-py makes for a rediss:// address, or None for another address."""
    if options.get("connection_class") is not SSLConnection:
        return None
    given = {name: value for name, value in options.items() if name.startswith("ssl_")}
    context: ssl.SSLContext = SSLConnection(**given).ssl_context.get()
    return context

"""One HTTP request and its response, as an ASGI application sees them. `protocol.py` reads the request."""

import asyncio
import re
from http import HTTPStatus
from typing import Any

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
INVALID_NAME = re.compile(rb'[\x00-\x20\x7f()<>@,;:\\[\]={}"]')
INVALID_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
DISCONNECT = {"type": "http.disconnect"}


class HttpExchange:
    """One request and its response. Its methods `receive` and `send` are those of ASGI."""

    __slots__ = (
        "bodiless",
        "body",
        "bytes_left",
        "chunked",
        "complete",
        "connection",
        "expects_continue",
        "fault",
        "gone",
        "has_news",
        "keep_alive",
        "more_body",
        "scope",
        "started",
        "task",
        "waiter",
    )

    def __init__(self, connection: Any, scope: dict[str, Any], keep_alive: bool, expects_continue: bool) -> None:
        self.connection, self.scope = connection, scope
        self.task: Any = None  # that runs the application
        self.body = bytearray()  # received since the application last called `receive`
        self.more_body = True  # the body is not complete
        self.has_news = False  # some of the body, or its end, has arrived
        self.expects_continue = expects_continue
        self.keep_alive = keep_alive
        self.fault = b""  # the response, if the request is invalid
        self.gone = False  # no one waits for the response
        self.started = self.complete = False  # the response
        self.bodiless = scope.get("method") == "HEAD"
        self.chunked = False
        self.bytes_left: int | None = None  # of the response's body, if it has a content-length
        self.waiter: asyncio.Future[None] | None = None  # in `receive`: applications read one message at a time

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def receive(self) -> dict[str, Any]:
        connection = self.connection
        if self.expects_continue:
            self.expects_continue = False
            if not connection.transport.is_closing():
                connection.transport.write(CONTINUE)
        if not (self.has_news or self.gone or self.complete):
            connection.resume_reading()
            self.waiter = connection.loop.create_future()
            await self.waiter
        if self.gone or self.complete:
            return DISCONNECT
        self.has_news = False
        body, self.body = bytes(self.body), bytearray()
        if not (self.more_body or connection.queue):  # otherwise it would go unnoticed that the client leaves
            connection.resume_reading()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        connection = self.connection
        if connection.stalled and not self.gone:
            await connection.drain()
        if self.gone:
            return
        if not self.started:
            assert message["type"] == "http.response.start"
            connection.transport.write(self._head(message["status"], message.get("headers", ())))
            return
        assert message["type"] == "http.response.body"
        assert not self.complete
        body, more = message.get("body", b""), message.get("more_body", False)
        if self.bodiless:
            body = b""
        elif self.bytes_left is not None:
            self.bytes_left -= len(body)
            if self.bytes_left < 0 or (self.bytes_left and not more):
                raise RuntimeError("the response's body does not match its content-length")
        connection.transport.write(self.frame(body, last=not more))
        if not more:
            self.finish()

    def _head(self, status: int, headers: Any) -> bytes:
        self.started, self.expects_continue = True, False
        self.bodiless = self.bodiless or status in (204, 304)
        lines = [STATUS_LINES[status]]
        for name, value in [*self.connection.server_state.default_headers, *headers]:
            if INVALID_NAME.search(name) or INVALID_VALUE.search(value):
                raise RuntimeError(f"the response's header {name!r} is not valid")
            name = name.lower()
            if name == b"content-length":
                self.bytes_left = int(value)
            elif name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if self.bytes_left is None and not self.bodiless:
            lines.append(self.open_body())
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join([*lines, b"\r\n"])

    def open_body(self) -> bytes:
        """Returns the header for a body of unknown length. In HTTP/1.0, the end of the connection ends the body."""
        self.chunked = self.scope["http_version"] != "1.0"
        return b"transfer-encoding: chunked\r\n" if self.chunked else b""

    def frame(self, body: bytes, *, last: bool) -> bytes:
        if not self.chunked:
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk + b"0\r\n\r\n" if last else chunk

    def finish(self) -> None:
        self.complete = True
        self.wake()
        self.connection.on_response_complete(self)

    def abandon(self) -> None:
        """Marks the exchange as gone: no one waits for the response."""
        self.gone = True
        self.wake()

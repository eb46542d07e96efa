"""Limits on the sizes and times of requests, over a real socket."""

import asyncio

import pytest

from gateway.server import connections
from gateway.server.protocol import ConnectionTimes
from tests.support.http_site import Site, serving
from tests.support.polling import wait_until


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Returns what the server sends before it closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 8)
    except ConnectionResetError:
        return b""


async def test_a_large_head_is_refused() -> None:
    async with serving(Site()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: " + b"y" * 100_000)
        assert (await read_to_end(reader)).startswith(b"HTTP/1.1 431 ")
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 20_000 + b"\r\n")
        assert (await read_to_end(reader)).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
        writer.close()


async def keep_sending(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 1000)
        await writer.drain()
        await asyncio.sleep(0.05)


async def test_a_connection_with_a_long_body_after_its_response_is_closed() -> None:
    async with serving(Site(), ConnectionTimes(leftover=0.2), sweep=0.05) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(keep_sending(writer), 8)
        writer.close()


async def test_the_connection_of_a_stalled_reader_is_closed() -> None:
    async with serving(Site(), ConnectionTimes(stall=0.2), sweep=0.05) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await wait_until(lambda: not connections.CONNECTIONS)
        writer.close()

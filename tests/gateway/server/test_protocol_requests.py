"""Requests that arrive in pieces, too long, incomplete, several at once, or as garbage."""

import asyncio
import contextlib
import json

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.fakes.server import HANG
from tests.support.accounts import App
from tests.support.polling import PATIENCE_SECONDS
from tests.support.prices import cost, max_cost
from tests.support.raw_http import bearer, error_of, is_healthy, request, send

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_request_with_both_a_length_and_chunks(app: App, provider: FakeProvider) -> None:
    """Request smuggling: one server reads a body where another reads the next request."""
    inner = provider.plays(tokens("x"))
    smuggled = request(app.path, json.dumps({"prompt": inner}).encode(), bearer(app))
    head = request(app.path, b"", bearer(app), f"Content-Length: {5 + len(smuggled)}", "Transfer-Encoding: chunked")
    reply = await send(app.gateway.port, head + b"0\r\n\r\n" + smuggled)
    assert reply is None or reply.status >= 400
    await asyncio.sleep(0.2)
    assert provider.asked(inner) == []


async def test_no_more_than_the_limit_is_read(app: App) -> None:
    """The error arrives long before ten megabytes have been sent, with or without a Content-Length."""
    piece = b"x" * 65_536
    sized = request(app.path, b"", bearer(app), "Content-Length: 10485760")
    reply = await send(app.gateway.port, sized, *[piece] * 160)
    assert error_of(reply) == (413, "REQUEST_TOO_LARGE")
    unsized = request(app.path, b"", bearer(app), "Transfer-Encoding: chunked")
    reply = await send(app.gateway.port, unsized, *[b"10000\r\n" + piece + b"\r\n"] * 160)
    assert error_of(reply) == (413, "REQUEST_TOO_LARGE")
    assert await is_healthy(app)


@pytest.mark.parametrize("path", ["<inference>", "/mcp", "/register", "/account/apps/<app>/source"])
async def test_a_content_length_of_thousands_of_digits(app: App, path: str) -> None:
    """It is a number for the parser of HTTP, and none for Python."""
    method = "PUT" if path.startswith("/account") else "POST"
    path = path.replace("<app>", app.name).replace("<inference>", app.path)
    key = bearer(app) if path == app.path else f"Authorization: Bearer {app.account.key}"
    kind = f"Content-Type: application/{'gzip' if path.endswith('source') else 'json'}"
    for length in ("0" * 5_000 + "2", "9" * 5_000, "9" * 19, "0" * 5_000):
        headers = (kind, f"Content-Length: {length}", key)
        ask = request(path, b"{}", *headers, method=method)
        reply = await send(app.gateway.port, ask, timeout=30)  # the first call of /mcp imports the SDK
        assert reply is not None
        assert 400 <= reply.status < 500, reply


async def test_a_content_length_above_the_limit(app: App) -> None:
    """It is refused before any byte of the body is sent."""
    reply = await send(app.gateway.port, request(app.path, b"", bearer(app), "Content-Length: 102401"))
    assert error_of(reply) == (413, "REQUEST_TOO_LARGE")


async def test_garbage_in_the_middle_of_a_stream(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("a"), HANG)
    body = json.dumps({"prompt": prompt, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", app.gateway.port)
    writer.write(request(app.path, body, bearer(app)))
    await reader.readuntil(b'{"token":"a"}')
    writer.write(b"\0\1garbage\r\n\r\n" * 1000)
    await asyncio.sleep(0.1)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), PATIENCE_SECONDS)
    assert await app.account.settled() == max_cost(prompt)
    assert await is_healthy(app)


async def test_a_client_that_half_closes(app: App, provider: FakeProvider) -> None:
    """A client such as `nc -N` is answered or treated as gone, and the request is settled."""
    prompt = provider.plays(ROLE, chunk("a"), 0.2, chunk(finish="stop"), chunk(usage=(1, 1)), DONE)
    body = json.dumps({"prompt": prompt, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", app.gateway.port)
    writer.write(request(app.path, body, bearer(app)))
    writer.write_eof()
    received = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    finished = b"event: done" in received
    settled = await app.account.settled()
    assert settled in ({cost(1, 1)} if finished else {0, max_cost(prompt)})


async def test_a_client_that_expects_100_continue(app: App) -> None:
    body = b'{"prompt":"x"}'
    for authorization, expected in ((bearer(app), b"100"), ("Authorization: Bearer x", b"401")):
        head = request(app.path, b"", authorization, f"Content-Length: {len(body)}", "Expect: 100-continue")
        reader, writer = await asyncio.open_connection("127.0.0.1", app.gateway.port)
        writer.write(head)
        line = await asyncio.wait_for(reader.readline(), 2)
        assert line.split()[1] == expected
        if expected == b"100":
            writer.write(body)
            assert b"200" in await asyncio.wait_for(reader.readuntil(b" 200 "), 5)
        writer.close()
        await writer.wait_closed()

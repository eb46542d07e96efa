"""Calls that need the complete response, to real servers."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import time
import tracemalloc
from pathlib import Path

import pytest

from gateway.outbound.addresses import BlockedAddress
from gateway.outbound.client import Client, ResponseTooLarge
from tests.gateway.outbound.origins import OK, Handler, Names, Recorder, Serve, answering, failure, forever, until


async def test_a_call_and_its_kept_connection(serve: Serve, client: Client) -> None:
    server = Recorder()
    port = await serve(server)
    url = f"http://127.0.0.1:{port}/a?b=c"
    answer = await client.fetch(
        "POST", url, headers={"X-Y": "z"}, content=b"hello", tenant="acc", budget=5, max_bytes=2
    )
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "2", b"ok")
    for _ in range(3):
        await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=2)
    assert server.connections == 1
    assert (await failure(client, url, max_bytes=1)).reason == "too-large"
    sent = server.requests[0].decode()
    assert sent.startswith("POST /a?b=c HTTP/1.1\r\n")
    assert sent.endswith("\r\n\r\nhello")
    assert f"\r\nHost: 127.0.0.1:{port}\r\n" in sent
    assert "\r\nX-Y: z\r\n" in sent
    assert "\r\nAccept-Encoding: identity\r\n" in sent


@pytest.mark.parametrize("location", ["http://127.0.0.1:1/", "http://[", "\xff"])
async def test_a_redirect_is_returned(serve: Serve, client: Client, location: str) -> None:
    port = await serve(
        Recorder(f"HTTP/1.1 302 F\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode("latin-1"))
    )
    url = f"http://127.0.0.1:{port}/"
    assert (await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=9)).status == 302
    assert (await client.send("GET", url, tenant="acc", budget=5)).status == 302


async def test_no_cookies_no_proxies_no_netrc_no_address_in_the_logs(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password s3cret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    caplog.set_level("DEBUG")
    server = Recorder(OK.replace(b"\r\n", b"\r\nSet-Cookie: a=b\r\n", 1))
    url = f"http://127.0.0.1:{await serve(server)}/s3cret"
    async with Client(allow_private=True) as client:
        for _ in range(2):
            await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=9)
        assert (await client.send("GET", url, tenant="acc", budget=5)).status == 200
    assert len(server.requests) == 3
    assert not any(word in request.lower() for request in server.requests for word in (b"cookie", b"authorization"))
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), "connect"),
        (answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "connect"),
        (answering(OK[:-2] + b"o", then=forever), "timeout"),
    ],
)
async def test_a_body_that_fails(serve: Serve, client: Client, handler: Handler, reason: str) -> None:
    """tests/gateway/outbound/test_client_send.py has the faults before it."""
    failed = await failure(client, f"http://127.0.0.1:{await serve(handler)}/s3cret", budget=0.5)
    assert failed.reason == reason


async def test_the_next_address_is_tried(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def swallow(sock: socket.socket, address: tuple[str, int]) -> None:
        if address[0] == "8.8.8.8":
            await asyncio.sleep(60)
        await connect(sock, address)

    monkeypatch.setattr(loop, "sock_connect", swallow)
    names = Names({"three.example.com": [["127.0.0.2", "8.8.8.8", "127.0.0.1"]]})
    url = f"http://three.example.com:{await serve(Recorder())}/"
    async with Client(allow_private=True, resolve=names.resolve) as client:
        assert (await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=9)).status == 200


async def test_a_drip_outlives_every_step_but_not_the_budget(serve: Serve, client: Client) -> None:
    gone = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            gone.set()

    began = time.monotonic()
    assert (await failure(client, f"http://127.0.0.1:{await serve(drip)}/s3cret", budget=0.7)).reason == "timeout"
    assert 0.6 < time.monotonic() - began < 2
    await asyncio.wait_for(gone.wait(), 5)  # the call closes the connection, not the garbage collector


async def test_a_huge_response_is_cut_off_with_flat_memory(serve: Serve, client: Client) -> None:
    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 104857600\r\n\r\n")
        piece = bytes(65536)
        for _ in range(1600):
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    url = f"http://127.0.0.1:{await serve(pour)}/s3cret"
    tracemalloc.start()
    try:
        with pytest.raises(ResponseTooLarge, match="more than 65536 bytes"):
            await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=65536)
        assert (await client.send("GET", url, tenant="acc", budget=5, drain_bytes=65536)).status == 200
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert sent < 50_000_000


def compressed(body: bytes, encoding: bytes = b"gzip") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (encoding, len(body), body)


async def test_gzip_is_read_within_the_limit(serve: Serve, client: Client) -> None:
    """A bomb of 20 MB takes no more memory than the limit."""
    large = [bytes(100_001), random.Random(1).randbytes(200_000), bytes(20_000_000)]
    for body, length in ((bytes(100_000), 100_000), *((body, None) for body in large)):
        url = f"http://127.0.0.1:{await serve(Recorder(compressed(gzip.compress(body))))}/s3cret"
        del body
        tracemalloc.start()
        try:
            if length is None:
                assert (await failure(client, url, max_bytes=100_000)).reason == "too-large"
            else:
                answer = await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=100_000)
                assert answer.body == bytes(length)
            assert (await client.send("GET", url, tenant="acc", budget=5, drain_bytes=100_000)).status == 200
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"no", b"gzip"),
        (b"", b"gzip"),
        (gzip.compress(b"ok")[:-4], b"gzip"),
        (gzip.compress(b"ok") + b"more", b"gzip"),
        (b"ok", b"br"),
        (gzip.compress(b"ok"), b"gzip, gzip"),
    ],
    ids=["no gzip", "empty", "cut", "surplus", "brotli", "twice"],
)
async def test_other_encodings_and_bad_gzip_fail(serve: Serve, client: Client, body: bytes, encoding: bytes) -> None:
    url = f"http://127.0.0.1:{await serve(Recorder(compressed(body, encoding)))}/s3cret"
    assert (await failure(client, url, max_bytes=99)).reason == "encoded"


async def test_canceled_calls_release_their_slots(serve: Serve) -> None:
    open_connections = 0

    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_connections
        open_connections += 1
        try:
            await _reader.read()
        finally:
            open_connections -= 1

    hanging, healthy = await serve(hang), Recorder()
    healthy_url = f"http://127.0.0.1:{await serve(healthy)}/"
    async with Client(allow_private=True, connections=4) as client:
        for _ in range(2):
            calls = [
                client.fetch("GET", f"http://127.0.0.1:{hanging}/", tenant="acc", budget=0.005 * n, max_bytes=9)
                for n in range(20)
            ]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {getattr(result, "reason", result) for result in results} == {"timeout"}
        for _ in range(8):
            await client.fetch("GET", healthy_url, tenant="acc", budget=1, max_bytes=9)
        await until(lambda: open_connections == 0)


async def test_the_client_itself_is_guarded() -> None:
    async with Client(allow_private=False) as client:
        for url in ("http://example.com/", "https://127.1/"):
            with pytest.raises(BlockedAddress):
                await client.send("GET", url, tenant="acc", budget=5)
            assert (await failure(client, url)).reason == "blocked"

"""Calls that need the complete response, to real servers, also over TLS."""

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
from tests.fakes.receiver import certificate
from tests.gateway.outbound.conftest import OK, Handler, Names, Recorder, Serve, answering, failure, forever


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


async def test_a_redirect_is_returned(serve: Serve, client: Client) -> None:
    port = await serve(Recorder(b"HTTP/1.1 302 F\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"))
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


def compressed(body: bytes, encoding: bytes = b"gzip") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (encoding, len(body), body)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), "connect"),
        (answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "connect"),
        (answering(OK[:-2] + b"o", then=forever), "timeout"),
        (answering(compressed(b"no")), "encoded"),
        (answering(compressed(gzip.compress(b"ok")[:-4])), "encoded"),
        (answering(compressed(gzip.compress(b"ok") + b"more")), "encoded"),
        (answering(compressed(b"ok", b"br")), "encoded"),
    ],
)
async def test_a_body_that_fails(serve: Serve, client: Client, handler: Handler, reason: str) -> None:
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


async def test_a_huge_response_is_cut_off(serve: Serve, client: Client) -> None:
    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 104857600\r\n\r\n")
        for _ in range(1600):
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    url = f"http://127.0.0.1:{await serve(pour)}/s3cret"
    with pytest.raises(ResponseTooLarge, match="more than 65536 bytes"):
        await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=65536)
    assert (await client.send("GET", url, tenant="acc", budget=5, drain_bytes=65536)).status == 200
    assert sent < 50_000_000


async def test_gzip_is_read_within_the_limit(serve: Serve, client: Client) -> None:
    """A bomb of 20 MB takes no more memory than the limit."""
    url = f"http://127.0.0.1:{await serve(Recorder(compressed(gzip.compress(bytes(100_000)))))}/"
    assert (await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=100_000)).body == bytes(100_000)
    for body in (bytes(100_001), random.Random(1).randbytes(200_000), bytes(20_000_000)):
        url = f"http://127.0.0.1:{await serve(Recorder(compressed(gzip.compress(body))))}/s3cret"
        del body
        tracemalloc.start()
        try:
            assert (await failure(client, url, max_bytes=100_000)).reason == "too-large"
            assert (await client.send("GET", url, tenant="acc", budget=5, drain_bytes=100_000)).status == 200
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()


async def test_canceled_calls_release_their_slots(serve: Serve) -> None:
    hanging = f"http://127.0.0.1:{await serve(answering(then=forever))}/"
    healthy = f"http://127.0.0.1:{await serve(Recorder())}/"
    async with Client(allow_private=True, connections=4) as client:
        for _ in range(2):
            calls = [client.fetch("GET", hanging, tenant="acc", budget=0.005 * n, max_bytes=9) for n in range(20)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {getattr(result, "reason", result) for result in results} == {"timeout"}
        for _ in range(8):
            await client.fetch("GET", healthy, tenant="acc", budget=1, max_bytes=9)


async def test_the_client_itself_is_guarded() -> None:
    async with Client(allow_private=False) as client:
        for url in ("http://example.com/", "https://127.1/"):
            with pytest.raises(BlockedAddress):
                await client.send("GET", url, tenant="acc", budget=5)
            assert (await failure(client, url)).reason == "blocked"


# TLS, and names whose addresses change


async def test_tls_is_verified_for_the_name(serve: Serve, tmp_path: Path) -> None:
    context, trusted = certificate(tmp_path, "receiver.example.com")
    asked_for: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: asked_for.append(name)
    server = Recorder()
    port = await serve(server, context)
    names = Names({"receiver.example.com": [["127.0.0.1"]], "other.example.com": [["127.0.0.1"]]})
    async with Client(allow_private=True, ca_file=trusted, resolve=names.resolve) as client:
        url = f"https://receiver.example.com.:{port}/"
        for _ in range(2):
            assert (await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=9)).status == 200
        assert (asked_for, server.connections) == (["receiver.example.com"], 1), "one handshake"
        assert f"\r\nHost: receiver.example.com:{port}\r\n".encode() in server.requests[0]
        failed = await failure(client, f"https://other.example.com:{port}/s3cret")
        assert failed.reason == "tls"
        assert "not valid for 'other.example.com'" in str(failed)
        assert (await failure(client, f"https://127.0.0.1:{port}/s3cret")).reason == "tls"
    async with Client(allow_private=True, resolve=names.resolve) as stranger:
        failed = await failure(stranger, f"https://receiver.example.com:{port}/s3cret")
        assert (failed.reason, "self-signed certificate" in str(failed)) == ("tls", True)
    assert len(server.requests) == 2, "nothing is sent before the certificate is verified"


async def test_bad_tls(serve: Serve, tmp_path: Path) -> None:
    context, trusted = certificate(tmp_path, "old.example.com", days=-1)
    names = Names({"old.example.com": [["127.0.0.1"]]})
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read(99_999)
        await reader.read()
        gone.set()

    async with Client(allow_private=True, ca_file=trusted, resolve=names.resolve) as client:
        failed = await failure(client, f"https://old.example.com:{await serve(Recorder(), context)}/s3cret")
        assert (failed.reason, "expired" in str(failed)) == ("tls", True)
        plain = await serve(answering(OK, then=forever))
        assert (await failure(client, f"https://old.example.com:{plain}/s3cret", budget=1)).reason in ("tls", "timeout")
        hanging = await serve(silent)
        assert (await failure(client, f"https://old.example.com:{hanging}/s3cret", budget=0.3)).reason == "timeout"
        await asyncio.wait_for(gone.wait(), 5)  # a canceled handshake closes its socket


async def test_a_name_that_changes_between_check_and_connection_gains_nothing(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, trusted = certificate(tmp_path, "rebind.example.com")
    closing = OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    port = await serve(answering(closing), context)
    names = Names({"rebind.example.com": [["93.184.215.14"], ["93.184.215.14", "127.0.0.1"], ["127.0.0.1"]]})
    dialled: list[str] = []
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def to_loopback(sock: socket.socket, address: tuple[str, int]) -> None:
        dialled.append(address[0])
        await connect(sock, ("127.0.0.1", address[1]))

    def no_second_look_up(*_: object, **__: object) -> None:
        raise AssertionError("looked up again")

    monkeypatch.setattr(loop, "sock_connect", to_loopback)
    monkeypatch.setattr(socket, "getaddrinfo", no_second_look_up)
    url = f"https://rebind.example.com:{port}/"
    async with Client(allow_private=False, ca_file=trusted, resolve=names.resolve) as client:
        assert (await client.fetch("GET", url, tenant="acc", budget=5, max_bytes=9)).status == 200
        assert (names.asked, dialled) == (["rebind.example.com."], ["93.184.215.14"])
        assert (await failure(client, url)).reason == "blocked", "one private address refuses the name"
        with pytest.raises(BlockedAddress):
            await client.send("GET", url, tenant="acc", budget=5)
    assert dialled == ["93.184.215.14"], "not even a connection"

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gzip
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpcore
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.outbound import addresses
from gateway.outbound import client as outbound
from gateway.outbound.addresses import BlockedAddress, CallFailed, check_url, is_public, resolve
from gateway.outbound.client import ResponseTooLarge, fetch

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[..., Awaitable[int]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


# The table of addresses


NOT_PUBLIC = """
    0.0.0.0 0.255.255.255 10.0.0.0 10.255.255.255 100.64.0.0 100.100.100.200 100.127.255.255
    127.0.0.0 127.0.0.1 127.255.255.255 168.63.129.16 169.254.0.0 169.254.169.254 169.254.170.2 169.254.42.42
    169.254.255.255 172.16.0.0 172.31.255.255 192.0.0.0 192.0.0.9 192.0.0.192 192.0.0.255 192.0.2.1 192.88.99.1
    192.168.0.0 192.168.255.255 198.18.0.0 198.19.255.255 198.51.100.7 203.0.113.7 224.0.0.1 239.255.255.255
    240.0.0.0 255.255.255.254 255.255.255.255
    :: ::1 ::7f00:1 ::8.8.8.8 ::ffff:0.0.0.0 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254
    ::ffff:0:127.0.0.1 64:ff9b::127.0.0.1 64:ff9b::10.0.0.1 64:ff9b::169.254.169.254 64:ff9b:0:0:1::8.8.8.8
    64:ff9b:1::8.8.8.8 64:ff9b:1:ffff:ffff:ffff:ffff:ffff 100::1 100:0:0:1::1 200::1 400::1 1fff:ffff::1
    2001::1 2001:0:5ef5:79fb:0:0:f5ff:fffe 2001:1::1 2001:2::1 2001:10::1 2001:20::1 2001:1ff:ffff::1
    2001:db8::1 2001:db8:ffff::1 2002:7f00:1:: 2002:a00:1::1 2002:808:808::1 3fff::1 3fff:fff:ffff::1
    4000::1 5f00::1 fc00::1 fd00:ec2::254 fd20:ce::254 fd00:42::42 fdff:ffff::1 fe80::1 fe80::1%eth0 febf::1
    fec0::1 feff::1 ff00::1 ff02::1 ff0e::1 2606:4700::1%eth0
    """


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_an_address_that_is_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


PUBLIC = """
    1.0.0.0 1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0
    168.63.129.15 168.63.129.17 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0
    192.0.3.0 192.88.98.255 192.88.100.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 198.51.99.255
    198.51.101.0 203.0.112.255 203.0.114.0 223.255.255.255
    ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2000::1 2001:200::1 2001:4860:4860::8888 2001:db7:ffff::1 2001:db9::1
    2001:ffff::1 2003::1 2606:4700:4700::1111 2a00:1450::1 3ffe:ffff::1 3fff:1000::1
    """


@pytest.mark.parametrize("address", PUBLIC.split())
def test_a_public_address(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


# The text of an address


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("https://example.com", "https://example.com/"),
        ("HTTPS://Example.COM/A?b=C", "https://example.com/A?b=C"),
        ("https://example.com.", "https://example.com/"),
        ("https://example.com.:8443/x", "https://example.com:8443/x"),
        ("https://example.com:443/", "https://example.com/"),
        ("https://example.com:/", "https://example.com/"),
        ("https://example.com:65535/", "https://example.com:65535/"),
        ("https://example.com/x#part", "https://example.com/x"),
        ("https://example.com?a=1", "https://example.com/?a=1"),
        ("https://münchen.de/ü", "https://xn--mnchen-3ya.de/%C3%BC"),
        ("https://example。com/", "https://example.com/"),
        ("https://a_b.example.com/", "https://a_b.example.com/"),
        ("https://1.1.1.1.example.com/", "https://1.1.1.1.example.com/"),
        ("https://8.8.8.8/", "https://8.8.8.8/"),
        ("https://134744072/", "https://8.8.8.8/"),
        ("https://0x8.010.2056/", "https://8.8.8.8/"),
        ("https://1.2.3/", "https://1.2.0.3/"),
        ("https://[2606:4700:4700:0:0:0:0:1111]:8443/", "https://[2606:4700:4700::1111]:8443/"),
        ("https://[::ffff:8.8.8.8]/", "https://8.8.8.8/"),
        ("https://example.com/" + "a" * 2028, "https://example.com/" + "a" * 2028),
    ],
)
def test_a_url_in_its_canonical_form(url: str, canonical: str) -> None:
    assert check_url(url, allow_private=False) == canonical
    assert check_url(canonical, allow_private=False) == canonical


INSIDE_HOSTS = """
    127.0.0.1 127.0.0.1. 127.1 127.0.1 0177.0.0.1 0177.1 00177.0.0.1 0x7f.0.0.1 0x7F.1 0x7f000001 2130706433
    017700000001 0 0x0 0.0.0.0 10.1 192.168.257 169.254.169.254 0xa9fea9fe 2852039166 0251.0376.0251.0376
    １２７.0.0.1 127。0。0。1 127．0．0．1 ①②⑦.0.0.1 ⑯⑨.254.169.254
    [::1] [::] [::127.0.0.1] [::ffff:127.0.0.1] [::ffff:7f00:1] [0:0:0:0:0:ffff:7f00:1] [64:ff9b::7f00:1]
    [64:ff9b:1::1] [2002:7f00:1::] [2001::1] [fe80::1] [fe80::1%25eth0] [fe80::1%eth0] [fc00::1] [fd00:ec2::254]
    [2606:4700::1%25lo] [ff02::1] [2001:db8::1]
    256.1.1.1 1.2.3.4.5 1.2.3.08 4294967296 0x1ffffffff 1.0x 08 127.0.0.1.. 1..1 [1.2.3.4 [v1.a] ::1
    localhost LOCALHOST localhost. a.localhost localhost.localdomain printer.local metadata.google.internal
    api.default.svc.cluster.local vault.internal. wiki.intranet db.corp nas.home router.lan box.home.arpa a.private
    backend com co.
    """


@pytest.mark.parametrize("host", INSIDE_HOSTS.split())
def test_a_host_that_is_not_public(host: str) -> None:
    with pytest.raises(BlockedAddress):
        check_url(f"https://{host}/", allow_private=False)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("", "can't be read|must start"),
        ("example.com", "must start with https"),
        ("//example.com/", "must start with https"),
        ("https:example.com", "names no host"),
        ("https:///s3cret", "names no host"),
        ("https://", "names no host"),
        ("https://:8443/s3cret", "names no host"),
        ("http://example.com/s3cret", "must start with https"),
        ("ftp://example.com/s3cret", "must start with https"),
        ("file:///s3cret", "must start with https"),
        ("gopher://example.com/s3cret", "must start with https"),
        ("unix:///s3cret", "must start with https"),
        ("https+unix://example.com/s3cret", "must start with https"),
        ("javascript:s3cret", "must start with https"),
        ("https://me:s3cret@example.com/", "user name or password"),
        ("https://s3cret@example.com/", "user name or password"),
        ("https://example.com:s3cret@127.0.0.1/", "user name or password"),
        ("https://example.com%2f@127.0.0.1/s3cret", "user name or password"),
        ("https://127.0.0.1#@example.com/s3cret", "not a public address"),
        ("https://127.0.0.1?@example.com/s3cret", "not a public address"),
        ("https://example.com\\@127.0.0.1/s3cret", "backslash"),
        ("https://example.com/s3cret\r\nX: y", "control character"),
        ("https://example.com/s3cret\t", "control character"),
        ("https://example.com/s3cret\x00", "control character"),
        ("https://example.com/s3cret\x7f", "control character"),
        ("https://example.com/s3cret\x85", "control character"),
        ("https://example.com/s3cret\u2028", "control character"),
        ("https://example.com/s3cret\u202e", "control character"),
        ("https://example.com/s3cret\ud800", "control character"),
        (" https://example.com/s3cret", "space"),
        ("https://exam ple.com/s3cret", "space"),
        ("https://example.com:0/s3cret", "port must be"),
        ("https://example.com:65536/s3cret", "port must be"),
        ("https://example.com:99999999999999999999/s3cret", "port must be|can't be read"),
        ("https://example.com:-1/s3cret", "port must be"),
        ("https://example.com:80a/s3cret", "can't be read"),
        ("https://exam%70le.com/s3cret", "not valid"),
        ("https://127%2e0.0.1/s3cret", "not valid"),
        ("https://%31%32%37.0.0.1/s3cret", "not valid"),
        ("https://example..com/s3cret", "not valid|can't be read"),
        ("https://.example.com/s3cret", "not valid|can't be read"),
        ("https://-a.example.com/s3cret", "not valid"),
        ("https://a-.example.com/s3cret", "not valid"),
        ("https://*.example.com/s3cret", "not valid"),
        ("https://exa$mple.com/s3cret", "not valid"),
        (f"https://{'a' * 64}.example.com/s3cret", "not valid"),
        (f"https://{'a.' * 127}example.com/s3cret", "not valid"),
        ("https://xn--a/s3cret", "can't be read"),
        ("https://[::1/s3cret", "can't be read"),
        ("https://example.com/s3cret" + "a" * 2048, "longer than 2048"),
        ("https://example.com/s3cret" + "ü" * 500, "longer than 2048"),
    ],
)
def test_a_url_that_is_refused_tells_why_and_no_secret(url: str, told: str) -> None:
    with pytest.raises(BlockedAddress, match=told) as refused:
        check_url(url, allow_private=False)
    assert refused.value.reason == "blocked"
    assert "s3cret" not in str(refused.value)


PRIVATE_URLS = "http://localhost:8000/x http://127.0.0.1/ https://10.0.0.1/ http://[::1]:9/ http://backend/x"


@pytest.mark.parametrize("url", PRIVATE_URLS.split())
def test_private_addresses_and_plain_http_where_they_are_allowed(url: str) -> None:
    assert check_url(url, allow_private=True) == url


@pytest.mark.parametrize(
    "url", ["ftp://localhost/", "http://me@localhost/", "http://1.2.3.4.5/", "http://[fe80::1%25lo]/"]
)
def test_what_no_setting_allows(url: str) -> None:
    with pytest.raises(BlockedAddress):
        check_url(url, allow_private=True)


AUTHORITY = st.text("0123456789abcfx.:[]%@/\\?#-_。１① \tü\u200b", max_size=24)


@given(st.text(max_size=40) | AUTHORITY.map("https://{}/".format) | AUTHORITY.map("https://{}.example.com".format))
@example("https://[")
@example("https://xn--\u0080.com/")
def test_whatever_is_written_is_refused_or_has_one_reading(url: str) -> None:
    try:
        canonical = check_url(url, allow_private=False)
    except BlockedAddress:
        return
    assert check_url(canonical, allow_private=False) == canonical
    assert canonical.isascii()
    other = urlsplit(canonical)  # another parser sees the same host
    assert other.scheme == "https"
    assert other.username is None
    assert other.hostname == httpx.URL(canonical).raw_host.decode()


# Names


def names(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[list[str]]]) -> list[str]:
    """Answers look-ups in order, the last for ever; returns the list of names looked up."""
    asked: list[str] = []

    async def look_up(name: str, _port: int, **_: object) -> list[str]:
        asked.append(name)
        queue = answers[name.removesuffix(".")]
        return queue.pop(0) if len(queue) > 1 else queue[0]

    monkeypatch.setattr(outbound, "look_up", look_up)
    return asked


async def test_the_addresses_of_a_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"8.8.8.{n}" for n in range(20)]
    asked = names(monkeypatch, {"a.example.com": [["1.1.1.1", "2606:4700::1", "1.1.1.1"], many]})
    assert await resolve("A.example.com.", 443, allow_private=False) == [("1.1.1.1", 443), ("2606:4700::1", 443)]
    assert len(await resolve("a.example.com", 443, allow_private=False)) == addresses.MOST_ADDRESSES
    assert asked == ["a.example.com."] * 2, "the final dot keeps search domains out"


@pytest.mark.parametrize(
    "found",
    [
        ["127.0.0.1"],
        ["1.1.1.1", "10.0.0.1"],
        ["10.0.0.1", "1.1.1.1"],
        [*(f"8.8.8.{n}" for n in range(20)), "169.254.169.254"],
        ["1.1.1.1", "::1"],
        ["1.1.1.1", "fe80::1%eth0"],
        ["64:ff9b::a00:1"],
    ],
)
async def test_one_address_that_is_not_public_refuses_the_name(
    monkeypatch: pytest.MonkeyPatch, found: list[str]
) -> None:
    names(monkeypatch, {"mixed.example.com": [found]})
    with pytest.raises(BlockedAddress) as refused:
        await resolve("mixed.example.com", 443, allow_private=False)
    assert not any(address in str(refused.value) for address in found), "an internal address is not theirs to learn"
    assert await resolve("mixed.example.com", 443, allow_private=True)


@pytest.mark.parametrize(
    "host", ["127.1", "[::1]", "::1", "0x7f.1", "localhost", "a.internal", "a\x00.com", "", "a%b.c"]
)
async def test_resolve_judges_the_text_too(host: str) -> None:
    with pytest.raises(BlockedAddress):
        await resolve(host, 443, allow_private=False)


async def test_a_literal_needs_no_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = names(monkeypatch, {})
    assert await resolve("134744072", 443, allow_private=False) == [("8.8.8.8", 443)]
    assert await resolve("[2606:4700::1]", 443, allow_private=False) == [("2606:4700::1", 443)]
    assert await resolve("127.1", 80, allow_private=True) == [("127.0.0.1", 80)]
    assert asked == []


async def test_the_real_resolver() -> None:
    assert ("127.0.0.1", 80) in await resolve("localhost", 80, allow_private=True)


async def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(CallFailed) as failed:
        await resolve("nowhere.example.com", 443, allow_private=False)
    assert failed.value.reason == "dns"


@pytest.fixture
def hanging_domain(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """Look-ups under evil.example hang until the test is over, all others answer; yields the names that hang."""
    over, hanging = threading.Event(), list[str]()

    def getaddrinfo(name: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if name.endswith("evil.example."):
            hanging.append(name)
            over.wait(20)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.1.1.1", 443))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield hanging  # type: ignore[misc]
    over.set()


async def test_a_domain_that_hangs_holds_up_no_other(hanging_domain: list[str]) -> None:
    async def impatient(number: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await resolve(f"n{number}.evil.example", 443, allow_private=False)

    await asyncio.gather(*(impatient(number) for number in range(200)))
    assert len(hanging_domain) == addresses.LOOKUPS_OF_A_DOMAIN, "turns last as long as threads, not as patience"
    async with asyncio.timeout(2):
        await asyncio.gather(*(resolve(f"n{n}.good{n}.com", 443, allow_private=False) for n in range(100)))
        await asyncio.gather(*(resolve(f"n{n}.example.com", 443, allow_private=False) for n in range(100)))
        assert await asyncio.to_thread(lambda: "free") == "free"
    assert len(hanging_domain) == addresses.LOOKUPS_OF_A_DOMAIN


def test_a_look_up_that_hangs_does_not_hold_up_the_exit() -> None:
    program = """
import asyncio, socket, time
from workers import egress
socket.getaddrinfo = lambda *_, **__: time.sleep(60)
async def main():
    async with asyncio.timeout(0.1):
        await egress.resolve("hangs.example.com", 443, allow_private=False)
try:
    asyncio.run(main())
except TimeoutError:
    print("left")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "left\n"
    assert done.stderr == ""


# Calls, to real servers


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers on loopback, and ends them and what they still do."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler: Handler, tls: ssl.SSLContext | None = None) -> int:
            tasks: set[asyncio.Task[None]] = set()

            async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                tasks.add(task)
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                    await handler(reader, writer)
                writer.transport.abort()

            server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)

            async def end() -> None:
                server.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

            stack.push_async_callback(end)
            return int(server.sockets[0].getsockname()[1])

        yield start


@pytest.fixture
async def client() -> AsyncIterator[outbound.Client]:
    async with outbound.client(allow_private=True) as client:
        yield client


def answering(*pieces: bytes, then: Callable[[], Awaitable[object]] | None = None) -> Handler:
    """Reads a request, sends the pieces; afterwards closes, or does `then`."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if then is not None:
            await then()

    return handler


async def forever() -> None:
    await asyncio.sleep(60)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


class Recorder:
    """Answers every request of every connection with 200, and keeps what was sent."""

    def __init__(self, answer: bytes = OK) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
            )
            self.requests.append(head + await reader.readexactly(length))
            writer.write(self.answer)
            await writer.drain()


async def failure(client: outbound.Client, url: str, *, budget: float = 5, max_bytes: int = 1000) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        await fetch(client, "GET", url, budget=budget, max_bytes=max_bytes)
    assert "s3cret" not in str(failed.value)
    return failed.value


async def test_a_call_and_its_kept_connection(serve: Serve, client: outbound.Client) -> None:
    server = Recorder()
    port = await serve(server)
    url = f"http://127.0.0.1:{port}/a?b=c"
    answer = await fetch(client, "POST", url, headers={"X-Y": "z"}, content=b"hello", budget=5, max_bytes=2)
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "2", b"ok")
    for _ in range(3):
        await fetch(client, "GET", url, budget=5, max_bytes=2)
    assert server.connections == 1
    sent = server.requests[0].decode()
    assert sent.startswith("POST /a?b=c HTTP/1.1\r\n")
    assert sent.endswith("\r\n\r\nhello")
    assert f"\r\nHost: 127.0.0.1:{port}\r\n" in sent
    assert "\r\nX-Y: z\r\n" in sent
    assert "\r\nAccept-Encoding: identity\r\n" in sent


async def test_a_connection_the_server_closed_is_not_used_again(serve: Serve, client: outbound.Client) -> None:
    close, closed = asyncio.Event(), asyncio.Event()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(OK, then=close.wait)(reader, writer)
        writer.close()
        await writer.wait_closed()
        closed.set()

    url = f"http://127.0.0.1:{await serve(once)}/"
    for _ in range(3):
        close.clear()
        closed.clear()
        assert (await fetch(client, "GET", url, budget=5, max_bytes=9)).status == 200
        close.set()
        await closed.wait()


@pytest.mark.parametrize(
    "location", ["http://127.0.0.1:1/", "https://xn--a/", "http://[", "//", "file:///etc/passwd", "\xff"]
)
async def test_a_redirect_is_an_answer(serve: Serve, client: outbound.Client, location: str) -> None:
    port = await serve(
        Recorder(f"HTTP/1.1 302 F\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode("latin-1"))
    )
    url = f"http://127.0.0.1:{port}/"
    assert (await fetch(client, "GET", url, budget=5, max_bytes=9)).status == 302
    assert (await client.get(url, follow_redirects=True)).status_code == 302


async def test_no_cookies_no_proxies_no_address_in_the_logs(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    caplog.set_level("DEBUG")
    server = Recorder(OK.replace(b"\r\n", b"\r\nSet-Cookie: a=b\r\n", 1))
    url = f"http://127.0.0.1:{await serve(server)}/s3cret"
    async with outbound.client(allow_private=True) as client:
        for _ in range(2):
            await fetch(client, "GET", url, budget=5, max_bytes=9)
        assert (await client.get(url)).text == "ok"
    assert len(server.requests) == 3
    assert not any(b"cookie" in request.lower() for request in server.requests)
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (answering(), "connect"),
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), "connect"),
        (answering(b"SSH-2.0-OpenSSH_9.2\r\n"), "connect"),
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"), "connect"),
        (answering(b"HTTP/1.1 200 OK\r\n" + b"X-Y: " + b"z" * 200_000), "connect"),
        (answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "connect"),
        (answering(OK[:-2] + b"o", then=forever), "timeout"),
        (answering(then=forever), "timeout"),
        (answering(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100, then=forever), "timeout"),
    ],
)
async def test_an_answer_that_fails(serve: Serve, client: outbound.Client, handler: Handler, reason: str) -> None:
    failed = await failure(client, f"http://127.0.0.1:{await serve(handler)}/s3cret", budget=0.5)
    assert failed.reason == reason


async def test_nobody_listens(client: outbound.Client) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert (await failure(client, f"http://127.0.0.1:{taken.getsockname()[1]}/s3cret")).reason == "connect"


async def test_the_next_address_is_tried(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_tcp = httpcore.AnyIOBackend.connect_tcp

    async def swallow(
        self: httpcore.AnyIOBackend, host: str, port: int, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        if host == "8.8.8.8":
            await asyncio.sleep(timeout or 60)
            raise httpcore.ConnectTimeout
        return await connect_tcp(self, host, port, timeout)

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", swallow)
    names(monkeypatch, {"three.example.com": [["127.0.0.2", "8.8.8.8", "127.0.0.1"]]})
    url = f"http://three.example.com:{await serve(Recorder())}/"
    async with outbound.client(allow_private=True, timeout=0.4) as client:
        assert (await fetch(client, "GET", url, budget=5, max_bytes=9)).status == 200


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"])
async def test_a_drip_outlives_every_step_but_not_the_budget(serve: Serve, start: bytes) -> None:
    gone = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(start)
        try:
            for byte in b"HTTP/1.1 200 OK\r\n" * 100:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            gone.set()

    url = f"http://127.0.0.1:{await serve(drip)}/s3cret"
    async with outbound.client(allow_private=True, timeout=0.3) as client:
        began = time.monotonic()
        assert (await failure(client, url, budget=0.7)).reason == "timeout"
        assert 0.6 < time.monotonic() - began < 2
        await asyncio.wait_for(gone.wait(), 5)  # the connection is closed, not left to the garbage collector


async def test_a_huge_answer_is_cut_with_flat_memory(serve: Serve, client: outbound.Client) -> None:
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
        for _ in range(3):
            sent = 0
            with pytest.raises(ResponseTooLarge, match="more than 65536 bytes"):
                await fetch(client, "GET", url, budget=5, max_bytes=65536)
            cut = await fetch(client, "GET", url, budget=5, max_bytes=65536, whole=False)
            assert (cut.status, len(cut.body)) == (200, 65536)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert sent < 50_000_000


async def test_exactly_the_bound_is_whole(serve: Serve, client: outbound.Client) -> None:
    url = f"http://127.0.0.1:{await serve(Recorder())}/"
    assert (await fetch(client, "GET", url, budget=5, max_bytes=2)).body == b"ok"
    assert (await failure(client, url, max_bytes=1)).reason == "too-large"


async def test_a_compressed_answer_is_never_inflated(serve: Serve, client: outbound.Client) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    url = f"http://127.0.0.1:{await serve(Recorder(head + bomb))}/s3cret"
    tracemalloc.start()
    try:
        assert (await failure(client, url, max_bytes=100_000)).reason == "encoded"
        assert (await fetch(client, "GET", url, budget=5, max_bytes=100_000, whole=False)).body == bomb
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


async def test_where_only_the_status_counts_a_late_or_cut_body_does_not(serve: Serve, client: outbound.Client) -> None:
    head = b"HTTP/1.1 204 No\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"
    for handler, body in (
        (answering(head[1], then=forever), b"half"),
        (answering(head[1]), b"half"),
        (answering(head[0], then=forever), b""),
    ):
        url = f"http://127.0.0.1:{await serve(handler)}/"
        answer = await fetch(client, "GET", url, budget=0.3, max_bytes=100, whole=False)
        assert answer.status in (200, 204)
        assert answer.body == body


async def test_calls_that_are_cancelled_leave_their_place(serve: Serve) -> None:
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
    async with outbound.client(allow_private=True, connections=4) as client:
        for _ in range(5):
            calls = [
                fetch(client, "GET", f"http://127.0.0.1:{hanging}/", budget=0.005 * n, max_bytes=9) for n in range(20)
            ]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {getattr(result, "reason", result) for result in results} == {"timeout"}
        for _ in range(8):
            await fetch(client, "GET", healthy_url, budget=1, max_bytes=9)
        await until(lambda: open_connections == 0)


async def test_an_origin_that_hangs_leaves_room_for_others(serve: Serve, client: outbound.Client) -> None:
    hanging = f"http://127.0.0.1:{await serve(answering(then=forever))}/"
    calls = [asyncio.create_task(failure(client, hanging, budget=2)) for _ in range(300)]
    await asyncio.sleep(0)
    healthy = f"http://127.0.0.1:{await serve(Recorder())}/"
    assert (await fetch(client, "GET", healthy, budget=1, max_bytes=9)).status == 200
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


# TLS, and names that change


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[ssl.SSLContext, str]]:
    """Makes a server's context for a name, and the file to trust it with."""
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str, *, expired: bool = False) -> tuple[ssl.SSLContext, str]:
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=9))
            .not_valid_after(now + datetime.timedelta(days=-1 if expired else 1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        file: Path = folder / f"{name}-{expired}.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(file)
        return context, str(file)

    return make


Authority = Callable[..., tuple[ssl.SSLContext, str]]


async def test_tls_is_verified_for_the_name(
    serve: Serve, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, trusted = authority("receiver.example.com")
    asked_for: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: asked_for.append(name)
    server = Recorder()
    port = await serve(server, context)
    names(monkeypatch, {"receiver.example.com": [["127.0.0.1"]], "other.example.com": [["127.0.0.1"]]})
    async with outbound.client(allow_private=True, ca_file=trusted) as client:
        url = f"https://receiver.example.com.:{port}/"
        assert (await fetch(client, "GET", url, budget=5, max_bytes=9)).status == 200
        assert asked_for == ["receiver.example.com"]
        assert f"\r\nHost: receiver.example.com:{port}\r\n".encode() in server.requests[0]
        failed = await failure(client, f"https://other.example.com:{port}/s3cret")
        assert failed.reason == "tls"
        assert "not valid for 'other.example.com'" in str(failed)
        assert (await failure(client, f"https://127.0.0.1:{port}/s3cret")).reason == "tls"
    async with outbound.client(allow_private=True) as stranger:
        failed = await failure(stranger, f"https://receiver.example.com:{port}/s3cret")
        assert (failed.reason, "self-signed certificate" in str(failed)) == ("tls", True)
    assert len(server.requests) == 1, "nothing is sent before the certificate is verified"


async def test_bad_tls(serve: Serve, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    context, trusted = authority("old.example.com", expired=True)
    names(monkeypatch, {"old.example.com": [["127.0.0.1"]]})
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read(99_999)
        await reader.read()
        gone.set()

    async with outbound.client(allow_private=True, ca_file=trusted) as client:
        failed = await failure(client, f"https://old.example.com:{await serve(Recorder(), context)}/s3cret")
        assert (failed.reason, "expired" in str(failed)) == ("tls", True)
        plain = await serve(answering(OK, then=forever))
        assert (await failure(client, f"https://old.example.com:{plain}/s3cret", budget=1)).reason in ("tls", "timeout")
        hanging = await serve(silent)
        assert (await failure(client, f"https://old.example.com:{hanging}/s3cret", budget=0.3)).reason == "timeout"
        await asyncio.wait_for(gone.wait(), 5)  # a cancelled handshake closes its socket


async def test_tls_that_breaks_after_the_handshake(
    serve: Serve, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, trusted = authority("forged.example.com")
    names(monkeypatch, {"forged.example.com": [["127.0.0.1"]]})

    async def forge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        os.write(writer.get_extra_info("socket").fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
        await forever()

    async with outbound.client(allow_private=True, ca_file=trusted) as client:
        url = f"https://forged.example.com:{await serve(forge, context)}/s3cret"
        assert (await failure(client, url)).reason == "tls"


async def test_a_name_that_changes_between_check_and_connection_gains_nothing(
    serve: Serve, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, trusted = authority("rebind.example.com")
    closing = OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    port = await serve(answering(closing), context)
    asked = names(monkeypatch, {"rebind.example.com": [["93.184.215.14"], ["127.0.0.1"]]})
    dialled: list[str] = []
    connect_tcp = httpcore.AnyIOBackend.connect_tcp

    async def to_loopback(
        self: httpcore.AnyIOBackend, host: str, port: int, **options: object
    ) -> httpcore.AsyncNetworkStream:
        dialled.append(host)
        return await connect_tcp(self, "127.0.0.1", port, **options)  # type: ignore[arg-type]

    def no_second_look_up(*_: object, **__: object) -> None:
        raise AssertionError("looked up again")

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", to_loopback)
    monkeypatch.setattr(socket, "getaddrinfo", no_second_look_up)
    url = f"https://rebind.example.com:{port}/"
    async with outbound.client(allow_private=False, ca_file=trusted) as client:
        assert (await fetch(client, "GET", url, budget=5, max_bytes=9)).status == 200
        assert (asked, dialled) == (["rebind.example.com."], ["93.184.215.14"])
        assert (await failure(client, url)).reason == "blocked"
        with pytest.raises(BlockedAddress):
            await client.get(url)
    assert dialled == ["93.184.215.14"], "not even a connection"


@pytest.mark.parametrize("url", ["http://example.com/", "https://127.1/", "https://[::1]/", "ftp://example.com/"])
async def test_the_client_itself_is_guarded(url: str) -> None:
    async with outbound.client(allow_private=False) as client:
        with pytest.raises(BlockedAddress):
            await client.get(url)
        assert (await failure(client, url)).reason == "blocked"

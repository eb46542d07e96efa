"""Addresses that may be called, and how their names are resolved."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import socket
import threading
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from gateway.outbound import addresses
from gateway.outbound.addresses import BlockedAddress, CallFailed, check_url, is_public, resolve
from tests.gateway.outbound.conftest import Names

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


def test_an_address_that_is_not_public() -> None:
    assert [address for address in NOT_PUBLIC.split() if is_public(ipaddress.ip_address(address))] == []


PUBLIC = """
    1.0.0.0 1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0
    168.63.129.15 168.63.129.17 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0
    192.0.3.0 192.88.98.255 192.88.100.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 198.51.99.255
    198.51.101.0 203.0.112.255 203.0.114.0 223.255.255.255
    ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2000::1 2001:200::1 2001:4860:4860::8888 2001:db7:ffff::1 2001:db9::1
    2001:ffff::1 2003::1 2606:4700:4700::1111 2a00:1450::1 3ffe:ffff::1 3fff:1000::1
    """


def test_a_public_address() -> None:
    assert [address for address in PUBLIC.split() if not is_public(ipaddress.ip_address(address))] == []


# The text of an address


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("https://example.com", "https://example.com/"),
        ("HTTPS://Example.COM/A?b=C", "https://example.com/A?b=C"),
        ("https://example.com.:8443/x", "https://example.com:8443/x"),
        ("https://example.com:443/", "https://example.com/"),
        ("https://example.com:/x#part", "https://example.com/x"),
        ("https://münchen.de/ü", "https://xn--mnchen-3ya.de/%C3%BC"),
        ("https://example。com/", "https://example.com/"),
        ("https://1.1.1.1.example.com/", "https://1.1.1.1.example.com/"),
        ("https://0x8.010.2056/", "https://8.8.8.8/"),
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


def test_a_host_that_is_not_public() -> None:
    for host in INSIDE_HOSTS.split():
        with pytest.raises(BlockedAddress):
            check_url(f"https://{host}/", allow_private=False)


# What the refusal says, of addresses without spaces.
REFUSED = {
    "must start with https": """
        example.com //example.com/ http://example.com/s3cret ftp://example.com/s3cret file:///s3cret unix:///s3cret
        gopher://example.com/s3cret https+unix://example.com/s3cret javascript:s3cret
        """,
    "has no host": "https:example.com https:///s3cret https:// https://:8443/s3cret",
    "user name or password": """
        https://me:s3cret@example.com/ https://s3cret@example.com/ https://example.com:s3cret@127.0.0.1/
        https://example.com%2f@127.0.0.1/s3cret
        """,
    "not a public address": "https://127.0.0.1#@example.com/s3cret https://127.0.0.1?@example.com/s3cret",
    "backslash": r"https://example.com\@127.0.0.1/s3cret",
    "port must be": "https://example.com:0/s3cret https://example.com:65536/s3cret https://example.com:-1/s3cret",
    "cannot be parsed": "https://example.com:80a/s3cret https://xn--a/s3cret https://[::1/s3cret",
    "not valid": f"""
        https://exam%70le.com/s3cret https://127%2e0.0.1/s3cret https://%31%32%37.0.0.1/s3cret
        https://-a.example.com/s3cret https://a-.example.com/s3cret https://*.example.com/s3cret
        https://exa$mple.com/s3cret https://{"a" * 64}.example.com/s3cret https://{"a." * 127}example.com/s3cret
        """,
    "not valid|cannot be parsed": "https://example..com/s3cret https://.example.com/s3cret",
    "longer than 2048": f"https://example.com/s3cret{'a' * 2048} https://example.com/s3cret{'ü' * 500}",
}
OTHERS = {
    "": "cannot be parsed|must start",
    " https://example.com/s3cret": "space",
    "https://exam ple.com/s3cret": "space",
    "https://example.com/s3cret\r\nX: y": "control character",
    **{f"https://example.com/s3cret{each}": "control character" for each in "\t\0\x7f\x85\u2028\u202e\ud800"},
}


def test_a_refused_url_is_explained_without_secrets() -> None:
    cases = {url: message for message, urls in REFUSED.items() for url in urls.split()} | OTHERS
    for url, message in cases.items():
        with pytest.raises(BlockedAddress, match=message) as refused:
            check_url(url, allow_private=False)
        assert refused.value.reason == "blocked"
        assert "s3cret" not in str(refused.value)


def test_private_addresses_and_plain_http_where_they_are_allowed() -> None:
    for url in ("http://localhost:8000/x", "https://10.0.0.1/", "http://[::1]:9/", "http://backend/x"):
        assert check_url(url, allow_private=True) == url
    for url in ("ftp://localhost/", "http://me@localhost/", "http://1.2.3.4.5/", "http://[fe80::1%25lo]/"):
        with pytest.raises(BlockedAddress):
            check_url(url, allow_private=True)


AUTHORITY = st.text("0123456789abcfx.:[]%@/\\?#-_。１① \tü\u200b", max_size=24)


@given(st.text(max_size=40) | AUTHORITY.map("https://{}/".format) | AUTHORITY.map("https://{}.example.com".format))
@example("https://[")
@example("https://xn--\u0080.com/")
def test_every_text_is_refused_or_has_one_interpretation(url: str) -> None:
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
    assert other.hostname == URL(canonical, encoded=True).raw_host


# Names


async def test_the_addresses_of_a_public_name() -> None:
    many = [f"8.8.8.{n}" for n in range(20)]
    names = Names({"a.example.com": [["1.1.1.1", "2606:4700::1", "1.1.1.1"], many]})
    assert await names.resolve("A.example.com.", 443, tenant="acc", allow_private=False) == [
        ("1.1.1.1", 443),
        ("2606:4700::1", 443),
    ]
    assert len(await names.resolve("a.example.com", 443, tenant="acc", allow_private=False)) == addresses.MAX_ADDRESSES
    assert names.asked == ["a.example.com."] * 2, "the final dot keeps search domains out"


async def test_one_address_that_is_not_public_refuses_the_name() -> None:
    many = [f"8.8.8.{n}" for n in range(20)]
    for found in (["127.0.0.1"], [*many, "169.254.169.254"], ["1.1.1.1", "fe80::1%eth0"], ["64:ff9b::a00:1"]):
        names = Names({"mixed.example.com": [found]})
        with pytest.raises(BlockedAddress) as refused:
            await names.resolve("mixed.example.com", 443, tenant="acc", allow_private=False)
        assert not any(address in str(refused.value) for address in found), "customers must not learn them"
        assert await names.resolve("mixed.example.com", 443, tenant="acc", allow_private=True)


async def test_resolve_checks_the_text_too() -> None:
    for host in ("127.1", "[::1]", "localhost", "a\x00.com", "", "a%b.c"):
        with pytest.raises(BlockedAddress):
            await resolve(host, 443, tenant="acc", allow_private=False)


async def test_a_name_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its public address, a call would bypass the firewall and reach ports that only this machine may use."""
    names = Names({"me.example.com": [["93.184.215.14", "93.184.215.15"]]})
    monkeypatch.setattr(addresses, "is_own_service", lambda address, port: (address, port) == ("93.184.215.15", 8443))
    with pytest.raises(BlockedAddress, match="an address of this service"):
        await names.resolve("me.example.com", 8443, tenant="acc", allow_private=False)
    assert len(await names.resolve("me.example.com", 443, tenant="acc", allow_private=False)) == 2


async def test_a_literal_needs_no_look_up() -> None:
    names = Names({})
    assert await names.resolve("134744072", 443, tenant="acc", allow_private=False) == [("8.8.8.8", 443)]
    assert await names.resolve("[2606:4700::1]", 443, tenant="acc", allow_private=False) == [("2606:4700::1", 443)]
    assert await names.resolve("127.1", 80, tenant="acc", allow_private=True) == [("127.0.0.1", 80)]
    assert names.asked == []


async def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(CallFailed) as failed:
        await resolve("nowhere.example.com", 443, tenant="acc", allow_private=False)
    assert failed.value.reason == "dns"


@pytest.fixture
def hanging_names(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """Makes lookups under .evil.example and .tarpit.co.uk hang until the end. Yields the names that hang."""
    over, hanging = threading.Event(), list[str]()

    def getaddrinfo(name: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if name.endswith((".evil.example.", ".tarpit.co.uk.")):
            hanging.append(name)
            over.wait(20)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.1.1.1", 443))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield hanging  # type: ignore[misc]
    over.set()


async def look_up_hanging_names(hanging_names: list[str], tenant: str, domain: str = "evil.example") -> int:
    """Looks up 50 names that hang, and gives up. Returns how many of them hold a thread now."""

    async def impatient(number: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await resolve(f"n{number}.{domain}", 443, tenant=tenant, allow_private=False)

    await asyncio.gather(*(impatient(number) for number in range(50)))
    return len(hanging_names)


async def test_hanging_names_do_not_delay_other_tenants(hanging_names: list[str]) -> None:
    """Slots are shared by tenant, and a lookup that hangs keeps its slot after its caller has given up."""
    held = await look_up_hanging_names(hanging_names, "evil")
    assert held <= addresses.MAX_LOOKUPS // 8, "a slot is held as long as its thread runs"
    async with asyncio.timeout(10):
        for tenant in ("one", "two"):
            names = [f"n{n}.good{n}.com" for n in range(100)] + [f"n{n}.evil{n}.example" for n in range(100)]
            await asyncio.gather(*(resolve(name, 443, tenant=tenant, allow_private=False) for name in names))
        assert await asyncio.to_thread(lambda: "free") == "free"
    assert len(hanging_names) == held


async def test_the_operators_names_do_not_wait_for_customers_names(hanging_names: list[str]) -> None:
    """The names of hosted apps have slots of their own, even while customers' names hold all others."""
    tenants = itertools.count()
    async with asyncio.timeout(20):
        while len(hanging_names) < addresses.MAX_LOOKUPS:  # all slots
            await asyncio.gather(*(look_up_hanging_names(hanging_names, f"evil-{next(tenants)}") for _ in range(20)))
    before = len(hanging_names)
    async with asyncio.timeout(10):
        found = await asyncio.gather(
            *(resolve(f"n{n}.apps.example", 443, tenant="evil-1", allow_private=False, own=True) for n in range(100))
        )
    assert found == [[("1.1.1.1", 443)]] * 100
    assert len(hanging_names) == before

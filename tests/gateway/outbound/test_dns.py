"""Lookups of TXT records, against a DNS server over UDP."""

import time
from collections.abc import AsyncIterator

import dns.nameserver
import dns.rcode
import dns.resolver
import pytest

from gateway.outbound.addresses import CallFailed
from gateway.outbound.dns import Resolver
from tests.support.dns_server import DnsServer, dns_server
from tests.support.redis_servers import free_port

NAME = "_capsule.shop.example"


@pytest.fixture
async def server() -> AsyncIterator[DnsServer]:
    async with dns_server() as server:
        yield server


async def test_the_records_of_a_name(server: DnsServer) -> None:
    """The parts of a text are joined, a CNAME is followed, and no search domain is appended."""
    resolver, other = Resolver(server.address), "other.example"
    assert await resolver.find_txt(NAME) == []
    server.addressed.add(NAME)
    assert await resolver.find_txt(NAME) == [], "the name has other records"
    server.sets(NAME, ("first ", "second"), "another", ("", ""))
    assert sorted(await resolver.find_txt(NAME)) == ["", "another", "first second"]
    assert set(server.asked) == {NAME}
    server.aliases[other] = NAME
    assert sorted(await resolver.find_txt(other)) == ["", "another", "first second"]
    server.sets(NAME)
    assert await resolver.find_txt(other) == []


async def test_a_failure_is_not_a_missing_record(server: DnsServer) -> None:
    server.failing[NAME] = dns.rcode.SERVFAIL
    with pytest.raises(CallFailed, match=r"^The DNS did not answer for _capsule\.shop\.example\.$") as raised:
        await Resolver(server.address).find_txt(NAME)
    assert raised.value.reason == "dns"
    with pytest.raises(CallFailed):
        await Resolver(server.address).find_txt("a" * 64 + ".example")


async def test_silence_is_bounded(server: DnsServer) -> None:
    server.silent.add(NAME)
    began = time.monotonic()
    with pytest.raises(CallFailed) as raised:
        await Resolver(server.address, lookup_seconds=0.5).find_txt(NAME)
    assert raised.value.reason == "timeout"
    assert time.monotonic() - began < 5


async def test_the_next_resolver_is_asked(server: DnsServer) -> None:
    server.sets(NAME, "text")
    resolver = Resolver(f"127.0.0.1:{free_port()},{server.address}", attempt_seconds=0.2)
    assert await resolver.find_txt(NAME) == ["text"]

"""A DNS server over UDP, which a test fills with records, makes fail, or makes silent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer(asyncio.DatagramProtocol):
    """Names without records do not exist."""

    def __init__(self) -> None:
        self.texts: dict[str, list[tuple[str, ...]]] = {}  # the parts of each TXT record of a name
        self.aliases: dict[str, str] = {}  # CNAME records
        self.addressed: set[str] = set()  # names with an A record
        self.failing: dict[str, dns.rcode.Rcode] = {}
        self.silent: set[str] = set()  # names for which no answer comes
        self.asked: list[str] = []
        self.address = ""
        self._transport: Any = None

    def sets(self, name: str, *texts: str | tuple[str, ...]) -> None:
        """Replaces the TXT records of a name; without texts, removes them."""
        self.texts[name] = [(text,) if isinstance(text, str) else text for text in texts]

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        name = query.question[0].name.to_text(omit_final_dot=True)
        self.asked.append(name)
        if name not in self.silent:
            self._transport.sendto(self._answer(query, name).to_wire(), address)

    def _answer(self, query: dns.message.Message, name: str) -> dns.message.Message:
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        while target := self.aliases.get(name):
            answer.answer.append(dns.rrset.from_text(f"{name}.", 60, "IN", "CNAME", f"{target}."))
            name = target
        if records := self.texts.get(name):
            quoted = [" ".join(f'"{part}"' for part in parts) for parts in records]
            answer.answer.append(dns.rrset.from_text(f"{name}.", 60, "IN", "TXT", *quoted))
        elif name in self.failing:
            answer.set_rcode(self.failing[name])
        elif name not in self.addressed:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer


@contextlib.asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    server = DnsServer()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, ("127.0.0.1", 0))
    host, port = transport.get_extra_info("sockname")
    server.address = f"{host}:{port}"
    try:
        yield server
    finally:
        transport.close()

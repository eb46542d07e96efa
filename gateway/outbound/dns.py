"""Looks up TXT records in the DNS.

Failure policy: no answer differs from the answer that there is no such record. A resolver that fails, refuses or does
not answer in time raises CallFailed, so that an outage of the DNS never looks like a removed record.
"""

import asyncio

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver

from gateway.outbound.addresses import CallFailed
from gateway.settings import split_address

LOOKUP_SECONDS = 4.0  # that a lookup may take, with all resolvers and repetitions
ATTEMPT_SECONDS = 2.0  # until the next resolver is asked


class Resolver:
    def __init__(
        self, servers: str, *, lookup_seconds: float = LOOKUP_SECONDS, attempt_seconds: float = ATTEMPT_SECONDS
    ) -> None:
        """`servers` are addresses as in `GATEWAY_DNS`. Without any, each lookup asks the system's resolvers.

        A lookup may take `lookup_seconds`, and asks the next resolver after `attempt_seconds`.
        """
        self._lookup_seconds, self._attempt_seconds = lookup_seconds, attempt_seconds
        self._servers = [split_address(server) for server in servers.split(",")] if servers else []

    async def find_txt(self, name: str) -> list[str]:
        """Returns the texts of a name's TXT records; none if there is no such record. Raises CallFailed.

        A text of several parts is joined. A CNAME at the name is followed.
        """
        try:
            async with asyncio.timeout(self._lookup_seconds):
                answer = await self._make_resolver().resolve(dns.name.from_text(name), "TXT")
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except (dns.exception.DNSException, OSError, TimeoutError) as error:
            late = isinstance(error, TimeoutError | dns.exception.Timeout)
            raise CallFailed("timeout" if late else "dns", f"The DNS did not answer for {name}.") from error
        return [b"".join(record.strings).decode(errors="replace") for record in answer]

    def _make_resolver(self) -> dns.asyncresolver.Resolver:
        """Reads the system's resolvers again for each lookup, because they may change."""
        resolver = dns.asyncresolver.Resolver(configure=not self._servers)
        if self._servers:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(*server) for server in self._servers]
        resolver.timeout, resolver.lifetime = self._attempt_seconds, self._lookup_seconds
        return resolver

"""The certificate of each verified custom domain, seen over a real TLS handshake.

Nothing is verified: what is looked for are the certificates that nobody would accept, such as an expired one. Within 7
days of its end an account is told, once for each certificate: a renewed one has another fingerprint. A domain that
cannot be reached tells nothing; it is looked at again within the hour, and what was seen stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import structlog
from cryptography import x509

from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.cancellation import end_if_cancelled
from gateway.errors import BackboneUnavailable
from gateway.events.catalogue import DomainExpiring
from gateway.ids import new_id, now_iso
from gateway.outbound import addresses
from gateway.settings import Settings
from gateway.store import keys
from gateway.store.client import backbone
from workers.monitors.rounds import Rounds, Seen, Taken

logger = structlog.get_logger()

WINDOW = 7 * 86_400_000  # ms before the end
DAY = 86_400_000  # ms
BUDGET = 10.0  # seconds for one look, from the look-up to the end of the handshake
UNDER_WAY = 100  # looks of one worker
AFTER_START = 600.0  # seconds in which every certificate is looked at once after a start
AFTER_FAILURE = 3_600.0  # seconds until a domain that could not be reached is looked at again, at the most
TOLD = 8  # certificates remembered: a domain behind several servers may show another at each look
BATCH = 1_000  # brought forward at once


class Certificate(NamedTuple):
    fingerprint: str  # SHA-256, hexadecimal
    expires: int  # ms


class Certificates:
    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._store = settings, registry.store
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.check_hostname = False
        self._tls.verify_mode = ssl.CERT_NONE
        self._rounds = Rounds(
            registry,
            keys.certificates_key,
            keys.certificate_key,
            self._wanted,
            self.look,
            interval=settings.certificate_interval,
            budget=BUDGET,
            under_way=UNDER_WAY,
        )

    async def run(self) -> None:
        await self._bring_forward()
        await self._rounds.run()

    async def _bring_forward(self) -> None:
        """Looks that are due later come soon: while no worker ran, certificates went on ageing. Of several starts at
        once the later ones find nothing to do."""
        soon = int(min(AFTER_START, self._settings.certificate_interval) * 1000)
        client = self._store.client
        for tag in keys.partition_tags():
            while True:
                end_if_cancelled()
                try:
                    with backbone():
                        seconds, micros = await client.time()
                        at = seconds * 1000 + micros // 1000 + soon
                        key = keys.certificates_key(tag)
                        later = await client.zrangebyscore(key, f"({at}", "+inf", start=0, num=BATCH)
                        if not later:
                            break
                        await client.zadd(key, dict.fromkeys(later, at), xx=True, lt=True)
                except BackboneUnavailable as error:
                    logger.warning("certificates.waiting", partition=tag, error=type(error.__cause__).__name__)
                    await asyncio.sleep(1.0)

    @staticmethod
    def _wanted(app: App, _: Account, __: bool) -> bool:
        return app.customDomain is not None and app.customDomainVerified

    async def look(self, taken: Taken) -> Seen:
        settings, domain = self._settings, taken.app.customDomain or ""
        try:
            seen = await self._shown_by(domain)
        except addresses.CallFailed as error:
            logger.info("certificate.unseen", app=taken.app.id, domain=domain, reason=error.reason)
            return Seen({}, [], min(AFTER_FAILURE, settings.certificate_interval))
        known, event = judge(taken.known, domain, seen, taken.now())
        events = [] if event is None else [(new_id("evt"), event)]
        return Seen(known, events, settings.certificate_interval)

    async def _shown_by(self, domain: str) -> Certificate:
        """Raises CallFailed."""
        host, _, port = (self._settings.certificate_address or f"{domain}:443").rpartition(":")
        # An address that the operator set may be an inside one.
        allow_private = bool(self._settings.certificate_address) or self._settings.allow_private_addresses
        try:
            async with asyncio.timeout(BUDGET):
                found = await addresses.resolve(host, int(port), allow_private=allow_private)
                return await self._shake_hands(found, domain)
        except TimeoutError as error:
            raise addresses.CallFailed("timeout", f"{domain} did not answer in time.") from error

    async def _shake_hands(self, found: list[tuple[str, int]], domain: str) -> Certificate:
        failure = addresses.CallFailed("connect", f"{domain} could not be reached.")
        for address, port in found:
            try:
                async with asyncio.timeout(BUDGET / len(found)):  # one that swallows packets leaves time for others
                    return await self._shake(address, port, domain)
            except TimeoutError:
                failure = addresses.CallFailed("timeout", f"{domain} did not answer in time.")
            except (ssl.SSLError, ValueError):
                failure = addresses.CallFailed("tls", f"TLS with {domain} failed.")
            except OSError:
                failure = addresses.CallFailed("connect", f"{domain} could not be reached.")
        raise failure

    async def _shake(self, address: str, port: int, domain: str) -> Certificate:
        _, writer = await asyncio.open_connection(address, port, ssl=self._tls, server_hostname=domain)
        try:
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        expires = x509.load_der_x509_certificate(shown).not_valid_after_utc
        return Certificate(hashlib.sha256(shown).hexdigest(), int(expires.timestamp() * 1000))


def judge(
    known: Mapping[str, str], domain: str, seen: Certificate, now: int
) -> tuple[dict[str, str], DomainExpiring | None]:
    """What is known from now on, and what is told. Pure; times in ms."""
    told = msgspec.json.decode(known["told"], type=list[str]) if known.get("domain") == domain else []
    event = None
    if seen.expires - now <= WINDOW and seen.fingerprint not in told:
        told = [*told, seen.fingerprint][-TOLD:]
        days = max(0, (seen.expires - now) // DAY)
        event = DomainExpiring(domain=domain, expiresAt=now_iso(seen.expires / 1000), daysLeft=days)
    record = {"domain": domain, "fingerprint": seen.fingerprint, "expiresAt": str(seen.expires)}
    return {**record, "told": msgspec.json.encode(told).decode()}, event

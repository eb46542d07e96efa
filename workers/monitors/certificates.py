"""Inspects the certificate of each verified custom domain, over a real TLS handshake.

The certificate is not verified, because invalid ones, such as expired ones, matter most. From 7 days before it
expires, the account is notified once per certificate: a renewed certificate has another fingerprint. A domain that
cannot be reached proves nothing: it is inspected again within the hour, and its last observation stays.
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
from cryptography.x509.oid import NameOID

from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneUnavailable
from gateway.events.catalog import DomainExpiring
from gateway.ids import new_id, now_iso
from gateway.monitors.keys import certificate_ends_key, certificate_key, certificates_key
from gateway.outbound.addresses import CallFailed, resolve
from gateway.redis.faults import code_of
from gateway.redis.partitions import PARTITION_TAGS
from gateway.settings import Settings
from workers.monitors.inspection_loop import Claim, InspectionLoop, Observation

logger = structlog.get_logger()

WINDOW = 7 * 86_400_000  # ms before the end
DAY = 86_400_000  # ms
BUDGET = 10.0  # seconds per inspection, from the look-up to the end of the handshake
INSPECTIONS = 100  # at a time, per worker
AFTER_START = 600.0  # seconds after a start within which every certificate is inspected once
AFTER_FAILURE = 3_600.0  # seconds at most until a domain that could not be reached is inspected again
REMEMBERED = 8  # fingerprints per domain: each of the servers behind it may have its own certificate
ISSUER_LENGTH = 100
BATCH = 1_000  # inspections brought forward per request


class Certificate(NamedTuple):
    fingerprint: str  # SHA-256, hexadecimal
    expires: int  # ms
    issuer: str = ""


class Certificates:
    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._store = settings, registry.store
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.check_hostname = False
        self._tls.verify_mode = ssl.CERT_NONE
        self._loop = InspectionLoop(
            registry,
            certificates_key,
            certificate_key,
            self._applies,
            self.inspect,
            interval=settings.certificate_interval,
            budget=BUDGET,
            at_a_time=INSPECTIONS,
        )

    async def run(self) -> None:
        await self._bring_forward()
        await self._loop.run()

    async def _bring_forward(self) -> None:
        """Moves inspections that are due later to soon: certificates kept ageing while no worker ran.

        When several workers start at once, all but the first find nothing to move.
        """
        soon = int(min(AFTER_START, self._settings.certificate_interval) * 1000)
        client, waiting = self._store.client, False
        for tag in PARTITION_TAGS:
            while True:
                end_if_canceled()
                try:
                    seconds, micros = await client.time()
                    at = seconds * 1000 + micros // 1000 + soon
                    key = certificates_key(tag)
                    later = await client.zrangebyscore(key, f"({at}", "+inf", start=0, num=BATCH)
                    if not later:
                        break
                    await client.zadd(key, dict.fromkeys(later, at), xx=True, lt=True)
                except BackboneUnavailable as error:
                    if not waiting:
                        logger.warning("certificates.waiting", partition=tag, error=code_of(error.__cause__))
                    waiting = True
                    await asyncio.sleep(1.0)

    @staticmethod
    def _applies(app: App, _: Account, __: bool) -> bool:
        return app.customDomain is not None and app.customDomainVerified

    async def inspect(self, claim: Claim) -> Observation:
        settings, domain = self._settings, claim.app.customDomain or ""
        try:
            certificate = await self._read_certificate(claim.app.account, domain)
        except CallFailed as error:
            logger.info("certificate.unseen", app=claim.app.id, domain=domain, reason=error.reason)
            return Observation({}, [], min(AFTER_FAILURE, settings.certificate_interval))
        known, event = step(claim.known, domain, certificate, claim.now())
        ends = certificate_ends_key(claim.tag)  # for operators; whoever reads it asks the app's record too
        await self._store.client.zadd(ends, {claim.app.id: certificate.expires})
        events = [] if event is None else [(new_id("evt"), event)]
        return Observation(known, events, settings.certificate_interval)

    async def _read_certificate(self, account: str, domain: str) -> Certificate:
        """Raises CallFailed."""
        host, _, port = (self._settings.certificate_address or f"{domain}:443").rpartition(":")
        # The operator may set an internal address.
        allow_private = bool(self._settings.certificate_address) or self._settings.allow_private_addresses
        try:
            async with asyncio.timeout(BUDGET):
                found = await resolve(host, int(port), tenant=account, allow_private=allow_private)
                return await self._try_addresses(found, domain)
        except TimeoutError as error:
            raise CallFailed("timeout", f"{domain} did not answer in time.") from error

    async def _try_addresses(self, found: list[tuple[str, int]], domain: str) -> Certificate:
        failure = CallFailed("connect", f"{domain} could not be reached.")
        for address, port in found:
            try:
                async with asyncio.timeout(BUDGET / len(found)):  # one that swallows packets leaves time for the next
                    return await self._handshake(address, port, domain)
            except TimeoutError:
                failure = CallFailed("timeout", f"{domain} did not answer in time.")
            except (ssl.SSLError, ValueError):
                failure = CallFailed("tls", f"TLS with {domain} failed.")
            except OSError:
                failure = CallFailed("connect", f"{domain} could not be reached.")
        raise failure

    async def _handshake(self, address: str, port: int, domain: str) -> Certificate:
        _, writer = await asyncio.open_connection(address, port, ssl=self._tls, server_hostname=domain)
        try:
            encoded = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        certificate = x509.load_der_x509_certificate(encoded)
        expires = int(certificate.not_valid_after_utc.timestamp() * 1000)
        return Certificate(hashlib.sha256(encoded).hexdigest(), expires, _name(certificate.issuer))


def _name(issuer: x509.Name) -> str:
    """The organization or, without one, the common name."""
    for kind in (NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME):
        for attribute in issuer.get_attributes_for_oid(kind):
            return str(attribute.value)[:ISSUER_LENGTH]
    return ""


def step(
    known: Mapping[str, str], domain: str, certificate: Certificate, now: int
) -> tuple[dict[str, str], DomainExpiring | None]:
    """Returns what to store from now on, and the event that follows. Pure; times in ms."""
    notified = msgspec.json.decode(known["told"], type=list[str]) if known.get("domain") == domain else []
    event = None
    if certificate.expires - now <= WINDOW and certificate.fingerprint not in notified:
        notified = [*notified, certificate.fingerprint][-REMEMBERED:]
        days = max(0, (certificate.expires - now) // DAY)
        event = DomainExpiring(domain=domain, expiresAt=now_iso(certificate.expires / 1000), daysLeft=days)
    record = {"domain": domain, "fingerprint": certificate.fingerprint, "expiresAt": str(certificate.expires)}
    return {**record, "issuer": certificate.issuer, "told": msgspec.json.encode(notified).decode()}, event

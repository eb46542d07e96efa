"""Inspects the certificate of each verified custom domain, over a real TLS handshake, those of an app at once.

The certificate is not verified, because invalid certificates, such as expired ones, matter most. From 7 days before it
expires, the account is notified once per certificate. A renewed certificate has another fingerprint. If a domain cannot
be reached, its last observation stays, and it is inspected again within the hour.
"""

import asyncio
import contextlib
import hashlib
import ssl

import structlog
from cryptography import x509
from cryptography.x509.oid import NameOID
from msgspec.structs import replace

from gateway.accounts.domain_observations import Certificate, read_certificates, write_certificates
from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.events.catalog import DomainExpiring, Event
from gateway.ids import new_id, now_iso
from gateway.keys import PARTITION_TAGS, certificate_ends_key, certificate_key, certificates_key
from gateway.outbound.addresses import CallFailed, resolve
from gateway.redis.client import patient
from gateway.settings import Settings
from workers.monitors.inspection_loop import InspectedApp, Inspection, InspectionLoop

logger = structlog.get_logger()

NOTICE_MS = 7 * 86_400_000  # before a certificate expires
DAY_MS = 86_400_000
BUDGET_SECONDS = 10.0  # per inspection, from the look-up to the end of the handshake
INSPECTIONS = 100  # at a time, per worker
AFTER_START_SECONDS = 600.0  # in which every certificate is inspected once after a start
AFTER_FAILURE_SECONDS = 3_600.0  # at most, until an unreachable domain is inspected again
REMEMBERED_FINGERPRINTS = 8  # per domain: each of the servers behind it may have its own certificate
ISSUER_CHARACTERS = 100
BATCH_APPS = 1_000  # whose inspections are moved per request


class Certificates:
    def __init__(self, settings: Settings, registry: Registry, *, budget_seconds: float = BUDGET_SECONDS) -> None:
        self._settings, self._store, self._budget = settings, registry.store, budget_seconds
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
            budget=budget_seconds,
            at_a_time=INSPECTIONS,
        )

    async def run(self) -> None:
        await self._bring_forward()
        await self._loop.run()

    async def _bring_forward(self) -> None:
        """Moves later inspections to the next minutes, because certificates may have changed while no worker ran.

        If several workers start at once, only the first one finds inspections to move.
        """
        for key in map(certificates_key, PARTITION_TAGS):
            while await patient(self, waiting="certificates.waiting")._move_inspections(key):
                pass

    async def _move_inspections(self, key: str) -> int:
        """Moves up to `BATCH_APPS` inspections. Returns their number. Raises BackboneUnavailable."""
        client = self._store.client
        seconds, micros = await client.time()
        soon = min(AFTER_START_SECONDS, self._settings.certificate_interval)
        at = seconds * 1000 + micros // 1000 + int(soon * 1000)
        later = await client.zrangebyscore(key, f"({at}", "+inf", start=0, num=BATCH_APPS)
        if later:
            await client.zadd(key, dict.fromkeys(later, at), xx=True, lt=True)
        return len(later)

    @staticmethod
    def _applies(app: App, _: Account, __: bool) -> bool:
        return bool(app.verified_domains)

    async def inspect(self, target: InspectedApp) -> Inspection:
        app, domains = target.app, target.app.verified_domains
        found = await asyncio.gather(*(self._try_to_read(app, domain) for domain in domains))
        seen = dict(zip(domains, found, strict=True))
        again = self._settings.certificate_interval
        if None in seen.values():
            again = min(AFTER_FAILURE_SECONDS, again)
        if not any(seen.values()):
            return Inspection({}, [], again)
        former = read_certificates(target.known)
        known, events = dict[str, Certificate](), list[tuple[str, Event]]()
        for domain, certificate in seen.items():
            if certificate is not None:
                known[domain], event = evaluate_certificate(former.get(domain), domain, certificate, target.now())
                events += [] if event is None else [(new_id("evt"), event)]
            elif domain in former:
                known[domain] = former[domain]
        record = write_certificates(known)
        ends = certificate_ends_key(target.tag)  # for operators; readers also check the app's record
        await self._store.client.zadd(ends, {app.id: int(record["expiresAt"])})
        return Inspection(record, events, again)

    async def _try_to_read(self, app: App, domain: str) -> Certificate | None:
        try:
            return await self._read_certificate(app.account, domain)
        except CallFailed as error:
            logger.info("certificate.unseen", app=app.id, domain=domain, reason=error.reason)
            return None

    async def _read_certificate(self, account: str, domain: str) -> Certificate:
        """Returns the certificate that the domain's server presents. Raises CallFailed."""
        host, _, port = (self._settings.certificate_address or f"{domain}:443").rpartition(":")
        # The operator may set an internal address.
        allow_private = bool(self._settings.certificate_address) or self._settings.allow_private_addresses
        try:
            async with asyncio.timeout(self._budget):
                found = await resolve(host, int(port), tenant=account, allow_private=allow_private)
                return await self._try_addresses(found, domain)
        except TimeoutError as error:
            raise CallFailed("timeout", f"{domain} did not answer in time.") from error

    async def _try_addresses(self, found: list[tuple[str, int]], domain: str) -> Certificate:
        failure = CallFailed("connect", f"{domain} could not be reached.")
        for address, port in found:
            try:
                # An address that swallows packets leaves time for the next one.
                async with asyncio.timeout(self._budget / len(found)):
                    return await self._handshake(address, port, domain)
            except TimeoutError:
                failure = CallFailed("timeout", f"{domain} did not answer in time.")
            except (ssl.SSLError, ValueError, x509.InvalidVersion):
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
        return Certificate(hashlib.sha256(encoded).hexdigest(), expires, _read_issuer(certificate.issuer))


def _read_issuer(issuer: x509.Name) -> str:
    """Returns the issuer's organization or, without one, its common name."""
    for kind in (NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME):
        for attribute in issuer.get_attributes_for_oid(kind):
            return str(attribute.value)[:ISSUER_CHARACTERS]
    return ""


def evaluate_certificate(
    known: Certificate | None, domain: str, certificate: Certificate, now: int
) -> tuple[Certificate, DomainExpiring | None]:
    """Returns the new record of the certificate, and the event that follows. A pure function; times are in ms."""
    notified = known.notified if known is not None else ()
    event = None
    if certificate.expires - now <= NOTICE_MS and certificate.fingerprint not in notified:
        notified = (*notified, certificate.fingerprint)[-REMEMBERED_FINGERPRINTS:]
        days = max(0, (certificate.expires - now) // DAY_MS)
        event = DomainExpiring(domain=domain, expiresAt=now_iso(certificate.expires / 1000), daysLeft=days)
    return replace(certificate, notified=notified), event

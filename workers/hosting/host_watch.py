"""Watches this host: its missing releases, its disk, and the service's own certificate.

Each finding is one line in the log when it begins and one when it ends. The report to Redis becomes gauges of the
gateways (`gateway/operations/overview.py`).
"""

import asyncio
import shutil
import ssl
import time
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import structlog
from cryptography import x509

from gateway.cancellation import run_in_thread
from gateway.deploys.serving import REPORT_SECONDS, HostReport, Records
from gateway.loops import every
from gateway.redis.client import Store
from gateway.settings import Settings
from workers.engine.reconciler import Reconciler
from workers.hosting import caddy
from workers.hosting.hold_engine import HostHold
from workers.hosting.releases import Releases

logger = structlog.get_logger()

WATCH_SECONDS = REPORT_SECONDS / 3  # between reports
LOW_DISK = 0.1  # free share of the disk
LATE_RENEWAL = 0.2  # of a certificate's lifetime; Caddy renews it when a third is left
HANDSHAKE_SECONDS = 10.0
NAMED_APPS = 5  # in a line of the log


class HostWatch:
    def __init__(
        self,
        settings: Settings,
        store: Store,
        releases: Releases,
        reconciler: Reconciler,
        hold: HostHold,
        *,
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        self._watch_seconds = watch_seconds
        self._store, self._records, self._reconciler, self._hold = store, Records(store), reconciler, hold
        self._host, self._folder = releases.folder_id(), releases.folder
        name = urlsplit(settings.api_url or settings.base_url).hostname
        self._own_name = name if settings.acme and settings.upstream else None
        self._findings: set[str] = set()  # that were logged and have not ended

    async def run(self) -> NoReturn:
        await every(self._watch_seconds, self.report, "sites.not_watched")

    async def report(self) -> None:
        """Raises BackboneUnavailable. What is found without Redis is logged nevertheless."""
        disk_free, certificate_left = await self._check_disk(), await self._check_certificate()
        missing = await self._check_releases()
        seconds, micros = await self._store.client.time()
        now = seconds * 1000 + micros // 1000
        report = HostReport(now, self._hold.is_elsewhere, missing, disk_free, certificate_left)
        await self._records.write_report(self._host, report)

    async def _check_releases(self) -> int:
        missing = await self._reconciler.find_missing()
        apps = sorted({wanted.app for wanted in missing})[:NAMED_APPS]
        action = "restore the data folder from a backup, or deploy these apps again; until then, visitors get 404"
        self._log("sites.releases_missing", bool(missing), addresses=len(missing), apps=apps, action=action)
        return len(missing)

    async def _check_disk(self) -> float:
        usage = await run_in_thread(shutil.disk_usage, self._folder)
        free = usage.free / usage.total if usage.total else 1.0  # some file systems do not say how large they are
        action = "free space on the disk of GATEWAY_DATA_DIR, or enlarge it"
        self._log("disk.low", free < LOW_DISK, free_mib=usage.free >> 20, percent=round(free * 100, 1), action=action)
        return free

    async def _check_certificate(self) -> float | None:
        if self._own_name is None:
            return None
        left = await read_certificate_left(self._folder, self._own_name)
        if left is not None:
            action = "read caddy/caddy.log in the data folder; the certificate authority may be out of reach"
            self._log("certificate.not_renewed", left < LATE_RENEWAL, name=self._own_name, action=action)
        return left

    def _log(self, finding: str, is_there: bool, **details: object) -> None:
        if is_there and finding not in self._findings:
            self._findings.add(finding)
            logger.error(finding, **details)
        elif not is_there and finding in self._findings:
            self._findings.discard(finding)
            logger.info(f"{finding}.ended")


async def read_certificate_left(folder: Path, name: str) -> float | None:
    """Returns the share of its lifetime that the certificate has left which Caddy presents for the name.

    None if Caddy presents none. The certificate is not verified, because expired ones matter most.
    """
    address = urlsplit(caddy.read_address(folder))
    if not address.netloc:  # Caddy has not been started here yet
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            _, writer = await asyncio.open_connection(address.hostname, address.port, ssl=tls, server_hostname=name)
    except (OSError, TimeoutError):  # other alerts fire if Caddy does not answer
        return None
    encoded = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    certificate = x509.load_der_x509_certificate(encoded)
    begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return max(0.0, (ends - time.time()) / (ends - begins))

"""The leases of hosts: a host may run apps with data only while it holds its lease.

Every second, each host renews its lease in Redis, and reads the leases of the others. It stops its apps `LEASE_SECONDS`
after the last renewal that succeeded. The others take its apps over once they have seen no renewal for
`TAKEOVER_SECONDS`, by their own clocks. So no two hosts run an app at once, even if the clock of Redis is set, or Redis
loses its last writes.

    web/lease                      this host's lease, which the keepers read (`workers/sandbox/lease.py`)
    releases/<app id>/live/lease   link to it: the app may run. The app is killed when the link is removed

All claims of a host belong to a session. A lease that ran out is never renewed: the host begins another session, and
claims its apps again. A worker that starts continues the session of the last one, if the lease has not run out.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from gateway.cancellation import end_if_canceled
from gateway.deploys import scripts
from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store
from workers.sandbox import lease
from workers.sandbox.lease import Lease

logger = structlog.get_logger()

RENEWAL_SECONDS = 1.0
LEASE_SECONDS = 11.0  # after which the keepers kill the apps; less than the next, with time for the killing
TAKEOVER_SECONDS = 15.0
STEADY_SECONDS = 3.0  # of renewals without a gap, before this host judges the others: all may have lost Redis
KEPT_MS = 3_600_000  # that the lease of a host that left is kept
FORGET_SECONDS = 600.0  # after which it is forgotten when a session without a lease was first seen
PRESENT_SECONDS = 5.0  # without a renewal, after which a host does not count as present


class HostLease(msgspec.Struct, frozen=True):
    """A lease in Redis."""

    session: str
    renewal: str  # random: each renewal changes the text
    address: str = ""  # host:port, where other hosts reach its Caddy


class Observed(msgspec.Struct):
    """The lease of another host, and since when it has not changed."""

    text: str
    lease: HostLease
    since: float
    left: bool = False  # it has ended its lease


class Leases:
    """The lease of this host, and what it knows of the others."""

    def __init__(self, store: Store, folder: Path, host: str, find_address: Callable[[], str]) -> None:
        self._store, self._host, self._find_address = store, host, find_address
        self.path = folder / "web" / "lease"
        self._session, self._ends, self._is_fresh = "", 0.0, False
        self._others: dict[str, Observed] = {}
        self._first_seen: dict[tuple[str, str], float] = {}  # when a session without a lease was first asked for
        self._steady_since = self._read_at = float("-inf")

    @property
    def session(self) -> str:
        """The session of this host; empty while it holds no lease."""
        return self._session if self.is_held() else ""

    def is_held(self) -> bool:
        return bool(self._session) and lease.now() < self._ends

    def resume(self) -> bool:
        """Continues the session of the worker before this one. Returns False if its lease ran out."""
        former = lease.read_lease(self.path)
        if former is None or lease.now() >= former.ends:
            return False
        self._session, self._ends = former.session, former.ends
        return True

    def begin_session(self) -> None:
        """Begins another session. The apps of the last one have ended."""
        self._session, self._ends, self._is_fresh = secrets.token_hex(8), 0.0, True

    async def renew(self) -> None:
        """Renews the lease, and reads the others. Raises BackboneUnavailable."""
        own = HostLease(self._session, secrets.token_hex(8), self._find_address())
        sent = lease.now()
        found = await scripts.renew_lease(self._store, self._host, msgspec.json.encode(own).decode(), KEPT_MS)
        if self.is_held() or self._is_fresh:  # otherwise it ran out before the answer came
            self._ends, self._is_fresh = sent + LEASE_SECONDS, False
            lease.write_lease(self.path, Lease(self._session, self._ends))
        self._observe(found)

    def _observe(self, found: dict[str, str]) -> None:
        now = time.monotonic()
        if now - self._read_at > STEADY_SECONDS:
            self._steady_since = now
        self._read_at = now
        self._first_seen = {asked: since for asked, since in self._first_seen.items() if now - since < FORGET_SECONDS}
        for host, text in found.items():
            known = self._others.get(host)
            if host != self._host and (known is None or known.text != text):
                self._others[host] = Observed(text, msgspec.json.decode(text, type=HostLease), now)
        for host, known in self._others.items():
            known.left = host not in found

    async def end(self) -> None:
        """Ends the lease: this host has given up its apps. Raises BackboneUnavailable."""
        self._ends = 0.0
        self.path.unlink(missing_ok=True)
        await scripts.renew_lease(self._store, self._host, "", KEPT_MS)

    # -- the other hosts -------------------------------------------------------------------------------------

    def find_address(self, host: str, session: str) -> str:
        """Returns where the other host is reached; empty if it has left, or has begun another session."""
        known = self._others.get(host)
        gone = known is None or known.lease.session != session or self.has_ended(host, session)
        return "" if gone or known is None else known.lease.address

    def has_ended(self, host: str, session: str) -> bool:
        """Returns whether the session has ended, so that no app runs that the host claimed in it."""
        now, known = time.monotonic(), self._others.get(host)
        if host == self._host:
            return session != self._session
        if known is not None and known.lease.session != session:
            return True  # the host itself has ended it
        since = known.since if known is not None else self._first_seen.setdefault((host, session), now)
        return now - since > TAKEOVER_SECONDS and self.is_steady()

    def is_steady(self) -> bool:
        """Returns whether this host has read the leases without a gap for a while."""
        return self._read_at - self._steady_since > STEADY_SECONDS > time.monotonic() - self._read_at

    def list_present(self) -> list[str]:
        """Lists the hosts that renew their leases now, with this one."""
        now = time.monotonic()
        others = (host for host, it in self._others.items() if now - it.since < PRESENT_SECONDS and not it.left)
        return sorted({self._host, *others})

    async def keep(self) -> None:
        """Renews the lease until canceled. Raises LeaseLost when it has run out."""
        while True:
            try:
                async with asyncio.timeout(LEASE_SECONDS / 2):
                    await self.renew()
            except (BackboneUnavailable, TimeoutError):
                pass
            except OSError as error:  # the disk is full
                logger.error("sites.lease_not_written", error=error.strerror)
            end_if_canceled()
            if not self.is_held() and not self._is_fresh:
                raise LeaseLost
            await asyncio.sleep(RENEWAL_SECONDS)


class LeaseLost(Exception):
    """The lease ran out: Redis did not answer, or this worker stood still."""

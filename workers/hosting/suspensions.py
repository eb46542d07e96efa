"""Marks the sites of suspended apps on this host. Caddy answers their requests with 503 (`Caddyfile`), and the watchdog
stops their start commands.

The list of suspended apps is in Redis (`gateway/accounts/suspended.py`). The marks are in the data folder. So while
Redis is unavailable, what was suspended stays suspended, and everything else is served.
"""

import time
from contextlib import suppress
from typing import NoReturn

from gateway.accounts.suspended import SuspendedList
from gateway.cancellation import run_in_thread
from gateway.errors import BackboneUnavailable
from gateway.loops import every
from gateway.redis.client import Store
from workers.hosting.releases import Releases, Site

POLL_SECONDS = 0.2  # between reads of the versions of the lists
REREAD_SECONDS = 60.0  # between reads of all lists


class Suspensions:
    def __init__(self, store: Store, releases: Releases) -> None:
        self._list, self._releases = SuspendedList(store), releases
        self._known = False  # whether the lists have been read
        self._seen: dict[str, int] = {}  # by app: the time of the last change of its sites that has been marked
        self._changes = 0  # of the lists, that have been marked
        self._reread_at = 0.0

    async def catch_up(self) -> None:
        """Marks all sites, unless Redis is unavailable."""
        with suppress(BackboneUnavailable):
            await self._update()

    async def run(self) -> NoReturn:
        """Runs until canceled."""
        await every(POLL_SECONDS, self._update, "sites.suspensions_not_marked")

    async def _update(self) -> None:
        """Raises BackboneUnavailable, after it has marked sites by what is known."""
        now = time.monotonic()
        try:
            await self._list.read_changes(everything=now >= self._reread_at)
            if now >= self._reread_at:
                self._reread_at = now + REREAD_SECONDS
            self._known = True
        finally:
            if self._known:
                await run_in_thread(self._mark_changed)

    def _mark_changed(self) -> None:
        """Marks the sites of the apps whose sites or suspensions may have changed."""
        if self._list.changes != self._changes:
            self._changes = self._list.changes
            self._seen.clear()
        present = self._releases.list_apps()
        for app_id, changed in present.items():
            if self._seen.get(app_id) != changed:
                for site in self._releases.sites_of(app_id):
                    self.mark(site)
                self._seen[app_id] = changed
        for app_id in self._seen.keys() - present.keys():
            del self._seen[app_id]

    def mark(self, site: Site) -> None:
        """Marks one site by what is known, such as one whose folder was just made."""
        if self._known and site.account:
            site.set_suspended(suspended=(site.account, site.app_id) in self._list)

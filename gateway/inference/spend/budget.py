"""Queues notices when the spend of an account or an app reaches 80% or 100% of its daily cap.

Each admission knows how much of the caps is used, so watching costs a request two comparisons. A cap that is nearly
full is reported in the background, by each process at most once per minute. Redis decides whether the notice was queued
before. While Redis is unavailable, the latest report of each cap waits.
"""

import asyncio
import time
from typing import NamedTuple

from gateway.accounts.records import App
from gateway.events.notices import BudgetUse, Notices
from gateway.redis.client import patient
from gateway.telemetry.usage import LimitUses

REPORT_SECONDS = 60.0  # between two reports of one cap at the same level
MAX_CAPS = 10_000  # that a process remembers; beyond that, it reports some more often


class _Report(NamedTuple):
    at: float  # monotonic seconds
    use: BudgetUse


Payer = tuple[str, tuple[str, str] | None]  # the account, and the id and name of the app whose cap it is


class BudgetWatch:
    def __init__(self, notices: Notices, *, report_seconds: float = REPORT_SECONDS) -> None:
        self._notices, self._report_seconds = patient(notices), report_seconds
        self._reported: dict[Payer, _Report] = {}
        self._waiting: dict[Payer, BudgetUse] = {}
        self._has_waiting = asyncio.Event()

    def observe(self, app: App, day: str, verdict: str, uses: LimitUses) -> None:
        """Looks at the caps after the decision about a request."""
        of_account, of_app, *_ = uses
        if of_account is not None and (of_account[1] * 5 >= of_account[0] * 4 or verdict == "cap"):
            self._report((app.account, None), *of_account, day, verdict == "cap")
        if of_app is not None and (of_app[1] * 5 >= of_app[0] * 4 or verdict == "app_cap"):
            self._report((app.account, (app.id, app.name)), *of_app, day, verdict == "app_cap")

    def _report(self, payer: Payer, cap: int, used: int, day: str, refused: bool) -> None:
        use, now = BudgetUse(100 if refused or used >= cap else 80, used, cap, day), time.monotonic()
        last = self._reported.get(payer)
        if last and last.use.day == day and last.use.level >= use.level and now - last.at < self._report_seconds:
            return
        if len(self._reported) >= MAX_CAPS:
            self._reported.clear()
        self._reported[payer] = _Report(now, use)
        self._waiting[payer] = use
        self._has_waiting.set()

    async def keep_reporting(self) -> None:
        """Queues the notices. Runs for the life of the process."""
        while True:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            while self._waiting:
                (account_id, app), use = self._waiting.popitem()
                await self._notices.queue_budget(account_id, app, use)

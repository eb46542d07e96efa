"""After how many seconds an app sleeps, by its account's plan. An app whose plan is not known stays awake."""

from collections.abc import Mapping
from contextlib import suppress

import msgspec

from gateway.accounts.registry import Registry
from gateway.errors import ServiceError
from gateway.settings import Plan


class SleepLimits:
    """After how many seconds apps sleep. While Redis is unavailable, the plans count that were known last."""

    def __init__(self, registry: Registry, seconds: Mapping[str, float]) -> None:
        """`seconds`: without a request, by plan; 0 or no entry: never."""
        self._registry, self._seconds = registry, seconds
        self._plans = dict[str, Plan]()  # by app

    async def find(self, app_id: str, *, is_preview: bool = False) -> float | None:
        """Returns the seconds after which the app sleeps. None: it stays awake, for now.

        With `is_preview`, it sleeps as an app of the plan `free` does.
        """
        if not any(self._seconds.values()):
            return None
        with suppress(ServiceError, msgspec.MsgspecError):
            app = await self._registry.find_app(app_id)
            account = None if app is None else await self._registry.account_of(app)
            self._plans.pop(app_id, None)
            if account is not None:
                self._plans[app_id] = account.plan
        plan = self._plans.get(app_id, "")
        return self._seconds.get("free" if is_preview and plan else plan) or None

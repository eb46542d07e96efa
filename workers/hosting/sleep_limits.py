"""After how many seconds an app sleeps, by its account's plan. An app whose plan is not known stays awake."""

from collections.abc import Mapping
from contextlib import suppress

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
        await self.read(app_id)
        return self.find_known(app_id, is_preview=is_preview)

    async def read(self, *app_ids: str) -> None:
        """Reads the plans of these apps."""
        if any(self._seconds.values()):
            with suppress(ServiceError):
                found, damaged = await self._registry.read_intact_apps(app_ids)
                for app_id in {*app_ids} - found.keys() - damaged.keys():
                    self._plans.pop(app_id, None)
                self._plans |= {app_id: account.plan for app_id, (_, account) in found.items()}

    def find_known(self, app_id: str, *, is_preview: bool = False) -> float | None:
        """Like `find`, by the plan that was read last."""
        plan = self._plans.get(app_id, "")
        return self._seconds.get("free" if is_preview and plan else plan) or None

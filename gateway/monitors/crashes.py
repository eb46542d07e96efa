"""The crashes of an app: each is an event for its account, and is kept with the last lines of the app's output.

The last 20 crashes of an app are kept for 30 days.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from gateway.accounts.records import App
from gateway.events.catalog import AppCrashed
from gateway.events.webhooks import Webhooks
from gateway.ids import Time
from gateway.keys import crashes_key, partition_tag
from gateway.redis.client import Store

MAX_CRASHES = 20  # of one app
KEPT_SECONDS = 30 * 86_400
MAX_LINES = 20  # of one crash
MAX_CHARACTERS = 4_096  # of all lines of a crash


class Crash(msgspec.Struct):
    at: Time
    reason: Literal["exit", "oom"]
    exitCode: int | None
    lines: list[str]  # the last lines of the output; empty if not known


class Crashes:
    def __init__(self, store: Store, webhooks: Webhooks) -> None:
        self._store, self._webhooks = store, webhooks

    async def report(self, app: App, crash: AppCrashed, event_id: str = "", lines: Sequence[str] = ()) -> str:
        """Queues the event, keeps the crash, and returns the event's id. Raises BackboneUnavailable.

        With an `event_id`, repeated calls report one crash.
        """
        queued = await self._webhooks.emit(app, crash, event_id)
        text = "\n".join(lines[-MAX_LINES:])[-MAX_CHARACTERS:]
        kept = Crash(crash.at, crash.reason, crash.exitCode, text.split("\n") if text else [])
        key = crashes_key(partition_tag(app.account), app.id)
        fields = {"event": queued, "crash": msgspec.json.encode(kept).decode()}
        async with self._store.client.pipeline(transaction=False) as pipeline:
            pipeline.xadd(key, fields, maxlen=MAX_CRASHES, approximate=False)
            pipeline.expire(key, KEPT_SECONDS)
            await pipeline.execute()
        return queued

    async def has(self, app: App, event_id: str) -> bool:
        """Returns whether this crash is among those that are kept."""
        entries = await self._store.client.xrevrange(crashes_key(partition_tag(app.account), app.id))
        return any(fields["event"] == event_id for _, fields in entries)

    async def list(self, app: App) -> list[Crash]:
        """Returns the kept crashes, newest first."""
        entries = await self._store.client.xrevrange(crashes_key(partition_tag(app.account), app.id))
        # A repeated report is one crash.
        by_event = {fields["event"]: fields["crash"] for _, fields in entries}
        return [msgspec.json.decode(text, type=Crash) for text in by_event.values()]

"""Runs the scripts of events in the order in which an event passes through them: emit, claim, record."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.lua.scripts import TAG, source

STREAM, LOG, OUTCOMES = f"{TAG}:events", f"{TAG}:deliveries:acc", f"{TAG}:outcomes"
BODIES, STORED, DEAD = f"{LOG}:bodies", f"{STREAM}:stored", f"{TAG}:dead"
EVENT_KEYS = [STREAM, LOG, OUTCOMES, BODIES, STORED]
DELETIONS = f"{TAG}:deletions"
RECEIVER, PREVIOUS = f"{TAG}:webhook:acc", f"{TAG}:previous-secret:acc"
GROUP = "webhooks"
DATA = '{"appId":"é","n":1}'


class Entry(NamedTuple):
    id: str
    fields: dict[str, str]


class Deliveries:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._scripts: dict[str, Callable[..., Any]] = {}

    def script(self, name: str, **bounds: int) -> Callable[..., Any]:
        return self._scripts.setdefault(f"{name}{bounds}", self.client.register_script(source(name, **bounds)))

    def emit(self, event: str = "evt_1", data: str = DATA, **bounds: int) -> str:
        keys, args = EVENT_KEYS, [event, "acc", "shop", "app.crashed", data]
        return self.script("events/emit_event", **bounds)(keys, args).decode()

    def read(self, consumer: str = "one", last: str = ">") -> list[Entry]:
        if not self.client.exists(STREAM) or not self.client.xinfo_groups(STREAM):
            self.client.xgroup_create(STREAM, GROUP, "0", mkstream=True)
        found = self.client.xreadgroup(GROUP, consumer, {STREAM: last})
        return [Entry(i.decode(), _text(fields)) for i, fields in (found[0][1] if found else [])]

    def claim(self, entry: Entry, consumer: str = "one") -> tuple[int, str, str, int]:
        """Returns the reply without the secret before the last rotation."""
        mine, receiver, data, _, attempt = self.claim_with_secret(entry, consumer)
        return mine, receiver, data, attempt

    def claim_with_secret(self, entry: Entry, consumer: str = "one") -> tuple[int, str, str, str, int]:
        keys = [STREAM, RECEIVER, BODIES, PREVIOUS, DELETIONS]
        args = [GROUP, consumer, entry.id, entry.fields["id"], entry.fields["account"]]
        mine, *found, attempt = self.script("events/claim_delivery")(keys, args)
        receiver, data, previous = (each.decode() for each in found)
        return mine, receiver, data, previous, attempt

    def record(
        self,
        entry: Entry,
        outcome: str = "delivered",
        status: Any = 204,
        reason: str = "",
        answer: tuple[str, str, str] = ("", "", ""),
        **bounds: int,
    ) -> int:
        fields = entry.fields
        event = [fields["id"], fields["account"], fields["app"], fields["type"]]
        marks = [fields.get("sample", ""), fields.get("redelivery", "")]
        args = [GROUP, entry.id, *event, outcome, 1782979200123, 45, status, reason, *answer, *marks]
        return self.script("events/record_delivery", **bounds)(EVENT_KEYS, args)

    def set_idle(self, *entries: Entry, consumer: str = "one", idle: int = 0) -> int:
        return self.script("set_entry_idle")([STREAM], [GROUP, consumer, idle, *(e.id for e in entries)])

    def pending(self) -> dict[str, tuple[str, int]]:
        """Returns each pending entry's worker and its idle time in ms."""
        found = self.client.xpending_range(STREAM, GROUP, "-", "+", 1000)
        return {p["message_id"].decode(): (p["consumer"].decode(), p["time_since_delivered"]) for p in found}

    def dead_letter(self, entry: Entry, *, complete: bool = True, **bounds: int) -> int:
        keys, args = [STREAM, DEAD], [GROUP, entry.id, "events", "ValueError: why", "{}"]
        if complete:
            keys += EVENT_KEYS[1:]
            args += [entry.fields[name] for name in ("id", "account", "app", "type")]
            args += [entry.fields.get(name, "") for name in ("sample", "redelivery")]
        return self.script("events/dead_letter", **bounds)(keys, args)

    def request(self, event: str) -> str:
        """Queues an event of the log again."""
        verdict, _ = self.script("events/request_event")(
            [*EVENT_KEYS, f"{TAG}:window:events:acc"], [1000, event, "acc"]
        )
        return verdict.decode()

    def redeliver(self, *events: tuple[str, int], **bounds: int) -> int:
        """Queues events again, each with the number of its entries in the log."""
        args = [part for event, entries in events for part in (event, "shop", "app.crashed", "", "1", entries)]
        return self.script("events/redeliver_events", **bounds)(EVENT_KEYS, ["acc", *args])

    def deliver(self, event: str, data: str = DATA, **bounds: int) -> None:
        """Emits an event and records its outcome."""
        self.emit(event, data, **bounds)
        for entry in self.read():
            self.record(entry, **bounds)

    def bodies(self) -> dict[str, str]:
        return _text(self.client.hgetall(BODIES))

    def stored(self) -> int:
        return int(self.client.zscore(STORED, "acc") or 0)

    def log(self) -> list[dict[str, str]]:
        return [_text(fields) for _, fields in self.client.xrange(LOG)]

    def outcomes(self) -> dict[str, int]:
        return {k: int(v) for k, v in _text(self.client.hgetall(OUTCOMES)).items()}


def _text(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in fields.items()}

"""An event's way through Redis: queued or dropped, begun by one worker, finished once, and logged."""

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from gateway.store.client import LUA
from tests.lua.scripts import TAG

STREAM, LOG, OUTCOMES = f"{TAG}:events", f"{TAG}:deliveries:acc", f"{TAG}:outcomes"
RECEIVER = f"{TAG}:webhook:acc"
GROUP = "webhooks"
DATA = '{"appId":"é","n":1}'


def text(name: str, **bounds: int) -> str:
    """A script with what it uses, and other bounds than production's."""
    own = (LUA / f"{name}.lua").read_text()
    used = [(LUA / f"{other}.lua").read_text() for other in re.findall(r"^-- uses (\w+)$", own, re.MULTILINE)]
    whole = "\n".join([*used, own])
    for bound, value in bounds.items():
        whole, count = re.subn(rf"^(local {bound} = )\S+", rf"\g<1>{value}", whole, flags=re.MULTILINE)
        assert count == 1, f"{name}.lua must set {bound} once"
    return whole


class Entry(NamedTuple):
    id: str
    fields: dict[str, str]


class Deliveries:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._scripts: dict[str, Callable[..., Any]] = {}

    def script(self, name: str, **bounds: int) -> Callable[..., Any]:
        return self._scripts.setdefault(f"{name}{bounds}", self.client.register_script(text(name, **bounds)))

    def emit(self, event: str = "evt_1", **bounds: int) -> str:
        keys, args = [STREAM, LOG, OUTCOMES], [event, "acc", "shop", "app.crashed", DATA]
        return self.script("emit", **bounds)(keys, args).decode()

    def read(self, consumer: str = "one", last: str = ">") -> list[Entry]:
        if not self.client.exists(STREAM) or not self.client.xinfo_groups(STREAM):
            self.client.xgroup_create(STREAM, GROUP, "0", mkstream=True)
        found = self.client.xreadgroup(GROUP, consumer, {STREAM: last})
        return [Entry(i.decode(), _text(fields)) for i, fields in (found[0][1] if found else [])]

    def begin(self, entry: Entry, consumer: str = "one") -> tuple[int, str]:
        mine, receiver = self.script("begin")([STREAM, RECEIVER], [GROUP, consumer, entry.id])
        return mine, receiver.decode()

    def finish(
        self, entry: Entry, outcome: str = "delivered", status: Any = 204, reason: str = "", **bounds: int
    ) -> int:
        fields = entry.fields
        event = [fields["id"], fields["account"], fields["app"], fields["type"], fields["data"]]
        args = [GROUP, entry.id, *event, outcome, 1782979200123, 45, status, reason]
        return self.script("finish", **bounds)([STREAM, LOG, OUTCOMES], args)

    def keep(self, *entries: Entry, consumer: str = "one", idle: int = 0) -> int:
        return self.script("keep")([STREAM], [GROUP, consumer, idle, *(e.id for e in entries)])

    def pending(self) -> dict[str, tuple[str, int]]:
        """Entry → its worker and its idle time, ms."""
        found = self.client.xpending_range(STREAM, GROUP, "-", "+", 1000)
        return {p["message_id"].decode(): (p["consumer"].decode(), p["time_since_delivered"]) for p in found}

    def log(self) -> list[dict[str, str]]:
        return [_text(fields) for _, fields in self.client.xrange(LOG)]

    def outcomes(self) -> dict[str, int]:
        return {k: int(v) for k, v in _text(self.client.hgetall(OUTCOMES)).items()}


def _text(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in fields.items()}


@pytest.fixture
def deliveries(client: Any) -> Deliveries:
    return Deliveries(client)


def test_queued(deliveries: Deliveries) -> None:
    assert deliveries.emit() == "queued"
    (entry,) = deliveries.read()
    at = int(entry.fields.pop("at"))
    assert abs(at - time.time() * 1000) < 5000
    assert entry.fields == {"id": "evt_1", "account": "acc", "app": "shop", "type": "app.crashed", "data": DATA}
    assert deliveries.log() == []


def test_a_full_stream_refuses_logs_and_counts_and_trims_nothing(deliveries: Deliveries) -> None:
    for number in range(5):
        assert deliveries.emit(f"evt_{number}", WAITING=5) == "queued"
    deliveries.read()  # what is read waits all the same
    for number in range(5, 8):
        assert deliveries.emit(f"evt_{number}", WAITING=5) == "dropped"
    assert len(deliveries.pending()) == deliveries.client.xlen(STREAM) == 5
    assert [row["id"] for row in deliveries.log()] == ["evt_5", "evt_6", "evt_7"]
    row = deliveries.log()[0]
    assert abs(int(row.pop("at")) - time.time() * 1000) < 5000
    assert row == {
        "id": "evt_5",
        "type": "app.crashed",
        "app": "shop",
        "data": DATA,
        "durationMs": "0",
        "outcome": "dropped",
        "status": "",
        "error": "overflow",
    }
    assert deliveries.outcomes() == {"dropped": 3, "dropped:overflow": 3}
    (first, *_) = deliveries.read(last="0")
    deliveries.finish(first)
    assert deliveries.emit("evt_8", WAITING=5) == "queued", "an outcome makes room"


def test_begun_by_the_worker_it_is_pending_for(deliveries: Deliveries) -> None:
    deliveries.emit()
    (entry,) = deliveries.read("one")
    assert deliveries.begin(entry, "one") == (1, "")
    deliveries.client.set(RECEIVER, "{}")
    assert deliveries.begin(entry, "one") == (1, "{}")
    assert deliveries.begin(entry, "two") == (0, "")
    assert deliveries.begin(entry, "nobody") == (0, "")
    deliveries.client.xclaim(STREAM, GROUP, "two", 0, [entry.id])
    assert deliveries.begin(entry, "one") == (0, "")
    assert deliveries.begin(entry, "two") == (1, "{}")
    deliveries.finish(entry)
    assert deliveries.begin(entry, "two") == (0, "")


def test_beginning_keeps_others_from_claiming(deliveries: Deliveries) -> None:
    deliveries.emit()
    (entry,) = deliveries.read()
    deliveries.keep(entry, idle=60_000)
    assert deliveries.pending()[entry.id][1] >= 60_000
    deliveries.begin(entry)
    assert deliveries.pending()[entry.id][1] < 5_000


def test_finished_once(deliveries: Deliveries) -> None:
    deliveries.emit("evt_1")
    deliveries.emit("evt_2")
    first, second = deliveries.read()
    assert deliveries.finish(first) == 1
    assert deliveries.finish(first) == 0
    assert deliveries.finish(first, "failed", 500, "status") == 0
    assert deliveries.pending().keys() == {second.id}
    assert deliveries.client.xlen(STREAM) == 1
    assert deliveries.finish(second, "failed", "", "timeout") == 1
    one, two = deliveries.log()
    assert one == {
        "id": "evt_1",
        "type": "app.crashed",
        "app": "shop",
        "data": DATA,
        "at": "1782979200123",
        "durationMs": "45",
        "outcome": "delivered",
        "status": "204",
        "error": "",
    }
    assert (two["id"], two["outcome"], two["status"], two["error"]) == ("evt_2", "failed", "", "timeout")
    assert deliveries.outcomes() == {"delivered": 1, "failed": 1, "failed:timeout": 1}


def test_whoever_knows_the_outcome_writes_it(deliveries: Deliveries) -> None:
    """The first worker was only slow: its answer counts, and the second's does not."""
    deliveries.emit()
    (entry,) = deliveries.read("one")
    deliveries.client.xclaim(STREAM, GROUP, "two", 0, [entry.id])
    assert deliveries.finish(entry) == 1
    assert deliveries.finish(entry, "failed", "", "timeout") == 0
    assert [row["outcome"] for row in deliveries.log()] == ["delivered"]


def test_the_log_has_a_bound_and_an_end(deliveries: Deliveries) -> None:
    for number in range(12):
        deliveries.emit(f"evt_{number}")
        (entry,) = deliveries.read()
        deliveries.finish(entry, LOGGED=10)
    assert [row["id"] for row in deliveries.log()] == [f"evt_{n}" for n in range(2, 12)]
    assert 30 * 86400 - 60 < deliveries.client.ttl(LOG) <= 30 * 86400
    assert re.search(r"^local LOGGED = 1000\b", text("finish"), re.MULTILINE)
    assert re.search(r"^local WAITING = 100000\b", text("emit"), re.MULTILINE)


def test_only_what_is_the_workers_own_is_kept(deliveries: Deliveries) -> None:
    for number in range(4):
        deliveries.emit(f"evt_{number}")
    entries = deliveries.read("one")
    deliveries.keep(*entries, idle=60_000)
    deliveries.client.xclaim(STREAM, GROUP, "two", 0, [entries[1].id], idle=60_000)
    deliveries.finish(entries[2])
    assert deliveries.keep(*entries) == 2
    pending = deliveries.pending()
    assert [pending[e.id][0] for e in (entries[0], entries[1], entries[3])] == ["one", "two", "one"]
    assert [pending[e.id][1] < 5_000 for e in (entries[0], entries[1], entries[3])] == [True, False, True]
    assert deliveries.keep(*entries, consumer="nobody") == 0


def test_what_is_given_back_is_anybodys(deliveries: Deliveries) -> None:
    deliveries.emit()
    (entry,) = deliveries.read("one")
    _, claimed, *_ = deliveries.client.xautoclaim(STREAM, GROUP, "two", 15_000, "0-0")
    assert claimed == []
    deliveries.keep(entry, idle=150_000)
    _, claimed, *_ = deliveries.client.xautoclaim(STREAM, GROUP, "two", 15_000, "0-0")
    assert [i.decode() for i, _ in claimed] == [entry.id]
    assert deliveries.begin(entry, "one") == (0, "")

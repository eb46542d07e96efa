"""The outcome of an event is recorded once, and logged."""

import re
import time

from tests.lua.deliveries import BODIES, DATA, LOG, STREAM, Deliveries
from tests.lua.scripts import ON_VALKEY, source


def test_finished_once(deliveries: Deliveries) -> None:
    deliveries.emit("evt_1")
    deliveries.emit("evt_2")
    first, second = deliveries.read()
    assert deliveries.record(first, answer=("https://example.com/hooks", '{"Server":"x"}', "ok")) == 1
    assert deliveries.record(first) == 0
    assert deliveries.record(first, "failed", 500, "status") == 0
    assert deliveries.pending().keys() == {second.id}
    assert deliveries.client.xlen(STREAM) == 1
    assert deliveries.record(second, "failed", "", "timeout") == 1
    one, two = deliveries.log()
    event = {"id": "evt_1", "type": "app.crashed", "app": "shop", "at": "1782979200123", "durationMs": "45"}
    answer = {"url": "https://example.com/hooks", "headers": '{"Server":"x"}', "body": "ok"}
    assert one == event | {"outcome": "delivered", "status": "204", "error": ""} | answer
    assert (two["id"], two["outcome"], two["status"], two["error"]) == ("evt_2", "failed", "", "timeout")
    assert deliveries.outcomes() == {"delivered": 1, "failed": 1, "failed:timeout": 1}


# The data of events is stored once


def test_the_data_goes_with_the_last_reference(deliveries: Deliveries) -> None:
    """The stream, the log and a redelivery share one copy."""
    deliveries.deliver("evt_1", MAX_DELIVERIES=3)
    assert deliveries.request("evt_1") == "queued"
    deliveries.deliver("evt_2", MAX_DELIVERIES=3)
    assert [row["id"] for row in deliveries.log()] == ["evt_1", "evt_1", "evt_2"]
    assert deliveries.bodies() == {"evt_1": DATA, "evt_1:more": "1", "evt_2": DATA}
    deliveries.deliver("evt_3", MAX_DELIVERIES=3)
    assert deliveries.bodies() == {"evt_1": DATA, "evt_2": DATA, "evt_3": DATA}
    deliveries.deliver("evt_4", MAX_DELIVERIES=3)
    assert deliveries.bodies() == {"evt_2": DATA, "evt_3": DATA, "evt_4": DATA}
    assert 30 * 86400 - 60 < deliveries.client.ttl(BODIES) <= 30 * 86400


def test_an_event_that_waits_keeps_its_data(deliveries: Deliveries) -> None:
    """Its first delivery may leave the log meanwhile."""
    deliveries.deliver("evt_1", MAX_DELIVERIES=1)
    deliveries.request("evt_1")
    (waiting,) = deliveries.read()
    deliveries.deliver("evt_2", MAX_DELIVERIES=1)
    assert deliveries.claim(waiting)[2] == DATA
    deliveries.record(waiting, MAX_DELIVERIES=1)
    assert deliveries.bodies() == {"evt_1": DATA}


@ON_VALKEY
def test_what_is_counted_is_what_is_there(deliveries: Deliveries) -> None:
    for number in range(30):
        deliveries.deliver(f"evt_{number}", "é" * number, MAX_DELIVERIES=10)
        if number % 3 == 0:
            deliveries.request(f"evt_{number}")
    for entry in deliveries.read():
        deliveries.record(entry, MAX_DELIVERIES=10)
    rows = deliveries.log()
    assert (len(rows), rows[-1]["id"]) == (10, "evt_29"), "the log has a bound"
    assert 30 * 86400 - 60 < deliveries.client.ttl(LOG) <= 30 * 86400
    assert re.search(r"^local MAX_DELIVERIES = 1000\b", source("events/record_delivery"), re.MULTILINE)
    assert re.search(r"^local MAX_WAITING = 100000\b", source("events/emit_event"), re.MULTILINE)
    logged = sum(150 + sum(len(value.encode()) for value in row.values()) for row in rows)
    held = {event: data for event, data in deliveries.bodies().items() if not event.endswith(":more")}
    assert held.keys() == {row["id"] for row in rows}
    assert deliveries.stored() == logged + sum(150 + len(data.encode()) for data in held.values())


@ON_VALKEY
def test_an_account_has_a_share(deliveries: Deliveries) -> None:
    """The oldest outcomes are removed for new events. Waiting events are not, so further events are dropped."""
    for number in range(20):
        deliveries.deliver(f"evt_{number}", "x" * 1000, SHARE_BYTES=10_000)
        assert deliveries.stored() <= 10_000
    rows = [row["id"] for row in deliveries.log()]
    assert rows == [f"evt_{number}" for number in range(20 - len(rows), 20)]
    assert 5 <= len(rows) <= 7
    verdicts = [deliveries.emit(f"evt_{number}", "x" * 1000, SHARE_BYTES=10_000) for number in range(20, 40)]
    waiting = verdicts.count("queued")
    assert verdicts == ["queued"] * waiting + ["dropped"] * (20 - waiting)
    assert 6 <= waiting <= 8
    assert deliveries.stored() <= 10_000
    assert deliveries.outcomes()["dropped:overflow"] == 20 - waiting
    entries = deliveries.read()
    assert {deliveries.claim(entry)[2] for entry in entries} == {"x" * 1000}, "waiting events are complete"
    for entry in entries:
        deliveries.record(entry, SHARE_BYTES=10_000)
    assert deliveries.emit("evt_40", "x" * 1000, SHARE_BYTES=10_000) == "queued", "outcomes are removed"
    assert re.search(r"^local SHARE_BYTES = 8388608\b", source("events/emit_event"), re.MULTILINE)


def test_outcomes_of_thirty_days_ago_make_room_first(deliveries: Deliveries) -> None:
    old = int(time.time() * 1000) - 30 * 86_400_000 - 1000
    fields = {"id": "evt_old", "type": "app.crashed", "app": "shop", "outcome": "failed"}
    deliveries.client.xadd(LOG, fields, id=f"{old}-1")
    deliveries.client.hset(BODIES, "evt_old", DATA)
    deliveries.deliver("evt_1")
    assert [row["id"] for row in deliveries.log()] == ["evt_1"]
    assert deliveries.bodies() == {"evt_1": DATA}

"""The outcome of an event is written once, and logged."""

import re

from tests.lua.deliveries import DATA, GROUP, LOG, STREAM, Deliveries
from tests.lua.scripts import source


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
    assert re.search(r"^local LOGGED = 1000\b", source("finish"), re.MULTILINE)
    assert re.search(r"^local WAITING = 100000\b", source("emit"), re.MULTILINE)

"""An event is queued, or dropped if too many events wait."""

import time

from tests.lua.deliveries import DATA, EVENT_KEYS, STREAM, Deliveries
from tests.lua.scripts import TAG


def test_a_full_stream_refuses_logs_and_counts_and_trims_nothing(deliveries: Deliveries) -> None:
    for number in range(5):
        assert deliveries.emit(f"evt_{number}", MAX_WAITING=5) == "queued"
    deliveries.read()  # entries that were read still wait
    for number in range(5, 8):
        assert deliveries.emit(f"evt_{number}", MAX_WAITING=5) == "dropped"
    assert len(deliveries.pending()) == deliveries.client.xlen(STREAM) == 5
    assert [row["id"] for row in deliveries.log()] == ["evt_5", "evt_6", "evt_7"]
    row = deliveries.log()[0]
    assert abs(int(row.pop("at")) - time.time() * 1000) < 5000
    named = {"id": "evt_5", "type": "app.crashed", "app": "shop", "durationMs": "0", "outcome": "dropped"}
    assert row == named | {"error": "overflow"} | dict.fromkeys(("status", "url", "headers", "body"), "")
    assert deliveries.outcomes() == {"dropped": 3, "dropped:overflow": 3}
    (first, *_) = deliveries.read(last="0")
    deliveries.record(first)
    assert deliveries.emit("evt_8", MAX_WAITING=5) == "queued", "an outcome frees a slot"


def test_a_call_with_a_mark_can_be_repeated(deliveries: Deliveries) -> None:
    emitted = f"{TAG}:emitted:evt_1"
    for _ in range(2):
        keys, args = [*EVENT_KEYS, emitted], ["evt_1", "acc", "shop", "app.crashed", DATA]
        assert deliveries.script("events/emit_event")(keys, args) == b"queued"
    assert deliveries.client.xlen(STREAM) == 1
    assert 0 < deliveries.client.ttl(emitted) <= 3600

"""Redelivery queues events of the log again, in batches, for a caller that has read the log."""

from tests.lua.deliveries import DATA, STREAM, Deliveries


def failed(deliveries: Deliveries, *events: str) -> None:
    for event in events:
        deliveries.emit(event)
        deliveries.record(deliveries.read()[0], "failed", 500, "status")


def test_a_repeated_call_queues_each_event_once(deliveries: Deliveries) -> None:
    """A caller that died halfway can start again: events that already wait are left out."""
    failed(deliveries, "evt_1", "evt_2", "evt_3")
    assert deliveries.redeliver(("evt_1", 1), ("evt_2", 1)) == 2
    assert deliveries.redeliver(("evt_1", 1), ("evt_2", 1), ("evt_3", 1)) == 1
    entries = deliveries.read()
    assert [entry.fields["id"] for entry in entries] == ["evt_1", "evt_2", "evt_3"]
    assert {entry.fields["redelivery"] for entry in entries} == {"1"}
    assert deliveries.claim(entries[0])[2] == DATA
    for entry in entries:
        deliveries.record(entry, "failed", 500, "status")
    assert deliveries.redeliver(("evt_1", 1)) == 0, "the caller read the log before the last entry"
    assert deliveries.redeliver(("evt_1", 2)) == 1
    deliveries.record(deliveries.read()[0])
    assert deliveries.client.xlen(STREAM) == 0
    assert deliveries.bodies()["evt_1:more"] == "2", "three entries of the log need the data"


def test_without_its_data_nothing_is_sent(deliveries: Deliveries) -> None:
    failed(deliveries, "evt_1")
    deliveries.client.hdel(f"{STREAM.removesuffix(':events')}:deliveries:acc:bodies", "evt_1")
    assert deliveries.redeliver(("evt_1", 1), ("evt_unknown", 1)) == 0
    assert deliveries.client.xlen(STREAM) == 0


def test_half_of_the_stream_is_left_to_new_events(deliveries: Deliveries) -> None:
    failed(deliveries, *(f"evt_{n}" for n in range(8)))
    assert deliveries.redeliver(*((f"evt_{n}", 1) for n in range(8)), MAX_WAITING=10) == 5
    assert deliveries.redeliver(("evt_7", 1), MAX_WAITING=10) == 0
    assert deliveries.emit("evt_new", MAX_WAITING=10) == "queued"

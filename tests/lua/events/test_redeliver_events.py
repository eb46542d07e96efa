"""Redelivery queues events of the log again, in batches, for a caller that has read the log."""

from tests.lua.deliveries import BODIES, DATA, STREAM, Deliveries


def failed(deliveries: Deliveries, *events: str) -> None:
    for event in events:
        deliveries.emit(event)
        deliveries.record(deliveries.read()[0], "failed", 500, "status")


def test_only_events_that_have_no_newer_entry_than_the_caller_read(deliveries: Deliveries) -> None:
    failed(deliveries, "evt_1")
    assert deliveries.redeliver(("evt_1", 1)) == 1
    assert deliveries.redeliver(("evt_1", 1)) == 0, "it waits already"
    deliveries.record(deliveries.read()[0], "failed", 500, "status")
    assert deliveries.redeliver(("evt_1", 1)) == 0, "the caller read the log before the last entry"
    assert deliveries.redeliver(("evt_1", 2)) == 1
    deliveries.record(deliveries.read()[0])
    assert deliveries.bodies() == {"evt_1": DATA, "evt_1:more": "2"}, "three entries of the log need the data"


def test_without_its_data_nothing_is_sent_and_half_of_the_stream_is_left_to_new_events(deliveries: Deliveries) -> None:
    failed(deliveries, *(f"evt_{n}" for n in range(9)))
    deliveries.client.hdel(BODIES, "evt_0")
    assert deliveries.redeliver(("evt_0", 1), ("evt_unknown", 1)) == 0
    assert deliveries.client.xlen(STREAM) == 0
    assert deliveries.redeliver(*((f"evt_{n}", 1) for n in range(1, 9)), MAX_WAITING=10) == 5
    assert deliveries.redeliver(("evt_8", 1), MAX_WAITING=10) == 0
    assert deliveries.emit("evt_new", MAX_WAITING=10) == "queued"

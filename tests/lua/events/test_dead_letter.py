"""An entry that cannot be processed leaves its stream and becomes a dead letter."""

from tests.lua.deliveries import DATA, DEAD, STREAM, Deliveries


def test_an_entry_is_moved_once(deliveries: Deliveries) -> None:
    deliveries.emit("evt_1")
    deliveries.emit("evt_2")
    first, second = deliveries.read()
    assert deliveries.dead_letter(first) == 1
    assert deliveries.dead_letter(first) == 0
    assert deliveries.record(first) == 0
    assert deliveries.pending().keys() == {second.id}
    assert deliveries.client.xlen(STREAM) == 1
    [(_, letter)] = deliveries.client.xrange(DEAD)
    named = {b"stream": b"events", b"entry": first.id.encode()}
    assert letter == named | {b"reason": b"ValueError: why", b"fields": b"{}"}
    assert 0 < deliveries.client.ttl(DEAD) <= 30 * 86400

    # The account sees the event, and can send it again.
    (row,) = deliveries.log()
    assert (row["id"], row["outcome"], row["error"]) == ("evt_1", "failed", "internal")
    assert deliveries.outcomes() == {"failed": 1, "failed:internal": 1}
    assert deliveries.request("evt_1") == "queued"
    assert deliveries.claim(deliveries.read()[0])[2] == DATA


def test_without_an_event_nothing_is_logged_and_the_number_of_dead_letters_is_limited(deliveries: Deliveries) -> None:
    for number in range(12):
        deliveries.client.xadd(STREAM, {"garbage": str(number)})
        assert deliveries.dead_letter(deliveries.read()[0], complete=False, MAX_DEAD_LETTERS=10) == 1
    assert deliveries.client.xlen(DEAD) == 10
    assert (deliveries.log(), deliveries.outcomes()) == ([], {})

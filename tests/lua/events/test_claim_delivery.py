"""The worker that an event is pending for begins to send it, and nobody else."""

from tests.lua.deliveries import DATA, GROUP, PREVIOUS, RECEIVER, STREAM, Deliveries


def test_begun_by_the_worker_it_is_pending_for(deliveries: Deliveries) -> None:
    deliveries.emit()
    (entry,) = deliveries.read("one")
    assert deliveries.begin(entry, "one") == (1, "", DATA, 1)
    deliveries.client.set(RECEIVER, "{}")
    assert deliveries.begin(entry, "one") == (1, "{}", DATA, 1)
    assert deliveries.begin(entry, "two") == (0, "", "", 0)
    assert deliveries.begin(entry, "nobody") == (0, "", "", 0)
    deliveries.client.xclaim(STREAM, GROUP, "two", 0, [entry.id])
    assert deliveries.begin(entry, "one") == (0, "", "", 0)
    assert deliveries.begin(entry, "two") == (1, "{}", DATA, 2)
    deliveries.finish(entry)
    assert deliveries.begin(entry, "two") == (0, "", "", 0)


def test_the_previous_secret_as_long_as_it_lives(deliveries: Deliveries) -> None:
    deliveries.emit()
    (entry,) = deliveries.read()
    deliveries.client.set(RECEIVER, "{}")
    deliveries.client.set(PREVIOUS, "sealed", ex=60)
    assert deliveries.begin_with_secret(entry)[3] == "sealed"
    deliveries.client.delete(PREVIOUS)
    assert deliveries.begin_with_secret(entry)[3] == ""


def test_beginning_keeps_others_from_claiming(deliveries: Deliveries) -> None:
    deliveries.emit()
    (entry,) = deliveries.read()
    deliveries.keep(entry, idle=60_000)
    assert deliveries.pending()[entry.id][1] >= 60_000
    deliveries.begin(entry)
    assert deliveries.pending()[entry.id][1] < 5_000

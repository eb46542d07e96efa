"""Only the worker for which an event is pending can claim its delivery."""

from tests.lua.deliveries import DATA, DELETIONS, GROUP, PREVIOUS, RECEIVER, STREAM, Deliveries


def test_claimed_by_the_worker_for_which_it_is_pending(deliveries: Deliveries) -> None:
    deliveries.emit()
    (entry,) = deliveries.read("one")
    assert deliveries.claim(entry, "one") == (1, "", DATA, 1)
    deliveries.client.set(RECEIVER, "{}")
    assert deliveries.claim(entry, "one") == (1, "{}", DATA, 1)
    assert deliveries.claim(entry, "two") == (0, "", "", 0)
    assert deliveries.claim(entry, "nobody") == (0, "", "", 0)
    deliveries.client.xclaim(STREAM, GROUP, "two", 0, [entry.id])
    assert deliveries.claim(entry, "one") == (0, "", "", 0)
    assert deliveries.claim(entry, "two") == (1, "{}", DATA, 2)
    deliveries.record(entry)
    assert deliveries.claim(entry, "two") == (0, "", "", 0)


def test_nothing_is_sent_while_the_account_is_being_deleted(deliveries: Deliveries) -> None:
    deliveries.emit()
    (entry,) = deliveries.read()
    deliveries.client.set(RECEIVER, "{}")
    deliveries.client.zadd(DELETIONS, {"acc": 1, "another": 1})
    assert deliveries.claim(entry) == (1, "", DATA, 1)
    deliveries.client.zrem(DELETIONS, "acc")
    assert deliveries.claim(entry) == (1, "{}", DATA, 1)


def test_the_previous_secret_until_it_expires(deliveries: Deliveries) -> None:
    """Each claim restarts the idle time."""
    deliveries.emit()
    (entry,) = deliveries.read()
    deliveries.client.set(RECEIVER, "{}")
    deliveries.client.set(PREVIOUS, "sealed", ex=60)
    for secret in ("sealed", ""):
        deliveries.set_idle(entry, idle=60_000)
        assert deliveries.pending()[entry.id][1] >= 60_000
        assert deliveries.claim_with_secret(entry)[3] == secret
        assert deliveries.pending()[entry.id][1] < 5_000
        deliveries.client.delete(PREVIOUS)

"""A worker renews its claim to its entries, or releases them."""

from tests.lua.deliveries import GROUP, STREAM, Deliveries


def test_only_the_workers_own_entries_change(deliveries: Deliveries) -> None:
    for number in range(4):
        deliveries.emit(f"evt_{number}")
    entries = deliveries.read("one")
    deliveries.set_idle(*entries, idle=60_000)
    deliveries.client.xclaim(STREAM, GROUP, "two", 0, [entries[1].id], idle=60_000)
    deliveries.record(entries[2])
    assert deliveries.set_idle(*entries) == 2
    pending = deliveries.pending()
    assert [pending[e.id][0] for e in (entries[0], entries[1], entries[3])] == ["one", "two", "one"]
    assert [pending[e.id][1] < 5_000 for e in (entries[0], entries[1], entries[3])] == [True, False, True]
    assert deliveries.set_idle(*entries, consumer="nobody") == 0

"""An account's byte count is removed when its log and the data of its events have expired."""

import pytest

from tests.lua.deliveries import BODIES, LOG, STORED, Deliveries


@pytest.mark.parametrize(("expired", "forgotten"), [((), 0), ((LOG,), 0), ((BODIES,), 0), ((LOG, BODIES), 1)])
def test_forgotten_with_both(deliveries: Deliveries, expired: tuple[str, ...], forgotten: int) -> None:
    deliveries.deliver("evt_1")
    for key in expired:
        deliveries.client.delete(key)
    assert deliveries.script("events/forget_stored_bytes")([LOG, BODIES, STORED], ["acc"]) == forgotten
    assert (deliveries.stored() == 0) == bool(forgotten)

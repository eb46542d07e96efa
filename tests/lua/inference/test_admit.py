"""Edge cases of admission that a random walk rarely meets."""

from typing import Any

from gateway.redis.client import Script
from tests.lua.scripts import MINUTE, ON_SERVERS, TAG


@ON_SERVERS
def test_a_window_outlives_its_last_request(client: Any) -> None:
    """The key's own expiry never frees a slot before its sixty seconds are over."""
    source = Script("inference/admit").source
    keys = [f"{TAG}:{name}" for name in ("window:app:a", "window:user:a:u", "spend:acc", "reservations", "leases")]
    for _ in range(200):
        client.eval(source, 5, *keys, 10**6, 10**6, 0, 1, "r", "acc", 1000, 0, "a")
        last = int(client.lindex(keys[0], -1))
        ends = client.pexpiretime(keys[0])  # milliseconds; gone once the clock is past it
        assert (ends + 1) * 1000 >= last + MINUTE

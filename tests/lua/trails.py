"""One part of an account's trail, as the scripts of accounts write it."""

import time
from typing import Any

from gateway.redis.client import Script
from tests.lua.scripts import SECOND, TAG, on_test_clock, set_clock

STREAM = f"{TAG}:audit:acc"
COUNTS = f"{STREAM}:counts"
MAX, SHARE = 20, 4  # entries
KEPT, COUNTED = 90 * 86_400, 60  # seconds


class Trails:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._add = client.register_script(on_test_clock("accounts/add_trail_entry"))
        self._take_back = client.register_script(Script("accounts/take_back_trail_entry").source)
        self.now = int(time.time()) * SECOND  # the server's clock numbers the entries
        set_clock(client, self.now)

    def of(self, actor: str) -> str:
        return f"{STREAM}:of:{actor}"

    def add(self, actor: str, action: str, target: str) -> bytes:
        keys = [STREAM, COUNTS, self.of(actor), f"{STREAM}:last:{actor}:{action}:{target}"]
        fields = ["who", actor, "by", "key", "action", action, "target", target]
        entry: bytes = self._add(keys, [MAX, SHARE, KEPT, COUNTED, *fields])
        return entry

    def take_back(self, actor: str, entry: bytes) -> int:
        left: int = self._take_back([STREAM, COUNTS, self.of(actor)], [entry])
        return left

    def list(self) -> list[tuple[bytes, bytes]]:
        """Returns the actors and targets, oldest first."""
        return [(fields[b"who"], fields[b"target"]) for _, fields in self.client.xrange(STREAM)]

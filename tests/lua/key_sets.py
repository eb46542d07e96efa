"""The scripts that share an app's public keys, on a clock that a test sets."""

from typing import Any

from gateway.keys import key_set_keys
from tests.lua.scripts import SECOND, on_test_clock, set_clock

KEYS = key_set_keys("acc", "app")
LIFE = 300_000  # ms
NOON = 1_800_000_000 * SECOND


class KeySets:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._find = client.register_script(on_test_clock("inference/find_key_set"))
        self._share = client.register_script(on_test_clock("inference/share_key_set"))
        self.set_clock(NOON)

    def set_clock(self, clock: int) -> None:
        """Sets the clock, in microseconds."""
        set_clock(self.client, clock)
        self.now = clock // 1_000

    def find(self, identity: str = "one", oldest: int = LIFE, claim: int = 6_000) -> list[Any]:
        """Returns the reply without the time."""
        verdict, now, *copy = self._find(KEYS, [identity, oldest, claim])
        assert now == self.now
        return [each.decode() if isinstance(each, bytes) else each for each in (verdict, *copy)]

    def share(self, document: str = "keys", *, identity: str = "one", age: int = 0, life: int = LIFE) -> None:
        self._share(KEYS, [identity, self.now - age, life, "digest", document])

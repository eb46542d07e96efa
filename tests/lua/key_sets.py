"""The scripts that share an app's public keys, on a clock that a test sets."""

from typing import Any

from gateway.inference.keys import key_set_keys
from tests.lua.scripts import SECOND, on_test_clock

KEYS = key_set_keys("acc", "app")
LIFE = 300_000  # ms
NOON = 1_800_000_000 * SECOND


class KeySets:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._find = client.register_script(on_test_clock("inference/find_key_set"))
        self._share = client.register_script(on_test_clock("inference/share_key_set"))

    def find(self, identity: str = "one", oldest: int = LIFE, claim: int = 6_000) -> list[Any]:
        reply = self._find(KEYS, [identity, oldest, claim])
        return [each.decode() if isinstance(each, bytes) else each for each in reply]

    def share(self, document: str = "keys", *, identity: str = "one", age: int = 0, life: int = LIFE) -> None:
        self._share(KEYS, [identity, age, life, "digest", document])

"""The scripts of key sets and of answers, on a clock that a test sets."""

from typing import Any

import pytest

from gateway.keys import answers_of_provider_key, key_set_keys
from tests.lua.scripts import SECOND, on_test_clock, set_clock

NOON = 1_800_000_000 * SECOND
KEY_SET_KEYS = key_set_keys("acc", "app")
KEY_SET_LIFE = 300_000  # ms
ANSWERS_KEY = answers_of_provider_key("one")
ANSWERS_LIFE = 30_000  # ms


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

    def find(self, identity: str = "one", oldest: int = KEY_SET_LIFE, claim: int = 6_000) -> list[Any]:
        """Returns the reply without the time."""
        verdict, now, *copy = self._find(KEY_SET_KEYS, [identity, oldest, claim])
        assert now == self.now
        return [each.decode() if isinstance(each, bytes) else each for each in (verdict, *copy)]

    def share(self, document: str = "keys", *, identity: str = "one", age: int = 0, life: int = KEY_SET_LIFE) -> None:
        self._share(KEY_SET_KEYS, [identity, self.now - age, life, "digest", document])


class Answers:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._record = client.register_script(on_test_clock("inference/record_answer"))
        self._list = client.register_script(on_test_clock("inference/list_answers"))

    def record(self, account: str, after: float = 0) -> None:
        """Records an answer so many seconds after noon."""
        set_clock(self.client, NOON + round(after * SECOND))
        self._record([ANSWERS_KEY], [account, ANSWERS_LIFE])

    def list(self, after: float = 0) -> set[str]:
        set_clock(self.client, NOON + round(after * SECOND))
        return {account.decode() for account in self._list([ANSWERS_KEY], [ANSWERS_LIFE])}


@pytest.fixture
def key_sets(client: Any) -> KeySets:
    return KeySets(client)


@pytest.fixture
def answers(client: Any) -> Answers:
    return Answers(client)

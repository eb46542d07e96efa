"""The scripts that record which accounts had an answer of a provider lately, on a clock that a test sets."""

from typing import Any

from gateway.keys import answers_of_provider_key
from tests.lua.scripts import SECOND, on_test_clock, set_clock

KEY = answers_of_provider_key("one")
LIFE = 30_000  # ms
NOON = 1_800_000_000 * SECOND


class Answers:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._record = client.register_script(on_test_clock("inference/record_answer"))
        self._list = client.register_script(on_test_clock("inference/list_answers"))

    def record(self, account: str, after: float = 0) -> None:
        """Records an answer so many seconds after noon."""
        set_clock(self.client, NOON + round(after * SECOND))
        self._record([KEY], [account, LIFE])

    def list(self, after: float = 0) -> set[str]:
        set_clock(self.client, NOON + round(after * SECOND))
        return {account.decode() for account in self._list([KEY], [LIFE])}

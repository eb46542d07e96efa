"""Log lines of requests, and the counters of one process on a clock that the test sets."""

import itertools
from datetime import UTC, datetime
from typing import Any

from gateway.log import RequestLine
from gateway.redis.client import Store
from gateway.telemetry.counters import Counters

_numbers = itertools.count()  # of requests, whose ids differ
NOON = datetime(2026, 7, 2, 12, 0, 30, tzinfo=UTC).timestamp()


def request_line(**fields: Any) -> RequestLine:
    """Returns the log line of a request, by default of one without an answer."""
    base: dict[str, Any] = {
        "request_id": f"r-{next(_numbers)}",
        "app": "notes",
        "model": "",
        "status": 200,
        "code": "",
        "input_tokens": None,
        "output_tokens": None,
        "nano_euro": 0,
        "ttft_ms": None,
        "duration_ms": 500.0,
    }
    return RequestLine(**{**base, "format": "native", **fields})


class CountingProcess:
    """The counters of one process. Its clock stands still until a test sets `now`."""

    def __init__(self, url: str, **limits: float) -> None:
        self.store = Store(url)
        self.now = NOON
        self.unlogged = 0
        self.counters = Counters(self.store, lambda: 3, self._drop, lambda: self.now, **limits)

    def _drop(self, requests: int) -> None:
        self.unlogged += requests

    def count_answers(self, account: str = "acc", times: int = 1) -> None:
        for _ in range(times):
            answer = request_line(model="gpt", input_tokens=7, output_tokens=3, nano_euro=100, ttft_ms=120.0)
            self.counters.count_request(account, answer)

    async def read_hash(self, key: str) -> dict[str, str]:
        return await self.store.client.hgetall(key)

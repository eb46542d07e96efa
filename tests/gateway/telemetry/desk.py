"""One process's counters, and the requests that they count."""

from datetime import UTC, datetime
from typing import Any

from gateway.log import RequestLine
from gateway.redis.client import Store
from gateway.telemetry.counters import Counters

NOON = datetime(2026, 7, 2, 12, 0, 30, tzinfo=UTC).timestamp()


def line(**fields: Any) -> RequestLine:
    """What the log says of a request; by default of one that got no answer."""
    base: dict[str, Any] = {
        "request_id": "r",
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


class Desk:
    """One process's counters, on a clock that stands still until it is set."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self.now = NOON
        self.unlogged = 0
        self.counters = Counters(self.store, lambda: 3, self._drop, lambda: self.now)

    def _drop(self, requests: int) -> None:
        self.unlogged += requests

    def count(self, account: str = "acc", times: int = 1) -> None:
        for _ in range(times):
            answer = line(model="gpt", input_tokens=7, output_tokens=3, nano_euro=100, ttft_ms=120.0)
            self.counters.request(account, answer)

    async def held(self, key: str) -> dict[str, str]:
        return await self.store.client.hgetall(key)

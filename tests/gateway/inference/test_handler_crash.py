"""A fault of the service itself: the log names its line, and contains nothing of the request."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.inference.handler import Inference
from gateway.inference.request import InferenceRequest

CONTENT = "Mandarine ardoise"


class Crashing(Inference):
    def __init__(self, after: int) -> None:
        self._traces, self._after = None, after

    async def _handle(self, call: InferenceRequest) -> None:
        if self._after:
            call.status = self._after
        raise ValueError(f"invalid literal: {CONTENT!r}") from KeyError(CONTENT)

    def _report(self, call: InferenceRequest) -> None:
        pass


@pytest.mark.parametrize("after", [0, 200])
async def test_a_crash_is_logged_without_the_text_of_its_exception(after: int) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is read")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/capsule/shop/ai",
        "headers": [],
        "query_string": b"",
        "state": {},
    }
    with capture_logs() as logged:
        if after:  # the stream has begun
            with pytest.raises(RuntimeError) as broken:
                await Crashing(after)(scope, receive, send)
            assert broken.value.__suppress_context__
            assert CONTENT not in str(broken.value)
        else:
            await Crashing(after)(scope, receive, send)
            assert sent[0]["status"] == 500
    (crash,) = [line for line in logged if line["event"] == "request.crashed"]
    assert crash["error"].startswith("ValueError at ")
    assert "test_handler_crash.py" in crash["error"]
    assert CONTENT not in str(logged) + str(sent)

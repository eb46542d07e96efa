"""What the event loop of a process logs, and work that is repeated."""

import asyncio
import gc
import logging
import socket

import pytest

from gateway import loops
from gateway.errors import BackboneUnavailable
from gateway.loops import every, ignore_late_lookups
from tests.support.logs import captured


@pytest.mark.parametrize(("error", "logged"), [(socket.gaierror(-2, "unknown"), 0), (ValueError("a bug"), 1)])
async def test_lookups_that_fail_late(error: Exception, logged: int, caplog: pytest.LogCaptureFixture) -> None:
    """Their callers have given up. All other errors that nobody reads are logged."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    ignore_late_lookups()
    try:
        with caplog.at_level(logging.ERROR, "asyncio"):
            future = loop.create_future()
            future.set_exception(error)
            del future
            gc.collect()
    finally:
        loop.set_exception_handler(before)
    assert len(caplog.records) == logged


async def test_rounds_go_on_after_each_failure() -> None:
    """A round without Redis is no line in the log: the next one does its work."""
    failures, done = [BackboneUnavailable(), ValueError("a bug")], asyncio.Event()

    async def work() -> None:
        if failures:
            raise failures.pop(0)
        done.set()

    with captured(loops) as lines:
        rounds = asyncio.create_task(every(0, work, "work.failed"))
        await asyncio.wait_for(done.wait(), 5)
    rounds.cancel()
    assert [line["event"] for line in lines] == ["work.failed"]

"""What the event loop of a process logs."""

import asyncio
import gc
import logging
import socket

import pytest

from gateway.loops import ignore_late_lookups


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

"""A standard output that is not read: the process continues and reports the missing lines."""

import asyncio
import fcntl
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from gateway import log
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.gateway_process import Gateway
from tests.support.redis_servers import RedisServer
from tests.support.responses import refused


def read_all(descriptor: int, until: bytes) -> list[bytes]:
    """Reads lines up to the first that contains `until`."""
    data = b""
    while until not in data:
        data += os.read(descriptor, 65_536)
    return data.splitlines()


def read_numbers(descriptor: int, total: int) -> int:
    """Reads all numbers, or the reports in their place. Returns how many were dropped."""
    expected = dropped = 0
    rest = b""
    while expected < total:
        *lines, rest = (rest + os.read(descriptor, 65_536)).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                expected += json.loads(line)["lines"]
                dropped += json.loads(line)["lines"]
            else:
                assert int(line) == expected
                expected += 1
    assert expected == total
    return dropped


def test_lines_are_written_in_order_and_gaps_are_reported() -> None:
    reading, writing = os.pipe()
    lines = log.LineWriter()
    lines.open(writing)
    dropped: list[int] = []
    lines.on_drop = dropped.append
    began = time.thread_time()
    for number in range(50_000):
        lines.write(b"%0100d\n" % number)
    assert time.thread_time() - began < 1
    assert dropped
    # The last gap is reported even if no further line is logged.
    assert read_numbers(reading, 50_000) == sum(dropped)
    lines.write(b"again\n")
    assert read_all(reading, b"again") == [b"again"]
    for end in (reading, writing):
        os.close(end)


# -- the process ---------------------------------------------------------------------------------------------


async def flood(gw: Gateway, path: str, number: int) -> None:
    """Sends requests that are refused, each of which logs a line."""
    for _ in range(number // 50):
        answers = await asyncio.gather(*(gw.http.post(path, content=b"{}", timeout=5) for _ in range(50)))
        for answer in answers:
            refused(answer, 401, "TOKEN_MISSING")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_gateway_whose_output_is_not_read(
    provider: FakeProvider, backend: FakeAppBackend, valkey: RedisServer, tmp_path: Path
) -> None:
    """It answers more requests than fit into the pipe, and reports the dropped lines."""
    gw = Gateway(valkey.url, provider, tmp_path, {"gateway.log.QUEUE_BYTES": 50_000})
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 32_768)  # half of the default, so that fewer requests fill it
    gw.log_file = Path(f"/dev/fd/{writing}")
    await gw.start()
    os.close(writing)
    try:
        app = await gw.app(backend)
        await flood(gw, app.path, 500)
        metrics = (await gw.http.get("/metrics")).text
        counted = re.search(r"^gateway_log_lines_dropped_total (\S+)$", metrics, re.M)
        assert counted
        assert float(counted[1]) > 100
        found = await asyncio.to_thread(read_all, reading, b"log.dropped")
        (report,) = [line for line in found if b"log.dropped" in line]
        assert int(re.search(rb'lines(?:"?:|=)(\d+)', report)[1]) >= float(counted[1])
        await flood(gw, app.path, 50)
        assert gw.process
        process = gw.process
        assert await gw.stop() in (0, -signal.SIGTERM)
        assert process.poll() is not None
        rest = b"".join(iter(lambda: os.read(reading, 65_536), b""))
        assert rest.count(b"TOKEN_MISSING") == 50
        assert b"Finished server process" in rest
    finally:
        gw.kill()
        await gw.http.aclose()
        os.close(reading)

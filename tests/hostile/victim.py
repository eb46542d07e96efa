"""Measures the time to first token of a tenant's app while another app is flooded with garbage tokens."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.accounts import App
from tests.support.raw_http import request

CONNECTIONS = 8


async def measure_first_tokens(app: App, seconds: float, rate: float = 50) -> list[float]:
    """Returns the milliseconds from each request to its first token. Every second request has a new user's token."""
    known, times = app.token("known"), list[float]()
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.gateway.port)
        due, count = time.monotonic() + number / rate, 0
        while due < until:
            await asyncio.sleep(max(0, due - time.monotonic()))
            due, count = max(due + CONNECTIONS / rate, time.monotonic()), count + 1
            token = known if count % 2 else app.token(f"user-{number}-{count}")
            data = request(app.path, b'{"prompt":"x","stream":true}', f"Authorization: Bearer {token}")
            began = time.perf_counter()
            writer.write(data)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            await reader.readuntil(b'"token"')
            times.append((time.perf_counter() - began) * 1000)
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()

    await asyncio.gather(*(client(number) for number in range(CONNECTIONS)))
    return times


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(int(len(times) * share), len(times) - 1)]


@contextlib.asynccontextmanager
async def run_flood(
    app: App, rate: float, seconds: float, header: dict[str, str], connections: int = 50
) -> AsyncIterator[dict[str, Any]]:
    """Sends garbage tokens to an app. The dictionary has the answers by status once the block has ended."""
    words = [app.gateway.port, app.path, rate, seconds, json.dumps(header), connections]
    script = Path(__file__).with_name("flood.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), *map(str, words), stdout=asyncio.subprocess.PIPE
    )
    answers: dict[str, Any] = {}
    try:
        yield answers
        output, _ = await asyncio.wait_for(process.communicate(), seconds + 60)
        answers |= json.loads(output)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

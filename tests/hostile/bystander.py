"""Measures another account's app during an attack: the time to its first token, and the gateway's CPU and memory."""

import asyncio
import contextlib
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.fakes import FakeAppBackend, FakeProvider
from tests.hostile.attacker import Job
from tests.support.accounts import App
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.raw_http import request

FULL = os.environ.get("HOSTILE") == "full"
SECONDS = 20.0 if FULL else 2.5  # of each measurement
PAUSE_SECONDS = 0.05  # between two requests of the bystander
# Rate limits, caps and permits are out of the way: the attacks test other limits.
SETTINGS = {
    "GATEWAY_RATE_LIMITS": "app=1000000,user=1000000",
    "GATEWAY_DAILY_CAPS": "free=1000000,starter=1000000,maker=1000000,max=1000000",
    "GATEWAY_LOG_LEVEL": "info",
    "GATEWAY_PROVIDER_CONCURRENCY": "0",
}
# Shorter than in production, so that the gateway ends stalled connections during a test.
CONSTANTS = {"gateway.server.protocol.STALL_SECONDS": 15.0 if FULL else 5.0}


def scale_attack(full: int) -> int:
    """Returns the size of an attack: a fifth of the full size without `HOSTILE=full`."""
    return full if FULL else full // 5


@dataclass
class Figures:
    p50: float  # milliseconds to the first token
    p99: float
    failed: int  # requests of the bystander without a complete answer
    cpu: float  # share of one core
    memory: float  # MiB
    descriptors: int


@dataclass
class Bystander:
    app: App
    before: Figures  # measured without an attack

    @property
    def gateway(self) -> Gateway:
        return self.app.gateway


@contextlib.asynccontextmanager
async def run_bystander(
    provider: FakeProvider, backend: FakeAppBackend, folder: Path, **options: Any
) -> AsyncIterator[Bystander]:
    """Runs a gateway with the bystander's app, measured without an attack."""
    async with gateway_with_redis(provider, folder, CONSTANTS, **SETTINGS, **options) as gateway:
        app = await gateway.app(backend)
        yield Bystander(app, await measure_app(app))


async def measure_app(app: App) -> Figures:
    process, waits, failed = app.gateway, [], 0
    began, spent = time.monotonic(), process.cpu_seconds
    peak_memory = peak_descriptors = 0.0
    while time.monotonic() < began + SECONDS:
        try:
            waits.append(await measure_first_token(app))
        except (OSError, AssertionError, TimeoutError, asyncio.IncompleteReadError):
            failed += 1
        peak_memory = max(peak_memory, process.memory)
        peak_descriptors = max(peak_descriptors, process.descriptors)
        await asyncio.sleep(PAUSE_SECONDS)
    cpu = (process.cpu_seconds - spent) / (time.monotonic() - began)
    waits = sorted(waits) or [float("inf")]
    p50, p99 = (waits[min(int(len(waits) * part), len(waits) - 1)] * 1000 for part in (0.5, 0.99))
    return Figures(p50, p99, failed, cpu, peak_memory, int(peak_descriptors))


async def measure_first_token(app: App) -> float:
    """Returns the seconds to the first token, over a new connection, as a new visitor's browser opens.

    Every second visitor is a new user, whose token is verified.
    """
    body = json.dumps({"prompt": "x", "stream": True, "maxTokens": 10}).encode()
    token = app.token(random.choice(("known", f"user-{secrets.token_hex(4)}")))
    data = request(app.path, body, f"Authorization: Bearer {token}", "Connection: close")
    began = time.perf_counter()
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", app.gateway.port)
        try:
            writer.write(data)
            line = await reader.readline()
            assert line.startswith(b"HTTP/1.1 200 "), line
            await reader.readuntil(b'data: {"token"')
            waited = time.perf_counter() - began
            await reader.readuntil(b"event: done")
        finally:
            writer.close()
    return waited


@contextlib.asynccontextmanager
async def run_attack(
    port: int, attack: str, count: int, *requests: bytes, patience: float = 60, **more: Any
) -> AsyncIterator[dict[str, int]]:
    """Attacks from a process of its own until the block ends. Its answers by status are in the dictionary then."""
    job = Job(attack, port, count, list(requests), **more)  # type: ignore[arg-type]
    command, root = [sys.executable, "-m", "tests.hostile.attacker"], Path(__file__).parents[2]
    attacker = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert attacker.stdin
    assert attacker.stdout
    answers: dict[str, int] = {}
    try:
        attacker.stdin.write(msgspec.json.encode(job) + b"\n")
        attacker.stdin.flush()
        async with asyncio.timeout(patience):
            ready = asyncio.to_thread(attacker.stdout.readline)
            assert (await ready).strip() == b"ready", "the attack did not begin"
        yield answers
        attacker.stdin.close()
        answers |= json.loads(await asyncio.to_thread(attacker.stdout.readline))
    finally:
        attacker.kill()
        attacker.wait()
        attacker.stdin.close()
        attacker.stdout.close()


def report_row(attack: str, before: Figures, during: Figures) -> None:
    """Prints a row of the table in docs/security.md, and append it to the file that `HOSTILE_REPORT` names."""
    row = (
        f"| {attack} | {before.p50:.0f} / {before.p99:.0f} ms | {during.p50:.0f} / {during.p99:.0f} ms, "
        f"{during.failed} failed | {during.cpu:.0%} | {before.memory:.0f} → {during.memory:.0f} MiB "
        f"| {before.descriptors} → {during.descriptors} |"
    )
    print(row)
    if path := os.environ.get("HOSTILE_REPORT"):
        with Path(path).open("a") as file:
            file.write(row + "\n")


def assert_unharmed(before: Figures, during: Figures) -> None:
    """Checks the bystander. The limits are lenient, because all processes may share two cores with other tests."""
    assert during.failed == 0, during
    assert during.p50 < before.p50 + 300, (before, during)
    assert during.p99 < before.p99 + (1000 if FULL else 3000), (before, during)

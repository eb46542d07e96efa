"""Measures the fair share of the provider: one account sends requests continuously, twenty send one per second.

Eight gateway processes share a provider that serves 100 requests at once and answers 429 to every further one. The
exit code is 1 if the provider ever answered 429, or if a quiet account waited too long or had a failed request.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import aiohttp
import jwt
import uvloop
from rig import OPERATOR_TOKEN, free_port, redis_server, running

BOUND = 100  # concurrent requests at the provider
GATEWAYS = 8
CROWD = 2_000  # clients of one account, each with one request at a time
QUIET = 20  # accounts with one request per second
DURATION = 1.0  # seconds of a request
SECONDS = 20.0
SECRET = "bench-secret-of-no-value-0123456789abcdef"
FIRST = b'data: {"choices":[{"delta":{"content":"Hello"}}]}\n\n'
LAST = (
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)


class Provider:
    """A provider that streams one token and ends the answer after DURATION."""

    def __init__(self) -> None:
        self.now = self.most = self.refused = 0
        self.busy = self.since = 0.0  # request seconds so far, and the time of the last update

    def count(self, change: int) -> None:
        clock = time.monotonic()
        self.busy, self.since = self.busy + self.now * (clock - self.since), clock
        self.now += change
        self.most = max(self.most, self.now)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.partition(b":")[2]))
                await self._answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if self.now >= BOUND:
            self.refused += 1
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")
            return
        self.count(1)
        try:
            length = len(FIRST) + len(LAST)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % length
            writer.write(head + FIRST)
            await asyncio.sleep(DURATION)
        finally:
            self.count(-1)
        writer.write(LAST)


@asynccontextmanager
async def serving(provider_port: int) -> AsyncIterator[list[str]]:
    """Runs Redis and the gateways, and yields the gateways' addresses."""
    with ExitStack() as stack:
        redis, ports = stack.enter_context(redis_server()), [free_port() for _ in range(GATEWAYS)]
        environment = {
            "GATEWAY_REDIS_URL": f"redis://127.0.0.1:{redis}/0",
            "GATEWAY_PROVIDER_URL": f"http://127.0.0.1:{provider_port}",
            "GATEWAY_PROVIDER_KEY": "key",
            "GATEWAY_PROVIDER_CONCURRENCY": str(BOUND),
            "GATEWAY_INFERENCE": "on",
            "GATEWAY_PROCESSING_APPROVED": "true",
            "GATEWAY_OPERATOR_TOKEN": OPERATOR_TOKEN,
            "GATEWAY_ENCRYPTION_KEY": SECRET,
            "GATEWAY_RATE_LIMITS": "app=1000000,user=1000000",
            "GATEWAY_DAILY_CAPS": "max=100000",
            "GATEWAY_LOG_LEVEL": "error",
        }
        for port in ports:
            command = [sys.executable, "-m", "capsule_gateway", "serve", "--port", str(port)]
            gateway = running(f"gateway-{port}", command, port, env=environment, path="/ready")
            await asyncio.to_thread(stack.enter_context, gateway)
        yield [f"http://127.0.0.1:{port}" for port in ports]


async def create_app(session: aiohttp.ClientSession, address: str, name: str) -> str:
    """Creates an account with one app, and returns a token of the app's user."""
    headers = {"authorization": f"Bearer {OPERATOR_TOKEN}"}
    async with session.post(
        f"{address}/platform/accounts", json={"name": name, "plan": "max"}, headers=headers
    ) as answer:
        account = (await answer.json())["id"]
    record = {"account": account, "auth": {"kind": "secret", "secret": SECRET}}
    async with session.put(f"{address}/platform/apps/{name}", json=record, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    return jwt.encode({"sub": "user", "exp": time.time() + 3600}, SECRET)


async def ask(session: aiohttp.ClientSession, address: str, app: str, token: str) -> tuple[float, int | None]:
    """Returns the seconds until the answer's first byte, and the Retry-After of a refusal."""
    began = time.monotonic()
    async with session.post(
        f"{address}/capsule/{app}/ai",
        json={"prompt": "Hello?", "stream": True},
        headers={"authorization": f"Bearer {token}"},
    ) as answer:
        first = time.monotonic() - began
        await answer.read()
    return first, None if answer.status == 200 else int(answer.headers["retry-after"])


async def measure(provider: Provider, addresses: list[str]) -> tuple[list[float], float, int]:
    """Returns the waits of the quiet accounts, the share of permits in use, and the number of their failed requests."""
    waits: list[float] = []
    failed = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3)) as session:
        crowd = await create_app(session, addresses[0], "crowd")
        quiet = [await create_app(session, addresses[0], f"quiet-{n}") for n in range(QUIET)]
        end = time.monotonic() + SECONDS

        async def press(n: int) -> None:
            pause = 1.0
            while time.monotonic() < end:
                _, retry_after = await ask(session, addresses[n % GATEWAYS], "crowd", crowd)
                if retry_after is None:
                    pause = 1.0
                else:  # like the SDKs: wait for Retry-After or a growing pause, whichever is longer
                    await asyncio.sleep(min(max(retry_after, pause * random.uniform(0.5, 1.5)), end - time.monotonic()))
                    pause = min(2 * pause, 16.0)

        async def ask_now_and_then(n: int) -> None:
            nonlocal failed
            await asyncio.sleep(2 + n / QUIET)
            while time.monotonic() < end:
                began = time.monotonic()
                wait, retry_after = await ask(session, addresses[n % GATEWAYS], f"quiet-{n}", quiet[n])
                waits.append(wait)
                failed += retry_after is not None
                await asyncio.sleep(max(0.0, began + 1 - time.monotonic()))

        tasks = [asyncio.create_task(press(n)) for n in range(CROWD)]
        tasks += [asyncio.create_task(ask_now_and_then(n)) for n in range(QUIET)]
        await asyncio.sleep(3)
        provider.count(0)
        busy, since = provider.busy, provider.since
        await asyncio.sleep(end - 1 - time.monotonic())
        provider.count(0)
        share = (provider.busy - busy) / (provider.since - since) / BOUND
        await asyncio.gather(*tasks)
    return sorted(waits), share, failed


async def main() -> int:
    provider, port = Provider(), free_port()
    async with await asyncio.start_server(provider.serve, "127.0.0.1", port), serving(port) as addresses:
        waits, share, failed = await measure(provider, addresses)
    p50, p99 = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
    print("| fair share | measured | must |")
    print("| --- | --- | --- |")
    print(
        f"| wait of a quiet account, p50 / p99 of {len(waits)} | {p50:.3f} / {p99:.3f} s | p99 < {1.2 * DURATION} s |"
    )
    print(f"| permits in use while requests wait | {share:.1%} | ≥ 95 % |")
    print(f"| most requests at once / answers 429 | {provider.most} / {provider.refused} | {BOUND} / 0 |")
    print(f"| failed requests of quiet accounts | {failed} | 0 |")
    return int(provider.refused > 0 or provider.most > BOUND or failed > 0 or p99 >= 1.2 * DURATION)


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))

"""Attacks a gateway from a process of its own, `python -m tests.hostile.attacker`, which `run_attack` starts.

The first line of its standard input is a `Job` in JSON. It prints `ready` when all connections are open, reopens each
connection that the gateway closes, and prints the number of answers by status when its standard input ends.
"""

import asyncio
import base64
import contextlib
import json
import os
import random
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop

DRIP_SECONDS = 10.0
FULL = os.environ.get("HOSTILE") == "full"
PAUSE_SECONDS = 2.0  # at most, before a closed connection is reopened
RECEIVE_BUFFER = 4096  # bytes of a stalled reader: small, so that unread data stays in the gateway
TOKEN = b"<token>"  # in a request, stands for a garbage token, which is another one each time
SIGNATURES = {"RS256": 1024, "ES256": 64, "ES384": 96, "ES512": 132, "EdDSA": 64}  # bytes


class Job(msgspec.Struct):
    attack: Literal["hold", "stall", "flood"]
    port: int
    count: int  # of connections
    requests: list[bytes]
    drip: bytes = b"x"  # what `hold` sends every ten seconds
    rate: float = 1000.0  # requests per second of `flood`
    header: dict[str, str] = msgspec.field(default_factory=lambda: {"alg": "ES256"})  # of the garbage tokens


def make_garbage_token(header: dict[str, str]) -> bytes:
    claims = {"sub": secrets.token_hex(4), "exp": int(time.time()) + 3600}
    signature = b"\x01" + secrets.token_bytes(SIGNATURES[header["alg"]] - 1)
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)


class Attacker:
    def __init__(self, job: Job) -> None:
        self.job, self.opened, self.answers = job, 0, Counter[str]()

    async def connect(self) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        if self.job.attack == "stall":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.job.port))
        return connection

    async def hold(self, _: int) -> None:
        """Sends the request, then a byte every ten seconds."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):
                connection = await self.connect()
                await loop.sock_sendall(connection, self.job.requests[0])
                self.opened += 1
                while await self._is_open(connection):
                    await loop.sock_sendall(connection, self.job.drip)
            connection.close()
            await asyncio.sleep(random.uniform(0, PAUSE_SECONDS))

    async def _is_open(self, connection: socket.socket) -> bool:
        try:
            async with asyncio.timeout(DRIP_SECONDS):
                while await asyncio.get_running_loop().sock_recv(connection, 65_536):
                    pass
        except TimeoutError:
            return True
        return False

    async def stall(self, _: int) -> None:
        """Sends the request, and reads only the beginning of the answer."""
        loop = asyncio.get_running_loop()
        connection = await self.connect()
        await loop.sock_sendall(connection, self.job.requests[0])
        await loop.sock_recv(connection, 16)
        self.opened += 1
        await asyncio.Event().wait()

    async def flood(self, number: int) -> None:
        """Sends one of the requests again and again, at this connection's share of the rate.

        A connection that still waits for an answer skips its next request.
        """
        request, due = self.job.requests[number % len(self.job.requests)], time.monotonic() + number / self.job.rate
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.job.port)
                self.opened += 1
                while True:
                    await asyncio.sleep(due - time.monotonic())
                    due = max(due + self.job.count / self.job.rate, time.monotonic())
                    writer.write(request.replace(TOKEN, make_garbage_token(self.job.header)))
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    if b"content-length: " in head:
                        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                    self.answers[head.split()[1].decode()] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                self.answers[type(error).__name__] += 1

    async def run(self) -> None:
        tasks = []
        for number in range(self.job.count):
            tasks.append(asyncio.create_task(getattr(self, self.job.attack)(number)))
            if number % 50 == 0:
                await asyncio.sleep(0.02)
        while self.opened < self.job.count:
            await asyncio.sleep(0.1)
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        print(json.dumps(self.answers), flush=True)


def scale_attack(full: int) -> int:
    """Returns the size of an attack: a fifth of the full size without `HOSTILE=full`."""
    return full if FULL else full // 5


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


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    uvloop.run(Attacker(msgspec.json.decode(sys.stdin.readline(), type=Job)).run())

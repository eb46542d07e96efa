"""Attacks a gateway from a process of its own: `python -m tests.hostile.attacker <attack> <port> <count> <request>`.

It prints `ready` when all connections are open, reopens each connection that the gateway closes, and stops when its
standard input ends. `request` is hexadecimal, because it may contain any byte.
"""

import asyncio
import contextlib
import random
import resource
import socket
import sys

import uvloop

DRIP_SECONDS = 10.0
PAUSE_SECONDS = 2.0  # at most, before a closed connection is reopened
RECEIVE_BUFFER = 4096  # bytes of a stalled reader: small, so that unread data stays in the gateway
RATE = 1000  # requests per second of `flood`


class Attack:
    def __init__(self, name: str, port: int, count: int, request: bytes) -> None:
        self.name, self.port, self.count, self.request = name, port, count, request
        self.opened = self.ended = self.answers = self.started = 0

    async def connect(self) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        if self.name == "stall":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        return connection

    async def hold(self) -> None:
        """Sends the request, then a byte every ten seconds."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):
                connection = await self.connect()
                await loop.sock_sendall(connection, self.request)
                self.opened += 1
                while await self._is_open(connection):
                    await loop.sock_sendall(connection, b"\n" if self.name == "breaks" else b"x")
            self.ended += 1
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

    async def stall(self) -> None:
        """Sends the request, and reads only the beginning of the answer."""
        loop = asyncio.get_running_loop()
        connection = await self.connect()
        await loop.sock_sendall(connection, self.request)
        await loop.sock_recv(connection, 16)
        self.opened += 1
        await asyncio.Event().wait()

    async def flood(self) -> None:
        """Sends requests one after the other on one connection, at this connection's share of the rate."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.opened += 1
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self.count / RATE
            await asyncio.sleep(due - loop.time())
            writer.write(self.request)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            self.answers += 1

    async def hammer(self) -> None:
        """Sends requests one after the other, as fast as they are answered.

        `request` holds several, each preceded by its length in four bytes.
        """
        requests, at = [], 0
        while at < len(self.request):
            size = int.from_bytes(self.request[at : at + 4], "big")
            requests.append(self.request[at + 4 : at + 4 + size])
            at += 4 + size
        index = self.started = self.started + 1
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
                self.opened += 1
                while True:
                    index += 1
                    writer.write(requests[index % len(requests)])
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    if b"content-length: " in head:
                        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                    elif b" 204 " not in head:  # a stream, which may be endless
                        writer.close()
                        break
                    self.answers += 1
            await asyncio.sleep(0.01)

    async def run(self) -> None:
        attack = {"stall": self.stall, "flood": self.flood, "hammer": self.hammer}.get(self.name, self.hold)
        tasks = []
        for number in range(self.count):
            tasks.append(asyncio.create_task(attack()))
            if number % 50 == 0:
                await asyncio.sleep(0.02)
        while self.opened < self.count:
            await asyncio.sleep(0.1)
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for task in tasks:
            task.cancel()
        print(self.ended, self.answers, flush=True)


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    name, port, count, request = sys.argv[1:]
    uvloop.run(Attack(name, int(port), int(count), bytes.fromhex(request)).run())

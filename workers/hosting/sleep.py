"""Stops apps that nobody asks, and keeps their sockets: the next connection starts the app, and waits for it.

The relay of an app (`workers/sandbox/relay.py`) knows when the app was last in use. It gives its listener to the worker
before the worker stops the app, and both have it open, so no connection is lost between them.
"""

import asyncio
import socket
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from workers.sandbox.relay import LISTENING, MESSAGE_BYTES

ANSWER_SECONDS = 5.0  # in which a relay must answer


class Idle(NamedTuple):
    """An app whose relay accepts no connections: they wait at the listener."""

    listener: socket.socket
    relay: socket.socket  # if it is closed before the app has ended, the relay accepts again


async def ask_relay(control: Path, seconds: float) -> Idle | float:
    """Asks whether an app has been idle for so long. If not, returns the seconds that are left.

    Raises OSError or ValueError if the relay does not answer.
    """
    loop, relay = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
    try:
        relay.setblocking(False)
        async with asyncio.timeout(ANSWER_SECONDS):
            await loop.sock_connect(relay, str(control))
            await loop.sock_sendall(relay, str(seconds).encode())
            await until_readable(relay)
        text, files, _, _ = socket.recv_fds(relay, MESSAGE_BYTES, 1)
        if files:
            return Idle(socket.socket(fileno=files[0]), relay)
    except BaseException:
        relay.close()
        raise
    relay.close()
    return float(text)


async def ask_listening(control: Path) -> bytes:
    """Asks where an app listens, and returns the answer (`Relay.describe_listening`). Raises OSError."""
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_unix_connection(control)
        with closing(writer):
            writer.write(LISTENING)
            return await reader.read()


async def until_readable(waiting: socket.socket) -> None:
    """Waits until there is something to receive or to accept."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(waiting, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(waiting)

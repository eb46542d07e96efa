"""Runs Caddy and the relay to the start command, in the container `web` of a pod (`pod.py`).

Each pod has this process, so it imports little. It holds the visitors' port, at its standard input, and starts Caddy
again when Caddy fails. If Caddy does not even listen, the process ends.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from workers.sandbox.keeper import be_killed_first, limit_files, listen_for_visitors, raise_file_limit
from workers.sandbox.relay import Relay

CANARY = Path("caddy/canary.sock")  # Caddy's own listener, in the folder of the pod
PAUSE_SECONDS = 0.5  # before Caddy is started again
# The app can connect to Caddy, and cannot use up its memory with unfinished heads of 64 KB.
CADDY_FILES = 1_000  # and connections
CADDY_MEMORY = "128MiB"  # beyond which Caddy frees memory at once


async def serve(
    path: str, port: int, start_address: str, relay_port: int, ignored: set[int], command: list[str]
) -> int:
    """Relays connections of the Unix socket to the port, and runs Caddy until SIGTERM. Returns the exit code.

    A connection to the relay's port gets two lines: the seconds without a visitor, and where the app listens.
    """
    with socket.socket(socket.AF_UNIX) as starts:
        starts.bind(start_address)
        starts.listen()
        starts.setblocking(False)
        relay = Relay(listen_for_visitors(path), port, ignored=ignored)
        relay.begin()

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"%f\n%b\n" % (relay.idle_seconds, relay.describe_listening()))
            writer.close()

        await asyncio.start_server(tell, None, relay_port)
        serving, noting = asyncio.create_task(keep_running(command)), asyncio.create_task(note_starts(starts, relay))
        await asyncio.wait([serving, noting], return_when=asyncio.FIRST_COMPLETED)
        noting.cancel()
        return serving.result() if serving.done() else 1


async def keep_running(command: list[str]) -> int:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    while True:
        prepare_start()
        caddy = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, "GOMEMLIMIT": CADDY_MEMORY}, preexec_fn=confine_caddy
        )
        ending = asyncio.create_task(caddy.wait())
        await asyncio.wait([ending, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stopped.is_set():
            with contextlib.suppress(ProcessLookupError):
                caddy.terminate()
        code = await ending
        if stopped.is_set() or not has_started():
            return code
        await asyncio.sleep(PAUSE_SECONDS)


def confine_caddy() -> None:
    be_killed_first()
    limit_files(CADDY_FILES)


def prepare_start() -> None:
    CANARY.unlink(missing_ok=True)


def has_started() -> bool:
    """Returns whether the last Caddy has listened."""
    return CANARY.exists()


async def note_starts(starts: socket.socket, relay: Relay) -> NoReturn:
    """Lets requests wait for the app, each time that `run` is about to start it."""
    while True:
        connection, _ = await asyncio.get_running_loop().sock_accept(starts)
        connection.close()
        relay.expect_start()


def main() -> None:
    raise_file_limit()
    path, port, start_address, ports, *command = sys.argv[1:]
    relay_port, *others = map(int, ports.split(","))
    code = asyncio.run(serve(path, int(port), f"\0{start_address}", relay_port, {relay_port, *others}, command))
    sys.exit(code if code >= 0 else 128 - code)

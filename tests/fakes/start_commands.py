"""The start commands of apps, inside the test: what each does, which of them run, and which ran at the same time."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable

from workers.hosting.watchdog import PORT

ENDED = "the start command ended with status 3"  # how a watchdog describes one of `ending`
END_SECONDS = 0.05  # that a command takes to end when it is told to


class StartCommands:
    """A command is named after the deploy that made its release, and answers with that name."""

    def __init__(self) -> None:
        self.ending: set[str] = set()  # those that end with status 3
        self.failing: set[str] = set()  # those that answer 500
        self.statuses: dict[tuple[str, str], int] = {}  # what else than 200 they answer, by deploy and path
        self.elsewhere: dict[str, list[str]] = {}  # where they listen instead, and so give no answer
        self.restarted: set[str] = set()  # those that have ended with status 3, and run again
        self.running: set[str] = set()
        self.ended: dict[str, float] = {}  # when, by `time.monotonic`
        self.together: set[frozenset[str]] = set()  # the commands that ran at once, at any time

    def begin(self, deploy: str) -> None:
        self.running.add(deploy)
        self.together.add(frozenset(self.running))

    def end(self, deploy: str) -> None:
        self.running.discard(deploy)
        self.ended[deploy] = time.monotonic()

    def answer(self, deploy: str, path: str) -> tuple[int, str]:
        status = 500 if deploy in self.failing else self.statuses.get((deploy, path), 200)
        return status, deploy if status == 200 else ""

    def describe_listening(self, deploy: str) -> bytes:
        """Says where a command listens, as its relay does."""
        found = self.elsewhere.get(deploy)
        return json.dumps({"port": PORT, "reached": found is None, "addresses": found or []}).encode()

    def ran_together(self, *deploys: str) -> bool:
        return any(each.issuperset(deploys) for each in self.together)


Answer = Callable[[str, str], Awaitable[tuple[int, str]]]
Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def http_server(answer: Answer) -> Accept:
    """Returns what accepts connections, each for one request. `answer` gets the host name and the path."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            host = next(line for line in head.split("\r\n") if line.lower().startswith("host:"))
            status, text = await answer(host.partition(":")[2].strip(), head.split(" ")[1])
            lines = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}"
            writer.write(lines.encode())
            await writer.drain()

    return accept


async def ask(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], host: str, path: str = "/"
) -> tuple[int, str]:
    """Requests a path of a host name. Raises OSError and EOFError if there is no answer."""
    reader, writer = connection
    with contextlib.closing(writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
        if not head:
            raise EOFError
        return int(head.split(" ")[1]), text

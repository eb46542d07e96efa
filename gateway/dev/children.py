"""The processes that `make run` starts: each writes to a log file and ends with its supervisor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path


class Refusal(Exception):
    """`make run` cannot go on; the message is all that the user is shown."""


class Child:
    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    async def ended(self) -> Refusal:
        code = await self.process.wait()
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:]) or "(it wrote nothing)"
        return Refusal(f"The {self.name} ended by itself, with code {code}. Its last lines, from {self.log}:\n\n{tail}")

    async def until(self, ready: Callable[[], Awaitable[bool]], seconds: float = 30) -> None:
        ended = asyncio.create_task(self.ended())
        try:
            async with asyncio.timeout(seconds):
                while not await ready():
                    if ended.done():
                        raise ended.result()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise Refusal(f"The {self.name} was not ready after {seconds:.0f} s; see {self.log}.") from None
        finally:
            ended.cancel()


@asynccontextmanager
async def child(
    name: str, *command: str | Path, log: Path, grace: float, settings: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """`grace` is how many seconds it may take to end itself."""
    with log.open("wb") as out:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(settings or {})},
                # Ctrl-C in the terminal must reach the supervisor alone, which stops the children in order.
                start_new_session=True,
            )
        except OSError as error:
            raise Refusal(f"The {name} cannot be started: {error}.") from None
    try:
        yield Child(name, process, log)
    finally:
        try:
            if process.returncode is None:
                process.terminate()
                async with asyncio.timeout(grace):
                    await process.wait()
        except TimeoutError:
            pass
        finally:
            # Also when a second Ctrl-C cuts the waiting short.
            if process.returncode is None:
                process.kill()
                await process.wait()

"""The processes that `capsule dev` starts. Each writes to a log file and is stopped before `capsule dev` ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple


class StartFailed(Exception):
    """`capsule dev` cannot start or continue. It prints the message and ends."""


class Child(NamedTuple):
    name: str
    process: asyncio.subprocess.Process
    log: Path

    async def wait_for_end(self) -> StartFailed:
        """Returns the error to report once the process ends."""
        code = await self.process.wait()
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:]) or "(The log is empty.)"
        return StartFailed(
            f"The {self.name} ended unexpectedly with code {code}. The last lines of {self.log}:\n\n{tail}"
        )

    async def wait_until_ready(self, is_ready: Callable[[], Awaitable[bool]], seconds: float = 30) -> None:
        """Raises StartFailed if the process ends, or is not ready in time."""
        end = asyncio.create_task(self.wait_for_end())
        try:
            async with asyncio.timeout(seconds):
                while not await is_ready():
                    if end.done():
                        raise end.result()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise StartFailed(f"The {self.name} was not ready after {seconds:.0f} s. See {self.log}.") from None
        finally:
            end.cancel()


@asynccontextmanager
async def run_child(
    name: str, *command: str | Path, log: Path, grace: float, settings: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """Runs a process; at the end, sends it SIGTERM and kills it after `grace` seconds. Raises StartFailed."""
    with log.open("wb") as out:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(settings or {})},
                # Ctrl-C in the terminal does not reach the children: `capsule dev` stops them in order.
                start_new_session=True,
            )
        except OSError as error:
            raise StartFailed(f"The {name} could not be started: {error}.") from None
    try:
        yield Child(name, process, log)
    finally:
        await _stop(process, grace)


async def _stop(process: asyncio.subprocess.Process, grace: float) -> None:
    try:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(grace):
                await process.wait()
    except TimeoutError:
        pass
    finally:
        # Also reached after a second Ctrl-C, which cancels the wait above.
        if process.returncode is None:
            process.kill()
            await process.wait()

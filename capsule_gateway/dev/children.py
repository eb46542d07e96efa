"""The processes that `capsule dev` starts. Each writes to a log file and is stopped before `capsule dev` ends."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

CHUNK_BYTES = 65_536


class StartFailed(Exception):
    """`capsule dev` cannot start or continue. It prints the message and ends."""


class DevProcess(NamedTuple):
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
) -> AsyncIterator[DevProcess]:
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
        yield DevProcess(name, process, log)
    finally:
        await _stop(process, grace)


@asynccontextmanager
async def run_shell(
    name: str, line: str, *, folder: Path, log: Path, grace: float, environment: Mapping[str, str]
) -> AsyncIterator[DevProcess]:
    """Runs a line of shell in the folder. Its output goes to the log and to the screen.

    At the end, it sends SIGTERM to all processes of the line, and kills them after `grace` seconds.
    """
    with log.open("wb", buffering=0) as out:
        process = await asyncio.create_subprocess_shell(
            line,
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        assert process.stdout
        copying = asyncio.create_task(_copy_output(process.stdout, out))
        try:
            yield DevProcess(name, process, log)
        finally:
            _signal_group(process.pid, signal.SIGTERM)
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_limit_grace(grace)):
                        await asyncio.gather(process.wait(), asyncio.shield(copying))
            finally:
                _signal_group(process.pid, signal.SIGKILL)
                copying.cancel()
                await asyncio.gather(process.wait(), copying, return_exceptions=True)


async def _copy_output(reader: asyncio.StreamReader, log: FileIO) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        log.write(chunk)
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _limit_grace(seconds: float) -> float:
    """Returns 0 after a second Ctrl-C, which may have come while another part was being stopped."""
    task = asyncio.current_task()
    return 0 if task is not None and task.cancelling() > 1 else seconds


async def _stop(process: asyncio.subprocess.Process, grace: float) -> None:
    try:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(_limit_grace(grace)):
                await process.wait()
    except TimeoutError:
        pass
    finally:
        # Also reached after a second Ctrl-C, which cancels the wait above.
        if process.returncode is None:
            process.kill()
            await process.wait()

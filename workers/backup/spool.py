"""Holds the files that are on the way between a storage and the target of a backup, in bounded space.

A file is hashed before it is stored under its digest, so it must be somewhere meanwhile: in the target's folder, or in
the data folder. On the file system where it will stay, it is not written twice. What a killed process has left, the
next one removes.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from gateway.operations.temporary import temporary_folder

PREFIX = "spool-"
PARALLEL = 8  # files
SPOOL_BYTES = 268_435_456  # of all files together; a larger one is alone


class SpoolFailed(Exception):
    """The disk of the folder is full, or cannot be written. The message is a sentence for the operator."""


@contextmanager
def open_spool(parent: Path) -> Iterator["Spool"]:
    """Yields a spool in a folder of its own. Raises SpoolFailed."""
    with ExitStack() as stack:
        with _failures(parent):
            parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(temporary_folder(parent, PREFIX))
        yield Spool(folder)


@contextmanager
def _failures(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "make room there, or correct this, and run the command again"
        raise SpoolFailed(f"{error.filename or folder}: {error.strerror or error}; {remedy}") from None


class Spool:
    def __init__(self, folder: Path) -> None:
        self._folder, self._sizes = folder, list[int]()
        self._turn, self._ended = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def file(self, size: int) -> AsyncIterator[Path]:
        """Waits for room. Yields the path of a new file, which is removed afterwards. Raises SpoolFailed."""
        async with self._turn:
            while self._sizes and (len(self._sizes) == PARALLEL or sum(self._sizes) + size > SPOOL_BYTES):
                self._ended.clear()
                await self._ended.wait()
            self._sizes.append(size)
        path = self._folder / secrets.token_hex(8)
        try:
            with _failures(self._folder):
                yield path
        finally:
            path.unlink(missing_ok=True)
            self._sizes.remove(size)
            self._ended.set()

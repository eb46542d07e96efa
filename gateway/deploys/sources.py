"""Stored sources: the tar.gz files that account holders publish, one object in the storage per source.

    sources/<app id>/<source id>.tar.gz

The ids sort by time. An upload is written to a local file first, so that a refused upload never reaches the storage.
This module handles the objects only; `states.py` decides which sources are still needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterable, Set
from pathlib import Path

from gateway.accounts.records import App
from gateway.errors import RateLimited, RequestMalformed, RequestTooLarge
from gateway.ids import new_id
from gateway.storage import Object, Storage

SOURCE_BYTES = 104_857_600  # of a packed source
UPLOAD_SECONDS = 600.0
MAX_UPLOADS = 2  # of one account at a time, in one process
RETRY_SECONDS = 10.0
KEPT_SOURCES = 10  # of one app, besides those that are still needed
GZIP_MAGIC = b"\x1f\x8b"
SUFFIX = ".tar.gz"
HOW_TO_PACK = "pack the folder of the app's source with: tar -czf source.tar.gz -C FOLDER ."


class Sources:
    def __init__(self, storage: Storage, uploads: Path) -> None:
        """`uploads` is a folder for uploads in progress."""
        self._storage, self._uploads = storage, uploads
        self._receiving: Counter[str] = Counter()  # uploads in progress by account

    @staticmethod
    def key(app_id: str, source: str) -> str:
        return f"sources/{app_id}/{source}{SUFFIX}"

    async def receive(self, app: App, body: AsyncIterable[bytes], size: int | None) -> str:
        """Stores an upload and returns the id of the source. A failed upload leaves nothing stored.

        `size` is the size that the request declares, or None. An upload that is refused for its size, or because the
        account has too many uploads in progress, is not read.
        """
        if size is not None and size > SOURCE_BYTES:
            raise _too_large()
        if self._receiving[app.account] >= MAX_UPLOADS:
            raise RateLimited(
                f"An account can publish {MAX_UPLOADS} sources at once; wait until one of the uploads has ended.",
                retry_after=RETRY_SECONDS,
            )
        self._receiving[app.account] += 1
        try:
            return await self._store(app.id, body)
        finally:
            self._receiving[app.account] -= 1
            self._receiving += Counter()  # drops accounts without uploads

    async def _store(self, app_id: str, body: AsyncIterable[bytes]) -> str:
        source = new_id("src")
        self._uploads.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_abandoned()
        path = self._uploads / f"{source}.part"
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                await _write(body, path)
            await self._storage.put(self.key(app_id, source), path)
        finally:
            path.unlink(missing_ok=True)
        return source

    def _remove_abandoned(self) -> None:
        """Removes the unfinished uploads of a gateway that was killed."""
        for path in self._uploads.glob("*.part"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > 2 * UPLOAD_SECONDS:
                    path.unlink()

    async def open(self, app_id: str, source: str) -> Object | None:
        return await self._storage.open(self.key(app_id, source))

    async def exists(self, app_id: str, source: str) -> bool:
        return await self._storage.exists(self.key(app_id, source))

    async def list_old(self, app_id: str) -> list[str]:
        """Returns the ids of all but the newest sources of an app, oldest first."""
        names = await self._storage.list_names(f"sources/{app_id}/")
        stored = sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
        return stored[:-KEPT_SOURCES]

    async def remove(self, app_id: str, sources: Set[str]) -> None:
        await self._storage.delete([self.key(app_id, source) for source in sources])

    async def remove_all(self, app_id: str) -> None:
        await self._storage.delete_folder(f"sources/{app_id}")


async def _write(body: AsyncIterable[bytes], path: Path) -> None:
    size = 0
    with path.open("xb") as file:
        async for part in body:
            if not size and len(part) > 1 and not part.startswith(GZIP_MAGIC):
                raise RequestMalformed(f"This is not a tar.gz file; {HOW_TO_PACK}")
            size += len(part)
            if size > SOURCE_BYTES:
                raise _too_large()
            file.write(part)
    if not size:
        raise RequestMalformed(f"The file is empty; {HOW_TO_PACK}")


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"A packed source can have at most {SOURCE_BYTES // 1_048_576} MiB.")

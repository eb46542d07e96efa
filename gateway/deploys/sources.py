"""Stored sources: the tar.gz files that account holders publish, one file per source.

    GATEWAY_DATA_DIR/sources/<app id>/<source id>.tar.gz

The ids sort by time. This module knows files only; which sources are still needed is known to `states.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, Set
from pathlib import Path

from gateway.accounts.records import App
from gateway.errors import RateLimited, RequestMalformed, RequestTooLarge
from gateway.ids import new_id

SOURCE_BYTES = 104_857_600  # of a packed source
UPLOAD_SECONDS = 600.0
UPLOADS = 2  # of one account at once, in one process
RETRY_SECONDS = 10.0
KEPT_SOURCES = 10  # of one app, besides those that are still needed
GZIP_MAGIC = b"\x1f\x8b"
SUFFIX = ".tar.gz"


class Sources:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._receiving: Counter[str] = Counter()  # uploads in progress by account

    def path(self, app_id: str, source: str) -> Path:
        return self._folder / app_id / f"{source}{SUFFIX}"

    async def receive(self, app: App, body: AsyncIterable[bytes], size: int | None) -> str:
        """Stores an upload and returns the id of the source. Nothing stays on disk when it fails.

        `size` is what the request declares, None if it declares nothing. Nothing is read of what is refused for it, or
        because the account has too many uploads in progress.
        """
        if size is not None and size > SOURCE_BYTES:
            raise _too_large()
        if self._receiving[app.account] >= UPLOADS:
            raise RateLimited(
                f"An account can publish {UPLOADS} sources at once; wait until one of the uploads has ended.",
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
        path = self.path(app_id, source)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                await _write(body, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return source

    def list_old(self, app_id: str) -> list[str]:
        """The ids of all but the newest sources of an app, oldest first."""
        stored = sorted(path.name.removesuffix(SUFFIX) for path in (self._folder / app_id).glob(f"*{SUFFIX}"))
        return stored[:-KEPT_SOURCES]

    def remove(self, app_id: str, sources: Set[str]) -> None:
        for source in sources:
            self.path(app_id, source).unlink(missing_ok=True)

    def remove_all(self, app_id: str) -> None:
        for path in (self._folder / app_id).glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)


async def _write(body: AsyncIterable[bytes], path: Path) -> None:
    size = 0
    with path.open("xb") as file:
        async for part in body:
            if not size and len(part) > 1 and not part.startswith(GZIP_MAGIC):
                raise RequestMalformed("The body must be a tar.gz of the app's source.")
            size += len(part)
            if size > SOURCE_BYTES:
                raise _too_large()
            file.write(part)
    if not size:
        raise RequestMalformed("The body is empty; send a tar.gz of the app's source.")


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"A packed source may have at most {SOURCE_BYTES // 1_048_576} MiB.")

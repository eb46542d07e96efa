"""Stored sources: what account holders publish, one tar.gz in the storage per source.

    sources/<app id>/<source id>.tar.gz

The ids sort by time. An upload (a tar.gz, a zip or a page) is written to a local file first, then a process of its own
checks it, and packs it as a tar.gz (`archives.py`). So a refused upload never reaches the storage, and an archive that
takes long delays no request. This module handles the objects only; `states.py` decides which sources are still needed.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterable, Set
from pathlib import Path
from typing import Literal

import msgspec

from gateway.accounts.records import App
from gateway.cancellation import run_process
from gateway.deploys import archives
from gateway.errors import MediaTypeUnsupported, RateLimited, RequestMalformed, RequestTooLarge
from gateway.ids import new_id
from gateway.settings.text_files import decode_text
from gateway.storage import Object, Storage, check_exit_code, full_disk_failures

SOURCE_BYTES = 104_857_600  # of an upload
SOURCE_FILES, UNPACKED_BYTES = 50_000, 1_073_741_824  # of a source; builds have the same limits
UPLOAD_SECONDS = 600.0
MAX_UPLOADS = 2  # of one account at a time, in one process
RETRY_SECONDS = 10.0
KEPT_SOURCES = 10  # of one app, besides those that are still needed
PACK_SECONDS = 180.0  # in which an upload is checked and packed
MAX_PACKING = 2  # processes of one gateway process that check and pack uploads; the other uploads wait
SUFFIX = ".tar.gz"
HOW_TO_SEND_A_PAGE = "send the HTML of the page, or an archive of the app's source with its own Content-Type."
HOW_TO_PACK = "pack the folder of the app's source with: tar -czf source.tar.gz -C FOLDER ."

Format = Literal["tar", "zip", "page"]
MEDIA_TYPES: dict[str, Format | None] = {
    "application/gzip": "tar",
    "application/x-gzip": "tar",
    "application/zip": "zip",
    "application/x-zip-compressed": "zip",  # as browsers on Windows call it
    "text/html": "page",
    # These say nothing: clients send them for any file.
    "application/octet-stream": None,
    "application/x-www-form-urlencoded": None,
    "": None,
}
NAMES: dict[Format, str] = {"tar": "a tar.gz file", "zip": "a zip file", "page": "an HTML page"}
HEAD_BYTES = 1_024  # from which the format is recognized
GZIP_MAGIC, ZIP_MAGIC = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06")
BLANK = " \t\r\n"  # in front of a page


class SourceLimits(msgspec.Struct, frozen=True):
    packed: int = SOURCE_BYTES
    files: int = SOURCE_FILES
    unpacked: int = UNPACKED_BYTES


LIMITS = SourceLimits()


class Sources:
    def __init__(self, storage: Storage, uploads: Path, limits: SourceLimits = LIMITS) -> None:
        """`uploads` is a folder for uploads in progress."""
        self._storage, self._uploads, self._limits = storage, uploads, limits
        self._receiving: Counter[str] = Counter()  # uploads in progress by account
        self._packing = asyncio.Semaphore(MAX_PACKING)

    @staticmethod
    def key(app_id: str, source: str) -> str:
        return f"sources/{app_id}/{source}{SUFFIX}"

    async def receive(
        self, app: App, body: AsyncIterable[bytes], size: int | None, declared: Format | None = None
    ) -> str:
        """Stores an upload and returns the id of the source. A failed upload leaves nothing stored.

        `size` and `declared` are the size and the format that the request declares, or None. An upload that is refused
        for its size, or because the account has too many uploads in progress, is not read.
        """
        if size is not None and size > self._limits.packed:
            raise _too_large(self._limits)
        if self._receiving[app.account] >= MAX_UPLOADS:
            raise RateLimited(
                f"An account can publish {MAX_UPLOADS} sources at once; wait until one of the uploads has ended.",
                retry_after=RETRY_SECONDS,
            )
        self._receiving[app.account] += 1
        try:
            return await self._store(app.id, body, declared)
        finally:
            self._receiving[app.account] -= 1
            self._receiving += Counter()  # drops accounts without uploads

    async def _store(self, app_id: str, body: AsyncIterable[bytes], declared: Format | None) -> str:
        source = new_id("src")
        path, packed = self._uploads / f"{source}.part", self._uploads / f"{source}.tar.part"
        try:
            with full_disk_failures():
                self._uploads.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._remove_abandoned()
                async with asyncio.timeout(UPLOAD_SECONDS):
                    form = await _write(body, path, declared, self._limits)
                    async with self._packing:
                        await _pack(form, path, packed, self._limits)
            await self._storage.put(self.key(app_id, source), path if form == "tar" else packed)
        finally:
            path.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
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


def read_format(content_type: str) -> Format | None:
    """Returns the format of a Content-Type; None for one that says nothing. Raises MediaTypeUnsupported."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in MEDIA_TYPES:
        raise MediaTypeUnsupported
    return MEDIA_TYPES[kind]


async def _write(body: AsyncIterable[bytes], path: Path, declared: Format | None, limits: SourceLimits) -> Format:
    """Writes an upload to the file, and returns its format."""
    size, head, form = 0, b"", None
    with path.open("xb") as file:
        async for part in body:
            size += len(part)
            if size > limits.packed:
                raise _too_large(limits)
            file.write(part)
            if form is None:
                head += part
                form = _recognize(head, declared) if len(head) >= HEAD_BYTES else None
    if not size:
        raise _refuse("The file is empty", declared)
    return form or _recognize(head, declared)


def _recognize(head: bytes, declared: Format | None) -> Format:
    """Returns the format of an upload with these first bytes. Raises RequestMalformed."""
    found: Format | None = None
    if head.startswith(GZIP_MAGIC):
        found = "tar"
    elif head.startswith(ZIP_MAGIC):
        found = "zip"
    elif declared == "page" or decode_text(head).lstrip(BLANK).startswith("<"):
        found = "page"
    if found is None or declared not in (None, found):
        expected = NAMES[declared] if declared else "a tar.gz file, a zip file or an HTML page"
        raise _refuse(f"This is not {expected}", declared)
    return found


def _refuse(fault: str, declared: Format | None) -> RequestMalformed:
    return RequestMalformed(f"{fault}; {HOW_TO_SEND_A_PAGE if declared == 'page' else HOW_TO_PACK}")


async def _pack(form: Format, upload: Path, packed: Path, limits: SourceLimits) -> None:
    """Checks an upload, and packs one that is not a tar.gz. Raises RequestMalformed, and OSError for a full disk."""
    try:
        with upload.open("rb") as source, packed.open("xb") as target:
            status, reason = await run_process(
                *(sys.executable, "-IS", archives.__file__, form, str(limits.files), str(limits.unpacked)),
                seconds=PACK_SECONDS,
                stdin=source,
                stdout=target,
                stderr=subprocess.PIPE,
                env={},
                start_new_session=True,
            )
    except TimeoutError:
        raise RequestMalformed("The archive takes too long to unpack; leave out files, and publish it again.") from None
    check_exit_code(status)
    if status:
        lines = reason.decode(errors="replace").strip().splitlines() if status == 1 else []
        fault = lines[-1] if lines else "the archive takes too long to unpack"
        raise RequestMalformed(f"{fault[0].upper()}{fault[1:]}. Correct the archive, and publish it again.")


def _too_large(limits: SourceLimits) -> RequestTooLarge:
    return RequestTooLarge(f"A packed source can have at most {limits.packed // 1_048_576} MiB.")

"""Archives of releases in the storage: one compressed tar per release.

A separate process packs and unpacks an archive (`archive_files.py`), which leaves the worker's event loop free. An
archive is unpacked only if its digest matches the deploy's record. A full disk is an OSError.
"""

import asyncio
import hashlib
import os
import sys
from pathlib import Path

import msgspec

from gateway.cancellation import run_process
from gateway.deploys.release import ReleaseArchive
from gateway.storage import check_exit_code
from workers.hosting.archive_files import RECORD, BadArchive

PACK_SECONDS = 300.0
ARCHIVE_BYTES = 2_147_483_648  # at most: the size of the largest unpacked release
FOLDER, SUFFIX = "archives/", ".tar.gz"


def archive_key(app_id: str, deploy_id: str) -> str:
    return f"{FOLDER}{app_id}/{deploy_id}{SUFFIX}"


async def pack(release: Path, target: Path) -> ReleaseArchive:
    """Packs the release into the file `target`. Raises BadArchive."""
    await _run("pack", release, target)
    return await asyncio.to_thread(_measure, target)


async def prepare(release: Path) -> None:
    """Prepares the files of a release that is served (`compression.py`, `digests.py`). Raises BadArchive."""
    await _run("prepare", release, release)


async def unpack(source: Path, expected: ReleaseArchive, folder: Path) -> None:
    """Unpacks the archive. Raises BadArchive, and unpacks nothing, if it is not the expected archive."""
    if await asyncio.to_thread(_measure, source) != expected:
        raise BadArchive("the archive of the release is damaged")
    await _run("unpack", source, folder)


def read_record(release: Path) -> ReleaseArchive | None:
    try:
        return msgspec.json.decode((release / RECORD).read_bytes(), type=ReleaseArchive)
    except (OSError, msgspec.MsgspecError):
        return None


def write_record(release: Path, archive: ReleaseArchive) -> None:
    fresh = release / f".{RECORD}.new"
    fresh.write_bytes(msgspec.json.encode(archive))
    fresh.replace(release / RECORD)


def _measure(path: Path) -> ReleaseArchive:
    with path.open("rb") as file:
        return ReleaseArchive(hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size)


# Not `-m`: an installed service adds the folder of its packages only to its own path.
_PROCESS = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r});"
    " from workers.hosting.archive_files import main; main()"
)


async def _run(action: str, source: Path, target: Path) -> None:
    command = sys.executable, "-I", "-c", _PROCESS, action, source, target
    try:
        status, error = await run_process(*command, seconds=PACK_SECONDS, stderr=asyncio.subprocess.PIPE)
    except TimeoutError:
        raise BadArchive(f"{action}: took longer than {PACK_SECONDS:.0f} seconds") from None
    check_exit_code(status)
    if status:
        lines = error.decode(errors="replace").strip().splitlines()
        raise BadArchive(f"{action}: {lines[-1][:200] if lines else status}")

"""Archives of releases in the storage: one compressed tar per release.

A separate process packs and unpacks an archive, which leaves the worker's event loop free. An archive is unpacked only
if its digest matches the deploy's record. Its names are checked too: nothing is written outside the folder or through a
link. The links of a start command's files may lead anywhere. Files that are served contain no links.
"""

import asyncio
import hashlib
import os
import sys
import tarfile
from contextlib import suppress
from pathlib import Path, PurePosixPath

import msgspec

from gateway.cancellation import finish_despite_cancellation
from gateway.deploys.serving import ReleaseArchive
from workers.hosting.compression import compress_files

PACK_SECONDS = 300.0
ARCHIVE_BYTES = 2_147_483_648  # at most: the size of the largest unpacked release
COMPRESSION_LEVEL = 1  # most files of a release are already compressed, or small
FOLDER, SUFFIX = "archives/", ".tar.gz"
FILES = "files"  # the folder of a release with files that are served
RECORD = "archive"  # the file of a release that identifies its archive
# Files of a release that belong to one host.
HOST_FILES = {"size", "environment", "url", "sock", "asleep", RECORD}


class BadArchive(Exception):
    """The archive is damaged, or cannot be packed or unpacked."""


def archive_key(app_id: str, deploy_id: str) -> str:
    return f"{FOLDER}{app_id}/{deploy_id}{SUFFIX}"


async def pack(release: Path, target: Path) -> ReleaseArchive:
    """Packs the release into the file `target`. Raises BadArchive."""
    await _run("pack", release, target)
    return await asyncio.to_thread(_measure, target)


async def compress(release: Path) -> None:
    """Compresses the files of a release that is served (`compression.py`). Raises BadArchive."""
    await _run("compress", release, release)


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
    " from workers.hosting.archives import main; main()"
)


async def _run(action: str, source: Path, target: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", _PROCESS, action, source, target),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, error = await asyncio.wait_for(process.communicate(), PACK_SECONDS)
    except BaseException as stopped:
        with suppress(ProcessLookupError):  # it has just ended
            process.kill()
        await finish_despite_cancellation(process.wait())
        if isinstance(stopped, TimeoutError):
            raise BadArchive(f"{action}: took longer than {PACK_SECONDS:.0f} seconds") from None
        raise
    if process.returncode:
        lines = error.decode(errors="replace").strip().splitlines()
        raise BadArchive(f"{action}: {lines[-1][:200] if lines else process.returncode}")


# -- in the separate process ---------------------------------------------------------------------------------


def _pack(release: Path, target: Path) -> None:
    with tarfile.open(target, "w:gz", compresslevel=COMPRESSION_LEVEL, format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(os.listdir(release)):
            if name not in HOST_FILES:
                tar.add(release / name, name)


def _unpack(source: Path, folder: Path) -> None:
    links: set[PurePosixPath] = set()
    files: set[PurePosixPath] = set()
    os.umask(0o022)
    with tarfile.open(source, "r:gz") as tar:
        if hasattr(tarfile, "fully_trusted_filter"):  # the checks below are stricter, except for the targets of links
            tar.extraction_filter = tarfile.fully_trusted_filter
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or links.intersection((path, *path.parents)):
                raise BadArchive("the archive contains a name that leaves its folder")
            if member.issym():
                if path.parts[:1] == (FILES,):
                    raise BadArchive("the archive contains a link among the files that are served")
                links.add(path)
            elif member.islnk():
                if PurePosixPath(member.linkname) not in files:
                    raise BadArchive("the archive contains a link to a file outside it")
            elif member.isfile():
                files.add(path)
            elif not member.isdir():
                raise BadArchive("the archive contains an entry that is not a file, a folder or a link")
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            tar.extract(member, folder)


def main() -> None:
    sys.setrecursionlimit(10_000)  # `tarfile` and `os.walk` recurse, and a path has at most half as many folders
    try:
        actions = {"compress": lambda release, _: compress_files(release), "pack": _pack, "unpack": _unpack}
        actions[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")

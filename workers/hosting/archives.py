"""Archives of releases: one compressed tar per release, as it is kept in the storage.

An archive is packed and unpacked by a process of its own, which leaves the worker's event loop free. Only an archive
whose digest is the one in its deploy's record is unpacked. Its names are checked all the same: nothing is written
outside the folder, or through a link. Links may lead anywhere, because those of a start command's files do; files that
are served hold none.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import tarfile
from pathlib import Path, PurePosixPath

import msgspec

from gateway.cancellation import finish_despite_cancellation

PACK_SECONDS = 300.0
ARCHIVE_BYTES = 2_147_483_648  # of the largest archive: as much as the largest release unpacked
LEVEL = 1  # of compression: most of a release is compressed already, or small
FOLDER, SUFFIX = "archives/", ".tar.gz"
FILES = "files"  # the folder of those that are served
RECORD = "archive"  # the file of a release that names its archive
OWN_FILES = {"size", ".size.new", "environment", RECORD}  # of a release on one host


class BadArchive(Exception):
    """The archive is not what it should be, or cannot be read."""


class Archive(msgspec.Struct, frozen=True):
    digest: str  # SHA-256 of the packed bytes, hexadecimal
    size: int  # bytes, packed


def archive_key(app_id: str, deploy_id: str) -> str:
    return f"{FOLDER}{app_id}/{deploy_id}{SUFFIX}"


async def pack(release: Path, target: Path) -> Archive:
    """Raises BadArchive."""
    await _run("pack", release, target)
    return await asyncio.to_thread(_describe, target)


async def unpack(source: Path, expected: Archive, folder: Path) -> None:
    """Raises BadArchive, and unpacks nothing, unless the archive is the expected one."""
    if await asyncio.to_thread(_describe, source) != expected:
        raise BadArchive("the archive of the release is damaged")
    await _run("unpack", source, folder)


def read_record(release: Path) -> Archive | None:
    try:
        return msgspec.json.decode((release / RECORD).read_bytes(), type=Archive)
    except (OSError, msgspec.MsgspecError):
        return None


def write_record(release: Path, archive: Archive) -> None:
    fresh = release / f".{RECORD}.new"
    fresh.write_bytes(msgspec.json.encode(archive))
    fresh.replace(release / RECORD)


def _describe(path: Path) -> Archive:
    with path.open("rb") as file:
        return Archive(hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size)


# Not `-m`: an installed service adds the folder of its packages to its own path alone.
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
        process.kill()
        await finish_despite_cancellation(process.wait())
        if isinstance(stopped, TimeoutError):
            raise BadArchive(f"{action}: it took longer than {PACK_SECONDS:.0f} seconds") from None
        raise
    if process.returncode:
        lines = error.decode(errors="replace").strip().splitlines()
        raise BadArchive(f"{action}: {lines[-1][:200] if lines else process.returncode}")


# -- in the process ------------------------------------------------------------------------------------------


def _pack(release: Path, target: Path) -> None:
    sys.setrecursionlimit(10_000)  # `tarfile` goes down by recursion; a path has at most half as many folders
    with tarfile.open(target, "w:gz", compresslevel=LEVEL, format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(os.listdir(release)):
            if name not in OWN_FILES:
                tar.add(release / name, name)


def _unpack(source: Path, folder: Path) -> None:
    links: set[PurePosixPath] = set()
    files: set[PurePosixPath] = set()
    os.umask(0o022)
    with tarfile.open(source, "r:gz") as tar:
        if hasattr(tarfile, "fully_trusted_filter"):  # the checks below are stricter, except for links' targets
            tar.extraction_filter = tarfile.fully_trusted_filter
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or links.intersection((path, *path.parents)):
                raise BadArchive("it contains a name that leaves its folder")
            if member.issym():
                links.add(path)
                if path.parts[0] == FILES:  # from when releases held links
                    continue
            elif member.islnk():
                if PurePosixPath(member.linkname) not in files:
                    raise BadArchive("it contains a link to no file of its own")
            elif member.isfile():
                files.add(path)
            elif not member.isdir():
                raise BadArchive("it contains what is neither a file, a folder nor a link")
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            tar.extract(member, folder)


def main() -> None:
    try:
        {"pack": _pack, "unpack": _unpack}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")

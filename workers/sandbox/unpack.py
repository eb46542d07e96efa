"""Unpacks a customer's tar.gz. This runs inside the sandbox, so a bug here affects only one build.

The whole archive is refused if it contains absolute names, names or links that leave the folder, files written through
a link, devices, or more than the limits allow. The target of a link may contain `..` only at its start, where it goes
up from real folders. After a name, `..` would go up from the target of the link with that name.
"""

from __future__ import annotations

import gzip
import sys
import tarfile
import time
from pathlib import PurePosixPath
from typing import BinaryIO


class Refused(Exception):
    """Account holders see the message."""


def unpack(archive: BinaryIO, folder: str, max_files: int, max_bytes: int) -> None:
    """Unpacks the archive into the folder. Raises Refused."""
    try:
        with gzip.open(archive) as plain:
            _extract(plain, folder, max_files, max_bytes)
            while plain.read(65_536):  # read up to the checksum at the end, which `tarfile` ignores
                pass
    except Refused:
        raise
    except Exception as error:  # of any kind, because the bytes come from a customer
        raise Refused(f"the archive can't be unpacked: {error}") from error


def _extract(plain: gzip.GzipFile, folder: str, max_files: int, max_bytes: int) -> None:
    files, total, now = 0, 0, time.time()
    links: set[PurePosixPath] = set()
    files_seen: set[str] = set()
    with tarfile.open(fileobj=plain, mode="r|") as tar:
        if hasattr(tarfile, "data_filter"):  # Python's own checks in addition to ours
            tar.extraction_filter = tarfile.data_filter
        for member in tar:
            files, total = files + 1, total + member.size
            if files > max_files:
                raise Refused(f"the archive has more than {max_files} files")
            if total > max_bytes:
                raise Refused(f"the archive has more than {max_bytes >> 20} MiB")
            path = _check_member(member, links, files_seen)
            member.name = str(path)
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.mtime = now  # the archive's time may be outside the calendar
            tar.extract(member, folder, set_attrs=not member.issym())
            tar.members.clear()  # type: ignore[attr-defined]  # millions of them would take too much memory


def _check_member(member: tarfile.TarInfo, links: set[PurePosixPath], files_seen: set[str]) -> PurePosixPath:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        raise Refused(f"the archive contains {member.name!r}, which leaves its folder")
    if any(parent in links for parent in path.parents) or (path in links and not member.issym()):
        raise Refused(f"the archive writes {member.name!r} through a link")
    if member.issym():
        if not _stays_inside(path, PurePosixPath(member.linkname)):
            raise Refused(f"the archive contains the link {member.name!r}, which leaves its folder")
        links.add(path)
        files_seen.discard(str(path))  # a hard link to this link would be the same link in another folder
    elif member.islnk():
        if str(PurePosixPath(member.linkname)) not in files_seen:
            raise Refused(f"the archive contains the link {member.name!r}, which points to no earlier file")
    elif member.isfile():
        files_seen.add(str(path))
    elif not member.isdir():
        raise Refused(f"the archive contains {member.name!r}, which is not a file, a folder or a link")
    return path


def _stays_inside(path: PurePosixPath, target: PurePosixPath) -> bool:
    ups = 0
    while ups < len(target.parts) and target.parts[ups] == "..":
        ups += 1
    return not target.is_absolute() and ".." not in target.parts[ups:] and ups < len(path.parts)


if __name__ == "__main__":  # inside the sandbox: max files, max bytes
    try:
        unpack(sys.stdin.buffer, ".", int(sys.argv[1]), int(sys.argv[2]))
    except Refused as refused:
        sys.exit(str(refused))

"""A customer's tar.gz, unpacked. It runs inside the sandbox, so that what this gets wrong costs a build and no more.

Refused whole, rather than mended: absolute names, names and links that leave the folder, anything written through a
link, devices, and more than the bounds. A link's `..` may only stand in front, where it leads up from real folders:
behind a name it would lead up from wherever that name's own link leads.
"""

from __future__ import annotations

import gzip
import tarfile
import time
from pathlib import PurePosixPath
from typing import BinaryIO


class Refused(Exception):
    pass


def unpack(archive: BinaryIO, folder: str, most_files: int, most_bytes: int) -> None:
    """Raises Refused."""
    try:
        with gzip.open(archive) as plain:
            _extract(plain, folder, most_files, most_bytes)
            while plain.read(65_536):  # to the checksum at its end, which `tarfile` does not look for
                pass
    except Refused:
        raise
    except Exception as error:  # of any kind: the bytes are a customer's, and so is what they break
        raise Refused(f"the archive can't be unpacked: {error}") from error


def _extract(plain: gzip.GzipFile, folder: str, most_files: int, most_bytes: int) -> None:
    files, total, now = 0, 0, time.time()
    links: set[PurePosixPath] = set()
    files_seen: set[PurePosixPath] = set()
    with tarfile.open(fileobj=plain, mode="r|") as tar:
        if hasattr(tarfile, "data_filter"):  # Python's own checks as well; ours do not need them
            tar.extraction_filter = tarfile.data_filter
        for member in tar:
            files, total = files + 1, total + member.size
            if files > most_files:
                raise Refused(f"the archive holds more than {most_files} files")
            if total > most_bytes:
                raise Refused(f"the archive holds more than {most_bytes >> 20} MiB")
            path = _checked(member, links, files_seen)
            member.name = str(path)
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.mtime = now  # an archive's may be of no calendar
            tar.extract(member, folder, set_attrs=not member.issym())


def _checked(member: tarfile.TarInfo, links: set[PurePosixPath], files_seen: set[PurePosixPath]) -> PurePosixPath:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        raise Refused(f"the archive holds {member.name!r}, which leaves its folder")
    if any(parent in links for parent in path.parents) or (path in links and not member.issym()):
        raise Refused(f"the archive writes {member.name!r} through a link")
    if member.issym():
        if not _stays(path, PurePosixPath(member.linkname)):
            raise Refused(f"the archive holds the link {member.name!r}, which leaves its folder")
        links.add(path)
        files_seen.discard(path)  # a hard link to it would be this link, in another folder
    elif member.islnk():
        if PurePosixPath(member.linkname) not in files_seen:
            raise Refused(f"the archive holds the link {member.name!r}, which is to no file before it")
    elif member.isfile():
        files_seen.add(path)
    elif not member.isdir():
        raise Refused(f"the archive holds {member.name!r}, which is neither a file, a folder nor a link")
    return path


def _stays(path: PurePosixPath, target: PurePosixPath) -> bool:
    ups = 0
    while ups < len(target.parts) and target.parts[ups] == "..":
        ups += 1
    return not target.is_absolute() and ".." not in target.parts[ups:] and ups < len(path.parts)

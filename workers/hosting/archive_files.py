"""Prepares the files of a release, and packs and unpacks its archive, in a process of its own (`archives.py`).

Every deploy starts this process, so it imports little. The names in an archive are checked: nothing is written outside
the folder or through a link. The links of a start command's files may lead anywhere. Files that are served contain no
links.
"""

import os
import sys
import tarfile
from pathlib import Path, PurePosixPath

from gateway.deploys.archives import end_if_full
from workers.hosting.compression import compress_files
from workers.hosting.digests import mark_digests

COMPRESSION_LEVEL = 1  # most files of a release are already compressed, or small
FILES = "files"  # the folder of a release with files that are served
RECORD = "archive"  # the file of a release that identifies its archive
# Files of a release that belong to one host.
HOST_FILES = {"size", "environment", "url", "sock", "asleep", RECORD}


class BadArchive(Exception):
    """The archive is damaged, or cannot be packed or unpacked."""


def _prepare(release: Path, _: Path) -> None:
    compress_files(release)
    mark_digests(release)


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
        actions = {"prepare": _prepare, "pack": _pack, "unpack": _unpack}
        actions[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    except Exception as error:
        if isinstance(error, OSError):
            end_if_full(error)
        sys.exit(f"{type(error).__name__}: {error}")

"""The files of a release hold no symbolic links, because whoever serves them would follow one out of the release.

Each link is replaced by the file that it names, or by a folder that holds what the named one does. The kernel finds it,
beneath the customer's own source (openat2). Nothing else may change the files meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MOST = 20_000  # links of an old release
OPENAT2 = 437  # the number of the system call, on every architecture
NO_MAGIC_LINKS, NO_LINKS, BENEATH = 0x02, 0x04, 0x08
NOBODY = 65_534
_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def replace_link(link: str, top: str, owner: int) -> bool:
    """False, and nothing changed, unless the link names a file or a folder beneath `top`. Raises OSError.

    A new folder holds links itself, to what is in the named one; they are `owner`'s, and to be replaced in turn.
    """
    if (named := _find_beneath(link, top)) is None:
        return False
    kind = os.lstat(named).st_mode
    if stat.S_ISREG(kind):
        os.unlink(link)
        os.link(named, link)
        return True
    place = os.path.realpath(os.path.dirname(link))
    if not stat.S_ISDIR(kind) or f"{place}{os.sep}".startswith(f"{named}{os.sep}"):  # a circle
        return False
    os.unlink(link)
    os.mkdir(link, 0o755)
    os.chown(link, owner, -1)
    for name in os.listdir(named):
        entry = os.path.join(link, name)
        os.symlink(os.path.relpath(os.path.join(named, name), os.path.join(place, os.path.basename(link))), entry)
        os.lchown(entry, owner, -1)
    return True


def open_file(path: Path, top: Path) -> BinaryIO | None:
    """The file at a path beneath `top`, if there is one that everybody may read. No link is followed on the way to it.

    The worker may be root, but it opens what it serves as nobody.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if not hasattr(os, "O_PATH"):
            if path.resolve() != top.resolve() / path.relative_to(top):
                return None
            file = os.fdopen(os.open(path, flags), "rb")
        else:
            folder = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with _as_nobody():
                    file = os.fdopen(_open_beneath(folder, path.relative_to(top), flags, NO_LINKS), "rb")
            finally:
                os.close(folder)
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return None


@contextmanager
def _as_nobody() -> Iterator[None]:
    """For file systems, and in this thread alone."""
    if os.geteuid() != 0:
        yield
        return
    _libc.setfsgid(NOBODY)
    _libc.setfsuid(NOBODY)
    try:
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(0)


def _open_beneath(folder: int, path: str | Path, flags: int, resolve: int) -> int:
    """Raises OSError."""
    how = _How(flags, 0, BENEATH | NO_MAGIC_LINKS | resolve)
    found: int = _libc.syscall(OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if found < 0:
        raise OSError(ctypes.get_errno(), "the file can't be opened")
    return found


def _find_beneath(link: str, top: str) -> str | None:
    """The real path of what the link names, if the way there stays beneath `top`. None on systems without openat2."""
    if not hasattr(os, "O_PATH"):
        return None
    folder = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = _open_beneath(folder, os.path.relpath(link, top), os.O_PATH | os.O_CLOEXEC, 0)
        try:
            return os.readlink(f"/proc/self/fd/{found}")
        finally:
            os.close(found)
    except OSError:
        return None
    finally:
        os.close(folder)


def remove_links(files: str) -> list[str]:
    """Of a release that was made when links were kept: replaces them, and removes those that lead out of its files.

    Returns the removed ones.
    """
    removed, replaced, pending = [], 0, [files]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in list(entries):
                if entry.is_symlink():
                    replaced += 1  # folders that name each other would go on without end
                    if replaced > MOST or not replace_link(entry.path, files, os.geteuid()):
                        os.unlink(entry.path)
                        removed.append(os.path.relpath(entry.path, files))
                        continue
                    # A folder that took the link's place holds links itself.
                    if os.path.isdir(entry.path):
                        pending.append(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return removed

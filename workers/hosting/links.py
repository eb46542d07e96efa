"""Removes symbolic links from the files of a release, because Caddy would follow them out of the release.

Each link is replaced by its target: by the file, or by a folder with the same contents. The kernel resolves the target
(openat2), and only below the customer's own source. No other process may change the files at the same time.
"""

import ctypes
import errno
import os
import stat

OPENAT2 = 437  # the number of the system call, on every architecture
NO_MAGIC_LINKS, BENEATH = 0x02, 0x08
ATTEMPTS = 1_000  # at a path with `..`: the kernel refuses it while anything on the machine is being renamed
_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def replace_link(link: str, top: str, owner: int) -> bool:
    """Replaces a link by its target. Returns False, and changes nothing, if it is not a file or folder below `top`.

    If the target is a folder, the new folder contains links to the entries of the target. They belong to `owner`, and
    the caller must replace them too. Raises OSError.
    """
    if (named := _find_beneath(link, top)) is None:
        return False
    kind = os.lstat(named).st_mode
    if stat.S_ISREG(kind):
        os.unlink(link)
        os.link(named, link)
        return True
    parent = os.path.realpath(os.path.dirname(link))
    if not stat.S_ISDIR(kind) or f"{parent}{os.sep}".startswith(f"{named}{os.sep}"):  # a loop
        return False
    os.unlink(link)
    os.mkdir(link, 0o755)
    os.chown(link, owner, -1)
    for name in os.listdir(named):
        entry = os.path.join(link, name)
        os.symlink(os.path.relpath(os.path.join(named, name), os.path.join(parent, os.path.basename(link))), entry)
        os.lchown(entry, owner, -1)
    return True


def _open_beneath(folder: int, path: str) -> int:
    """Opens a path below the folder. Raises OSError."""
    how = _How(os.O_PATH | os.O_CLOEXEC, 0, BENEATH | NO_MAGIC_LINKS)
    for _ in range(ATTEMPTS):
        found: int = _libc.syscall(OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
        if found >= 0:
            return found
        if ctypes.get_errno() != errno.EAGAIN:
            break
    raise OSError(ctypes.get_errno(), "the file can't be opened")


def _find_beneath(link: str, top: str) -> str | None:
    """Returns the real path of the link's target if it can be resolved below `top`. None on systems without openat2."""
    if not hasattr(os, "O_PATH"):
        return None
    folder = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = _open_beneath(folder, os.path.relpath(link, top))
        try:
            return os.readlink(f"/proc/self/fd/{found}")
        finally:
            os.close(found)
    except OSError:
        return None
    finally:
        os.close(folder)

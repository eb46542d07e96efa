"""Linux Landlock: an allow-list of files and ports for a process and all its future children.

Unlike namespaces it needs no privileges and works inside containers. A restricted process also can't trace an
unrestricted one, and so can't read its environment or memory; with newer kernels it can't signal it either. No
maintained Python package exists, and the interface has only three system calls.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # the kernel refuses other rights on a file
BIND, CONNECT = 1 << 0, 1 << 1
ABSTRACT_SOCKETS, SIGNALS = 1 << 0, 1 << 1

# The numbers are the same on every architecture.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PATH, _PORT = 1, 2
_VERSION = 1
_NO_NEW_PRIVILEGES = 38

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Path(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _Port(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def _call(number: int, *args: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return result


def version() -> int:
    """The version of the kernel's interface, or 0 without one. Ports need version 4, signals version 6."""
    if sys.platform != "linux":
        return 0
    try:
        return _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:
        return 0


class Ruleset:
    """Created while all paths can still be opened, and applied later with `enter`."""

    def __init__(
        self, *, read: Iterable[str], write: Iterable[str], bind: Iterable[int], connect: Iterable[int]
    ) -> None:
        abi = version()
        # Version 1 has 13 rights on files; versions 2, 3 and 5 add one each.
        self._files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
        attributes = _Ruleset(
            self._files,
            BIND | CONNECT if abi >= 4 else 0,
            ABSTRACT_SOCKETS | SIGNALS if abi >= 6 else 0,
        )
        size = 8 if abi < 4 else 16 if abi < 6 else 24
        self._fd = _call(_CREATE, ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0))
        for path in read:
            self._allow(path, READ)
        for path in write:
            self._allow(path, self._files & ~(MAKE_CHAR | MAKE_BLOCK))
        if abi >= 4:
            for right, ports in ((BIND, bind), (CONNECT, connect)):
                for port in ports:
                    self._add(_PORT, _Port(right, port))

    def _allow(self, path: str, rights: int) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):  # a missing file needs no rule
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                if not stat.S_ISDIR(os.fstat(fd).st_mode):
                    rights &= OF_FILES
                self._add(_PATH, _Path(rights & self._files, fd))
            finally:
                os.close(fd)

    def _add(self, kind: int, rule: ctypes.Structure) -> None:
        _call(_ADD, ctypes.c_int(self._fd), ctypes.c_int(kind), ctypes.byref(rule), ctypes.c_uint32(0))

    def enter(self) -> None:
        """Restricts this process and all its children for good. Call `no_new_privileges` first."""
        _call(_RESTRICT, ctypes.c_int(self._fd), ctypes.c_uint32(0))
        os.close(self._fd)


def no_new_privileges() -> None:
    """From now on set-user-ID programs grant no privileges."""
    prctl(_NO_NEW_PRIVILEGES, 1)


def prctl(option: int, value: int) -> None:
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) != 0:
        raise OSError(ctypes.get_errno(), "prctl")

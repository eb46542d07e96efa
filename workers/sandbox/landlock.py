"""Linux Landlock: what a process may touch, as a list of what it may, kept from then on by it and all its children.

It needs no privilege and works inside containers, unlike namespaces. A process under it also can't trace one that is
not (so it can't read another's environment or memory), nor, with a newer kernel, signal it. There is no package for
it that is kept up, and it is three system calls.
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
    """Of the kernel's interface; 0 where there is none. Ports are guarded from 4 on, signals from 6 on."""
    if sys.platform != "linux":
        return 0
    try:
        return _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:
        return 0


class Ruleset:
    """Opened while everything may still be looked at, `enter`ed later."""

    def __init__(
        self, *, read: Iterable[str], write: Iterable[str], bind: Iterable[int], connect: Iterable[int]
    ) -> None:
        abi = version()
        # Version 1 knows 13 rights on files, 2, 3 and 5 brought one more each.
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
        with suppress(FileNotFoundError, NotADirectoryError):  # what is not there needs no rule
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
        """For this process and all it starts, for ever. `no_new_privileges` comes before."""
        _call(_RESTRICT, ctypes.c_int(self._fd), ctypes.c_uint32(0))
        os.close(self._fd)


def no_new_privileges() -> None:
    """No set-user-ID program gives any from now on."""
    prctl(_NO_NEW_PRIVILEGES, 1)


def prctl(option: int, value: int) -> None:
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) != 0:
        raise OSError(ctypes.get_errno(), "prctl")

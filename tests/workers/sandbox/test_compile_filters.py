"""The filters in the repository match the rules, and decide as the rules say."""

import ctypes
import errno
import itertools
import os
import struct
from collections.abc import Callable

import pytest

from workers.sandbox import compile_filters
from workers.sandbox.compile_filters import ALLOW, ARCHITECTURES, FOLDER, REFUSE, REFUSED, compile_filter

OPERATORS: dict[int, Callable[[int, int], bool]] = {
    0x15: lambda value, operand: value == operand,
    0x25: lambda value, operand: value > operand,
    0x35: lambda value, operand: value >= operand,
    0x45: lambda value, operand: value & operand != 0,
}
# First and third arguments of clone and socket, and second ones of ioctl and fallocate.
INTERESTING = [*range(4), 10, 16, 17, 38, 40, 44, 132, 262, 0x5412, 0x10000011, 0x2000000]
INTERESTING += [0x40305828, 0x4030582A, 0x40305839]
INTERESTING += [value | 1 << 32 for value in INTERESTING]
HIGHEST_CALL = 480


def decide(program: bytes, architecture: int, call: int, arguments: tuple[int, int, int] = (0, 0, 0)) -> int:
    """Runs a filter as the kernel does."""
    data = struct.pack("=iIQ6Q", call, architecture, 0, *arguments, 0, 0, 0)
    value, at = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            [value] = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            value &= operand
        elif code == 0x05:
            at += operand
        elif code == 0x06:
            return operand
        else:
            at += if_true if OPERATORS[code](value, operand) else if_false


def shipped(architecture: str) -> bytes:
    return (FOLDER / f"{architecture}.bpf").read_bytes()


def call_number(architecture: str, name: str) -> int:
    seccomp = ctypes.CDLL("libseccomp.so.2")
    return seccomp.seccomp_syscall_resolve_name_arch(ctypes.c_uint32(ARCHITECTURES[architecture]), name.encode())


@pytest.fixture(scope="module", autouse=True)
def libseccomp() -> None:
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        if os.environ.get("CI"):
            raise
        pytest.skip("libseccomp is not installed: the package libseccomp2")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_filters_match_the_rules(architecture: str) -> None:
    """The version of libseccomp that compiled them makes no difference."""
    ours, fresh = shipped(architecture), compile_filter(architecture)
    number = ARCHITECTURES[architecture]
    for call, value in itertools.product(range(HIGHEST_CALL), INTERESTING):
        for arguments in ((value, 0, 0), (0, value, 0), (2, 0, value)):
            assert decide(ours, number, call, arguments) == decide(fresh, number, call, arguments), (call, arguments)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_dangerous_call_is_refused(architecture: str) -> None:
    program, number = shipped(architecture), ARCHITECTURES[architecture]
    known = {name: call for name in REFUSED.split() if (call := call_number(architecture, name)) >= 0}
    assert len(known) > 40
    assert {decide(program, number, call) for call in known.values()} == {REFUSE | errno.EPERM}
    for name in ("read", "openat", "execve", "exit_group", "futex", "mmap"):
        assert decide(program, number, call_number(architecture, name)) == ALLOW, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_calls_that_depend_on_arguments(architecture: str) -> None:
    """The kernel reads 32 bits of each argument, so the other bits must not matter."""
    program, number = shipped(architecture), ARCHITECTURES[architecture]

    def ask(name: str, *arguments: int) -> int:
        first, second, third = (*arguments, 0, 0, 0)[:3]
        return decide(program, number, call_number(architecture, name), (first, second, third))

    for high in (0, 1 << 32, 0xFFFF_FFFF << 32):
        assert ask("socket", 2, 1, high | 262) == REFUSE | errno.EPROTONOSUPPORT, "MPTCP"
        assert ask("socket", 2, 1, high | 132) == REFUSE | errno.EPROTONOSUPPORT, "SCTP"
        assert ask("socket", high | 40) == REFUSE | errno.EAFNOSUPPORT, "VSOCK"
        assert ask("socket", high | 3) == REFUSE | errno.EAFNOSUPPORT, "AX25"
        assert ask("ioctl", 0, high | 0x5412) == REFUSE | errno.EPERM, "TIOCSTI"
        assert ask("ioctl", 0, high | 0x4030582A) == REFUSE | errno.EOPNOTSUPP, "FS_IOC_RESVSP64"
        for mode in (0, 1, 0x10):
            assert ask("fallocate", 3, high | mode) == REFUSE | errno.EOPNOTSUPP
        assert ask("fallocate", 3, high | 3) == ALLOW, "a hole takes no space"
    assert ask("socket", 2, 1, 6) == ask("socket", 10, 2, 17) == ask("socket", 1, 1) == ask("ioctl", 0, 0x5401) == ALLOW
    for name, before in (("ptrace", [16]), ("process_vm_readv", []), ("process_vm_writev", [])):
        for high in (0, 1 << 32):
            assert ask(name, *before, high | 1) == REFUSE | errno.EPERM, "bubblewrap's process"
        assert ask(name, *before, 2) == ALLOW, "debuggers work"
    for flag in compile_filters.NEW_NAMESPACES:
        assert ask("clone", flag | 17) == REFUSE | errno.EPERM
    assert ask("clone", 0x003D0F00) == ALLOW, "a thread"
    assert ask("clone3") == REFUSE | errno.ENOSYS
    assert decide(program, 0x40000003, 1) == 0, "another architecture's calls end the process"

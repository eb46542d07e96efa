"""Compiles the sandbox's system call filters: `python -m workers.sandbox.compile_filters` writes `filters/`.

Only this module needs libseccomp (Debian's package libseccomp2). A sandbox passes the compiled program for its
architecture to the kernel. Compile the filters after each change of the rules; a test compares both.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "filters"
ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}  # by the names of `uname -m`

# Builds and apps do not need these calls. They have a history of flaws, or reach resources outside all namespaces.
REFUSED = (
    "acct add_key bpf delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick init_module"
    " io_uring_enter io_uring_register io_uring_setup kcmp kexec_file_load kexec_load keyctl lookup_dcookie mount"
    " mount_setattr move_mount move_pages name_to_handle_at nfsservctl open_by_handle_at open_tree perf_event_open"
    " pivot_root quotactl quotactl_fd reboot request_key setns settimeofday swapoff swapon syslog umount umount2"
    " unshare userfaultfd uselib vhangup vmsplice"
)
NEW_NAMESPACES = (0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000, 0x0002_0000)
FAMILIES = (1, 2, 10, 16)  # UNIX, INET, INET6, NETLINK. VSOCK, for one, would reach the host of a virtual machine.
PROTOCOLS = (132, 262)  # SCTP, MPTCP
# Process 1 of a sandbox is bubblewrap's. It could be made to outlive its keeper, and the command with it. Its folder in
# /proc is hidden (`bwrap.py`).
FIRST = 1
REACH_OTHERS = {"ptrace": 1, "process_vm_readv": 0, "process_vm_writev": 0}  # which argument is the process
TYPE_INTO_TERMINAL = 0x5412  # TIOCSTI
# These reserve space without writing to it. So they could fill the disk before a keeper measures. C libraries and
# programs write instead, because some file systems refuse these calls, too.
PUNCH_HOLE = 0x02  # a mode of fallocate, which only frees space
RESERVE_SPACE = (0x4030_5828, 0x4030_582A, 0x4030_5839)  # FS_IOC_RESVSP, FS_IOC_RESVSP64, FS_IOC_ZERO_RANGE
ALLOW, REFUSE = 0x7FFF_0000, 0x0005_0000
GREATER, MASKED = 6, 7
# The kernel reads only 32 bits of these arguments, but a filter sees all 64.
WORD = 0xFFFF_FFFF


class _Comparison(ctypes.Structure):
    _fields_ = (("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def compile_filter(architecture: str) -> bytes:
    """Compiles the filter into a program for the kernel. Raises OSError without libseccomp."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(ALLOW)))
    native, wanted = seccomp.seccomp_arch_native(), ARCHITECTURES[architecture]

    def check(code: int) -> None:
        if code != 0:
            raise OSError(f"libseccomp can't compile the filter: {os.strerror(-code)}")

    def refuse(name: str, code: int = errno.EPERM, comparisons: Sequence[tuple[int, int, int, int]] = ()) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        array = (_Comparison * len(comparisons))(*(_Comparison(*each) for each in comparisons))
        check(seccomp.seccomp_rule_add_array(context, ctypes.c_uint32(REFUSE | code), number, len(comparisons), array))

    try:
        if ctypes.c_uint32(native).value != wanted:
            check(seccomp.seccomp_arch_add(context, ctypes.c_uint32(wanted)))
            check(seccomp.seccomp_arch_remove(context, native))
        for name in REFUSED.split():
            refuse(name)
        refuse("clone3", errno.ENOSYS)  # a filter can't read its flags; the C library falls back to clone
        for flag in NEW_NAMESPACES:
            refuse("clone", comparisons=[(0, MASKED, flag, flag)])
        highest = max(FAMILIES)
        for family in range(highest):
            if family not in FAMILIES:
                refuse("socket", errno.EAFNOSUPPORT, [(0, MASKED, WORD, family)])
        refuse("socket", errno.EAFNOSUPPORT, [(0, GREATER, highest, 0)])
        for protocol in PROTOCOLS:
            refuse("socket", errno.EPROTONOSUPPORT, [(2, MASKED, WORD, protocol)])
        for name, argument in REACH_OTHERS.items():
            refuse(name, comparisons=[(argument, MASKED, WORD, FIRST)])
        refuse("ioctl", comparisons=[(1, MASKED, WORD, TYPE_INTO_TERMINAL)])
        refuse("fallocate", errno.EOPNOTSUPP, [(1, MASKED, PUNCH_HOLE, 0)])
        for request in RESERVE_SPACE:
            refuse("ioctl", errno.EOPNOTSUPP, [(1, MASKED, WORD, request)])
        with os.fdopen(os.memfd_create("filter"), "r+b") as file:
            check(seccomp.seccomp_export_bpf(context, file.fileno()))
            return os.pread(file.fileno(), 1 << 16, 0)
    finally:
        seccomp.seccomp_release(context)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for architecture in ARCHITECTURES:
        (FOLDER / f"{architecture}.bpf").write_bytes(compile_filter(architecture))

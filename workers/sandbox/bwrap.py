"""What a sandbox sees: the arguments of bubblewrap, and the system calls that are refused.

bubblewrap gives the command namespaces of its own: users, processes, IPC, host name, and a file system that contains
the machine's tools and the folders that were asked for. The network is in `network.py`. Every process on the machine
can see command lines, so the environment is not part of them.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import shutil
from collections.abc import Sequence
from typing import Any

SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # links into /usr on most machines
# The rest of /etc may hold operators' secrets.
ETC = (
    "alternatives ca-certificates crypto-policies gitconfig group host.conf gai.conf ld.so.cache ld.so.conf"
    " ld.so.conf.d locale.alias localtime mime.types nsswitch.conf os-release passwd pki/ca-trust pki/tls/cert.pem"
    " pki/tls/certs pki/tls/openssl.cnf protocols services ssl/cert.pem ssl/certs ssl/openssl.cnf timezone"
)
FILES = {"/etc/resolv.conf": "nameserver 127.0.0.1\n", "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n"}

# Without a use in builds and apps, and with a history of flaws; or they reach what is not in any namespace.
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
ALLOW, REFUSE = 0x7FFF_0000, 0x0005_0000
EQUAL, GREATER, MASKED = 4, 6, 7


def find() -> str | None:
    return shutil.which("bwrap", path=os.defpath)


def arguments(spec: dict[str, Any], info_fd: int) -> list[str]:
    """bubblewrap's command line."""
    uid = os.getuid() if spec["uid"] is None else spec["uid"]
    size = str(spec["limits"]["memory"] // 2)
    words = [spec["bwrap"], "--unshare-user", "--uid", str(uid), "--gid", str(uid), "--unshare-pid", "--unshare-ipc"]
    words += [
        "--unshare-uts",
        "--hostname",
        "app",
        "--unshare-cgroup-try",
        "--new-session",
        "--die-with-parent",
        "--cap-drop",
        "ALL",
    ]
    words += ["--info-fd", str(info_fd), "--seccomp", str(_memory_file(bytes.fromhex(spec["filter"])))]
    words += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108 - its own
        words += ["--size", size, "--perms", "1777", "--tmpfs", folder]
    for path in SYSTEM:
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    for path in (*(f"/etc/{name}" for name in ETC.split()), *spec["tools"]):
        words += ["--ro-bind-try", path, path]
    for path, text in FILES.items():
        words += ["--perms", "0444", "--ro-bind-data", str(_memory_file(text.encode())), path]
    for option, paths in (("--ro-bind", spec["read"]), ("--bind", spec["write"])):
        for path in paths:
            words += [option, path, path]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", spec["folder"], "--"]
    return [*words, *_limits(spec["limits"]), *spec["command"]]


def _limits(limits: dict[str, Any]) -> list[str]:
    """Generous ones, inside: whoever reaches one fails for no visible reason. The keeper's bounds give a reason."""
    words = ["/usr/bin/prlimit", "--core=0", f"--nofile={limits['files']}", f"--nproc={2 * limits['processes']}"]
    return [*words, *([f"--fsize={2 * limits['disk']}"] if limits["disk"] else []), "--"]


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("sandbox", 0)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


# -- system calls --------------------------------------------------------------------------------------------


class _Comparison(ctypes.Structure):
    _fields_ = (("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def compile_filter() -> bytes:
    """The program for the kernel. Raises OSError without libseccomp."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(ALLOW)))

    def refuse(name: str, code: int = errno.EPERM, comparisons: Sequence[tuple[int, int, int, int]] = ()) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # this architecture, and this version of the library, know it
            array = (_Comparison * len(comparisons))(*(_Comparison(*each) for each in comparisons))
            action = ctypes.c_uint32(REFUSE | code)
            if seccomp.seccomp_rule_add_array(context, action, number, len(comparisons), array) != 0:
                raise OSError(f"libseccomp refuses a rule for {name}")

    for name in REFUSED.split():
        refuse(name)
    refuse("clone3", errno.ENOSYS)  # its flags can't be read here; the C library falls back to clone
    for flag in NEW_NAMESPACES:
        refuse("clone", comparisons=[(0, MASKED, flag, flag)])
    highest = max(FAMILIES)
    for family in range(highest):
        if family not in FAMILIES:
            refuse("socket", errno.EAFNOSUPPORT, [(0, EQUAL, family, 0)])
    refuse("socket", errno.EAFNOSUPPORT, [(0, GREATER, highest, 0)])
    for protocol in PROTOCOLS:
        refuse("socket", errno.EPROTONOSUPPORT, [(2, EQUAL, protocol, 0)])
    refuse("ioctl", comparisons=[(1, EQUAL, 0x5412, 0)])  # TIOCSTI types into a terminal
    fd = os.memfd_create("filter")
    try:
        if seccomp.seccomp_export_bpf(context, fd) != 0:
            raise OSError("libseccomp can't compile the filter")
        return os.pread(fd, 1 << 16, 0)
    finally:
        os.close(fd)
        seccomp.seccomp_release(context)

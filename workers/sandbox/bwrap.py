"""bubblewrap's command line, and the filter of system calls (compiled by `compile_filters.py`).

bubblewrap gives the command its own namespaces: users, processes, IPC, host name, and a file system that contains the
machine's tools and the requested folders. `network.py` sets up the network. Every process on the machine can read
command lines, so the environment does not appear in them.
"""

import os
import platform
from pathlib import Path

from workers.sandbox.spec import Limits, Spec

SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # links into /usr on most machines
# The rest of /etc may contain operators' secrets.
ETC = (
    "alternatives ca-certificates crypto-policies gitconfig group host.conf gai.conf ld.so.cache ld.so.conf"
    " ld.so.conf.d locale.alias localtime mime.types nsswitch.conf os-release passwd pki/ca-trust pki/tls/cert.pem"
    " pki/tls/certs pki/tls/openssl.cnf protocols services ssl/cert.pem ssl/certs ssl/openssl.cnf timezone"
)
IN_MEMORY = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - each sandbox has its own file systems here
DATA_FILES = "files"  # in the folder of an app's data: what the app sees
HOST_NAME = "app"  # programs such as git look it up
FILES = {
    "/etc/resolv.conf": "nameserver 127.0.0.1\n",
    "/etc/hosts": f"127.0.0.1 localhost {HOST_NAME}\n::1 localhost {HOST_NAME}\n",
}


def read_filter() -> bytes:
    """Reads the filter of system calls, a program for the kernel. Raises OSError for other architectures."""
    return (Path(__file__).parent / "filters" / f"{platform.machine()}.bpf").read_bytes()


def build_arguments(spec: Spec, info_fd: int) -> list[str]:
    """Builds bubblewrap's command line."""
    uid = os.getuid() if spec["uid"] is None else spec["uid"]
    size = str(spec["limits"]["memory"] // 2)
    # bubblewrap itself must not get the customer's variables: LD_PRELOAD would load code outside the sandbox.
    variables = [word for name, value in spec["environment"].items() for word in ("--setenv", name, value)]
    settings = _create_memory_file("".join(f"{word}\0" for word in variables).encode(errors="surrogateescape"))
    words = [spec["bwrap"], "--args", str(settings), "--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    words += ["--unshare-user", "--uid", str(uid), "--gid", str(uid), "--unshare-pid", "--unshare-ipc"]
    words += ["--unshare-uts", "--hostname", HOST_NAME, "--unshare-cgroup-try"]
    words += ["--info-fd", str(info_fd), "--seccomp", str(_create_memory_file(bytes.fromhex(spec["filter"])))]
    words += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    # Otherwise, the command could write to the memory of bubblewrap's process, which must end with its keeper.
    words += ["--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    for folder in IN_MEMORY:
        words += ["--size", size, "--perms", "1777", "--tmpfs", folder]
    for path in SYSTEM:
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    places = spec["places"]
    for path in (*(f"/etc/{name}" for name in ETC.split()), *spec["tools"]):
        words += ["--ro-bind-try", path, places.get(path, path)]
    for path, text in FILES.items():
        words += ["--perms", "0444", "--ro-bind-data", str(_create_memory_file(text.encode())), path]
    write = [*spec["write"], *([f"{spec['data']}/{DATA_FILES}"] if spec["data"] else [])]
    for option, paths in (("--ro-bind", spec["read"]), ("--bind", write)):
        for path in paths:
            words += [option, path, places.get(path, path)]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", spec["folder"], "--"]
    return [*words, *_build_limits(spec["limits"], files_bounded=not spec["data"]), *spec["command"]]


def _build_limits(limits: Limits, *, files_bounded: bool) -> list[str]:
    """Builds the command that sets limits inside the sandbox. The files of an app's data have a limit of their own.

    A process that reaches one of these limits fails without an explanation. The limits on processes and file sizes are
    twice the keeper's, so that the keeper ends the command first and names the limit.
    """
    words = ["/usr/bin/prlimit", "--core=0", f"--nofile={limits['files']}", f"--nproc={2 * limits['processes']}"]
    return [*words, *([f"--fsize={2 * limits['disk']}"] if limits["disk"] and files_bounded else []), "--"]


def _create_memory_file(content: bytes) -> int:
    fd = os.memfd_create("sandbox", 0)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd

"""Checks whether this process may run customers' code, and as which users.

Customers' code never runs as the root user of the machine. If the worker is root of the machine, each build and app has
its own user. An ordinary user runs them as itself, and so does root of a container that is an ordinary user outside.
"""

import contextlib
import os
import sys
from pathlib import Path

NEEDED_CAPABILITIES = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 19  # CHOWN, KILL, SETGID, SETUID and SYS_PTRACE
# Kernel settings: the value that forbids user namespaces, and one that allows them.
NAMESPACE_SETTINGS = (
    ("user.max_user_namespaces", "0", "15000"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)
DOCUMENTED = "see docs/install.md#isolation"


class Unsafe(Exception):
    """This machine can't confine customers' code. `remedy` is an instruction for the operator."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}: {remedy}")
        self.reason, self.remedy = reason, remedy


def can_change_users(users: range) -> bool:
    """Returns whether this process may become each of the users, and act on their files and processes."""
    if os.geteuid() != 0:
        return False
    return _read_capabilities() & NEEDED_CAPABILITIES == NEEDED_CAPABILITIES and not _find_incomplete_map(users)


def check_own_user(users: range) -> None:
    """Checks a process that cannot change users. Raises Unsafe if this user must not run customers' code."""
    if os.geteuid() != 0:
        return
    capabilities = _read_capabilities()
    if capabilities and capabilities & NEEDED_CAPABILITIES != NEEDED_CAPABILITIES:
        needed = "CHOWN, KILL, SETGID, SETUID and SYS_PTRACE"
        raise Unsafe("the worker has some of root's capabilities", f"give it {needed}, or none")
    if not _is_root_outside():
        return
    if not capabilities:
        raise Unsafe("builds would run as root", "run the worker as an ordinary user")
    reason = f"builds use the user ids {users[0]} to {users[-1]}, and {_find_incomplete_map(users)} lacks them"
    raise Unsafe(reason, "give the container's user a longer range in /etc/subuid and /etc/subgid")


def find_namespace_remedy() -> str:
    """Returns the command or advice that enables user namespaces, after the kernel has refused them."""
    for name, refusal, permission in NAMESPACE_SETTINGS:
        with contextlib.suppress(OSError):
            if Path("/proc/sys", *name.split(".")).read_text().strip() == refusal:
                return f"sudo sysctl -w {name}={permission}"
    return f"in a container, allow user namespaces as compose.yaml does; {DOCUMENTED}"


def _is_root_outside() -> bool:
    """Returns whether root here is also root of the machine. In a rootless container, it is another user."""
    if sys.platform != "linux":
        return True
    return any(inside == outside == 0 for inside, outside, _ in _read_id_map("/proc/self/uid_map"))


def _find_incomplete_map(users: range) -> str:
    """Returns the file whose id map lacks some of the users, or an empty string."""
    for file in ("/proc/self/uid_map", "/proc/self/gid_map"):
        mapped = [range(inside, inside + count) for inside, _, count in _read_id_map(file)]
        if not any(users[0] in ids and users[-1] in ids for ids in mapped):
            return file
    return ""


def _read_id_map(file: str) -> list[tuple[int, int, int]]:
    """Reads the ranges of ids: the first id in this user namespace, the first id outside, and their number."""
    with open(file) as lines:
        return [(int(inside), int(outside), int(count)) for inside, outside, count in map(str.split, lines)]


def _read_capabilities() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0

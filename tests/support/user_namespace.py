"""Runs a command in a user namespace in which no further one can be made, as in some containers."""

import os
import sys

_ENTER = """
import ctypes, os, sys
uid, gid = os.getuid(), os.getgid()
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) != 0:
    sys.exit(f"no user namespace: {os.strerror(ctypes.get_errno())}")
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
os.execvp(sys.argv[1], sys.argv[1:])
"""
# The sandbox's fault in it: a reason and a remedy.
FAULT = (
    (
        "builds use the user ids 60579 to 60593, and /proc/self/uid_map lacks them",
        "give the container's user a longer range in /etc/subuid and /etc/subgid",
    )
    if os.geteuid() == 0
    else (
        "bubblewrap can't make namespaces here ([Errno 28] the kernel refuses to create namespaces for this user)",
        "sudo sysctl -w user.max_user_namespaces=15000",
    )
)


def enter_user_namespace(*command: str) -> list[str]:
    """Returns the command that runs as root of a namespace with only this user."""
    return [sys.executable, "-c", _ENTER, *command]

"""Control groups: bounds on memory (including shared memory), processes and CPU for everything in a sandbox.

This module uses version 2 where the machine has it, and version 1 elsewhere. The keeper stays outside the group, so a
full group cannot stop it. A separate group bounds the CPU that the keeper itself uses for connections and output.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMORY_INFO = Path("/proc/meminfo")
CONTROLLERS = ("memory", "pids", "cpu")
PREFIX = "capsule-"
WORKERS = "capsule-worker"  # version 2 does not allow processes in a group that bounds other groups
KEEPER = "-keeper"  # the suffix of the name of a keeper's group
KEEPER_CPUS = 0.5
PERIOD_MICROSECONDS = 100_000
REMOVAL_SECONDS = 2.0


def find_parents() -> list[str]:
    """Returns the groups in which this process can create groups: one for version 2, one per controller for version 1.

    Returns an empty list if the worker is neither root nor in a group that was delegated to it.
    """
    own: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= {name: path.lstrip("/") for name in controllers.split(",")}
    if _is_unified():
        parents = [(MOUNT / own.get("", "")).parent if own.get("", "").endswith(WORKERS) else MOUNT / own.get("", "")]
        if not _prepare(parents[0]):
            return []
    else:
        parents = [MOUNT / name / own.get(name, "") for name in CONTROLLERS]
    usable = all(os.access(path, os.W_OK) and os.statvfs(path).f_flag & os.ST_RDONLY == 0 for path in parents)
    return [os.fspath(path) for path in parents] if usable else []


def read_available_memory() -> int:
    """Returns the bytes of memory that this machine, or the container around it, has available."""
    numbers = dict(re.findall(r"^(\w+): +(\d+)", MEMORY_INFO.read_text(), re.M)) if MEMORY_INFO.exists() else {}
    found = [int(numbers["MemAvailable"]) * 1_024] if "MemAvailable" in numbers else []
    with contextlib.suppress(OSError, ValueError):  # a container has its own limit
        inactive = _read_counter(MOUNT / "memory.stat", "inactive_file")
        limit, used = (int((MOUNT / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(limit - used + inactive)
    return min(found, default=sys.maxsize)


def _prepare(group: Path) -> bool:
    """Enables bounds for the groups inside this group. Returns False if this is not possible.

    Some kernels allow this only in a group without processes. This group's processes then move into a group inside it.
    """
    control, wanted = group / "cgroup.subtree_control", " ".join(f"+{name}" for name in CONTROLLERS)
    with contextlib.suppress(OSError):
        if {*CONTROLLERS} <= {*control.read_text().split()}:
            return True
        with contextlib.suppress(OSError):
            control.write_text(wanted)
            return True
        (group / WORKERS).mkdir(exist_ok=True)
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (group / WORKERS / "cgroup.procs").write_text(pid)
        control.write_text(wanted)
        return True
    return False


def enter_keepers_group(parents: Sequence[str]) -> None:
    """Moves this process, a keeper, into a group that bounds its CPU. Raises OSError when that is not possible.

    The next keeper removes the group, because a process cannot remove its own group.
    """
    folder = Path(parents[-1], f"{PREFIX}{os.getpid()}{KEEPER}")
    folder.mkdir(exist_ok=True)
    _bound_cpu(folder, KEEPER_CPUS)
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def _is_unified() -> bool:
    """Returns whether the machine has control groups of version 2, which have one tree for all controllers."""
    return (MOUNT / "cgroup.controllers").exists()


def _bound_cpu(folder: Path, cpus: float) -> None:
    quota = int(cpus * PERIOD_MICROSECONDS)
    if _is_unified():
        (folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
    else:
        (folder / "cpu.cfs_quota_us").write_text(str(quota))


class Cgroup:
    """The control group of one command. Raises OSError when it cannot be created."""

    def __init__(self, parents: Sequence[str], *, memory: int, processes: int, cpus: float) -> None:
        for parent in map(Path, parents):
            for left in parent.glob(f"{PREFIX}[0-9]*"):  # groups of keepers that were killed
                if not os.path.exists(f"/proc/{left.name.removeprefix(PREFIX).removesuffix(KEEPER)}"):
                    with contextlib.suppress(OSError):
                        left.rmdir()
        self._folders = [Path(parent, f"{PREFIX}{os.getpid()}") for parent in parents]
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
        if len(parents) == 1:
            self._memory = self._pids = folder = self._folders[0]
            (folder / "memory.max").write_text(str(memory))
            with contextlib.suppress(FileNotFoundError):
                (folder / "memory.swap.max").write_text("0")
            (folder / "pids.max").write_text(str(processes))
            self._oom_file = folder / "memory.events"
        else:
            self._memory, self._pids, _ = self._folders
            (self._memory / "memory.limit_in_bytes").write_text(str(memory))
            with contextlib.suppress(FileNotFoundError):  # without swap accounting
                (self._memory / "memory.memsw.limit_in_bytes").write_text(str(memory))
            (self._pids / "pids.max").write_text(str(processes))
            self._oom_file = self._memory / "memory.oom_control"
        _bound_cpu(self._folders[-1], cpus)

    def attach(self, pid: int) -> None:
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def list_processes(self) -> list[int]:
        return [int(pid) for pid in (self._pids / "cgroup.procs").read_text().split()]

    def find_exceeded(self) -> str:
        """Returns the bound at which the kernel killed a process or refused to start one; '' if there is none."""
        if _read_counter(self._oom_file, "oom_kill"):
            return "memory"
        return "processes" if _read_counter(self._pids / "pids.events", "max") else ""

    def remove(self) -> None:
        """Removes the group after its processes have ended. The kernel may take a moment to notice their end."""
        ends = time.monotonic() + REMOVAL_SECONDS
        for folder in self._folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > ends:
                        return
                    time.sleep(0.01)


def _read_counter(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0

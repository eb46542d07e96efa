"""The keeper: a process between a worker and a customer's command. `sandbox.py` starts it.

The keeper puts the command into its namespaces (`network.py`, `bwrap.py`) and its control group (`cgroups.py`), relays
its connections, watches its time, memory and disk, and ends it. All processes of the command are in one process
namespace. When the first process of the namespace ends, the kernel ends the others.

The keeper of a build ends with its worker. The keeper of an app outlives its worker: it ends when its link in `running`
is removed. When a keeper is killed, the kernel kills the command.

A developer's trusted command runs without namespaces and control groups, and so does the start command in a pod, which
has those of the pod (`workers/kubernetes/pod.py`). The keeper just starts, watches and ends it.
"""

import asyncio
import contextlib
import errno
import json
import os
import re
import resource
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from workers.sandbox import bwrap, network, relay
from workers.sandbox.cgroups import Cgroup, enter_keepers_group
from workers.sandbox.folders import walk
from workers.sandbox.output import (
    FLUSH_SECONDS,
    BuildOutput,
    LineSplitter,
    Output,
    StandardOutput,
    make_concealer,
)
from workers.sandbox.spec import Spec

CADDY_USER = 60_578  # the first of the free ids (`sandbox.py`), if the worker is root
NOT_ENTERED = "the sandbox could not be entered: "
ENTRY_BYTES = 1_024  # counted for each file in addition to its size: removing a million empty files takes long
CHECK_SECONDS = 0.25  # between checks of the limits
DRAIN_SECONDS = 300.0  # for the requests in progress of an app whose link is gone
STOP_SOON_SUFFIX = ".stop-soon"  # of a file beside the link: requests for another release wait until this app has ended
STOP_SOON_DRAIN_SECONDS, STOP_SOON_GRACE_SECONDS = 2.0, 2.0  # then
CONNECTED = ("02", "03")  # states of a socket in /proc/net/unix: waits to be accepted, is accepted
CHUNK_BYTES = 65_536  # per read of the command's output
PIPE_READS = 16
PAUSE_SECONDS = 0.01  # between reads of output that is dropped, or that the worker does not read fast enough
UNMEASURABLE = 1 << 60  # bytes
DATA_SECONDS = 5.0  # at most, between two measurements of an app's data
STOPPED_STATUS = 240  # of a keeper in a pod that was told to stop its command, which has not failed
HIDDEN_CHECKS = 8  # consecutive checks that must find files in sockets: programs may briefly pass files to each other


def enter_sandbox(
    spec: Spec, parent: int, keeper: socket.socket, sockets: list[socket.socket], info: int, output: int
) -> NoReturn:
    """Becomes bubblewrap, in a new network namespace. `parent` is the keeper's process id."""
    try:
        network.end_with_parent(parent)
        os.dup2(output, 1)
        os.dup2(output, 2)
        words = bwrap.build_arguments(spec, info)
        be_killed_first()
        change_user(spec["uid"], parent)
        listeners = network.enter_namespace(spec["connect"], spec["hosts"], spec["endpoints"])
        socket.send_fds(keeper, [b"listeners"], [each.fileno() for each in listeners])
        own = os.getpid()
        if sockets and os.fork() == 0:
            network.end_with_parent(own)
            ports = {*spec["connect"], *(port for _, port in spec["endpoints"])}  # of the listeners above
            asyncio.run(relay.relay(spec["port"], *sockets, ignored=ports))
        if keeper.recv(8):  # the keeper has put this process into its control group
            restore_signals()
            os.execve(words[0], words, {})  # noqa: S606
    except BaseException as error:
        os.write(2, f"{NOT_ENTERED}{error}\n".encode())
    os._exit(126)


def change_user(uid: int | None, parent: int) -> None:
    """Changes to the command's user, if it has one."""
    if uid is None:
        return
    os.fchown(1, uid, uid)  # otherwise the command can't open /dev/stdout
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    network.end_with_parent(parent)  # the change of user has reset it


def be_killed_first() -> None:
    """When memory runs out, the kernel kills this process before the servers, and before its keeper."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # a cluster gives the keepers in its pods up to 999


def restore_signals() -> None:
    """Restores the default actions of signals that Python ignores. The command would inherit that."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def enter_unconfined(spec: Spec, parent: int, output: int) -> NoReturn:
    """Becomes the command itself, without a sandbox: for a developer's own code."""
    try:
        network.end_with_parent(parent)
        os.setsid()
        be_killed_first()
        os.dup2(output, 1)
        os.dup2(output, 2)
        change_user(spec["uid"], parent)
        restore_signals()
        os.chdir(find_real_path(spec, spec["folder"]))
        environment = {
            # The paths of tools are the machine's own already.
            name: value if name == "PATH" else find_real_path(spec, value)
            for name, value in spec["environment"].items()
        }
        os.execvpe(spec["command"][0], spec["command"], environment)  # noqa: S606
    except BaseException as error:
        os.write(2, f"the command could not be started: {error}\n".encode())
    os._exit(126)


def find_real_path(spec: Spec, text: str) -> str:
    """Returns the machine's path of what a command in the sandbox would see at this path; other text as it is.

    Paths below /tmp are the machine's own.
    """
    for path, place in spec["places"].items():
        if text == place or (place not in bwrap.IN_MEMORY and text.startswith(f"{place}/")):
            return path + text.removeprefix(place)
    return text


class Keeper:
    def __init__(self, spec: Spec) -> None:
        self.spec, self.limits = spec, spec["limits"]
        self.cgroup: Cgroup | None = None
        self.pid = 0  # until the command is started
        self.status: int | None = None
        self._drain_ends = float("inf")
        self._disk_at = self._scanned_at = 0.0
        self._data = DataFolder(spec["data"]) if spec["data"] else None
        self._used, self._hidden_checks = 0, 0  # bytes; checks in a row
        self._most_free = self._free_at_scan = 0  # free bytes on the disk: the maximum so far, and at the last scan
        self._first, self._pipe = 0, -1
        self._sockets: list[socket.socket] = []  # of the relay, if it runs in this process
        self._splitter, self._output = LineSplitter(), self._open_output()
        if spec["cgroups"]:
            enter_keepers_group(spec["cgroups"])
            memory, processes, cpus = self.limits["memory"], self.limits["processes"], self.limits["cpus"]
            self.cgroup = Cgroup(spec["cgroups"], memory=memory, processes=processes, cpus=cpus)

    def _open_output(self) -> Output | BuildOutput | StandardOutput:
        conceal = make_concealer(self.spec["secrets"])
        if self.spec["report"] is None:
            return StandardOutput(conceal)
        return Output(Path(self.spec["output"]), conceal) if self.spec["output"] else BuildOutput(1, conceal)

    def start(self) -> list[socket.socket]:
        """Starts the command. Returns the listeners for its outgoing connections."""
        ours, theirs = socket.socketpair()
        ours.settimeout(20)
        self._info, info_to = os.pipe()
        os.set_blocking(self._info, False)
        os.set_inheritable(info_to, True)
        sockets = _open_sockets(self.spec) if self.spec["socket"] else []
        self._pipe, pipe_to = os.pipe()
        os.set_blocking(self._pipe, False)
        own = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            if self.spec["trusted"]:
                enter_unconfined(self.spec, own, pipe_to)
            enter_sandbox(self.spec, own, theirs, sockets, info_to, pipe_to)
        theirs.close()
        os.close(info_to)
        os.close(pipe_to)
        if self.spec["trusted"]:
            ours.close()
            self._first, self._sockets = self.pid, sockets
            return []
        for each in sockets:
            each.close()
        with ours:
            _, fds, _, _ = socket.recv_fds(ours, 64, 32)
            if self.cgroup is not None:
                self.cgroup.attach(self.pid)
            with contextlib.suppress(OSError):  # the command has failed, and its output has the reason
                ours.send(b"go")
        return [socket.socket(fileno=fd) for fd in fds]

    async def watch(self, listeners: list[socket.socket]) -> str:
        """Waits until the command ends. Returns the reason to kill it, or an empty string if it ended by itself."""
        loop, child_ended, stop = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGCHLD, child_ended.set)
        loop.add_reader(self._pipe, self._take_output)
        self._egress = self._make_egress()
        await self._egress.serve(listeners)
        if self._sockets:
            self._relay = asyncio.create_task(relay.relay(self.spec["port"], *self._sockets))
        try:
            return await self._until_over(child_ended, stop)
        finally:  # before the loop closes the descriptor that its handlers write to
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGCHLD)

    async def _until_over(self, child_ended: asyncio.Event, stop: asyncio.Event) -> str:
        ends = time.monotonic() + (self.limits["seconds"] or float("inf"))
        stopping = False
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child_ended.wait(), CHECK_SECONDS)
            child_ended.clear()
            self._output.flush()
            if self._has_ended():
                self._disk_at = 0.0  # it may have exceeded the disk limit since the last check
                return "stopped" if stopping else self._find_excess()
            held = self._data is not None and self._data.is_held()
            if not stopping and (stop.is_set() or held or self._is_over()):
                stopping = True
                ends = time.monotonic() + (STOP_SOON_GRACE_SECONDS if self._must_stop_soon() else self.limits["grace"])
                with contextlib.suppress(OSError):
                    os.killpg(self._find_first(), signal.SIGTERM)  # the namespace's first process ignores it
            if time.monotonic() > ends:
                return "stopped" if stopping else "time"
            if self._egress.has_lost_endpoint:
                return "network"
            if excess := self._find_excess():
                return excess

    def _make_egress(self) -> network.Egress:
        """Makes the outgoing connections. A build's output names what it can't reach."""
        endpoints = [(host, port) for host, port in self.spec["endpoints"]]
        if self.spec["link"]:
            return network.Egress(self.spec["hosts"], endpoints)
        return network.Egress(self.spec["hosts"], endpoints, self._output.write_line, network.ANSWER_SECONDS)

    def _has_ended(self) -> bool:
        """Returns whether the command has ended. Also collects orphans, which become children of the keeper."""
        with contextlib.suppress(ChildProcessError):
            while self.status is None:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def _is_over(self) -> bool:
        """Returns whether the app's link is gone and no connection to the app is left."""
        if not self.spec["link"] or os.path.lexists(self.spec["link"]):
            self._drain_ends = float("inf")
            return False
        now = time.monotonic()
        drain = STOP_SOON_DRAIN_SECONDS if self._must_stop_soon() else DRAIN_SECONDS
        self._drain_ends = min(self._drain_ends, now + drain)
        return now >= self._drain_ends or not _is_connected(self.spec["socket"])

    def _must_stop_soon(self) -> bool:
        return bool(self.spec["link"]) and os.path.exists(self.spec["link"] + STOP_SOON_SUFFIX)

    def _find_first(self) -> int:
        """Returns the first process of the command's namespace. Raises ProcessLookupError until it has started."""
        if not self._first:
            with contextlib.suppress(OSError):
                found = re.search(rb'"child-pid": *(\d+)', os.read(self._info, 4_096))
                self._first = int(found[1]) if found else 0
        if not self._first:
            raise ProcessLookupError
        return self._first

    def kill_processes(self) -> None:
        """Kills the processes that are left, and waits for their end."""
        if self.spec["trusted"]:
            self._kill_descendants()
        with contextlib.suppress(OSError):
            os.kill(self._find_first(), signal.SIGKILL)
        if self.pid and self.status is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # orphans become children of the keeper
            while True:
                pid, status = os.waitpid(-1, 0)
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
        if self.cgroup is not None:
            self.cgroup.remove()

    def _kill_descendants(self) -> None:
        """Kills the descendants of a command that has no process namespace."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        while descendants := _list_descendants(os.getpid())[1:]:
            for pid in descendants:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            pid, status = os.waitpid(-1, 0)
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)

    def _take_output(self) -> None:
        loop = asyncio.get_running_loop()
        self._output.flush()
        waits = self._output.full and isinstance(self._output, BuildOutput)
        if not waits and not self._read_output():
            loop.remove_reader(self._pipe)
        elif self._output.full:
            loop.remove_reader(self._pipe)
            loop.call_later(PAUSE_SECONDS, loop.add_reader, self._pipe, self._take_output)

    def _read_output(self) -> bytes:
        """Copies the command's output, line by line. Returns the bytes read. Raises BlockingIOError."""
        data = os.read(self._pipe, CHUNK_BYTES)
        if self._output.full and isinstance(self._output, Output):
            self._output.drop(data.count(b"\n"))
            return data
        for line in self._splitter.split(data):
            self._output.write_line(line)
        self._output.flush()
        return data

    def read_rest(self) -> None:
        """Copies the rest of the output: at most as much as a pipe holds, because a process may still write to it."""
        with contextlib.suppress(OSError):
            for _ in range(PIPE_READS):
                if not self._read_output():
                    break
        self._output.flush(FLUSH_SECONDS)

    def record_data_size(self) -> None:
        """Measures the app's data at the end, because they may have grown since the last time."""
        if self._data is not None:
            with contextlib.suppress(OSError):
                self._data.record_size()

    # -- limits ----------------------------------------------------------------------------------------------

    def _find_excess(self) -> str:
        """Returns the limit that the command exceeds, or an empty string."""
        living = self.cgroup.list_processes() if self.cgroup is not None else _list_descendants(os.getpid())[1:]
        if self.cgroup is not None:
            if exceeded := self.cgroup.find_exceeded():
                return exceeded
        elif len(living) > self.limits["processes"]:
            return "processes"
        elif self.limits["memory"] and self._measure_memory(living) > self.limits["memory"]:
            return "memory"
        if self._data is not None and self._data.is_full():
            return "data"
        return self._find_disk_excess(living) if self.limits["disk"] and self.spec["write"] else ""

    def _measure_memory(self, living: list[int]) -> int:
        return sum(map(_read_memory, living)) + self._measure_unnamed(living, on_disk=False)

    def _find_disk_excess(self, living: list[int]) -> str:
        limit, now = self.limits["disk"], time.monotonic()
        disk = os.statvfs(self.spec["write"][0])
        free = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and free < self.limits["free"]:  # without blocks, the file system does not say how large it is
            return "full"
        self._most_free = max(self._most_free, free)
        hides = self._most_free - free > limit and _files_in_sockets(living)
        self._hidden_checks = self._hidden_checks + 1 if hides else 0
        if self._hidden_checks > HIDDEN_CHECKS:
            return "disk"
        if now > self._disk_at or (now > self._scanned_at and self._free_at_scan - free > limit - self._used):
            self._used, entries = _measure(self.spec["write"], limit)
            self._used += self._measure_unnamed(living, on_disk=True)
            if self._used > limit:
                return "disk"
            if entries > self.limits["inodes"]:
                return "inodes"
            # Measuring many files takes long. It may use a twentieth of the time, or half of it while the disk fills.
            taken = time.monotonic() - now
            self._scanned_at, self._disk_at, self._free_at_scan = now + 2 * taken, now + max(1.0, 20 * taken), free
        return ""

    def _measure_unnamed(self, living: list[int], *, on_disk: bool) -> int:
        """Returns the bytes of unnamed files, which open descriptors and mappings keep on the disk or in memory."""
        found: dict[tuple[int, int], int] = {}  # by device and inode
        for _, _, status in _open_files(living):
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
        for pid in living if on_disk else ():
            thread, maps = _read_first(pid, "maps")
            for line in maps.splitlines():
                if line.endswith(" (deleted)"):
                    found.setdefault(*_read_mapping(thread, line.split()))
        disks, in_memory = {os.stat(path).st_dev for path in self.spec["write"]}, 0
        if self.spec["data"]:
            disks.add(os.stat(self.spec["data"]).st_dev)
        for folder in () if on_disk else bwrap.IN_MEMORY:  # in these folders, files with a name count too
            with contextlib.suppress(OSError):
                own = f"/proc/{self._find_first()}/root{folder}"
                if (device := os.stat(own).st_dev) != os.stat(folder).st_dev:  # bubblewrap has mounted the sandbox's
                    disks.add(device)
                    space = os.statvfs(own)
                    in_memory += (space.f_blocks - space.f_bfree) * space.f_frsize
        return in_memory + sum(size for (device, _), size in found.items() if (device in disks) == on_disk)


class DataFolder:
    """The folder of an app's data: `files`, and beside them files of the worker (`workers/engine/app_data.py`).

    If the keeper cannot write to it, another process measures the files.
    """

    def __init__(self, path: str) -> None:
        self._path, self._measures = Path(path), os.access(path, os.W_OK)
        self._earliest = self._next = 0.0  # of the next measurement: when the disk fills, and otherwise
        self._free = self._room = 0  # at the last measurement: bytes on the disk, and bytes below the limit

    def is_held(self) -> bool:
        """Returns whether the worker wants no process of the app to run."""
        return os.path.lexists(self._path / "hold")

    def is_full(self) -> bool:
        """Measures the files from time to time, and records their size. Returns whether they exceed their limit."""
        if not self._measures:
            limit = read_number(self._path / "limit")
            return limit is not None and (read_number(self._path / "used") or 0) > limit
        now, disk = time.monotonic(), os.statvfs(self._path)
        free = disk.f_bavail * disk.f_frsize
        if now < self._next and (now < self._earliest or self._free - free <= self._room):
            return False
        used, limit = measure_data(self._path / bwrap.DATA_FILES), read_number(self._path / "limit")
        write_number(self._path / "used", used)
        taken = time.monotonic() - now
        self._earliest, self._next = now + 2 * taken, now + min(max(1.0, 20 * taken), DATA_SECONDS)
        self._free, self._room = free, UNMEASURABLE if limit is None else limit - used
        return limit is not None and used > limit

    def record_size(self) -> None:
        self._next = 0.0
        self.is_full()


def measure_data(folder: Path) -> int:
    """Returns the bytes that files take. Holes in files count too, because copies of the files have none.

    Returns UNMEASURABLE if files could hide from this: below a path that is too long, or in a folder that its owner has
    closed.
    """
    try:
        statuses = (entry.status for entry in walk(folder, [errno.ENAMETOOLONG, errno.EACCES]))
        return sum(max(status.st_size, status.st_blocks * 512) + ENTRY_BYTES for status in statuses)
    except OSError:
        return UNMEASURABLE


def measure_disk(folder: Path) -> int:
    """Returns the bytes that files take on the disk. Holes in files take none."""
    return sum(entry.status.st_blocks * 512 for entry in walk(folder))


def read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def write_number(path: Path, number: int) -> None:
    """Writes the number unless the file has it already. Keepers and threads may do this at the same time."""
    if read_number(path) != number:
        fresh = path.with_name(f".{path.name}-{threading.get_native_id()}")
        fresh.write_text(str(number))
        fresh.replace(path)


def _list_descendants(pid: int) -> list[int]:
    """Returns the process, and then its descendants."""
    found, pending = [], [pid]
    while pending:
        found.append(pid := pending.pop())
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                pending += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _list_tasks(living: list[int]) -> Iterator[str]:
    """Yields the folders of all threads. Each thread may have its own descriptors, even after the first has ended."""
    for pid in living:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                yield f"/proc/{pid}/task/{task}"


def _read_first(pid: int, name: str) -> tuple[int, str]:
    """Reads a file of the first thread for which it is not empty. It is empty for a thread that has ended."""
    for task in _list_tasks([pid]):
        with contextlib.suppress(OSError):
            if text := Path(task, name).read_text(errors="replace"):
                return int(os.path.basename(task)), text
    return pid, ""


def _open_files(living: list[int]) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yields each open descriptor: its thread's folder, its number, and the status of its file."""
    for task in _list_tasks(living):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"{task}/fd"):
                with contextlib.suppress(OSError):
                    yield task, fd, os.stat(f"{task}/fd/{fd}")


def _files_in_sockets(living: list[int]) -> bool:
    """Returns whether files wait in a Unix socket to be received. Their sizes are not visible there."""
    for task, fd, status in _open_files(living):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(status.st_mode):
                found = re.search(r"^scm_fds:\s*(\d+)", Path(task, "fdinfo", fd).read_text(), re.M)
                if found and int(found[1]):
                    return True
    return False


def _read_memory(pid: int) -> int:
    """Returns the memory of a process in bytes. Each process that shares a page counts its share of it."""
    found = re.search(r"^Pss: +(\d+)", _read_first(pid, "smaps_rollup")[1], re.M)
    return int(found[1]) * 1_024 if found else 0


def _read_mapping(pid: int, fields: list[str]) -> tuple[tuple[int, int], int]:
    """Returns a mapped file and its size: for root, the size of the file; otherwise, the size of the mapping."""
    major, minor = (int(part, 16) for part in fields[3].split(":"))
    start, end = (int(part, 16) for part in fields[0].split("-"))
    size = end - start
    with contextlib.suppress(OSError):
        size = os.stat(f"/proc/{pid}/map_files/{fields[0]}").st_blocks * 512
    return (os.makedev(major, minor), int(fields[4])), size


def _measure(folders: list[str], limit: int) -> tuple[int, int]:
    """Returns the bytes and the number of entries in the folders. Stops when the bytes exceed the limit."""
    total, count = 0, 0
    try:
        for folder in folders:
            for entry in walk(folder, [errno.ENAMETOOLONG]):
                total, count = total + entry.status.st_blocks * 512 + ENTRY_BYTES, count + 1
                if total > limit:
                    return total, count
    except OSError:  # files could hide below a path that is too long
        return limit + 1, count
    return total, count


def _is_connected(path: str) -> bool:
    """Returns whether there is a connection to the socket at this path."""
    try:
        with open("/proc/net/unix") as sockets:
            return any(fields[5] in CONNECTED and fields[7:] == [path] for fields in map(str.split, sockets))
    except OSError:  # a system without such a list
        return False


def _open_sockets(spec: Spec) -> list[socket.socket]:
    """Returns the sockets of the relay: where the visitors of the app wait, and where the worker asks."""
    passed = spec["listener"]
    listener = listen_for_visitors(spec["socket"]) if passed is None else socket.socket(fileno=passed)
    return [listener, _listen(spec["control"])]


def listen_for_visitors(path: str) -> socket.socket:
    """Creates a Unix socket to which only the worker and Caddy can connect."""
    listener = _listen(path)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a root that cannot change users runs Caddy itself
            os.chown(path, CADDY_USER, CADDY_USER)
    return listener


def _listen(path: str) -> socket.socket:
    """Creates a Unix socket to which only this user can connect."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener, mask = socket.socket(socket.AF_UNIX), os.umask(0o177)
    listener.bind(path)
    os.umask(mask)
    listener.listen(relay.BACKLOG)
    return listener


def run(spec: Spec) -> dict[str, Any]:
    keeper, why = Keeper(spec), ""
    try:
        why = asyncio.run(keeper.watch(keeper.start()))
    finally:
        keeper.kill_processes()
        keeper.read_rest()
        keeper.record_data_size()
    code = -signal.SIGKILL if keeper.status is None else keeper.status
    code = 128 - code if code > 128 else code  # how bubblewrap reports a signal
    if not why and code == -signal.SIGXFSZ:
        why = "disk"
    return {"code": code, "why": why}


def _wait_for_data(spec: Spec) -> None:
    """Waits while the worker replaces the app's data. A container that starts again has the new ones."""
    for lock in spec["inherited"]:
        os.close(lock)
    while spec["data"] and DataFolder(spec["data"]).is_held():
        time.sleep(CHECK_SECONDS)


def raise_file_limit() -> None:
    """Lets this process open as many files as the machine allows."""
    with contextlib.suppress(ValueError, OSError):  # macOS does not accept "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def limit_files(most: int) -> None:
    """Lets this process, and those that it starts, have no more files and connections open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    with open(int(sys.argv[1]), "rb") as file:
        spec = json.load(file)
    for fd in spec["inherited"]:
        os.set_inheritable(fd, False)
    if spec["link"]:  # only the removal of the link ends this keeper
        if pid := os.fork():
            os.write(1, str(pid).encode())
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
    else:
        network.end_with_parent(spec["parent"], signal.SIGTERM)
    os.nice(spec["limits"]["nice"])  # for the keeper too: the command determines how much it works
    network.prctl(network.SUBREAPER, 1)
    raise_file_limit()
    if spec["trusted"] and spec["socket"]:  # all apps share the machine's ports
        with socket.create_server(("127.0.0.1", 0)) as free:
            spec["port"] = free.getsockname()[1]
        spec["environment"]["PORT"] = str(spec["port"])
    try:
        result = run(spec)
    except BaseException as error:
        result = {"code": 126, "error": f"{type(error).__name__}: {error}"}
    if spec["report"] is None:
        if result.get("why") == "stopped":
            _wait_for_data(spec)
            os._exit(STOPPED_STATUS)
        os._exit(128 - result["code"] if result["code"] < 0 else result["code"])
    os.write(spec["report"], json.dumps(result).encode())
    os._exit(0)  # without waiting for pending look-ups

"""The process between a worker and a customer's command. `sandbox.py` starts it.

It starts the command confined and in its own session, watches its time, memory and disk, and kills everything that
the command started. Processes that the command leaves behind become children of the keeper, which is their subreaper.
When the worker dies in any way, the kernel sends the keeper SIGTERM, and the keeper ends in the same way.
Its environment is the command's, so that the keeper reveals nothing of the worker either.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import sys
import time
from typing import Any, NoReturn

from workers.sandbox import landlock, unpack

PARENT_DIED, SUBREAPER, AMBIENT, CLEAR = 1, 36, 47, 4  # prctl
ENTRY = 1_024  # bytes that each file counts in addition, because removing a million empty files takes long
CHECK_INTERVAL = 0.25  # seconds
STOP_ROUNDS = 20
FILE_BYTES = 1 << 30
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is how a shell reports it
TOO_LARGE = (-signal.SIGXFSZ, 128 + signal.SIGXFSZ)
PAGE = os.sysconf("SC_PAGE_SIZE")


def confine(spec: dict[str, Any]) -> None:
    """Restricts this process, and with it everything it starts."""
    limits = spec["limits"]
    os.setsid()
    for fd in spec["open_fds"]:
        os.close(fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and children would inherit that
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("800")  # when memory runs out, the kernel kills this before the servers
    os.nice(limits["nice"])
    os.umask(0o022)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, limits["files"])
    # The next three limits are generous: a command that hits one fails for no visible reason. `excess` gives a reason.
    _limit(resource.RLIMIT_FSIZE, 2 * (limits["disk"] or FILE_BYTES))
    # This limits writable memory. Address space can't be limited: Node reserves a hundred times what it uses.
    _limit(resource.RLIMIT_DATA, 4 * limits["memory"])
    rules = None
    if spec["landlock"]:
        write = [*spec["devices"], *spec["write"]]
        rules = landlock.Ruleset(read=spec["read"], write=write, bind=spec["bind"], connect=spec["connect"])
    # The kernel counts threads too, and all processes of the user.
    _limit(resource.RLIMIT_NPROC, 2 * limits["processes"] + (_threads() if spec["uid"] is None else 0))
    if (uid := spec["uid"]) is not None:
        os.fchown(sys.stdout.fileno(), uid, uid)  # or /dev/stdout can't be opened
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    landlock.prctl(PARENT_DIED, signal.SIGKILL)  # after the change of user, which resets it
    if os.getppid() != spec["keeper"]:
        os._exit(126)
    os.chdir(spec["folder"])
    landlock.no_new_privileges()
    landlock.prctl(AMBIENT, CLEAR)  # capabilities that a user other than root would pass on
    if rules is not None:
        rules.enter()


def _limit(what: int, wanted: int) -> None:
    _, hard = resource.getrlimit(what)
    bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(what, (bound, bound))


def _threads() -> int:
    """How many threads this user has."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def run(spec: dict[str, Any]) -> NoReturn:
    try:
        confine(spec)
        if spec["unpack"] is not None:
            unpack.unpack(sys.stdin.buffer, ".", *spec["unpack"])
            os._exit(0)
        # Python adds variables when the environment has no locale.
        environment = {name: os.environ[name] for name in spec["environment"]}
        os.execvpe(spec["command"][0], spec["command"], environment)  # noqa: S606
    except BaseException as error:
        print(f"{spec['command'][0]}: {error}" if spec["command"] else error, file=sys.stderr, flush=True)
        os._exit(126)


class ProcessTree:
    """The command and all processes that descend from it."""

    def __init__(self, spec: dict[str, Any], first: int) -> None:
        self.spec, self.first = spec, first
        self.status: int | None = None
        self.disk_at = 0.0

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.first:
                    self.status = ended[1]

    def living(self, *, but: bytes = b"Z") -> list[int]:
        """All descendants except those in the given states. Scans all processes of the machine."""
        children: dict[int, list[int]] = {}
        states: dict[int, bytes] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                    states[int(name)] = fields[0]
                    children.setdefault(int(fields[1]), []).append(int(name))
        found, pending = [], [os.getpid()]
        while pending:
            below = children.get(pending.pop(), [])
            found += below
            pending += below
        return [pid for pid in found if states[pid] not in but]

    def excess(self) -> str:
        """The limit that the command exceeds, or an empty string."""
        limits, living, memory = self.spec["limits"], _below(os.getpid()), 0
        if len(living) > limits["processes"]:
            return "processes"
        for pid in living:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
                _, resident, shared, *_ = map(int, file.read().split())
                memory += (resident - shared) * PAGE
        if memory > limits["memory"]:
            return "memory"
        now = time.monotonic()
        if limits["disk"] and now > self.disk_at:
            if _size(self.spec["write"], limits["disk"]) > limits["disk"]:
                return "disk"
            # Adding up many files takes long: spend at most a twentieth of the time on it.
            self.disk_at = now + max(1.0, 20 * (time.monotonic() - now))
        return ""

    def kill(self) -> None:
        """Kills the whole tree, even if it forks meanwhile."""
        uid = self.spec["uid"]
        while True:
            if self.status is None:  # not reaped yet, so the id is still its own
                _signal(self.first, signal.SIGKILL)
            if uid is not None:
                _kill_all_of(uid)
            else:
                for _ in range(STOP_ROUNDS):  # a stopped process can't fork
                    if not (moving := self.living(but=b"ZTt")):
                        break
                    for pid in moving:
                        _signal(pid, signal.SIGSTOP)
                for pid in self.living():
                    _signal(pid, signal.SIGKILL)
            self.reap()
            if not self.living():
                return
            time.sleep(0.005)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _kill_all_of(uid: int) -> None:
    """Kills in one step of the kernel, which no fork escapes. No one but this build uses the user."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(OSError):
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _below(pid: int) -> list[int]:
    """A fast version of `living`, which may miss processes that are being forked."""
    found, pending = [], [pid]
    while pending:
        pid = pending.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                    children = [int(child) for child in file.read().split()]
                    found += children
                    pending += children
    return found


def _out_of_memory_kills() -> int:
    """How often the kernel has killed a process for lack of memory since boot."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _size(folders: list[str], limit: int) -> int:
    """Bytes in the folders. Stops counting beyond the limit."""
    total, pending = 0, list(folders)
    while pending and total <= limit:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
                        total += entry.stat(follow_symlinks=False).st_blocks * 512 + ENTRY
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # files could hide below such a path
                return limit + 1
    return total


def supervise(tree: ProcessTree) -> str:
    """Waits for the end of the command. Returns the reason to kill it, or an empty string if it ended by itself."""
    limits = tree.spec["limits"]
    ends = time.monotonic() + (limits["seconds"] or float("inf"))
    stopping = False
    while True:
        received = signal.sigtimedwait(WATCHED, CHECK_INTERVAL)
        tree.reap()
        draining = stopping and time.monotonic() < ends and tree.living()  # its children get the same time
        if tree.status is not None and not draining:
            tree.disk_at = 0.0  # it may have exceeded the disk limit since the last check
            return "stopped" if stopping else tree.excess()
        if received is not None and received.si_signo != signal.SIGCHLD:
            if os.getppid() != tree.spec["parent"] or not limits["grace"]:
                return "stopped"
            if not stopping:
                stopping = True
                ends = time.monotonic() + limits["grace"]
                with contextlib.suppress(OSError):
                    os.killpg(tree.first, signal.SIGTERM)
        if time.monotonic() > ends:
            return "stopped" if stopping else "time"
        if excess := tree.excess():
            return excess


def main() -> None:
    spec = json.loads(sys.argv[1]) | {"keeper": os.getpid()}
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    landlock.prctl(PARENT_DIED, signal.SIGTERM)
    landlock.prctl(SUBREAPER, 1)
    if os.getppid() != spec["parent"]:
        return  # the worker died before PARENT_DIED was set
    if spec["uid"] is not None:
        _kill_all_of(spec["uid"])  # what a killed keeper left behind
    kills = _out_of_memory_kills()
    first = os.fork()
    if first == 0:
        run(spec)
    tree = ProcessTree(spec, first)
    try:
        why = supervise(tree)
    finally:
        tree.kill()
    code = os.waitstatus_to_exitcode(tree.status) if tree.status is not None else -signal.SIGKILL
    if not why and code in TOO_LARGE:
        why = "disk"
    if not why and code in KILLED and _out_of_memory_kills() > kills:
        why = "memory"
    os.write(spec["open_fds"][0], json.dumps({"code": code, "why": why}).encode())

"""The process between a worker and what it runs for a customer: `sandbox.py` starts it, this is all it does.

It starts the command in a session of its own with nothing but what it may have, watches its time, memory and disk,
and ends with it, all of it: what a command leaves behind becomes this process's child (it is the subreaper) and is
killed. It ends the same way when its worker dies, however that was, because the kernel then sends it SIGTERM.
Its environment is the command's, so that nothing of the worker's can be read here either.
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
ENTRY = 1_024  # bytes that an empty file counts: removing a million of them takes long
LOOK = 0.25  # seconds between looks at what is running
PASSES = 20  # over all that has to be stopped
FILE_BYTES = 1 << 30
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is how a shell tells it of what it ran
TOO_LARGE = (-signal.SIGXFSZ, 128 + signal.SIGXFSZ)
PAGE = os.sysconf("SC_PAGE_SIZE")


def confine(spec: dict[str, Any]) -> None:
    """What this process gives up, and all it starts never had."""
    limits = spec["limits"]
    os.setsid()
    for fd in spec["keeps"]:
        os.close(fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a child would too
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("800")  # when the machine is out of memory, this goes before what serves
    os.nice(limits["nice"])
    os.umask(0o022)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, limits["files"])
    # The next three are generous: who runs into one sees a failure of its own, while what `excess` ends is told why.
    _limit(resource.RLIMIT_FSIZE, 2 * (limits["disk"] or FILE_BYTES))
    # Of memory that can be written: of addresses, Node reserves a hundred times what it uses.
    _limit(resource.RLIMIT_DATA, 4 * limits["memory"])
    rules = None
    if spec["landlock"]:
        write = [*spec["devices"], *spec["write"]]
        rules = landlock.Ruleset(read=spec["read"], write=write, bind=spec["bind"], connect=spec["connect"])
    # It counts threads too, and all of a user's.
    _limit(resource.RLIMIT_NPROC, 2 * limits["processes"] + (_threads() if spec["uid"] is None else 0))
    if (uid := spec["uid"]) is not None:
        os.fchown(sys.stdout.fileno(), uid, uid)  # or /dev/stdout can't be opened
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    landlock.prctl(PARENT_DIED, signal.SIGKILL)  # after the change of user, which takes it back
    if os.getppid() != spec["keeper"]:
        os._exit(126)
    os.chdir(spec["folder"])
    landlock.no_new_privileges()
    landlock.prctl(AMBIENT, CLEAR)  # capabilities that another user than root would pass on
    if rules is not None:
        rules.enter()


def _limit(what: int, wanted: int) -> None:
    _, hard = resource.getrlimit(what)
    bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(what, (bound, bound))


def _threads() -> int:
    """Of this user."""
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
        # Python has added its own when there is no locale in it.
        environment = {name: os.environ[name] for name in spec["environment"]}
        os.execvpe(spec["command"][0], spec["command"], environment)  # noqa: S606
    except BaseException as error:
        print(f"{spec['command'][0]}: {error}" if spec["command"] else error, file=sys.stderr, flush=True)
        os._exit(126)


class Kept:
    """The command, and whatever came of it."""

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
        """Everything that descends from here, but what is in these states: a look at the whole machine."""
        children: dict[int, list[int]] = {}
        states: dict[int, bytes] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                    states[int(name)] = fields[0]
                    children.setdefault(int(fields[1]), []).append(int(name))
        found, look = [], [os.getpid()]
        while look:
            below = children.get(look.pop(), [])
            found += below
            look += below
        return [pid for pid in found if states[pid] not in but]

    def excess(self) -> str:
        """What it has too much of, or nothing."""
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
            # A folder of many files takes long to add up: a twentieth of the time at the most.
            self.disk_at = now + max(1.0, 20 * (time.monotonic() - now))
        return ""

    def kill(self) -> None:
        """All of it, whatever it forks meanwhile."""
        uid = self.spec["uid"]
        while True:
            if self.status is None:  # not yet collected, so the number is still its own
                _signal(self.first, signal.SIGKILL)
            if uid is not None:
                _kill_all_of(uid)
            else:
                for _ in range(PASSES):  # what is stopped does not fork, and leaves no room for what would
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
    """In one step of the kernel's, which no fork escapes. The user is this build's alone, so it hits nobody else."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(OSError):
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _below(pid: int) -> list[int]:
    """The same at a glance: what forks meanwhile may be missing."""
    found, look = [], [pid]
    while look:
        pid = look.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                    children = [int(child) for child in file.read().split()]
                    found += children
                    look += children
    return found


def _out_of_memory_kills() -> int:
    """By the kernel, since the machine started."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _size(folders: list[str], most: int) -> int:
    total, look = 0, list(folders)
    while look and total <= most:
        try:
            with os.scandir(look.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            look.append(entry.path)
                        total += entry.stat(follow_symlinks=False).st_blocks * 512 + ENTRY
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # as good a place as any to hide what is too much
                return most + 1
    return total


def keep(kept: Kept) -> str:
    """Until it has ended; why, when it was not by itself."""
    limits = kept.spec["limits"]
    ends = time.monotonic() + (limits["seconds"] or float("inf"))
    told_to_stop = False
    while True:
        told = signal.sigtimedwait(WATCHED, LOOK)
        kept.reap()
        still = told_to_stop and time.monotonic() < ends and kept.living()  # its children have the same time
        if kept.status is not None and not still:
            kept.disk_at = 0.0  # it was faster than a look, or failed of what it was about to be ended for
            return "stopped" if told_to_stop else kept.excess()
        if told is not None and told.si_signo != signal.SIGCHLD:
            if os.getppid() != kept.spec["parent"] or not limits["grace"]:
                return "stopped"
            if not told_to_stop:
                told_to_stop = True
                ends = time.monotonic() + limits["grace"]
                with contextlib.suppress(OSError):
                    os.killpg(kept.first, signal.SIGTERM)
        if time.monotonic() > ends:
            return "stopped" if told_to_stop else "time"
        if excess := kept.excess():
            return excess


def main() -> None:
    spec = json.loads(sys.argv[1]) | {"keeper": os.getpid()}
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    landlock.prctl(PARENT_DIED, signal.SIGTERM)
    landlock.prctl(SUBREAPER, 1)
    if os.getppid() != spec["parent"]:
        return  # it died before we asked to be told
    if spec["uid"] is not None:
        _kill_all_of(spec["uid"])  # what a keeper left that was killed itself
    kills = _out_of_memory_kills()
    first = os.fork()
    if first == 0:
        run(spec)
    kept = Kept(spec, first)
    try:
        why = keep(kept)
    finally:
        kept.kill()
    code = os.waitstatus_to_exitcode(kept.status) if kept.status is not None else -signal.SIGKILL
    if not why and code in TOO_LARGE:
        why = "disk"
    if not why and code in KILLED and _out_of_memory_kills() > kills:
        why = "memory"
    os.write(spec["keeps"][0], json.dumps({"code": code, "why": why}).encode())

"""Runs customers' code: builds, their tools, and apps. That code reaches no file, process or address of this service.

- bubblewrap puts the code into its own namespaces, and a filter refuses dangerous system calls (`bwrap.py`).
- Its network is empty. A keeper outside checks each connection (`network.py`). Apps get requests over a Unix socket.
- Control groups bound memory, processes and CPU (`cgroups.py`). The keeper bounds time and disk (`keeper.py`).
- If the worker is root, each build and each app also has its own user.

Failure policy: closed. A machine that cannot provide this isolation runs nothing. Control groups are optional only in
development (`allow_private_addresses`): the keeper then measures, which is less exact. Nothing runs as the root user of
the machine. `trusted` commands run without a sandbox (`capsule dev --trust-builds`).
"""

import asyncio
import contextlib
import fcntl
import io
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Literal, NoReturn

import msgspec
import structlog
import uvloop

from gateway.cancellation import cancel, finish_despite_cancellation
from gateway.deploys import archives
from gateway.settings import Settings
from gateway.storage import closed_folders
from workers.sandbox import bwrap, cgroups, pack, tools
from workers.sandbox.keeper import CADDY_USER, NOT_ENTERED
from workers.sandbox.machine import DOCUMENTED, Unsafe, can_change_users, check_own_user, find_namespace_remedy
from workers.sandbox.network import Endpoint
from workers.sandbox.output import LineSplitter
from workers.sandbox.spec import Spec

logger = structlog.get_logger()

# These ranges are free: systemd assigns the ids above them, and people and packages use the ids below them. A container
# may map only the first 65,536 ids.
BUILD_USERS, APP_USERS = range(CADDY_USER + 1, 60_594), range(60_594, 61_184)
# One file per user. A worker on this machine locks the file while it uses the user.
USERS = Path("/run/capsule/users")
EFFECTIVE = os.access in os.supports_effective_ids
COPIES = "tools"  # in the data folder
OWN_TOOLS = "/opt/capsule"  # where commands see copies
NODE = f"{OWN_TOOLS}/node"
# Where a build and a start command see their folders, on every host. So a virtual environment of the build starts.
APP, HOME, DATA, TMP = "/app", "/home/app", "/data", "/tmp"  # noqa: S108
OWN_FOLDERS = (APP, HOME, DATA, TMP)
MIB = 1 << 20
CHUNK_BYTES = 16_384  # per read of output
LINES_PER_PAUSE, PAUSE_SECONDS = 256, 0.01  # a pause after so many lines, so that other tasks run
KILL_SECONDS = 5.0  # in which a keeper must kill the remaining processes
PIPE_SECONDS = 2.0  # to read the output that is still in the pipe after its keeper has ended
START_SECONDS = 30.0
DATA_FULL = "the app's data are larger than its plan allows; clear them, restore a snapshot, or choose a larger plan"

PACK, ARCHIVES = Path(pack.__file__).read_text(), Path(archives.__file__).read_text()  # programs of a command

Why = Literal["", "time", "memory", "disk", "inodes", "full", "processes", "data", "network", "stopped"]


class SandboxLimits(msgspec.Struct, frozen=True):
    seconds: float = 0  # 0: no limit
    memory: int = 2_048 * MIB  # 0: no limit
    disk: int = 0  # bytes in the writable folders; 0: no limit, and the next two do not apply either
    inodes: int = 500_000  # files and folders in the writable folders
    free: int = 0  # bytes that must stay free on the disk
    processes: int = 1_024
    cpus: float = 2.0
    files: int = 4_096  # open at once
    nice: int = 10
    grace: float = 0  # seconds between SIGTERM and SIGKILL


class Outcome(msgspec.Struct, frozen=True):
    code: int  # the exit status; negative: the signal
    why: Why = ""
    error: str = ""  # a failure of the sandbox itself, for operators

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.why

    @property
    def is_service_fault(self) -> bool:
        """Whether it says nothing about the command: the same one may succeed later."""
        return self.why == "full"

    def describe(self, subject: str, limits: SandboxLimits) -> str:
        """Describes the outcome to account holders."""
        match self.why:
            case "time":
                return f"{subject} took longer than {limits.seconds:.0f} seconds"
            case "memory":
                return f"{subject} ran out of memory; its limit is {limits.memory // MIB} MiB"
            case "disk":
                return f"{subject} wrote more than {limits.disk // MIB} MiB"
            case "inodes":
                return f"{subject} created more than {limits.inodes:,} files"
            case "full":
                return f"{subject} was stopped because the machine's disk is almost full; try again later"
            case "processes":
                return f"{subject} started more than {limits.processes} processes"
            case "data":
                return f"{subject} was stopped because {DATA_FULL}"
            case "network":
                return f"{subject} could not reach a package registry, which its log names"
            case "stopped":
                return f"{subject} was stopped"
        return f"{subject} ended with {f'status {self.code}' if self.code >= 0 else f'signal {-self.code}'}"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    arguments: Sequence[str] = ()
    program: str = ""  # a Python program that gets the arguments, in place of a command
    folder: Path  # the working folder, as the command sees it
    places: Mapping[Path, str] = {}  # path in `read`, `write` or the data → where the command sees it, if elsewhere
    environment: Mapping[str, str]
    read: Sequence[Path] = ()
    write: Sequence[Path] = ()
    connect: Sequence[int] = ()  # TCP ports of public addresses
    hosts: Sequence[str] = ()  # IPv4 addresses that may be reached although they are not public
    endpoints: Sequence[Endpoint] = ()  # hosts that may be reached at one port each, whatever their addresses are
    limits: SandboxLimits = SandboxLimits()
    secrets: Mapping[str, str] = {}  # variables whose values the output must not show
    data: Path | None = None  # the folder of the app's data (`workers/engine/app_data.py`)
    locks: Sequence[int] = ()  # descriptors of locked files, which the keeper holds open until it ends


class Detached(msgspec.Struct, frozen=True, kw_only=True):
    """The additional parameters of a command that outlives the worker."""

    link: Path  # its removal ends the command
    socket: Path  # connections to it reach the port
    listener: int | None = None  # the descriptor of that socket, if it exists already
    control: Path  # a socket at which the worker asks whether the command is idle (`relay.py`)
    port: int  # at 127.0.0.1 in the sandbox
    output: Path
    report: Path  # the keeper writes the Outcome to it


class Sandbox:
    def __init__(self, *, development: bool, users: range, trusted: bool = False) -> None:
        """`trusted`: commands run without a sandbox. Use it only for developers' own code on their own machines."""
        self._development, self._trusted = development, trusted
        self._root = can_change_users(users)
        self.users = users
        self._user_locks: dict[int, list[int]] = {}  # user id → open lock files
        self._cgroups: list[str] = []
        self._bwrap, self._filter = "", ""
        self._checked, self._checking = False, threading.Lock()
        folders = [Path(folder) for folder in os.get_exec_path() if os.path.isabs(folder)]
        folders = [folder for folder in folders if os.access(folder, os.X_OK, effective_ids=EFFECTIVE)]
        if self._root:  # leave out tools that only root can start
            folders = [folder for folder in folders if not closed_folders(folder.resolve())]
        if not trusted:  # leave out what the folders of each command hide
            folders = [folder for folder in folders if not any(folder.is_relative_to(each) for each in OWN_FOLDERS)]
        if sys.prefix != sys.base_prefix:  # the service's own packages are no tools
            folders = [folder for folder in folders if not folder.is_relative_to(sys.prefix)]
        self._folders, self._made_folders, self._tool_places = [*map(str, folders)], list[str](), dict[str, str]()
        self.tools: list[tools.Program] = []  # as commands see them, once `check` has found them
        self.path = os.pathsep.join(self._folders)  # as commands see it
        self._python = _find_python(any_user=self._root)

    def check(self, folder: Path) -> None:
        """Raises Unsafe if customers' code can't be isolated from the data folder and the rest of the machine."""
        with self._checking:  # builds start in threads
            if self._checked:
                return
            folder = folder.resolve()
            if not self._trusted and sys.platform != "linux":
                raise Unsafe("apps are built on Linux only", "use Linux, or set GATEWAY_DEPLOY_ENGINE=external")
            self._check_user(folder)
            if not self._trusted:
                self._check_tools(folder)
                self._check_cgroups()
                self._check_descriptors()
                self._try_out()
            if node := tools.find_node(self.path, folder / COPIES):
                self._folders.insert(0, node)
                if not self._trusted:
                    self._tool_places = {f"{Path(node).parent}/{name}": f"{NODE}/{name}" for name in ("bin", "lib")}
                self.path = os.pathsep.join(self._tool_places.get(each, each) for each in self._folders)
            self._find_versions(folder / COPIES)
            self._checked = True

    def _find_versions(self, copies: Path) -> None:
        found = tools.find_versions(self._folders, copies, tools.ask_versions if self._trusted else self._ask_versions)
        self._made_folders = sorted({tool.folder for tool in found} - {*self._folders})
        if not self._trusted:
            self._tool_places |= {each: f"{OWN_TOOLS}/{Path(each).parent.name}/bin" for each in self._made_folders}
        self.tools = [tool._replace(folder=self._tool_places.get(tool.folder, tool.folder)) for tool in found]

    def _ask_versions(self, programs: Sequence[str]) -> list[str]:
        """Returns what each program says where commands run. It may lack files there, and then it says nothing."""
        seen = [
            f"{self._tool_places.get(os.path.dirname(each), os.path.dirname(each))}/{os.path.basename(each)}"
            for each in programs
        ]
        script = 'for program; do echo "$(timeout 5 "$program" --version 2>/dev/null | head -n 1)"; done'
        command = Command(arguments=["sh", "-c", script, "sh", *seen], folder=Path("/"), environment=self.environment)
        _, output = self._run_quickly(command)
        return [*output.split("\n"), *[""] * len(programs)][: len(programs)]

    def _check_user(self, folder: Path) -> None:
        if not self._root:
            check_own_user(self.users)
        if self._root and (closed := closed_folders(folder)):
            raise Unsafe(
                f"builds run as separate users, which can't pass through {closed[0]}", f"chmod o+x {closed[0]}"
            )

    def _check_tools(self, folder: Path) -> None:
        if not self._python:
            raise Unsafe("builds can't start Python", f"install it in /usr, or run chmod o+x on {sys.base_prefix}")
        if opened := [path for path in ("/usr", *self._list_tool_folders()) if folder.is_relative_to(path)]:
            raise Unsafe(f"builds may read {opened[0]}", "move GATEWAY_DATA_DIR out of it")
        try:
            self._filter = bwrap.read_filter().hex()
        except OSError:
            machine = platform.machine()
            raise Unsafe(f"there is no system call filter for {machine}", "use x86_64 or aarch64") from None
        self._bwrap = tools.find_bwrap(folder / COPIES, any_user=self._root) or ""
        if not self._bwrap:
            raise Unsafe("bubblewrap is missing", "install its package, for example with apt install bubblewrap")

    def _check_cgroups(self) -> None:
        self._cgroups = cgroups.find_parents()
        if not self._cgroups:
            action = "delegate a control group with memory, pids and cpu to the worker, or run it as root"
            if not self._development:
                raise Unsafe("memory and processes can't be bounded", action)
            logger.warning("sandbox.no_cgroup", action=f"{action}; until then the keeper only measures usage")

    def _check_descriptors(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < SandboxLimits().files:
            reason = f"a command may open {SandboxLimits().files:,} files, but this process only {hard:,}"
            raise Unsafe(reason, "raise the hard limit of open files (nofile) to 16,384 or more")

    def _try_out(self) -> None:
        """Raises Unsafe if the kernel, or a container around the worker, does not allow namespaces."""
        outcome, output = self._run_quickly(Command(arguments=["true"], folder=Path("/"), environment=self.environment))
        if not outcome.ok:
            reason = outcome.error or output.strip().removeprefix(NOT_ENTERED)
            raise Unsafe(f"bubblewrap can't make namespaces here ({reason})", find_namespace_remedy())

    def _run_quickly(self, command: Command) -> tuple[Outcome, str]:
        """Runs a command with little output, which is returned. Raises Unsafe if it takes long."""
        with self.reserve_user() as uid, contextlib.ExitStack() as files:
            report, report_to = _pipe(files, files)
            output, output_to = _pipe(files, files)
            keeper, fds = self._build_keeper(command, uid, report_to.fileno(), files)
            try:
                subprocess.run(  # noqa: S603
                    keeper, stdout=output_to, stderr=output_to, pass_fds=fds, timeout=START_SECONDS, cwd="/"
                )
            except subprocess.TimeoutExpired:
                raise Unsafe("bubblewrap does not start here", DOCUMENTED) from None
            report_to.close()
            output_to.close()
            outcome = msgspec.json.decode(report.read() or b'{"code": 126}', type=Outcome)
            return outcome, output.read().decode(errors="replace")

    @contextlib.contextmanager
    def reserve_user(self) -> Iterator[int | None]:
        """Yields a user id for the commands of one build, or None if the worker can't change users.

        Raises OSError when all users are taken.
        """
        if not self._root:
            yield None
            return
        with self._hold_user(*self._lock_user()) as uid:
            yield uid

    @contextlib.contextmanager
    def share_user(self, owner: str, former: int) -> Iterator[int | None]:
        """Yields the user id that all processes of an owner share at a time, or None, as `reserve_user` does.

        This is the `former` one if no other owner has got it since. One process at a time may call this for an owner.
        """
        if not self._root:
            yield None
            return
        with self._hold_user(*self._lock_shared_user(owner, former)) as uid:
            yield uid

    @contextlib.contextmanager
    def _hold_user(self, uid: int, lock: int) -> Iterator[int]:
        self._user_locks.setdefault(uid, []).append(lock)
        try:
            yield uid
        finally:
            self._user_locks[uid].remove(lock)
            os.close(lock)  # without unlocking it: a keeper that is still killing processes holds the file open too

    def _lock_user(self) -> tuple[int, int]:
        """Locks a user id. Takes one that an owner shared before only if no other is left."""
        for unowned in (True, False):
            for uid in self.users:
                lock = _open_user(uid)
                with contextlib.suppress(BlockingIOError):
                    if not unowned or not os.fstat(lock).st_size:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.ftruncate(lock, 0)
                        return uid, lock
                os.close(lock)
        raise self._no_user()

    def _lock_shared_user(self, owner: str, former: int) -> tuple[int, int]:
        """Locks the owner's user id, or else one without an owner, or else any free one.

        The owner is written to the lock file under an exclusive lock, and read again under the shared lock, because
        another process may lock the file while the lock changes.
        """
        for owners in ({owner}, {""}, None):
            for uid in sorted(self.users, key=lambda uid: uid != former):
                lock = _open_user(uid)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    if owners is None or _read_owner(lock) in owners:
                        if _read_owner(lock) != owner:
                            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            os.ftruncate(lock, 0)
                            os.pwrite(lock, owner.encode(), 0)
                            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        if _read_owner(lock) == owner:
                            return uid, lock
                os.close(lock)
        raise self._no_user()

    def _no_user(self) -> OSError:
        return OSError(f"all {len(self.users)} users for builds or apps are taken")

    def give_to_user(self, folder: Path, uid: int | None) -> None:
        if uid is not None:
            os.chown(folder, uid, uid)

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": self.path, "LANG": "C.UTF-8"}

    def prepend_path(self, folders: Sequence[str]) -> dict[str, str]:
        """Returns the environment of a command that finds programs in these folders first."""
        return {**self.environment, "PATH": os.pathsep.join([*folders, self.path])}

    async def run(
        self,
        command: Command,
        uid: int | None,
        on_line: Callable[[str], None],
        *,
        stdin: IO[bytes] | None = None,
    ) -> Outcome:
        """Runs the command to its end, and pass each line of output to `on_line`.

        When canceled, this kills all processes of the command before it returns.
        """
        async with self.start(command, uid, on_line, stdin=stdin) as ending:
            return await asyncio.shield(ending)

    @asynccontextmanager
    async def start(
        self,
        command: Command,
        uid: int | None,
        on_line: Callable[[str], None],
        *,
        stdin: IO[bytes] | None = None,
    ) -> AsyncIterator[asyncio.Task[Outcome]]:
        """Runs the command until it ends or the context is left."""
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                (output, output_to), (report, report_to) = _pipe(ours, theirs), _pipe(ours, theirs)
                words, fds = self._build_keeper(command, uid, report_to.fileno(), theirs)
                keeper = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=stdin or asyncio.subprocess.DEVNULL,
                    stdout=output_to,
                    stderr=asyncio.subprocess.STDOUT,
                    env={},
                    cwd="/",
                    pass_fds=fds,
                    start_new_session=True,
                )
            ending = asyncio.create_task(_follow_keeper(keeper, output, report, on_line))
            try:
                yield ending
            finally:
                await finish_despite_cancellation(_stop_keeper(keeper, ending, command.limits.grace + KILL_SECONDS))

    def become_keeper(self, command: Command) -> NoReturn:
        """Turns this process into the keeper of a command, which ends as the command does, and prints its output."""
        with contextlib.ExitStack() as files:
            words, fds = self._build_keeper(command, None, None, files)
            for fd in fds:
                os.set_inheritable(fd, True)
            os.execve(words[0], words, {})  # noqa: S606

    def detach(self, command: Command, uid: int | None, detached: Detached) -> int:
        """Starts a command that outlives the worker. Returns the process id of its keeper. Raises OSError."""
        with contextlib.ExitStack() as files:
            detached.report.unlink(missing_ok=True)
            report = files.enter_context(open(os.open(detached.report, os.O_WRONLY | os.O_CREAT, 0o600), "wb"))
            words, fds = self._build_keeper(command, uid, report.fileno(), files, detached)
            started = subprocess.run(  # noqa: S603
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=fds,
                start_new_session=True,
                timeout=START_SECONDS,
                check=False,
            )
        if not started.stdout:
            raise OSError("the keeper of a command did not start")
        return int(started.stdout)

    def _build_keeper(
        self,
        command: Command,
        uid: int | None,
        report: int | None,
        files: contextlib.ExitStack,
        detached: Detached | None = None,
    ) -> tuple[list[str], list[int]]:
        """Returns the keeper's command line, and the descriptors that it inherits.

        The specification is in an unnamed file, because it contains secrets and every process can read command lines.
        """
        inherited = [] if report is None else [report]
        inherited += [*command.locks, *([] if uid is None else self._user_locks[uid][-1:])]
        if detached is not None:
            inherited += [] if detached.listener is None else [detached.listener]
        read, arguments = [*map(os.fspath, command.read)], command.arguments
        if command.program:
            read += self._python[:1]
            arguments = [*self._python[1:], "-IS", "-c", command.program, *arguments]

        def path_of(name: str) -> str:
            return os.fspath(getattr(detached, name, None) or "")

        spec: Spec = {
            "trusted": self._trusted,
            "bwrap": self._bwrap,
            "command": [*arguments],
            "environment": dict(command.environment),
            "folder": os.fspath(command.folder),
            "limits": msgspec.to_builtins(command.limits),
            "read": read,
            "write": [os.fspath(path) for path in command.write],
            "places": {os.fspath(path): place for path, place in command.places.items()} | self._tool_places,
            "tools": self._list_tool_folders(),
            "connect": [*command.connect],
            "hosts": [*command.hosts],
            "endpoints": [*command.endpoints],
            "uid": uid,
            "parent": os.getppid() if report is None else os.getpid(),
            "cgroups": self._cgroups,
            "filter": self._filter,
            "report": report,
            "secrets": dict(command.secrets),
            "inherited": inherited,
            "listener": detached.listener if detached else None,
            "port": detached.port if detached else 0,
            "link": path_of("link"),
            "socket": path_of("socket"),
            "control": path_of("control"),
            "output": path_of("output"),
            "data": os.fspath(command.data or ""),
        }
        file = files.enter_context(_open_memory_file())
        file.write(msgspec.json.encode(spec))
        file.seek(0)
        return [sys.executable, "-IS", "-c", _KEEPER, str(file.fileno())], [file.fileno(), *inherited]

    def _list_tool_folders(self) -> list[str]:
        """Lists the folders on the operator's PATH and the folders that tools there need.

        `share` is left out, because it may contain personal data.
        """
        folders = [each for each in (*self._folders, *self._made_folders) if not each.startswith("/usr/")]
        siblings = [f"{os.path.dirname(folder)}/{name}" for folder in folders for name in ("include", "lib", "libexec")]
        return [*folders, *(path for path in siblings if path.count("/") > 1), "/nix/store"]


def open_sandbox(settings: Settings, users: range) -> Sandbox:
    return Sandbox(development=settings.allow_private_addresses, trusted=settings.trust_builds, users=users)


# The keeper's Python ignores the environment and the working folder (-I), so its command line contains the module path.
_KEEPER = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r});"
    " from workers.sandbox.keeper import main; main()"
)


def _find_python(*, any_user: bool) -> list[str]:
    """Returns the folder that an interpreter needs, and the interpreter. Returns an empty list if there is none.

    With `any_user`, every user can start the interpreter.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for prefix, binary in ((sys.base_prefix, f"{sys.base_prefix}/bin/{name}"), ("/usr", "/usr/bin/python3")):
        if os.access(binary, os.X_OK) and not (any_user and closed_folders(Path(prefix).resolve())):
            return [prefix, binary]
    return []


def _open_user(uid: int) -> int:
    USERS.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(USERS / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _read_owner(lock: int) -> str:
    return os.pread(lock, 4_096, 0).decode()


def _open_memory_file() -> IO[bytes]:
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("capsule-spec", 0), "r+b")
    return tempfile.TemporaryFile()


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return ours.enter_context(open(read, "rb", 0)), theirs.enter_context(open(write, "wb", 0))


def read_outcome(report: bytes) -> Outcome:
    """Decodes the report of a keeper. The report of a killed keeper is empty."""
    outcome = msgspec.json.decode(report, type=Outcome) if report else Outcome(-9, "stopped")
    if outcome.error:
        logger.error("sandbox.failed", error=outcome.error)
    return outcome


async def _follow_keeper(
    keeper: asyncio.subprocess.Process, output: IO[bytes], report: IO[bytes], on_line: Callable[[str], None]
) -> Outcome:
    reader, transport = await read_pipe(output)
    reading, exited = asyncio.create_task(_read_lines(reader, on_line)), asyncio.create_task(keeper.wait())
    try:
        await asyncio.wait([reading, exited], return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():  # a process that the keeper could not kill may hold the pipe open forever
            await asyncio.wait([reading], timeout=PIPE_SECONDS)
        if reading.done():
            reading.result()
        await exited
        return read_outcome(report.read(4_096))
    finally:
        transport.close()
        await cancel(reading, exited)


async def read_pipe(pipe: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """Reads the pipe through a descriptor of its own, which the transport closes."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=CHUNK_BYTES)
    # uvloop closes the descriptor, and then the file. Meanwhile, another thread may have opened a file of this number.
    copy = io.FileIO(os.dup(pipe.fileno()), closefd=not isinstance(loop, uvloop.Loop))
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), copy)
    return reader, transport


async def _read_lines(reader: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    splitter = LineSplitter()
    while chunk := await reader.read(CHUNK_BYTES):
        for number, line in enumerate(splitter.split(chunk)):
            on_line(line)
            if number % LINES_PER_PAUSE == LINES_PER_PAUSE - 1:
                await asyncio.sleep(PAUSE_SECONDS)
        await asyncio.sleep(PAUSE_SECONDS)
    for line in splitter.split(b""):
        on_line(line)


async def _stop_keeper(keeper: asyncio.subprocess.Process, ending: asyncio.Task[Outcome], seconds: float) -> None:
    if keeper.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            keeper.terminate()
    try:
        async with asyncio.timeout(seconds):
            await keeper.wait()
    except TimeoutError:
        logger.error("sandbox.left", pid=keeper.pid)
        with contextlib.suppress(ProcessLookupError):
            keeper.kill()
    await asyncio.wait([ending], timeout=1)
    await cancel(ending)

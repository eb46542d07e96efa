"""Runs customers' code: builds, their tools, and apps. That code cannot read the worker's files or memory.

Three mechanisms confine it, as far as the machine supports them:

- Users: when the worker is root, each build runs as its own user, which cannot reach the data folder or other builds.
- Landlock: only the listed folders and TCP ports are open, so Redis and port 80 of a cloud's metadata service are not.
  Other processes cannot be traced or signalled.
- Limits: resource limits, and a keeper (`keeper.py`) that kills everything the code started, background jobs included.

Users and Landlock each protect files from being read. Landlock alone does not prevent the code from changing the
modes of the worker's own files, or from connecting to named sockets, so it is better to run as root. Every process on
the machine can see command lines, so they must not contain secrets.

Failure policy: closed. Without users and Landlock, nothing runs except in development (`allow_private_addresses`).
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import msgspec
import structlog

from gateway.cancellation import finish_despite_cancellation
from workers.sandbox import landlock

T = TypeVar("T")
logger = structlog.get_logger()

# Free ranges: systemd assigns the ids above, people and packages have the ids below, and a container may map only the
# first 65,536 ids.
BUILD_USERS, APP_USERS = range(60_578, 60_594), range(60_594, 61_184)
# One file per user, locked while a worker on this machine uses it.
USERS = Path("/run/capsule/users")
MIB = 1 << 20
LINE = 4_096  # characters; longer lines of output are split
CHUNK, PAUSE = 16_384, 0.01  # bytes per read, seconds between reads: 1.6 MB/s, so that other tasks get a turn
KILL_SECONDS = 5.0  # within which a keeper kills what is left
PIPE_SECONDS = 2.0  # for output that is still in the pipe after its keeper has ended
PORTS_GUARDED, SIGNALS_GUARDED = 4, 6  # Landlock's versions
NEEDED_CAPABILITIES = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7  # CHOWN, KILL, SETGID and SETUID

# Every tool reads these. /opt and the rest of /etc stay closed: they may hold operators' secrets, or this program.
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/proc", "/sys"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"]
ETC = (
    "alternatives ca-certificates crypto-policies gitconfig group host.conf hosts gai.conf ld.so.cache ld.so.conf"
    " ld.so.conf.d locale.alias localtime mime.types nsswitch.conf os-release passwd pki/ca-trust pki/tls/cert.pem"
    " pki/tls/certs pki/tls/openssl.cnf protocols resolv.conf services ssl/cert.pem ssl/certs ssl/openssl.cnf timezone"
)

Why = Literal["", "time", "memory", "disk", "processes", "stopped"]


class Limits(msgspec.Struct, frozen=True):
    seconds: float = 0  # 0: no limit
    memory: int = 2_048 * MIB
    disk: int = 0  # bytes in the writable folders; 0: no limit
    processes: int = 1_024
    files: int = 4_096  # open at once
    nice: int = 10
    grace: float = 0  # seconds between SIGTERM and SIGKILL when it is asked to stop


class Outcome(msgspec.Struct, frozen=True):
    code: int  # negative: the signal
    why: Why = ""

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.why

    def describe(self, subject: str, limits: Limits) -> str:
        """For account holders."""
        match self.why:
            case "time":
                return f"{subject} took longer than {limits.seconds:.0f} seconds"
            case "memory":
                return f"{subject} ran out of memory; it may use {limits.memory // MIB} MiB"
            case "disk":
                return f"{subject} wrote more than {limits.disk // MIB} MiB"
            case "processes":
                return f"{subject} started more than {limits.processes} processes"
            case "stopped":
                return f"{subject} was stopped"
        return f"{subject} ended with {f'status {self.code}' if self.code >= 0 else f'signal {-self.code}'}"


class Unsafe(Exception):
    """This machine can't confine customers' code. The message tells the operator what to do."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    arguments: Sequence[str] = ()
    unpack: tuple[int, int] | None = None  # instead of arguments: max files, max bytes of a tar.gz on stdin
    folder: Path  # the working folder
    environment: Mapping[str, str]
    read: Sequence[Path] = ()
    write: Sequence[Path] = ()
    bind: Sequence[int] = ()  # TCP ports
    connect: Sequence[int] = ()
    limits: Limits = Limits()


class Sandbox:
    def __init__(self, *, development: bool, users: range) -> None:
        self._development = development
        capabilities = _capabilities() if os.geteuid() == 0 else 0
        self._root = capabilities & NEEDED_CAPABILITIES == NEEDED_CAPABILITIES
        self._half_root = bool(capabilities) and not self._root
        self._users = users
        self._user_locks: dict[int, int] = {}  # user id → open lock file
        self._landlock = landlock.version()
        folders = [Path(folder) for folder in os.get_exec_path() if os.path.isabs(folder)]
        if os.geteuid() == 0:  # without tools that only root can start
            folders = [folder for folder in folders if folder.is_dir() and not _closed_folders(folder.resolve())]
        self.path = os.pathsep.join(map(str, folders))

    def check(self, folder: Path) -> None:
        """Raises Unsafe when customers' code can't be confined to what is below the folder."""
        folder = folder.resolve()
        if sys.platform != "linux":
            raise Unsafe("apps are built on Linux only: run the worker there, or use GATEWAY_DEPLOY_ENGINE=external")
        if self._root:
            closed = _closed_folders(folder)
            if closed and not self._development:
                raise Unsafe(f"builds run as separate users, which can't pass through {closed[0]}: run chmod o+x on it")
            if closed:
                logger.warning(
                    "sandbox.no_users", action=f"run chmod o+x on {closed[0]}; until then builds run as root"
                )
                self._root = False
        elif self._half_root:  # builds would inherit them, and some of them bypass Landlock
            raise Unsafe("the worker has some of root's capabilities: give it CHOWN, KILL, SETGID and SETUID, or none")
        if self._root:
            pass
        elif self._landlock:
            opened = [p for p in self._readable() if folder.is_relative_to(p)]
            if opened:
                raise Unsafe(f"builds may read {opened[0]}: move GATEWAY_DATA_DIR out of it")
        elif not self._development:
            raise Unsafe("builds can't be confined on this machine: run the worker as root, or on Linux 5.13 or newer")
        else:
            logger.warning(
                "sandbox.none", action="builds run as the worker's user and can read its files; run the worker as root"
            )
        if 0 < self._landlock < SIGNALS_GUARDED and not self._root:
            logger.warning("sandbox.signals_open", action="run the worker as root; until then builds can kill it")
        if self._landlock < PORTS_GUARDED:
            logger.warning("sandbox.ports_open", action="set a Redis password; builds can connect to Redis")

    @contextlib.contextmanager
    def reserve_user(self) -> Iterator[int | None]:
        """A user id for the commands of one build, or None when the worker can't change users.

        Raises OSError when all users are taken.
        """
        if not self._root:
            yield None
            return
        uid, lock = self._take_user()
        self._user_locks[uid] = lock
        try:
            yield uid
        finally:
            del self._user_locks[uid]
            os.close(lock)  # without unlocking: a keeper that is still killing holds the file open too

    def _take_user(self) -> tuple[int, int]:
        USERS.mkdir(mode=0o700, parents=True, exist_ok=True)
        for uid in self._users:
            lock = os.open(USERS / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                return uid, lock
        raise OSError(f"all {len(self._users)} users for builds or apps are taken")

    def give_to_user(self, folder: Path, uid: int | None) -> None:
        if uid is not None:
            os.chown(folder, uid, uid)

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": self.path, "LANG": "C.UTF-8"}

    async def run(
        self,
        command: Command,
        uid: int | None,
        on_line: Callable[[str], None],
        *,
        stdin: IO[bytes] | None = None,
    ) -> Outcome:
        """Runs the command to its end and passes each line of output to `on_line`.

        When this is cancelled, it kills everything that the command started before it returns.
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
                open_fds = [report_to.fileno(), *([] if uid is None else [self._user_locks[uid]])]
                keeper = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-IS", "-c", _KEEPER, msgspec.json.encode(self._spec(command, uid, open_fds))),
                    stdin=stdin or asyncio.subprocess.DEVNULL,
                    stdout=output_to,
                    stderr=asyncio.subprocess.STDOUT,
                    env=dict(command.environment),
                    cwd="/",
                    pass_fds=open_fds,
                    start_new_session=True,
                )
            ending = asyncio.create_task(_follow(keeper, output, report, on_line))
            try:
                yield ending
            finally:
                await finish_despite_cancellation(_end(keeper, ending, command.limits.grace + KILL_SECONDS))

    def _spec(self, command: Command, uid: int | None, open_fds: Sequence[int]) -> dict[str, Any]:
        write = [os.fspath(path) for path in command.write]
        return {
            "command": command.arguments,
            "unpack": command.unpack,
            "environment": list(command.environment),
            "folder": os.fspath(command.folder),
            "limits": command.limits,
            "landlock": bool(self._landlock),
            "read": [*self._readable(), *map(os.fspath, command.read)],
            "devices": DEVICES,
            "write": write,
            "bind": command.bind,
            "connect": command.connect,
            "uid": uid,
            "parent": os.getpid(),
            "open_fds": open_fds,
        }

    def _readable(self) -> list[str]:
        """Everything that runs here may read these: the system's folders, and those on the operator's PATH."""
        found = [*SYSTEM, *(f"/etc/{name}" for name in ETC.split())]
        for folder in self.path.split(os.pathsep):
            found += [folder, *(f"{os.path.dirname(folder)}/{name}" for name in ("include", "lib", "libexec", "share"))]
        return found


# The keeper's Python ignores the environment and the working folder (-I), because both belong to the customer. So
# its command line contains the path of its module.
KEEPER_MODULE = "workers.sandbox.keeper"
_KEEPER = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from {KEEPER_MODULE} import main; main()"
)


def _closed_folders(folder: Path) -> list[Path]:
    """The folder and its parents, as far as only their owner can pass through them."""
    return [p for p in (folder, *folder.parents) if not p.stat().st_mode & stat.S_IXOTH]


def _capabilities() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return ours.enter_context(open(read, "rb", 0)), theirs.enter_context(open(write, "wb", 0))


async def _follow(
    keeper: asyncio.subprocess.Process, output: IO[bytes], report: IO[bytes], on_line: Callable[[str], None]
) -> Outcome:
    reader = asyncio.StreamReader(limit=CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), output
    )
    reading, exited = asyncio.create_task(_read_lines(reader, on_line)), asyncio.create_task(keeper.wait())
    try:
        await asyncio.wait([reading, exited], return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():  # a process that the keeper could not reach may hold the pipe open for ever
            await asyncio.wait([reading], timeout=PIPE_SECONDS)
        if reading.done():
            reading.result()
        await exited
        result = report.read(1_024)
        return msgspec.json.decode(result, type=Outcome) if result else Outcome(-9, "stopped")
    finally:
        transport.close()
        reading.cancel()
        exited.cancel()
        await asyncio.gather(reading, exited, return_exceptions=True)


async def _read_lines(reader: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    while chunk := await reader.read(CHUNK):
        *lines, rest = (rest + decoder.decode(chunk)).split("\n")
        for line in lines:
            _split_line(line.removesuffix("\r"), on_line)
        whole = len(rest) - len(rest) % LINE
        if whole:
            _split_line(rest[:whole], on_line)
            rest = rest[whole:]
        await asyncio.sleep(PAUSE)
    rest += decoder.decode(b"", final=True)
    if rest:
        on_line(rest)


def _split_line(line: str, on_line: Callable[[str], None]) -> None:
    for at in range(0, len(line) or 1, LINE):
        on_line(line[at : at + LINE])


async def _end(keeper: asyncio.subprocess.Process, ending: asyncio.Task[Outcome], seconds: float) -> None:
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
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)

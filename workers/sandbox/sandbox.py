"""Runs what customers bring: builds, their tools, their apps. Nothing of the worker's can be read from there.

What keeps it in, each where the machine has it:

- a user of its own for each build, when the worker is root: then the data folder and other builds are out of reach;
- Landlock: only the listed folders, only the listed TCP ports (so not Redis, nor a cloud's metadata service on port
  80), no tracing or signalling of others;
- resource limits, and a keeper that ends all of it, whatever it left in the background (`keeper.py`).

Either of the first two keeps files from being read. Landlock alone does not keep the modes of the worker's own files
from being changed, nor named sockets from being connected to: as root is better. Command lines can be seen by all
that runs on the machine, so no secret belongs in one.

Failure policy: closed. Without the first two nothing is run, but for development (`allow_private_addresses`).
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

from gateway.cancellation import undisturbed
from workers.sandbox import landlock

T = TypeVar("T")
logger = structlog.get_logger()

# Nobody else's: systemd gives out what is above, people and packages have what is below, and a container may have
# mapped no more than the first 65,536.
BUILD_USERS, APP_USERS = range(60_578, 60_594), range(60_594, 61_184)
# A file each, locked while the user is taken, by whichever worker on this machine.
USERS = Path("/run/capsule/users")
MIB = 1 << 20
LINE = 4_096  # characters of output after which a line is broken
PART, PAUSE = 16_384, 0.01  # bytes of output read at once, seconds in between: 1.6 MB/s, so that others get a turn
STOP = 5.0  # seconds that a keeper gets for killing
LEFT = 2.0  # seconds for output that is still in the pipe when its keeper is gone
PORTS_GUARDED, SIGNALS_GUARDED = 4, 6  # Landlock's versions
ENOUGH = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7  # the capabilities chown, kill, setgid and setuid

# Every tool reads these. Not all of /etc, nor /opt: an operator's secrets may be there, and this program with its data.
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/proc", "/sys"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"]
ETC = (
    "alternatives ca-certificates crypto-policies gitconfig group host.conf hosts gai.conf ld.so.cache ld.so.conf"
    " ld.so.conf.d locale.alias localtime mime.types nsswitch.conf os-release passwd pki/ca-trust pki/tls/cert.pem"
    " pki/tls/certs pki/tls/openssl.cnf protocols resolv.conf services ssl/cert.pem ssl/certs ssl/openssl.cnf timezone"
)

Why = Literal["", "time", "memory", "disk", "processes", "stopped"]


class Limits(msgspec.Struct, frozen=True):
    seconds: float = 0  # 0: no end
    memory: int = 2_048 * MIB
    disk: int = 0  # bytes in the folders it may write to; 0: not looked at
    processes: int = 1_024
    files: int = 4_096  # open ones
    nice: int = 10
    grace: float = 0  # seconds between SIGTERM and SIGKILL when it is told to stop


class Ended(msgspec.Struct, frozen=True):
    code: int  # below zero: the signal
    why: Why = ""

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.why

    def told(self, what: str, limits: Limits) -> str:
        """In words for the account holder."""
        match self.why:
            case "time":
                return f"{what} took longer than {limits.seconds:.0f} seconds"
            case "memory":
                return f"{what} ran out of memory; it may use {limits.memory // MIB} MiB"
            case "disk":
                return f"{what} wrote more than {limits.disk // MIB} MiB"
            case "processes":
                return f"{what} started more than {limits.processes} processes"
            case "stopped":
                return f"{what} was stopped"
        return f"{what} ended with {f'status {self.code}' if self.code >= 0 else f'signal {-self.code}'}"


class Unsafe(Exception):
    """This machine can't keep a customer's code in; the message says what the operator can do."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    arguments: Sequence[str] = ()
    unpack: tuple[int, int] | None = None  # instead of a command: most files, most bytes of a tar.gz on stdin
    folder: Path  # where it runs
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
        self._root = capabilities & ENOUGH == ENOUGH
        self._half_root = bool(capabilities) and not self._root
        self._users = users
        self._taken: dict[int, int] = {}  # the locks of users, as open files
        self._landlock = landlock.version()
        folders = [Path(folder) for folder in os.get_exec_path() if os.path.isabs(folder)]
        if os.geteuid() == 0:  # not root's own tools, which nobody else could start
            folders = [folder for folder in folders if folder.is_dir() and not _closed(folder.resolve())]
        self.path = os.pathsep.join(map(str, folders))

    def check(self, folder: Path) -> None:
        """Whether what is below the folder can be worked on safely. Raises Unsafe."""
        folder = folder.resolve()
        if sys.platform != "linux":
            raise Unsafe("apps are built on Linux only: run the worker there, or use GATEWAY_DEPLOY_ENGINE=external")
        if self._root:
            closed = _closed(folder)
            if closed and not self._development:
                raise Unsafe(f"builds run as a user of their own, which can't pass {closed[0]}: chmod o+x it")
            if closed:
                logger.warning("sandbox.no_users", action=f"chmod o+x {closed[0]}: until then builds run as root")
                self._root = False
        elif self._half_root:  # builds would have them too, and some pass by Landlock
            raise Unsafe("the worker has some of root's capabilities: give it CHOWN, KILL, SETGID and SETUID, or none")
        if self._root:
            pass
        elif self._landlock:
            opened = [p for p in self._readable() if folder.is_relative_to(p)]
            if opened:
                raise Unsafe(f"builds may read {opened[0]}: move GATEWAY_DATA_DIR out of it")
        elif not self._development:
            raise Unsafe("builds can't be kept in here: run the worker as root, or on Linux 5.13 or newer")
        else:
            logger.warning("sandbox.none", action="builds run as this user and may read its files")
        if 0 < self._landlock < SIGNALS_GUARDED and not self._root:
            logger.warning("sandbox.signals_open", action="run the worker as root: builds may kill it")
        if self._landlock < PORTS_GUARDED:
            logger.warning("sandbox.ports_open", action="give Redis a password: builds may connect to it")

    @contextlib.contextmanager
    def user(self) -> Iterator[int | None]:
        """A user for one command after the other of one build; none where the worker can't change users.

        Raises OSError when all are taken.
        """
        if not self._root:
            yield None
            return
        uid, lock = self._take_user()
        self._taken[uid] = lock
        try:
            yield uid
        finally:
            del self._taken[uid]
            os.close(lock)  # not unlocked: a keeper that still kills has it open too

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

    def give(self, folder: Path, uid: int | None) -> None:
        if uid is not None:
            os.chown(folder, uid, uid)

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": self.path, "LANG": "C.UTF-8"}

    async def run(
        self,
        command: Command,
        uid: int | None,
        tell: Callable[[str], None],
        *,
        stdin: IO[bytes] | None = None,
    ) -> Ended:
        """To its end; `tell` gets each line of its output. When cancelled, all of it is dead before this returns."""
        async with self.started(command, uid, tell, stdin=stdin) as ending:
            return await asyncio.shield(ending)

    @asynccontextmanager
    async def started(
        self,
        command: Command,
        uid: int | None,
        tell: Callable[[str], None],
        *,
        stdin: IO[bytes] | None = None,
    ) -> AsyncIterator[asyncio.Task[Ended]]:
        """It runs until it ends or this is left."""
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                (output, output_to), (report, report_to) = _pipe(ours, theirs), _pipe(ours, theirs)
                keeps = [report_to.fileno(), *([] if uid is None else [self._taken[uid]])]
                keeper = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-IS", "-c", _KEEPER, msgspec.json.encode(self._spec(command, uid, keeps))),
                    stdin=stdin or asyncio.subprocess.DEVNULL,
                    stdout=output_to,
                    stderr=asyncio.subprocess.STDOUT,
                    env=dict(command.environment),
                    cwd="/",
                    pass_fds=keeps,
                    start_new_session=True,
                )
            ending = asyncio.create_task(_follow(keeper, output, report, tell))
            try:
                yield ending
            finally:
                await undisturbed(_end(keeper, ending, command.limits.grace + STOP))

    def _spec(self, command: Command, uid: int | None, keeps: Sequence[int]) -> dict[str, Any]:
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
            "keeps": keeps,
        }

    def _readable(self) -> list[str]:
        """By everything that runs here: the system's, and the operator's tools elsewhere with what is beside them."""
        found = [*SYSTEM, *(f"/etc/{name}" for name in ETC.split())]
        for folder in self.path.split(os.pathsep):
            found += [folder, *(f"{os.path.dirname(folder)}/{name}" for name in ("include", "lib", "libexec", "share"))]
        return found


# The keeper's Python ignores the environment and the working folder (-I), because both belong to the customer: it has
# to be told where its module is.
KEEPER_MODULE = "workers.sandbox.keeper"
_KEEPER = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from {KEEPER_MODULE} import main; main()"
)


def _closed(folder: Path) -> list[Path]:
    """Of the folder and those above it, the ones that others than their owner can't pass."""
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
    keeper: asyncio.subprocess.Process, output: IO[bytes], report: IO[bytes], tell: Callable[[str], None]
) -> Ended:
    reader = asyncio.StreamReader(limit=PART)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), output
    )
    telling, gone = asyncio.create_task(_tell_lines(reader, tell)), asyncio.create_task(keeper.wait())
    try:
        await asyncio.wait([telling, gone], return_when=asyncio.FIRST_COMPLETED)
        if not telling.done():  # for ever, if something out of the keeper's reach holds the other end
            await asyncio.wait([telling], timeout=LEFT)
        if telling.done():
            telling.result()
        await gone
        told = report.read(1_024)
        return msgspec.json.decode(told, type=Ended) if told else Ended(-9, "stopped")
    finally:
        transport.close()
        telling.cancel()
        gone.cancel()
        await asyncio.gather(telling, gone, return_exceptions=True)


async def _tell_lines(reader: asyncio.StreamReader, tell: Callable[[str], None]) -> None:
    decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    while part := await reader.read(PART):
        *lines, rest = (rest + decoder.decode(part)).split("\n")
        for line in lines:
            _tell_broken(line.removesuffix("\r"), tell)
        whole = len(rest) - len(rest) % LINE
        if whole:
            _tell_broken(rest[:whole], tell)
            rest = rest[whole:]
        await asyncio.sleep(PAUSE)
    rest += decoder.decode(b"", final=True)
    if rest:
        tell(rest)


def _tell_broken(line: str, tell: Callable[[str], None]) -> None:
    for at in range(0, len(line) or 1, LINE):
        tell(line[at : at + LINE])


async def _end(keeper: asyncio.subprocess.Process, ending: asyncio.Task[Ended], patience: float) -> None:
    if keeper.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            keeper.terminate()
    try:
        async with asyncio.timeout(patience):
            await keeper.wait()
    except TimeoutError:
        logger.error("sandbox.left", pid=keeper.pid)
        with contextlib.suppress(ProcessLookupError):
            keeper.kill()
    await asyncio.wait([ending], timeout=1)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)

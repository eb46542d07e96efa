"""A build's folder in a sandbox, both made as by the deploy engine."""

import atexit
import contextlib
import errno
import functools
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import passable_folder
from tests.support.programs import require
from workers.sandbox import cgroups
from workers.sandbox.machine import Unsafe
from workers.sandbox.sandbox import BUILD_USERS, COPIES, Command, Outcome, Sandbox, SandboxLimits

ROOT = os.geteuid() == 0
# With control groups, if this user may have some, or only with measured limits.
WAYS = ["control groups", "measured"] if cgroups.find_parents() else ["measured"]


class Room:
    def __init__(self, sandbox: Sandbox, uid: int | None, top: Path) -> None:
        self.sandbox, self.uid, self.top = sandbox, uid, top
        self.build = top / "builds" / "mine"  # ours, and what is in it the build's
        self.folder = self.build / "work"
        self.lines: list[str] = []
        # Distinguishes the processes of this room from all others on the machine.
        self.mark = f"1000.{secrets.randbelow(10**9):09}"

    def command(self, script: str, limits: SandboxLimits, environment: Mapping[str, str] = {}, **more: Any) -> Command:
        return Command(
            arguments=["sh", "-c", script],
            folder=self.folder,
            environment={**self.sandbox.environment, "MARK": self.mark, **environment},
            write=[self.folder],
            limits=limits,
            **more,
        )

    async def run(
        self, script: str, *, connect: Sequence[int] = (), hosts: Sequence[str] = (), **limits: Any
    ) -> Outcome:
        command = self.command(script, SandboxLimits(**{"seconds": 20, **limits}), connect=connect, hosts=hosts)
        return await self.sandbox.run(command, self.uid, self.lines.append)

    def write_script(self, name: str, text: str) -> None:
        """Writes a file that the command can read."""
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o644)

    def alive(self) -> list[str]:
        return marked(self.mark)


def marked(mark: str) -> list[str]:
    """Returns the command lines of running processes that contain the mark."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{name}/cmdline").read_bytes()
            if mark.encode() in line and int(name) != os.getpid():
                found.append(line.replace(b"\0", b" ").decode())
    return found


def require_control_groups() -> None:
    """Skips a test that needs control groups, or fails it in CI. Outside development, workers require them."""
    if WAYS == ["measured"]:
        if os.environ.get("CI"):
            raise RuntimeError("this user has no control groups, and CI must run every test")
        pytest.skip("this user has no control groups: run it as root, or delegate some to it")


def checked_sandbox(users: range, folder: Path, *, development: bool = False, trusted: bool = False) -> Sandbox:
    """Returns a sandbox. If the machine allows none, a test skips, and in CI it fails."""
    sandbox = Sandbox(development=development or WAYS == ["measured"], users=users, trusted=trusted)
    try:
        sandbox.check(folder)
    except Unsafe as fault:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no sandbox: {fault}")
    return sandbox


@functools.cache
def _copies() -> Path:
    """Returns the copies of the tools that all rooms of this process share, because copying Node.js takes seconds."""
    context = passable_folder()
    atexit.register(context.__exit__, None, None, None)
    return context.__enter__()


@contextlib.contextmanager
def room_of(*, measured: bool = False, trusted: bool = False) -> Iterator[Room]:
    with passable_folder() as top:
        (top / "builds").mkdir(mode=0o711)
        (top / COPIES).symlink_to(_copies())
        sandbox = checked_sandbox(BUILD_USERS, top, development=measured, trusted=trusted)
        if measured:
            sandbox._cgroups = []
        with sandbox.reserve_user() as uid:
            room = Room(sandbox, uid, top)
            room.build.mkdir(mode=0o711)
            room.folder.mkdir(mode=0o700)
            sandbox.give_to_user(room.folder, uid)
            yield room


# -- the same as an ordinary user ----------------------------------------------------------------------------

ORDINARY = 61_200  # an unused user id
REPOSITORY = Path(__file__).parents[2]


# Shows folders below closed ones, such as /root, to the ordinary user, in a separate mount namespace.
SHOW = """
set -e
closed=$1; shift
for path in $closed; do mkdir -p "$SHOWN$path"; mount --bind "$path" "$SHOWN$path"; done
for path in $closed; do mount -t tmpfs -o mode=755 none "/$(echo "$path" | cut -d/ -f2)"; done
for path in $closed; do mkdir -p "$path"; mount --move "$SHOWN$path" "$path"; done
exec "$@"
"""


def as_ordinary_user(command: Sequence[str]) -> list[str]:
    needed = [REPOSITORY, Path(sys.base_prefix)]
    closed = [path for path in needed if not all(each.stat().st_mode & 1 for each in (path, *path.parents))]
    user = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups", "--bounding-set=-all"]
    return [require("unshare"), "--mount", "sh", "-c", SHOW, "sh", " ".join(map(str, closed)), *user, *command]


def repeat_without_root(*options: str, enter: Callable[[], None] = lambda: None) -> None:
    """Runs these tests again as an ordinary user, whose process `enter` prepares."""
    if "CAPSULE_AGAIN" in os.environ or not ROOT:
        return
    with passable_folder() as temporary:
        for folder in (temporary / "shown", temporary / "own"):
            folder.mkdir()
        os.chown(temporary / "own", ORDINARY, ORDINARY)
        own = {"CAPSULE_AGAIN": "1", "PYTHONDONTWRITEBYTECODE": "1", "SHOWN": str(temporary / "shown")}
        ended = subprocess.run(
            as_ordinary_user([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]),
            env={**os.environ, **own, "HOME": str(temporary / "own"), "TMPDIR": str(temporary / "own")},
            preexec_fn=enter,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert ended.returncode == 0, ended.stdout[-8_000:] + ended.stderr[-2_000:]


@contextlib.contextmanager
def delegation() -> Iterator[Callable[[], None]]:
    """Creates control groups of the ordinary user. Yields a function that moves its process into them."""
    parents = cgroups.find_parents()
    groups = [Path(parent, f"capsule-tests-{secrets.token_hex(4)}") for parent in parents]
    for group in groups:
        group.mkdir()
        for path in (group, *group.glob("*procs"), *group.glob("cgroup.subtree_control")):
            os.chown(path, ORDINARY, ORDINARY)

    def enter() -> None:
        for group in groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        yield enter
    finally:
        for group in groups:
            for inner in [*group.glob("*/"), group]:
                remove_group(inner)


def remove_group(group: Path, seconds: float = 10.0) -> None:
    """Removes a control group once the processes in it, which have been killed, are gone."""
    ends = time.monotonic() + seconds
    while True:
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > ends:
                raise
        time.sleep(0.05)

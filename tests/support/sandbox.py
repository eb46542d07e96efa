"""A build's folder inside the sandbox, as the deploy engine makes both."""

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.sandbox import landlock
from workers.sandbox.sandbox import BUILD_USERS, Command, Limits, Outcome, Sandbox

ROOT = os.geteuid() == 0
LANDLOCK = landlock.version() > 0
# What keeps a build in here, each of which has to do alone.
USERS = Sandbox(development=False, users=BUILD_USERS)._root
WAYS = [way for way, there in (("Landlock", LANDLOCK), ("users", USERS)) if there]


class Room:
    def __init__(self, sandbox: Sandbox, uid: int | None, top: Path) -> None:
        self.sandbox, self.uid, self.top = sandbox, uid, top
        self.build = top / "builds" / "mine"  # ours, and what is in it the build's
        self.folder = self.build / "work"
        self.lines: list[str] = []
        # By which what runs here is told from all else on the machine.
        self.mark = f"1000.{secrets.randbelow(10**9):09}"

    def command(self, script: str, limits: Limits, environment: Mapping[str, str] = {}, **more: Any) -> Command:
        return Command(
            arguments=["sh", "-c", script],
            folder=self.folder,
            environment={**self.sandbox.environment, "MARK": self.mark, **environment},
            write=[self.folder],
            limits=limits,
            **more,
        )

    async def run(self, script: str, *, connect: Sequence[int] = (), **limits: Any) -> Outcome:
        command = self.command(script, Limits(**{"seconds": 20, **limits}), connect=connect)
        return await self.sandbox.run(command, self.uid, self.lines.append)

    def alive(self) -> list[str]:
        return marked(self.mark)


def marked(mark: str) -> list[str]:
    """Command lines of the living that hold the mark."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{name}/cmdline").read_bytes()
            if mark.encode() in line and int(name) != os.getpid():
                found.append(line.replace(b"\0", b" ").decode())
    return found


@contextlib.contextmanager
def passable() -> Iterator[Path]:
    """A folder that a build's user can pass, unlike pytest's own."""
    top = Path(tempfile.mkdtemp(prefix="capsule-"))
    top.chmod(0o711)
    try:
        yield top
    finally:
        shutil.rmtree(top)


@contextlib.contextmanager
def room_of(*, landlock: bool = True) -> Iterator[Room]:
    sandbox = Sandbox(development=False, users=BUILD_USERS)
    if not landlock:
        sandbox._landlock = 0
    with passable() as top, sandbox.reserve_user() as uid:
        room = Room(sandbox, uid, top)
        for folder in (top / "builds", room.build):
            folder.mkdir(mode=0o711)
        room.folder.mkdir(mode=0o700)
        sandbox.give_to_user(room.folder, uid)
        sandbox.check(room.build)
        yield room

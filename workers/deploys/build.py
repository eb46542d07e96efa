"""The build command, and what becomes of its output: a release, which nothing that the customer runs can change."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from itertools import islice
from pathlib import Path, PurePosixPath

from workers.deploys.source import Failed
from workers.sandbox.sandbox import MIB, Command, Limits, Sandbox

LIMITS = Limits(seconds=600, memory=2_048 * MIB, disk=4_096 * MIB)
# Packages come over https. Nothing else is open: Redis is not, nor a cloud's metadata service on port 80.
PORTS = [443]
STATIC_FILES, STATIC_BYTES = 20_000, 512 * MIB
APP_FILES, APP_BYTES = 200_000, 2_048 * MIB


async def build(
    sandbox: Sandbox,
    uid: int | None,
    folder: Path,
    command: str,
    ai_url: str | None,
    tell: Callable[[str], None],
    limits: Limits = LIMITS,
) -> None:
    """In `source` of the build's folder. Raises Failed."""
    for name in ("home", "tmp"):
        (folder / name).mkdir(mode=0o700)
        sandbox.give(folder / name, uid)
    tell(f"$ {command}")
    environment = {**sandbox.environment, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "CI": "true"}
    if ai_url is not None:
        environment["VITE_SERVICE_AI_URL"] = ai_url
    ended = await sandbox.run(
        Command(
            arguments=["sh", "-c", command],
            folder=folder / "source",
            environment=environment,
            write=[folder / name for name in ("source", "home", "tmp")],
            connect=PORTS,
            limits=limits,
        ),
        uid,
        tell,
    )
    if not ended.ok:
        raise Failed(ended.told("the build command", limits))


def collect(source: Path, output: str, release: Path, uid: int | None, *, runs: bool) -> None:
    """Moves the output into the release. Nothing of the build runs any more: what is seen stays so. Raises Failed."""
    try:
        found = _output(source, output)
        shutil.rmtree(found / ".git", ignore_errors=True)
        _take_over(found, os.geteuid() if uid is None else uid, runs=runs)
    except OSError as error:  # such as a path that is too long
        raise Failed(f"the output can't be read: {error.strerror}") from None
    release.mkdir(mode=0o755)
    found.rename(release / ("app" if runs else "files"))


def _output(source: Path, output: str) -> Path:
    wanted = PurePosixPath(output)
    if wanted.is_absolute() or ".." in wanted.parts or "\0" in output:
        raise Failed(f"the output folder {output!r} is not one inside the source")
    path = source
    for part in ("", *wanted.parts):
        path /= part
        if path.is_symlink() or not path.is_dir():
            raise Failed(f"the build left no folder {output!r}")
    return path


def _take_over(top: Path, owner: int, *, runs: bool) -> None:
    """An app that runs may hold any link: only itself follows them, and only to what it may read."""
    most_files, most_bytes = (APP_FILES, APP_BYTES) if runs else (STATIC_FILES, STATIC_BYTES)
    files, total, look = 0, 0, [os.fspath(top)]
    linked: set[int] = set()  # files with several names, already ours
    while look:
        path = look.pop()
        there, name = os.lstat(path), os.path.relpath(path, top)
        files, total = files + 1, total + there.st_size
        if files + len(look) > most_files or total > most_bytes:
            raise Failed(f"the output is more than {most_files} files, or more than {most_bytes // MIB} MiB")
        if there.st_ino in linked:
            continue
        if there.st_uid != owner:
            # A hard link to a file that is not the build's, which we would open to everyone.
            raise Failed(f"the output holds {name!r}, which the build does not own")
        if stat.S_ISDIR(there.st_mode):
            _make_ours(path, 0o755)
            with os.scandir(path) as entries:
                look += [entry.path for entry in islice(entries, most_files)]
        elif stat.S_ISREG(there.st_mode):
            _make_ours(path, 0o755 if there.st_mode & 0o100 else 0o644)
            if there.st_nlink > 1:
                linked.add(there.st_ino)
        elif not stat.S_ISLNK(there.st_mode) or not (runs or _stays(path, top)):
            raise Failed(f"the output holds {name!r}, which is a device, or a link that leaves the output")


def _make_ours(path: str, mode: int) -> None:
    os.chown(path, os.geteuid(), os.getegid())
    os.chmod(path, mode)
    os.utime(path)  # a web server tells a changed file by its time, and archives set it


def _stays(link: str, top: Path) -> bool:
    real, led = os.path.realpath(top), os.path.realpath(link)
    return not os.path.isabs(os.readlink(link)) and (led == real or led.startswith(real + os.sep))

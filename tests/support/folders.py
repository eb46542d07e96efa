"""Temporary folders for programs that run as another user or listen on Unix sockets."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def passable_folder() -> Iterator[Path]:
    """Yields a folder that other users can traverse, as in production; pytest's own folders are closed to them.

    Its path is short, because the path of a Unix socket has at most 107 characters.
    """
    folder = Path(tempfile.mkdtemp(prefix="capsule-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        kill_caddies(folder)
        subprocess.run(["rm", "-rf", folder], check=False)  # builds may leave folders too deep for `shutil.rmtree`


def kill_caddies(folder: Path) -> None:
    """Kills each Caddy whose data folder is inside, because it outlives its worker. The folder may be gone by now."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            data = os.readlink(process / "cwd").removesuffix(" (deleted)")
            if Path(os.readlink(process / "exe")).name == "caddy" and Path(data).is_relative_to(folder):
                os.kill(int(process.name), signal.SIGKILL)


@contextlib.contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Switches root, which may read and write everywhere, to an ordinary user for the `with` block."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65_534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def nest(folder: Path, depth: int, name: str = "d") -> None:
    """Nests folders deeper than any path can name."""
    folder.mkdir(parents=True)
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=inner)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
        inner, outer = os.open(name, os.O_RDONLY, dir_fd=inner), inner
        os.close(outer)
    os.close(inner)

"""Temporary folders for programs that run as another user or listen on Unix sockets."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from workers.hosting import caddy


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
    """Kills each Caddy with a data folder inside, because it outlives its worker."""
    for record in (path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}web/caddy.json")):
        if (process := caddy.read_process(record.parent.parent)) is not None:
            os.kill(process.pid, signal.SIGKILL)


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

"""Temporary folders for what runs as another user, or listens on Unix sockets."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def passable_folder() -> Iterator[Path]:
    """A folder that other users can pass, as an operator's; pytest's own are closed to them.

    Its path is short: those of Unix sockets have at most 107 characters.
    """
    folder = Path(tempfile.mkdtemp(prefix="capsule-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", folder], check=False)  # builds may leave folders too deep for `shutil.rmtree`


@contextlib.contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root may write and read everywhere, so for this time it is somebody else."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65_534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)

"""Makes temporary folders that the next process removes if theirs is killed.

<parent>/<prefix><random>/lock     locked by the process for its life: a folder without a lock is a leftover
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields an empty folder and removes it afterwards. If the process is killed, the next call of any process does."""
    _remove_leftovers(parent, prefix)
    hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    folder = parent / hidden.name.removeprefix(".")
    with (hidden / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hidden.rename(folder)  # only now, so that nobody takes it for a leftover
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, or another user's

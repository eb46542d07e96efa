"""Several gateway processes on one port, and the folder through which they share their metrics.

    <temporary folder>/capsule-metrics-<random>/
        lock                    held by the supervisor for its life: a folder without a holder is a leftover
        <type>_<pid>.db         prometheus_client's figures of one process

Counters of a process that ended stay, because a sum must not decrease. Its gauges tell of a state that is no more, so
the supervisor removes them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from uvicorn.supervisors import Multiprocess

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the variable in which prometheus_client expects the folder
PREFIX = "capsule-metrics-"


class Supervisor(Multiprocess):
    """Starts a process again when it ended, was killed, or does not answer."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], folder: Path) -> None:
        super().__init__(config, sockets)
        self._folder = folder

    def keep_subprocess_alive(self) -> None:
        """Runs twice a second, also after the signals that replace or end a process."""
        super().keep_subprocess_alive()
        remove_gauges_of_others(self._folder, {process.pid for process in self.processes})


def remove_gauges_of_others(folder: Path, alive: set[int | None]) -> None:
    for path in folder.glob("gauge_live*_*.db"):
        if int(path.stem.rpartition("_")[2]) not in alive:
            path.unlink(missing_ok=True)


@contextmanager
def metrics_folder() -> Iterator[Path]:
    """An empty folder, which is removed afterwards. If that fails because of a SIGKILL, the next start removes it."""
    _remove_leftovers(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, (Path(name) / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, or not ours to remove

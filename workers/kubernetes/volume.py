"""The volume of an app's data, which the containers of its pods share: who may use it when.

Nothing runs on a new volume until the worker has brought the newest snapshot, if there is one (`AppData.is_stale`).
"""

import fcntl
import os
import time

from workers.engine.app_data import STOP_POLL_SECONDS, AppData, try_to_lock
from workers.engine.replacements import Replacements


def prepare_volume(data: AppData) -> None:
    """Creates what is missing on the volume. Takes back what a container that was killed has begun.

    It may have left the app held, and the app may be about to end.
    """
    data.folder.mkdir(parents=True, exist_ok=True)  # it is the volume
    lock = os.open(data.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    try:
        ends = time.monotonic() + data.stop_seconds
        while not try_to_lock(lock):
            is_late = time.monotonic() > ends
            if data.exists and (is_late or not data.is_held):  # another pod of the app uses it
                return
            if is_late:
                break
            time.sleep(STOP_POLL_SECONDS)
        Replacements(data).recover()
        if not data.exists:
            data.mark_stale()
            data.files.mkdir()
        # Who made one of them gives the group the right to it: files that were restored are the start command's.
        for path, mode in ((data.files, 0o2770), (data.folder / "lock", 0o660)):
            if path.stat().st_uid == os.geteuid():
                path.chmod(mode)
    finally:
        os.close(lock)


def wait_for_data(data: AppData) -> int:
    """Waits until the start command may run. Returns the descriptor of a lock that it must hold meanwhile."""
    lock = os.open(data.folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    while data.is_held or data.is_full:
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(STOP_POLL_SECONDS)
        fcntl.flock(lock, fcntl.LOCK_SH)
    return lock

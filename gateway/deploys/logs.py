"""Logs of deploys that have ended: one compressed file per deploy, in a folder per day.

    GATEWAY_DATA_DIR/logs/<day on which the deploy was queued>/<deploy id>.gz

Redis holds a log only while its deploy is in progress (`states.py`). This module knows files only.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import os
import shutil
from pathlib import Path

KEPT_DAYS = 90


class DeployLogs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, deploy_id: str, day: str, text: str) -> None:
        """Stores a log, and removes the logs of days long past. Raises OSError; then nothing is stored."""
        path = self._path(deploy_id, day)
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
                file.write(gzip.compress(text.encode(), mtime=0))
                file.flush()
                os.fsync(file.fileno())
                if os.geteuid() == 0:  # the gateway reads it, as the user to whom the data folder belongs
                    owner = self._folder.parent.stat()
                    os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._prune()

    def read(self, deploy_id: str, day: str) -> str | None:
        try:
            return gzip.decompress(self._path(deploy_id, day).read_bytes()).decode()
        except FileNotFoundError:
            return None

    def _path(self, deploy_id: str, day: str) -> Path:
        return self._folder / day / f"{deploy_id}.gz"

    def _prune(self) -> None:
        today = datetime.datetime.now(datetime.UTC).date()
        for folder in self._folder.iterdir():
            with contextlib.suppress(ValueError):
                if today - datetime.date.fromisoformat(folder.name) > datetime.timedelta(days=KEPT_DAYS):
                    shutil.rmtree(folder, ignore_errors=True)

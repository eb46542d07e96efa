"""Replaces all files of an app's data, and takes back what a process that was killed has not completed.

A replacement moves the files to `former`, the new ones to `files`, and `former` to `replaced-<id of the change>`. The
last of these renames completes it; it can then be undone until it is confirmed.
"""

import os
from pathlib import Path

from workers.engine.app_data import REPLACED, AppData
from workers.sandbox.removal import empty_folder, remove_folder


class Replacements:
    """The changes that replace the files of one app. The app must not run while its files change."""

    def __init__(self, data: AppData) -> None:
        self._data, self._former = data, data.folder / "former"

    @property
    def changes(self) -> list[str]:
        """The ids of the changes that have replaced the files, and can be undone or were made a short time ago."""
        return [path.name.removeprefix(REPLACED) for path in self._data.folder.glob(f"{REPLACED}*")]

    def replace(self, fresh: Path, change: str) -> None:
        """Replaces the files, and keeps the former ones until `confirm` or `undo`.

        `change` is an id. The last of the renames completes it: until then, it is taken back.
        """
        try:
            self._data.files.rename(self._former)
            fresh.rename(self._data.files)
            self._former.rename(self._replaced(change))
        finally:
            self._bring_back()
        self._data.measure()

    def clear(self, change: str) -> None:
        """Replaces the files by an empty folder of the same owner. Keeps only the fact, for who repeats the change."""
        empty, owner = self._data.folder / "empty", self._data.files.stat()
        remove_folder(empty)
        empty.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(empty, owner.st_uid, owner.st_gid)
        self.replace(empty, change)
        empty_folder(self._replaced(change))

    def undo(self, change: str) -> None:
        """Brings back the files from before the change, unless that was done or the change is confirmed."""
        if self._replaced(change).is_dir():
            self._replaced(change).rename(self._former)
            self._bring_back()

    def confirm(self, change: str) -> None:
        remove_folder(self._replaced(change))

    def recover(self) -> None:
        """Takes back what a process that was killed has begun. The command that it carried out is still queued."""
        self._bring_back()
        if self._data.is_full:  # nothing runs that would measure what has been replaced
            self._data.measure()
        self._data.release()

    def _bring_back(self) -> None:
        if self._former.is_dir():
            remove_folder(self._data.files)
            self._former.rename(self._data.files)
            self._data.measure()

    def _replaced(self, change: str) -> Path:
        return self._data.folder / f"{REPLACED}{change}"

"""The data of apps in folders: of a host, or of a volume in a cluster. A start command sees its app's as DATA_DIR.

    data/<app id>/files/       what the app sees; the other files here are the service's
    data/<app id>/account      the account whose app wrote the files
    data/<app id>/limit        the bytes that they may take, by the account's plan
    data/<app id>/used         the bytes that they take, as the app's keeper or a restore has measured them
    data/<app id>/lock         locked, together with others, by each keeper of the app, and alone by `stopped`
    data/<app id>/hold         while this file exists, no process of the app runs: keepers end, and none starts
    data/<app id>/snapshot-ids the ids of the snapshots that were made of the files, and of the one that they come from
    data/<app id>/stale        while this file exists, no process runs: a newer snapshot may have to replace the files
    data/<app id>/daily        when the last daily snapshot was made, and a fingerprint of its files (`daily.py`)
    data/<app id>/stopped      the snapshot of the worker's last stop, and a fingerprint of its files
    data/<app id>/former       the files before a change that is not complete (`replacements.py`)
    data/<app id>/replaced-<id>   the files before a restore, until its deploy has succeeded; empty if they were cleared
    data/<app id>/gone-<account>  the files of another account, to which an app of this id belonged before

If the worker is root, all processes of an app have one user id, which owns the files. Other users cannot enter the
folder, and other apps do not see it. After a restart of the machine, or if the user id has another owner by now, the
app gets another one, and its files too.

Files in `files` may be anything that an app can make. No link among them is followed here.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Container, Iterator
from pathlib import Path

from gateway.accounts.records import SLUG
from workers.sandbox.folders import walk
from workers.sandbox.keeper import measure_data, read_number, write_number
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import Sandbox

FOLDER = "data"  # in the data folder of the service
REPLACED, GONE = "replaced-", "gone-"
REPLACED_SECONDS = 86_400.0  # that files before a restore are kept if their deploy never ends
GONE_SECONDS = 7 * 86_400.0  # that the files of another account and of a deleted app are kept, and its releases
LISTED = 64  # snapshots whose ids are noted: more than are kept of an app
STOP_SECONDS, STOP_POLL_SECONDS = 30.0, 0.1  # in which the processes of an app must end

_one_at_a_time = threading.Lock()  # for user ids: two processes of an app must get the same one


class DataHeld(Exception):
    """No process of the app may run at the moment."""


class AppData:
    """The data of one app."""

    def __init__(self, folder: Path, app_id: str, *, stop_seconds: float = STOP_SECONDS) -> None:
        """`folder` is the data folder of the service."""
        if not SLUG.fullmatch(app_id):
            raise ValueError(f"{app_id!r} is not the id of an app")
        self.app_id, self.stop_seconds = app_id, stop_seconds
        self.folder = folder.resolve() / FOLDER / app_id
        self.files = self.folder / "files"
        self._hold, self._stale = self.folder / "hold", self.folder / "stale"

    @property
    def exists(self) -> bool:
        return self.files.is_dir()

    @property
    def account(self) -> str:
        try:
            return (self.folder / "account").read_text()
        except FileNotFoundError:
            return ""

    def set_aside(self, account: str) -> Path:
        """Moves the files of the account away, and returns the folder that has them now, if there are any.

        Removes those that were replaced, of which there are snapshots: they are never another account's.
        """
        gone = self.folder / f"{GONE}{account}"
        if self.exists and self.account == account:
            for replaced in self.folder.glob(f"{REPLACED}*"):
                remove_folder(replaced)
            remove_folder(gone)
            self.files.rename(gone)
            for name in ("used", "snapshot-ids", "stale", "stopped"):
                (self.folder / name).unlink(missing_ok=True)
            (self.folder / "account").unlink()
        return gone

    # -- how much --------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        return read_number(self.folder / "limit")

    @limit.setter
    def limit(self, limit: int) -> None:
        write_number(self.folder / "limit", limit)

    @property
    def used(self) -> int:
        return read_number(self.folder / "used") or 0

    @property
    def is_full(self) -> bool:
        limit = self.limit
        return limit is not None and self.used > limit

    def measure(self) -> None:
        write_number(self.folder / "used", measure_data(self.files))

    def fingerprint(self) -> str:
        """Returns a text that changes when a file changes. Sorts nothing, because there may be millions of files."""
        combined = 0
        for path, _, _, status in walk(self.files):
            described = repr((path, status.st_ino, status.st_size, status.st_mtime_ns))
            combined ^= int.from_bytes(hashlib.sha256(described.encode()).digest())
        return f"{combined:x}"

    # -- how new ---------------------------------------------------------------------------------------------

    def comes_from(self, snapshot_id: str) -> bool:
        """Returns whether the files are as new as this snapshot of the app. If not, another host has made it."""
        try:
            return snapshot_id in (self.folder / "snapshot-ids").read_text().split()
        except FileNotFoundError:
            return self.exists  # the files of an app without a snapshot, or of a version that has kept no list

    def note_snapshot(self, snapshot_id: str) -> None:
        """Adds a snapshot to the list, before it is made."""
        path = self.folder / "snapshot-ids"
        known = path.read_text().split() if path.exists() else []
        fresh = path.with_suffix(".new")
        fresh.write_text("\n".join([*(each for each in known if each != snapshot_id), snapshot_id][-LISTED:]))
        fresh.replace(path)

    @property
    def is_stale(self) -> bool:
        return os.path.lexists(self._stale)

    def mark_stale(self) -> None:
        """Lets no process of the app run until it is known that there are no newer files, or they have come."""
        self._stale.touch()

    def unmark_stale(self) -> None:
        self._stale.unlink(missing_ok=True)

    def is_as_stopped(self, snapshot_id: str, fingerprint: str) -> bool:
        """Returns whether the worker's last stop has made this snapshot, of these files."""
        path = self.folder / "stopped"
        return path.exists() and path.read_text() == f"{snapshot_id} {fingerprint}"

    def note_stop(self, snapshot_id: str, fingerprint: str) -> None:
        (self.folder / "stopped").write_text(f"{snapshot_id} {fingerprint}")

    # -- whose -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def user(self, sandbox: Sandbox, files: Path | None = None) -> Iterator[int | None]:
        """Yields the user id of the app's processes, which owns the files; None if the worker can't change users.

        Raises OSError when all users are taken.
        """
        files = files or self.files
        with contextlib.ExitStack() as stack:
            with _one_at_a_time:
                former = files.stat().st_uid
                uid = stack.enter_context(sandbox.share_user(str(files), former))
                if uid is not None and uid != former:
                    give_files(files, uid, {*sandbox.users, former} - {0})
            yield uid

    # -- whether processes of the app run --------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        return os.path.lexists(self._hold) or self.is_stale

    def hold(self) -> None:
        self._hold.touch()

    def release(self) -> None:
        self._hold.unlink(missing_ok=True)

    @contextlib.contextmanager
    def running(self, account: str, limit: int) -> Iterator[int]:
        """Yields a lock for a keeper of the account's app. Creates the folder. Raises DataHeld.

        `limit` applies until the account's plan is known.
        """
        self._make_folder()
        with self._open_lock() as lock:
            if not try_to_lock(lock, shared=True) or self.is_held:
                raise DataHeld
            self.prepare(account, limit)
            yield lock

    def _make_folder(self) -> None:
        for folder in (self.folder.parent, self.folder):
            folder.mkdir(mode=0o711, exist_ok=True)

    def prepare(self, account: str, limit: int) -> None:
        """Creates what is missing, and sets the files of another account aside."""
        self._make_folder()
        with _one_at_a_time:
            if self.account not in ("", account):
                self.set_aside(self.account)
            if not self.exists:
                (self.folder / "account").write_text(account)
                self.files.mkdir(mode=0o700)
            if self.limit is None:
                self.limit = limit

    @property
    def is_running(self) -> bool:
        """Returns whether a keeper of the app runs."""
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                return not try_to_lock(lock)
            finally:
                os.close(lock)
        return False

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the processes of the app, and starts none within the context. Raises TimeoutError.

        In a thread, because it waits for the processes.
        """
        with self._open_lock() as lock:
            self.hold()
            ends = time.monotonic() + self.stop_seconds
            try:
                while not try_to_lock(lock):
                    if time.monotonic() > ends:
                        raise TimeoutError
                    time.sleep(STOP_POLL_SECONDS)
                yield
            finally:
                self.release()

    @contextlib.contextmanager
    def _open_lock(self) -> Iterator[int]:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield lock
        finally:
            os.close(lock)

    # -- what is no longer needed ----------------------------------------------------------------------------

    def remove(self) -> None:
        """Removes the files. The app must not run."""
        if self.exists:
            remove_folder(self.set_aside(self.account))

    def remove_leftovers(self) -> None:
        """Removes what was set aside long ago."""
        for prefix, seconds in ((REPLACED, REPLACED_SECONDS), (GONE, GONE_SECONDS)):
            for path in self.folder.glob(f"{prefix}*"):
                if time.time() - path.stat().st_ctime > seconds:
                    remove_folder(path)


def is_long_gone(mark: Path, *, is_deleted: bool) -> bool:
    """Returns whether an app has been deleted for a week. `mark` is a file that notes since when."""
    if not is_deleted:
        mark.unlink(missing_ok=True)
        return False
    if not mark.exists():
        mark.touch()
    return time.time() - mark.stat().st_mtime > GONE_SECONDS


def is_empty(files: Path) -> bool:
    try:
        with os.scandir(files) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True


def list_data(folder: Path) -> list[AppData]:
    """Returns the data of all apps in the data folder of the service, by app."""
    top = folder / FOLDER
    names = sorted(os.listdir(top)) if top.is_dir() else []
    return [AppData(folder, name) for name in names if SLUG.fullmatch(name) and (top / name).is_dir()]


def give_files(files: Path, uid: int, owners: Container[int]) -> None:
    """Gives a folder, and everything in it that belongs to one of the owners, to a user. The app must not run.

    Follows no link. The folder itself belongs to root meanwhile: if this is interrupted, it is done again.
    """
    os.chown(files, 0, 0)
    for entry in walk(files):
        if entry.status.st_uid in owners:
            os.chown(entry.name, uid, uid, dir_fd=entry.folder, follow_symlinks=False)
    os.chown(files, uid, uid)


def try_to_lock(lock: int, *, shared: bool = False) -> bool:
    """Locks an open file: alone, or together with others that share it. Returns False if another lock forbids that."""
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

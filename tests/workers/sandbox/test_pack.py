"""The program that packs an app's data, as a process of its own."""

import contextlib
import errno
import os
import socket
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.deploys import archives
from tests.support.programs import on_small_disk
from workers.sandbox import pack

MOST = 1 << 30


class Data:
    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.packed = folder, folder / "files", folder / "packed"
        self.files.mkdir()

    def run(self, most: int = MOST, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        command = [*prefix, sys.executable, "-IS", "-c", Path(pack.__file__).read_text()]
        paths = [str(self.files), str(self.packed), str(self.packed.with_name("copy"))]
        return subprocess.run([*command, *paths, str(most)], capture_output=True, text=True, timeout=100)

    def pack(self, most: int = MOST) -> list[str]:
        """Packs the files. Returns the notes."""
        done = self.run(most)
        assert done.returncode == 0, done.stderr
        assert sorted(os.listdir(self.folder)) == ["files", "packed"], "it leaves nothing beside the archive"
        return done.stdout.splitlines()

    def unpack(self) -> Path:
        """Unpacks the archive with the program that restores it."""
        restored = self.folder.with_name("restored")
        restored.mkdir()
        with self.packed.open("rb") as archive:
            archives.unpack(archive, str(restored), 1_000, MOST)
        return restored

    def names(self) -> list[str]:
        with tarfile.open(self.packed) as tar:
            return tar.getnames()


@pytest.fixture
def data(tmp_path: Path) -> Data:
    (tmp_path / "data").mkdir()
    return Data(tmp_path / "data")


def test_files_folders_and_links_come_back(data: Data) -> None:
    (data.files / "inner" / "empty").mkdir(parents=True)
    (data.files / "inner" / "note").write_text("kept")
    (data.files / "run.sh").write_text("true")
    (data.files / "run.sh").chmod(0o755)
    (data.files / "inner" / "up").symlink_to("../run.sh")
    os.link(data.files / "inner" / "note", data.files / "again")
    assert data.pack() == []
    restored = data.unpack()
    assert (restored / "inner" / "note").read_text() == "kept"
    assert (restored / "again").read_text() == "kept"
    assert (restored / "inner" / "up").readlink() == Path("../run.sh")
    assert os.access(restored / "run.sh", os.X_OK)
    assert (restored / "inner" / "empty").is_dir()


def test_links_that_leave_the_folder_and_odd_files_are_left_out(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As are files beyond the limit: `workers/engine/test_data.py`."""
    (data.files / "out").symlink_to(tmp_path / "secret")
    (data.files / "up").symlink_to("../../secret")
    os.mkfifo(data.files / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(data.files)  # the path of a socket is short
        listener.bind("socket")
        assert len(data.pack()) == 4
    assert data.names() == []


def test_a_database_with_an_open_transaction_is_copied_as_it_was_before(data: Data) -> None:
    writer = sqlite3.connect(data.files / "app.db")
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("CREATE TABLE notes (text)")
    writer.execute("INSERT INTO notes VALUES ('committed')")
    writer.commit()
    writer.execute("INSERT INTO notes VALUES ('not committed')")
    assert (data.files / "app.db-wal").stat().st_size > 0
    assert data.pack() == []
    writer.close()
    assert data.names() == ["app.db"], "the copy has what is in the files beside the database"
    copy = sqlite3.connect(data.unpack() / "app.db")
    assert copy.execute("SELECT text FROM notes").fetchall() == [("committed",)]
    copy.close()


def test_what_only_looks_like_a_database_is_copied_as_it_is(data: Data) -> None:
    content = b"SQLite format 3\0" + os.urandom(5_000)
    (data.files / "app.db").write_bytes(content)
    (data.files / "app.db-wal").write_bytes(b"also kept")
    [note] = data.pack()
    assert note.startswith("'app.db' is no readable database, and is copied as it is: ")
    restored = data.unpack()
    assert (restored / "app.db").read_bytes() == content
    assert (restored / "app.db-wal").read_bytes() == b"also kept"


def test_a_file_that_shrinks_meanwhile_keeps_the_archive_readable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    reader = pack.Exact(fd, 6)
    assert reader.read(2) + reader.read() == b"abc\0\0\0"
    os.close(fd)


@pytest.mark.parametrize("kind", ["file", "database"])
def test_on_a_full_disk_there_is_no_archive(data: Data, tmp_path: Path, kind: str) -> None:
    """A database that does not fit is not copied as a file, while the app writes to it."""
    (disk := tmp_path / "disk").mkdir()
    data.packed = disk / "packed"
    if kind == "file":
        (data.files / "big").write_bytes(os.urandom(2 << 20))
    else:
        with contextlib.closing(sqlite3.connect(data.files / "big")) as database, database:
            database.execute("create table t (x)")
            database.execute("insert into t values (zeroblob(2000000))")  # as a file it would fit into the archive
    done = data.run(prefix=on_small_disk(disk))
    assert (done.returncode, done.stdout) == (errno.ENOSPC, "")

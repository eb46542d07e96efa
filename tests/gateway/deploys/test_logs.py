"""Logs of deploys that have ended are stored as files."""

import datetime
import os
import stat
from pathlib import Path

import pytest

from gateway.deploys.logs import StoredLogs, split_times, stamp_line
from gateway.errors import StorageUnavailable
from gateway.storage import FolderStorage

TODAY = datetime.datetime.now(datetime.UTC).date()
DAY = TODAY.isoformat()
LOG = "one line of é\n" * 15_000


@pytest.fixture
def logs(tmp_path: Path) -> StoredLogs:
    return StoredLogs(FolderStorage(tmp_path))


async def test_a_log_is_read_as_it_was_written(logs: StoredLogs, tmp_path: Path) -> None:
    assert await logs.read("dep_1", DAY) is None
    await logs.write("dep_1", DAY, LOG)
    await logs.write("dep_2", DAY, "")
    assert (await logs.read("dep_1", DAY), await logs.read("dep_2", DAY)) == (LOG, "")
    path = tmp_path / "logs" / DAY / "dep_1.gz"
    assert path.stat().st_size < len(LOG) / 20, "compressed"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "no build can read it"
    assert sorted(each.name for each in path.parent.iterdir()) == ["dep_1.gz", "dep_2.gz"]
    await logs.write("dep_1", DAY, "again")
    assert await logs.read("dep_1", DAY) == "again"


async def test_the_data_folders_owner_reads_it(logs: StoredLogs, tmp_path: Path) -> None:
    """A worker that runs as root gives the file to the gateway's user."""
    if os.geteuid() == 0:
        os.chown(tmp_path, 10_001, 10_001)
    await logs.write("dep_1", DAY, LOG)
    found = (tmp_path / "logs" / DAY / "dep_1.gz").stat()
    assert (found.st_uid, found.st_gid) == (tmp_path.stat().st_uid, tmp_path.stat().st_gid)


async def test_old_logs_are_removed(logs: StoredLogs, tmp_path: Path) -> None:
    old, young = ((TODAY - datetime.timedelta(days=days)).isoformat() for days in (92, 89))
    for day in (old, young):
        await logs.write("dep_1", day, LOG)
    (tmp_path / "logs" / "not a day").mkdir()
    await logs.write("dep_2", DAY, LOG)
    assert (await logs.read("dep_1", old), await logs.read("dep_1", young)) == (None, LOG)
    assert sorted(each.name for each in (tmp_path / "logs").iterdir()) == sorted([young, DAY, "not a day"])


async def test_a_file_that_cannot_be_written_leaves_nothing(logs: StoredLogs, tmp_path: Path) -> None:
    (tmp_path / "logs" / DAY).mkdir(parents=True)
    (tmp_path / "logs" / DAY / "dep_1.gz").mkdir()
    with pytest.raises(StorageUnavailable):
        await logs.write("dep_1", DAY, LOG)
    assert [each.name for each in (tmp_path / "logs" / DAY).iterdir()] == ["dep_1.gz"]


async def test_nothing_is_written_through_a_link(logs: StoredLogs, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / "logs" / DAY).mkdir(parents=True)
    (tmp_path / "logs" / DAY / "dep_1.gz").symlink_to(other)
    await logs.write("dep_1", DAY, LOG)
    assert other.read_text() == "precious"
    assert await logs.read("dep_1", DAY) == LOG


def test_the_times_of_lines() -> None:
    stored = "without a time\n" + stamp_line("one", 5) + "with it\n" + stamp_line("", 7) + "cut"
    assert split_times(stored) == ("without a time\none\nwith it\n\ncut", [None, 5, 5, 7, 7])
    assert split_times("") == ("", [])
    assert split_times("\n") == ("\n", [None])

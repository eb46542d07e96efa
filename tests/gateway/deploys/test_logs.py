"""Logs of deploys that have ended are stored as files."""

import datetime
import os
import stat
from pathlib import Path

import msgspec
import pytest

from gateway.deploys.line_times import stamp_line
from gateway.deploys.logs import (
    FIRST_BYTES,
    LAST_BYTES,
    SPARE_BYTES,
    DeployLogs,
    Line,
    StoredLogs,
    count_lines,
    read_lines,
    shorten,
    skip_lines,
)
from gateway.deploys.records import Deploy
from gateway.keys import deploy_log_key
from gateway.redis.client import Store
from gateway.storage import FolderStorage

TODAY = datetime.datetime.now(datetime.UTC).date()
DAY = TODAY.isoformat()
LOG = "one line of é\n" * 15_000


@pytest.fixture
def logs(tmp_path: Path) -> StoredLogs:
    return StoredLogs(FolderStorage(tmp_path))


async def test_a_log_is_read_as_it_was_written(logs: StoredLogs, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 10_001, 10_001)
    assert await logs.read("dep_1", DAY) is None
    await logs.write("dep_1", DAY, LOG)
    await logs.write("dep_2", DAY, "")
    assert (await logs.read("dep_1", DAY), await logs.read("dep_2", DAY)) == (LOG, "")
    path = tmp_path / "logs" / DAY / "dep_1.gz"
    found, folder = path.stat(), tmp_path.stat()
    assert (found.st_uid, found.st_gid) == (folder.st_uid, folder.st_gid), "a worker that runs as root gives it away"
    assert path.stat().st_size < len(LOG) / 20, "compressed"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "no build can read it"
    await logs.write("dep_1", DAY, "again")
    assert await logs.read("dep_1", DAY) == "again"


async def test_old_logs_are_removed(logs: StoredLogs, tmp_path: Path) -> None:
    old, young = ((TODAY - datetime.timedelta(days=days)).isoformat() for days in (92, 89))
    for day in (old, young):
        await logs.write("dep_1", day, LOG)
    (tmp_path / "logs" / "not a day").mkdir()
    await logs.write("dep_2", DAY, LOG)
    assert (await logs.read("dep_1", old), await logs.read("dep_1", young)) == (None, LOG)
    assert sorted(each.name for each in (tmp_path / "logs").iterdir()) == sorted([young, DAY, "not a day"])


def test_the_times_of_lines() -> None:
    stored = "without a time\n" + stamp_line("one", 5) + "with it\n" + stamp_line("", 7) + "cut"
    expected = [("without a time", None), ("one", 5), ("with it", 5), ("", 7), ("cut", 7)]
    assert [(line.text, line.time) for line in read_lines(stored)] == expected
    assert read_lines("\n") == [("", None, 1)]


def numbered(first: int, end: int) -> str:
    return "".join(stamp_line(f"line {number} é{'x' * (number % 70)}", number) for number in range(first, end))


def test_a_long_log_keeps_its_first_and_its_last_part() -> None:
    log = numbered(0, 9_000) + "FATAL: the reason\nFailed: status 7\n"
    kept = shorten(log)
    first, last = kept.split("\n\x1e", 1)
    assert len(first.encode()) in range(FIRST_BYTES - 200, FIRST_BYTES)
    assert len(last.encode()) in range(LAST_BYTES - 200, LAST_BYTES + 10)
    assert kept.endswith("FATAL: the reason\nFailed: status 7\n")
    lines = read_lines(kept)
    [gap] = [line for line in lines if line.stands_for != 1]
    assert gap.text == f"… {9_002 - len(lines) + 1:,} lines are missing here"
    assert (gap.time, count_lines(lines)) == (None, 9_002)
    assert shorten(kept) == kept
    assert shorten(numbered(0, 100)) == numbered(0, 100)


@pytest.mark.parametrize(("step", "misses"), [(1_500, False), (12_000, True)])
def test_a_reader_gets_each_line_once_and_is_told_what_it_missed(step: int, misses: bool) -> None:
    """The reader asks after each `step` lines that the deploy has written."""
    log, seen, read = "", list[Line](), 0
    for first in range(0, 6 * step, step):
        log = shorten(log + numbered(first, first + step))
        lines = read_lines(log)
        seen += skip_lines(lines, read)
        read = count_lines(lines)
        assert count_lines(seen) == read == first + step
        assert skip_lines(lines, read) == []
    number = 0
    for line in seen:
        if line.stands_for == 1:
            assert line.text.startswith(f"line {number} ")
        number += line.stands_for
    assert any(line.stands_for > 1 for line in seen) is misses


@pytest.mark.asyncio(loop_scope="session")
async def test_redis_keeps_a_bounded_log(store: Store, tmp_path: Path) -> None:
    deploy = Deploy(
        id="dep_1", account="acc_1", app="shop", appId="app_1", kind="live", state="building", trigger="upload",
        createdAt=f"{DAY}T10:00:00.000Z",
    )  # fmt: skip
    logs, key = DeployLogs(store, FolderStorage(tmp_path)), deploy_log_key("acc_1", "dep_1")
    for first in range(0, 15_000, 3_000):
        await logs.append(deploy, numbered(first, first + 3_000))
        assert await store.client.strlen(key) <= FIRST_BYTES + LAST_BYTES + SPARE_BYTES + 20
        lines = read_lines(await logs.read(deploy))
        assert count_lines(lines) == first + 3_000
        assert len((await logs.read(deploy)).encode()) <= FIRST_BYTES + LAST_BYTES + 20
    await logs.append(deploy, "Failed: status 7\n")
    await logs.store(deploy)
    assert await store.get(key) is None
    stored = read_lines(await logs.read(msgspec.structs.replace(deploy, state="failed")))
    assert stored[-1].text == "Failed: status 7"

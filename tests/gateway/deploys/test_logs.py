"""Logs of deploys, which are stored as files once they have ended, and the output of start commands."""

import datetime
import math
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.accounts.records import App, Build
from gateway.deploys.line_times import FORMER, stamp_line
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
from gateway.deploys.pod_log import PodLog
from gateway.deploys.records import Deploy
from gateway.deploys.release import Release
from gateway.deploys.runtime_log import RuntimeLog
from gateway.deploys.serving import Records, Wanted
from gateway.ids import TimeSpan, read_time
from gateway.keys import deploy_log_key, serving_key
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


def numbered(first: int, end: int) -> str:
    return "".join(stamp_line(f"line {number} é{'x' * (number % 70)}", number) for number in range(first, end))


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


# -- the output of start commands -----------------------------------------------------------------------------

APP = App(id="app_1", name="notes", account="acc_1", createdAt="")


async def find_deploy() -> str:
    return "dep_1"


@pytest.fixture
def running(tmp_path: Path) -> Path:
    folder = tmp_path / "running"
    folder.mkdir()
    return folder


async def test_nothing_is_lost_or_repeated_when_the_files_are_swapped(running: Path) -> None:
    path, live, seen = running / "dep_1.output", "dep_1", list[str]()

    async def find_live() -> str:
        return live

    path.write_text("one\ntwo\nthr")
    follow = RuntimeLog(str(running.parent), poll_seconds=0, deploy_seconds=0).follow(find_live, 1, lambda: False)

    async def read() -> None:
        seen.extend(await anext(follow))

    await read()
    assert seen == ["two"], "only complete lines"
    with path.open("a") as file:
        file.write("ee\nfour\n")
    await read()
    with path.open("a") as file:
        file.write("five\n")
    path.replace(running / f"dep_1.output{FORMER}")
    path.write_text("six\nsev")
    await read()
    with path.open("a") as file:
        file.write("en\n")
    await read()
    assert seen == ["two", "three", "four", "five", "six", "seven"]
    live = "dep_2"
    (running / "dep_2.output").write_text("of the next\n")
    while seen[-1] != "of the next":
        await read()
    await follow.aclose()


async def test_a_span_of_the_output(running: Path) -> None:
    path = running / "dep_1.output"
    path.with_name(path.name + FORMER).write_text("of an older version\n" + stamp_line("one", 10_000))
    path.write_text(stamp_line("two", 20_000) + "of the same instant\n" + stamp_line("three", 30_500))
    log = RuntimeLog(str(running.parent))

    async def tail(since: float = -math.inf, until: float = math.inf, lines: int = 100) -> list[str]:
        return await log.tail("dep_1", lines, TimeSpan(since, until))

    assert await tail() == ["of an older version", "one", "two", "of the same instant", "three"]
    assert await tail(since=10) == ["one", "two", "of the same instant", "three"]
    assert await tail(since=10.001, until=30.5) == ["two", "of the same instant"]
    assert await tail(until=30, lines=1) == ["of the same instant"]
    follow = RuntimeLog(str(running.parent), poll_seconds=0).follow(find_deploy, 100, lambda: False, TimeSpan(20))
    assert await anext(follow) == ["two", "of the same instant", "three"]
    with path.open("a") as file:
        file.write(stamp_line("four", 40_000))
    assert await anext(follow) == ["four"]
    await follow.aclose()


@pytest.mark.asyncio(loop_scope="session")
async def test_an_app_has_a_start_command_by_its_setting_or_because_it_has_run_one(store: Store, running: Path) -> None:
    """On Kubernetes, its pod may not exist yet."""
    releases = {"dep_1": Release("d" * 64, 1, runs=True), "dep_2": Release("e" * 64, 1)}
    record = Wanted("acc_1", "app_1", "live", "live", "dep_1", releases=releases)
    await store.client.hset(serving_key("acc_1", "app_1"), "live", msgspec.json.encode(record))  # type: ignore[misc]
    (running / "dep_1.output").touch()
    for log in (PodLog("apps", Records(store)), RuntimeLog(str(running.parent))):
        assert await log.has_start_command(APP, "dep_1")
        assert not await log.has_start_command(APP, "dep_2")
        assert not await log.has_start_command(APP, None)
        assert not await log.has_start_command(msgspec.structs.replace(APP, build=Build()), "dep_1")
        assert await log.has_start_command(msgspec.structs.replace(APP, build=Build(start="x")), None)


# A container engine gives nanoseconds.
TIMES = [f"2026-07-02T10:00:00.{part}00000000Z" for part in (1, 2, 2, 2, 3)]
LINES = list(zip(TIMES, "abcde", strict=True))


class CutLog(PodLog):
    """The log of a container, whose connections end after the given numbers of lines. Each begins with all lines."""

    def __init__(self, lines: list[tuple[str, str]], *ends: int) -> None:
        super().__init__("apps", None, poll_seconds=0.05, retry_seconds=0.01)  # type: ignore[arg-type]
        self._lines, self._ends = lines, list(ends)
        self.asked: list[dict[str, Any]] = []

    async def _find_pod(self, deploy_id: str) -> str:
        return "pod"

    async def _read_pod(self, pod: str, **which: Any) -> AsyncIterator[tuple[str, str]]:
        self.asked.append({name: value for name, value in which.items() if name != "follow"})
        for line in self._lines[: self._ends.pop(0)] if self._ends else self._lines:
            yield line


@pytest.mark.parametrize("ends", [(), (1, 3, 4)])
async def test_lines_of_one_instant_are_all_read_once(ends: tuple[int, ...]) -> None:
    """Some container engines give the same time to all lines that they read at once, such as those of a stack trace."""
    log = CutLog(LINES, *ends)
    rounds, found = iter(range(5)), list[str]()
    async for lines in log.follow(find_deploy, 100, lambda: next(rounds, None) is None):
        found += lines
    assert "".join(found) == "abcde"
    assert log.asked[0]["tail_lines"] == 100
    assert all("since" in which and "tail_lines" not in which for which in log.asked[1:]), "nothing is left out"


async def test_a_span_of_a_containers_output() -> None:
    first, last = read_time("2026-07-02T10:00:00.2Z"), read_time("2026-07-02T10:00:00.3Z")
    log = CutLog(LINES)
    assert await log.tail("dep_1", 10) == [*"abcde"]
    assert await log.tail("dep_1", 10, TimeSpan(since=first)) == [*"bcde"]
    assert await log.tail("dep_1", 2, TimeSpan(first, last)) == [*"cd"]
    assert await log.tail("dep_1", 10, TimeSpan(until=first)) == ["a"]
    assert [*map(sorted, log.asked)] == [["tail_lines"], ["since"], ["since"], ["tail_lines"]]
    assert log.asked[3]["tail_lines"] is None, "the last lines may be later"

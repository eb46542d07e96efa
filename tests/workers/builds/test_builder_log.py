"""The log of a deploy, with Redis replaced by a list."""

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest

from gateway.deploys.logs import FIRST_BYTES, LAST_BYTES, DeployLogs, Line, count_lines, read_lines
from gateway.deploys.records import Deploy
from gateway.errors import BackboneUnavailable
from gateway.settings import Settings
from tests.support.polling import wait_until
from workers.builds import builder
from workers.builds.builder import DeployLog

DEPLOY = Deploy(
    id="dep_1",
    account="acc_1",
    app="shop",
    appId="app_1",
    kind="live",
    state="building",
    trigger="upload",
    createdAt="2026-07-02T10:00:00.000Z",
)


class Stored:
    """Stands for `DeployLogs`."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.lines: list[Line] = []
        self.failures = 0

    async def append(self, deploy: Deploy, text: str) -> None:
        if self.failures:
            self.failures -= 1
            raise BackboneUnavailable
        self.texts.append("".join(f"{line.text}\n" for line in read_lines(text)))
        self.lines += read_lines(text)


@pytest.fixture
def stored() -> Stored:
    return Stored()


def flushed(stored: Stored) -> DeployLog:
    return DeployLog(cast("DeployLogs", stored), DEPLOY, flush_seconds=0.01)


async def test_each_line_has_a_time(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.05, 101.5])
    monkeypatch.setattr(builder, "time", SimpleNamespace(time=lambda: next(clock)))
    lines = flushed(stored)
    for line in ("one", "two", "three"):
        lines.write_line(line)
    assert [line.time for line in read_lines("".join(lines._lines))] == [100_000, 100_000, 101_500]


async def test_lines_are_flushed_regularly_and_at_the_end_and_wait_for_redis_in_order(stored: Stored) -> None:
    stored.failures = 1
    async with flushed(stored) as lines:
        lines.write_line("one")
        await wait_until(lambda: stored.failures == 0)
        lines.write_line("two")
        await wait_until(lambda: "".join(stored.texts) == "one\ntwo\n")
        lines.write_line("three")
    assert "".join(stored.texts) == "one\ntwo\nthree\n"


async def test_a_canceled_deploy_keeps_its_last_lines(stored: Stored) -> None:
    async def deploy() -> None:
        async with flushed(stored) as lines:
            await asyncio.sleep(0.05)
            lines.write_line("last")
            await asyncio.sleep(0)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await deploy()
    assert stored.texts == ["last\n"]


async def test_control_characters_are_dropped(stored: Stored) -> None:
    """Among them are those that mark the times of lines, and missing lines."""
    async with flushed(stored) as lines:
        for line in ("\x1b[31mred\x1b[0m\x07", "\x1b]0;title\x07abcdefg", "\x1e500"):
            lines.write_line(line)
    assert "".join(stored.texts) == "red\nabcdefg\n500\n"


async def test_lines_that_wait_are_bounded(stored: Stored) -> None:
    """While Redis is away, a build may print much more than a log keeps."""
    stored.failures = 1_000_000
    async with flushed(stored) as lines:
        for number in range(60_000):
            lines.write_line(f"line {number}")
            assert number % 1_000 or sum(map(len, lines._lines)) < 3 * (FIRST_BYTES + LAST_BYTES)
        lines.write_line("Failed: status 7")
        stored.failures = 0
    assert count_lines(stored.lines) == 60_001
    assert (stored.lines[0].text, stored.lines[-1].text) == ("line 0", "Failed: status 7")
    assert len("".join(stored.texts)) < FIRST_BYTES + LAST_BYTES


async def test_a_flood_is_flushed_at_a_pace(stored: Stored) -> None:
    async with flushed(stored) as lines:
        for _ in range(5_000):
            lines.write_line("y" * 100)
        await wait_until(lambda: len(stored.texts) == 1)
        lines.write_line("waits")
        await asyncio.sleep(0.1)
        assert len(stored.texts) == 1
    assert stored.texts[-1] == "waits\n"


async def test_a_full_disk_is_said_to_be_full(stored: Stored, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = builder.Builder(Settings(data_dir=str(tmp_path)))
    for change in ("_undo", "_finish_phase"):
        monkeypatch.setattr(worker, change, AsyncMock())
    async with flushed(stored) as log:
        await worker._fail_phase(DEPLOY, "build", OSError(errno.EDQUOT, "Disk quota exceeded"), log)
    assert "".join(stored.texts) == "Failed: the disk of the service is full; deploy again later\n"

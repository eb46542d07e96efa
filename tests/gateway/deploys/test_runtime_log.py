"""The output of a start command is followed while the worker swaps its files."""

import math
from pathlib import Path

import msgspec
import pytest

from gateway.accounts.records import App, Build
from gateway.deploys.line_times import FORMER, stamp_line
from gateway.deploys.runtime_log import RuntimeLog
from gateway.ids import TimeSpan


@pytest.fixture
def running(tmp_path: Path) -> Path:
    folder = tmp_path / "running"
    folder.mkdir()
    return folder


async def find_live() -> str:
    return "dep_1"


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


async def test_an_app_has_a_start_command_by_its_setting_or_because_it_has_run_one(running: Path) -> None:
    log, app = RuntimeLog(str(running.parent)), App(id="app_1", name="notes", account="acc", createdAt="")
    (running / "dep_1.output").touch()
    assert await log.has_start_command(app, "dep_1")
    assert not await log.has_start_command(app, "dep_2")
    assert not await log.has_start_command(msgspec.structs.replace(app, build=Build()), "dep_1")
    assert await log.has_start_command(msgspec.structs.replace(app, build=Build(start="x")), None)


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
    follow = RuntimeLog(str(running.parent), poll_seconds=0).follow(find_live, 100, lambda: False, TimeSpan(20))
    assert await anext(follow) == ["two", "of the same instant", "three"]
    with path.open("a") as file:
        file.write(stamp_line("four", 40_000))
    assert await anext(follow) == ["four"]
    await follow.aclose()


async def test_a_reader_that_is_behind_is_told(running: Path) -> None:
    path = running / "dep_1.output"
    path.write_text(stamp_line("one", 1))
    follow = RuntimeLog(str(running.parent), poll_seconds=0, deploy_seconds=60).follow(find_live, 1, lambda: False)
    assert await anext(follow) == ["one"]
    for text in ("lost", "kept"):
        path.replace(path.with_name(path.name + FORMER))
        path.write_text(stamp_line(text, 2))
    path.replace(path.with_name(path.name + FORMER))
    path.write_text(stamp_line("last", 3))
    missing, *rest = await anext(follow)
    assert "lines are missing here" in missing
    assert rest == ["last"]
    await follow.aclose()

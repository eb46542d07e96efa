"""The output of a start command is followed while the worker swaps its files."""

from pathlib import Path

import msgspec
import pytest

from gateway.accounts.records import App, Build
from gateway.deploys.runtime_log import FORMER, RuntimeLog


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


async def test_an_app_that_wrote_nothing(running: Path) -> None:
    assert await RuntimeLog(str(running.parent)).tail("dep_1", 10) == []


async def test_an_id_with_a_path_reads_nothing(running: Path) -> None:
    (running.parent / "secret.output").write_text("secret\n")
    assert await RuntimeLog(str(running.parent)).tail("dep_none", 10) == []


async def test_an_app_has_a_start_command_by_its_setting_or_because_it_has_run_one(running: Path) -> None:
    log, app = RuntimeLog(str(running.parent)), App(id="app_1", name="notes", account="acc", createdAt="")
    (running / "dep_1.output").touch()
    assert await log.has_start_command(app, "dep_1")
    assert not await log.has_start_command(app, "dep_2")
    assert not await log.has_start_command(app, None)
    assert not await log.has_start_command(msgspec.structs.replace(app, build=Build()), "dep_1")
    assert await log.has_start_command(msgspec.structs.replace(app, build=Build(start="x")), None)

"""The command line as a whole: its help, its errors, and its output in a pipe and in a terminal."""

import asyncio
import datetime
import re

import pytest

from capsule_gateway.cli.main import TOPICS
from tests.capsule_gateway.cli.conftest import Service
from tests.support.command_line import Tool, run_in_terminal, run_process

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_help_has_each_command_under_its_topic(offline: Tool) -> None:
    page = (await offline("--help")).out
    for topic, commands in TOPICS.items():
        section = page.partition(f"\n{topic}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\S+)", section, re.MULTILINE) == [*commands], topic
        for name in commands:
            assert (await offline(name, "-h")).out.startswith(f"Usage: capsule {name}")
    assert "..." not in page.partition("Start here:")[2], "a description is cut"
    assert "hook " not in page


async def test_a_pipe_gets_whole_lines_and_a_terminal_colors(stubbed: Tool, service: Service) -> None:
    url = "https://shop.apps.example"
    service.answers["GET /account/apps"] = [{"name": "shop", "status": "never-live", "url": url}]
    run = await asyncio.to_thread(run_process, stubbed, "apps", "list")
    assert run.stdout.splitlines() == [line.rstrip() for line in run.stdout.splitlines()]
    assert [line.split() for line in run.stdout.splitlines()] == [
        ["APP", "STATUS", "ADDRESS"],
        ["shop", "never-live", url],
    ]
    seen = await asyncio.to_thread(run_in_terminal, stubbed, "apps", "list", columns=20)
    assert url in seen  # a narrow one cuts no address
    assert "\x1b[" in seen
    assert "\x1b" not in await asyncio.to_thread(run_in_terminal, stubbed, "apps", "list", NO_COLOR="1")


async def test_an_argument_that_is_not_text_is_refused_in_one_line(stubbed: Tool) -> None:
    run = await asyncio.to_thread(run_process, stubbed, "deploys", "show", "dep_\udcff")
    assert (run.returncode, run.stderr) == (2, "capsule: an argument is not text in UTF-8\n")


async def test_a_deletion_asks_for_the_name(stubbed: Tool, service: Service) -> None:
    remove = ("apps", "remove", "shop")
    seen = await asyncio.to_thread(run_in_terminal, stubbed, *remove, given="other\n")
    assert "nothing was deleted" in seen
    assert not service.exchanges
    assert "Deleted shop" in await asyncio.to_thread(run_in_terminal, stubbed, *remove, given="shop\n")
    assert service.calls == ["DELETE /account/apps/shop"]


async def test_the_last_days_of_usage_include_today(stubbed: Tool, service: Service) -> None:
    service.answers["GET /account/usage"] = {"rows": []}
    today = datetime.datetime.now(datetime.UTC).date()
    for days in (1, 7):
        await stubbed("usage", "--days", str(days), "--by", "app")
        begin = today - datetime.timedelta(days=days - 1)
        assert service.calls[-1] == f"GET /account/usage?by=day&group=app&from={begin}"
    assert "--days" in await stubbed.refused("usage", "--days", "401", code=2)

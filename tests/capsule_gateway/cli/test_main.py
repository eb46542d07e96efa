"""The command line as a whole: its help, its errors, and its output in a pipe and in a terminal."""

import asyncio
import os
import re
import subprocess
import sys

import pytest

from capsule_gateway.cli.main import TOPICS
from tests.support.accounts import App
from tests.support.command_line import Tool, run_in_terminal, run_process

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_wrong_usage_is_one_line(offline: Tool) -> None:
    for arguments, message in (
        (["hooks", "create", "shop"], "Missing option '--name' (see 'capsule hooks create --help')"),
        (["hooks", "remove"], "Missing argument 'ID' (see 'capsule hooks remove --help')"),
        (["hoks"], "No such command 'hoks'. (Did you mean one of: 'hooks', 'webhooks'?)"),
        (["webhooks", "test", "deploy.exploded"], "'deploy.exploded' is not one of"),
        (["deliveries", "list", "--limit", "0"], "0 is not in the range"),
        (["deliveries", "redeliver"], "give either the ID of an event, or --failed and --since"),
        (["deliveries", "redeliver", "evt_1", "--failed", "--since", "1h"], "give either the ID"),
        (["deliveries", "redeliver", "--failed"], "give either the ID"),
        (["deliveries", "redeliver", "--failed", "--since", "lately"], "'lately' is not a time"),
        (["deploys", "publish", "shop", "/nowhere/at/all"], "does not exist"),
        (["worker", "webhook"], "'webhook' is not one of 'webhooks', 'deploys', 'sites', 'monitors'"),
    ):
        assert message in await offline.refused(*arguments, code=2)


async def test_a_group_alone_shows_its_help(offline: Tool) -> None:
    assert (await offline("keys", "-h")).out.startswith("Usage: capsule keys [OPTIONS] COMMAND")
    run = await asyncio.to_thread(run_process, offline, "webhooks")
    assert run.returncode == 2
    assert "Usage: " in run.stderr
    assert "rotate" in run.stderr


async def test_the_help_has_each_command_under_its_topic(offline: Tool) -> None:
    page = (await offline("--help")).out
    for topic, commands in TOPICS.items():
        section = page.partition(f"\n{topic}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\S+)", section, re.MULTILINE) == [*commands], topic
        for name in commands:
            assert (await offline(name, "-h")).out.startswith(f"Usage: capsule {name}")
    assert "..." not in page.partition("Start here:")[2], "a description is cut"
    assert "hook " not in page


@pytest.mark.parametrize(
    ("command", "former"),
    [("apps list", "-o"), ("apps list", "--output"), ("requests", "--from"), ("apps set", "--output")],
)
async def test_the_help_has_no_former_options(offline: Tool, command: str, former: str) -> None:
    assert not re.search(rf"{former}[ ,]", (await offline(*command.split(), "-h")).out)


async def test_an_error_names_what_was_typed(capsule: Tool, app: App) -> None:
    assert (await capsule.refused("limits", "set", app.name, "--daily-euro", "abc")).startswith("--daily-euro: ")
    assert (await capsule.refused("deploys", "rollback", app.name, "dep_x")).startswith("ID: ")
    assert (await capsule.refused("domains", "set", app.name, "nothing")).startswith("DOMAIN: ")
    assert (await capsule.refused("apps", "set", app.name, "--build", "x", "--output-dir", "../x")).startswith(
        "--output-dir: "
    )


async def test_an_unknown_app_is_repeated(capsule: Tool, app: App) -> None:
    near = f"{app.name}s"
    said = f"There is no app {near} in this account (did you mean {app.name}?) (NOT_FOUND, request "
    assert (await capsule.refused("limits", "show", near)).startswith(said)
    assert (await capsule.refused("env", "list", "zzzzz")).startswith(
        "There is no app zzzzz in this account (NOT_FOUND"
    )


async def test_a_pipe_gets_whole_lines_without_colors(capsule: Tool, app: App) -> None:
    run = await asyncio.to_thread(run_process, capsule, "apps", "list")
    assert "\x1b" not in run.stdout
    row = [app.name, "never-live", app.origin]
    assert [line.split() for line in run.stdout.splitlines()] == [["APP", "STATUS", "ADDRESS"], row]
    assert all(line == line.rstrip() for line in run.stdout.splitlines())


async def test_a_narrow_terminal_cuts_no_address(capsule: Tool, app: App) -> None:
    seen = await asyncio.to_thread(run_in_terminal, capsule, "apps", "list", columns=20)
    assert app.origin in seen
    assert "\x1b[" in seen
    assert "\x1b" not in await asyncio.to_thread(run_in_terminal, capsule, "apps", "list", NO_COLOR="1")


async def test_shell_completion(capsule: Tool) -> None:
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "capsule_gateway"],
        env={
            "PATH": os.environ["PATH"],
            "_CAPSULE_COMPLETE": "bash_complete",
            "COMP_WORDS": "capsule keys r",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "plain,remove"


@pytest.mark.parametrize("arguments", [["--version"], ["-h"], ["deploys", "list", "-h"], ["completion", "zsh"]])
async def test_a_start_imports_only_what_it_needs(arguments: list[str]) -> None:
    """Each of these takes longer than the rest of the start."""
    heavy = ("aiohttp", "dotenv", "httpx", "litestar", "mcp", "redis", "rich.table", "workers")
    code = (
        "import sys; from capsule_gateway.cli.main import main\n"
        f"try: main({arguments!r})\nfinally: print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    run = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr.strip()) == (0, "[]")

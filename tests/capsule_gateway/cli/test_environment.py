"""`capsule env` and `capsule logs`."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from gateway.deploys.line_times import stamp_line
from gateway.ids import now_iso
from tests.fakes.server import FakeServer
from tests.support.accounts import App
from tests.support.command_line import Tool
from tests.support.deploys import publish, report_phases

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def capsule(hosted: App, tmp_path: Path) -> Tool:
    return Tool(hosted.gateway.address, hosted.account.key, tmp_path)


async def test_a_file_of_variables(tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.write_text("# a comment\nexport A = one\n\nB='two words'\n", encoding="utf-16")
    async with FakeServer() as service:
        run = await Tool(service.address, "csk_key", tmp_path)("env", "set", "shop", "--file", str(file), "--json")
        assert run.json == {"set": ["A", "B"]}
        assert service.exchanges[0].json == {"A": "one", "B": "two words"}


async def test_values_for_previews(capsule: Tool, hosted: App) -> None:
    app = hosted.name
    for name in ("DATABASE", "PAYMENTS", "SAME"):
        await capsule("env", "set", app, name, given="live")
    run = await capsule("env", "set", app, "DATABASE", "--preview", given="test")
    assert run.out == f"Set DATABASE for previews of {app}, effective from the next deploy.\n"
    run = await capsule("env", "set", app, "PAYMENTS", "--preview", "--no-value")
    assert run.out == f"Kept PAYMENTS out of previews of {app}, effective from the next deploy.\n"
    listed = (await capsule("env", "list", app, "--preview", "--json")).json
    assert {each["name"]: each["inPreviews"] for each in listed} == {
        "DATABASE": "other",
        "PAYMENTS": "none",
        "SAME": "same",
    }
    assert "none" in (await capsule("env", "list", app, "--preview")).out
    assert "none" not in (await capsule("env", "list", app)).out
    said = await capsule.refused("env", "remove", app, "DATABASE", "SAME", "--preview")
    assert said == f"previews of {app} have no value of their own for SAME; nothing was removed"
    run = await capsule("env", "remove", app, "DATABASE", "PAYMENTS", "--preview")
    assert run.out == f"Removed DATABASE, PAYMENTS from previews of {app}, effective from the next deploy.\n"
    listed = (await capsule("env", "list", app, "--preview", "--json")).json
    assert [each["inPreviews"] for each in listed] == ["same"] * 3
    run = await capsule("env", "set", app, "PAYMENTS", "--no-value")
    assert (run.code, "give --no-value with a NAME and --preview" in run.err) == (2, True)


async def test_wrong_usage(offline: Tool, tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.write_text("GOOD=1\na secret line\n")
    for arguments, words in (
        (("TOKEN=on-the-line",), "keep the value off the command line"),
        ((), "either a NAME or --file"),
        (("--file", str(file)), "line 2: use NAME=value"),
    ):
        said = await offline.refused("env", "set", "shop", *arguments, code=2)
        assert words in said
        assert "on-the-line" not in said
        assert "secret" not in said


async def test_logs_are_printed_and_followed(capsule: Tool, hosted: App) -> None:
    gateway = hosted.gateway
    assert "NOT_FOUND" in (await capsule("logs", hosted.name)).err
    await gateway.platform(
        "PUT", f"apps/{hosted.name}", {"account": hosted.account.id, "build": {"start": "exec node server.js"}}
    )
    assert (await capsule("logs", hosted.name)).out == ""
    deploy = (await publish(hosted.account, hosted.name)).json()["deployId"]
    await report_phases(hosted.gateway, deploy, "build", "health", "canary")
    running = Path(gateway.environment["GATEWAY_DATA_DIR"]) / "running"
    running.mkdir()
    (running / f"{deploy}.output").write_text("one\ntwo \x1b[31mred\nthree\n")
    assert (await capsule("logs", hosted.name, "--tail", "2")).out == "two [31mred\nthree\n"
    now = int(time.time() * 1_000)
    text = stamp_line("old", now - 7_200_000) + stamp_line("new", now - 60_000) + stamp_line("three", now)
    (running / f"{deploy}.output").write_text(text)
    assert (await capsule("logs", hosted.name, "--since", "1h")).out == "new\nthree\n"
    assert (await capsule("logs", hosted.name, "--since", "1h", "--until", "30s")).out == "new\n"
    assert (await capsule("logs", hosted.name, "--until", now_iso(now / 1_000 - 3_600))).out == "old\n"
    assert (await capsule("logs", hosted.name, "--since", "1h", "--tail", "1")).out == "three\n"
    for options, reason in (
        (("--since", "lately"), "'lately' is not a time; use a time in ISO 8601"),
        (("--until", "1h", "--follow"), "give either --follow or --until"),
    ):
        refused = await capsule("logs", hosted.name, *options)
        assert refused.code == 2
        assert reason in refused.err
    assert "since: must be before until." in (await capsule("logs", hosted.name, "--since", "1h", "--until", "2h")).err
    environment = {"CAPSULE_URL": gateway.address, "CAPSULE_API_KEY": hosted.account.key, "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "capsule_gateway", "logs", hosted.name, "--tail", "1", "--follow"]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"three\n"
            with (running / f"{deploy}.output").open("a") as file:
                file.write("four\n")
            assert await process.stdout.readline() == b"four\n"
    finally:
        process.terminate()
        await process.wait()

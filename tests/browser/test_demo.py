"""`capsule dev`: its demo app in a real browser, the printed curl line, and the end of a run."""

import asyncio
import os
import re
import signal
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from tests.support.dev_process import Run, start
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.programs import require
from tests.support.redis_servers import five_free_ports

pytestmark = pytest.mark.asyncio(loop_scope="session")

BUILD_SECONDS = 250  # for the template, whose packages are downloaded


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run() -> AsyncIterator[Run]:
    with passable_folder() as folder:
        run = await start_run(folder / "a folder")
        yield run
        if not run.ended:  # the last test takes it down
            assert await run.stop() == 0, run.said


async def start_run(folder: Path, port: int = 0) -> Run:
    run = await start(port or five_free_ports(), folder)
    await run.read(until="Press Ctrl-C to stop.")
    assert not run.ended, run.said
    return run


async def test_the_demo_app_is_the_template_and_a_restart_keeps_its_data(page: Page, run: Run) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    assert "is being built" in run.said
    await run.read(until="demo answers at", seconds=BUILD_SECONDS)
    assert "could not be served" not in run.said, (run.folder / "logs" / "workers.log").read_text()
    await page.goto(run.demo)
    await page.get_by_role("button", name="Create an account").click()
    await page.get_by_label("Name").fill("Somebody")
    await page.get_by_label("E-mail").fill("ana@example.com")
    await page.get_by_label("Password").fill("correct horse battery")
    await page.get_by_label("Password").press("Enter")
    await page.get_by_label("New note").fill("Remember the milk")
    await page.get_by_role("button", name="Save note").click()
    await expect(page.locator("#list")).to_contain_text("Remember the milk")
    await ask(page)

    require("curl")
    key = run.api_key
    stream = await asyncio.create_subprocess_shell(f"{run.curl} -s", stdout=asyncio.subprocess.PIPE)
    assert stream.stdout
    assert await stream.stdout.readline() == b'data: {"token":"I"}\n'
    run.process.send_signal(signal.SIGINT)
    await run.read(until="Stopping")
    output, _ = await asyncio.wait_for(stream.communicate(), 20)
    assert b"\nevent: done\n" in output, "a running answer ends"
    assert await run.stop() == 0
    again = await start_run(run.folder, run.port)
    run.process, run.said = again.process, again.said
    assert "is being built" not in run.said
    assert run.api_key == key

    async def answers() -> bool:
        response = await page.goto(run.demo)
        return response is not None and response.ok

    await wait_until(answers, 30)
    await expect(page.locator("#list")).to_contain_text("Remember the milk")
    await ask(page)
    assert not broken


async def ask(page: Page) -> None:
    await page.get_by_label("Your question").fill("What is a capsule?")
    await page.get_by_label("Your question").press("Enter")
    answer = page.locator("article").last.locator(".answer")
    await expect(answer).to_contain_text("I am not")
    await expect(answer).to_have_attribute("aria-busy", "true")  # it streams
    await expect(answer).to_contain_text("a euro (€).")


async def test_the_printed_key_is_the_accounts(run: Run) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        headers = {"Authorization": f"Bearer {run.api_key}"}
        response = await http.get(f"http://localhost:{run.port}/account/apps", headers=headers)
    assert "demo" in [app["name"] for app in response.json()]
    for name in ("keys.json", "user-token"):  # only the user can read them
        assert stat.S_IMODE((run.folder / name).stat().st_mode) == 0o600


async def test_a_second_run_names_the_first(run: Run) -> None:
    second = await start(run.port, run.folder)
    await second.read()
    assert await second.process.wait() == 1
    assert second.said.startswith(f"Already running at {run.demo}")


async def test_a_failed_start_prints_one_line(tmp_path: Path) -> None:
    first = five_free_ports()
    with socket.create_server(("127.0.0.1", first)):
        run = await start(first, tmp_path)
        await run.read()
        assert await run.process.wait() == 1
    assert run.said.startswith(f"Port {first} is in use, and the gateway needs it.")
    assert len(run.said.splitlines()) == 1


async def test_a_child_that_dies_ends_the_run_with_its_log(run: Run) -> None:
    """Must be the last test of this module, because it ends the run."""
    log = run.folder / "logs" / "valkey.log"
    os.kill(int(re.findall(r"pid=(\d+)", log.read_text())[0]), signal.SIGKILL)
    await run.read()
    assert await run.process.wait() == 1
    assert "The database ended unexpectedly with code -9." in run.said
    await wait_until(lambda: not _listens(run.port))


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

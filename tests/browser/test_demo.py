"""`capsule dev`, its demo app and another app in a real browser, the printed curl line, and the end of a run."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, expect

from capsule_gateway.cli.folders import write_template
from capsule_gateway.dev import run as dev
from capsule_gateway.dev.children import StartFailed
from capsule_gateway.dev.layout import Layout
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


async def test_the_curl_line_streams_while_the_demo_is_being_built(run: Run) -> None:
    assert "is being built" in run.said
    await paste_curl(run)


async def paste_curl(run: Run) -> None:
    require("curl")
    shell = await asyncio.create_subprocess_shell(f"{run.curl} -s", stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(shell.communicate(), 20)
    assert output.startswith(b'data: {"token":"I"}\n\n')
    assert b"\nevent: done\n" in output


async def test_the_demo_app_is_the_template(browser: Browser, run: Run) -> None:
    await run.read(until="demo answers at", seconds=BUILD_SECONDS)
    assert "could not be served" not in run.said, (run.folder / "logs" / "workers.log").read_text()
    async with visiting(browser, run.demo) as page:
        await sign_up(page, "ana@example.com")
        await ask(page)
    await paste_curl(run)


async def test_an_app_of_ones_own_from_nothing_to_a_note_that_stays(browser: Browser, run: Run, tmp_path: Path) -> None:
    """Publishes it, uses it in the browser, changes and publishes it again, and restarts the whole service."""
    capsule(run, tmp_path, "new", "notes")
    out = capsule(run, tmp_path / "notes", "deploy")
    address = re.findall(r"Live at (\S+) after", out)[0]
    assert address == run.demo.replace("demo", "notes")
    context = await browser.new_context()
    async with visiting(browser, address, context) as page:
        await expect(page).to_have_title("notes")
        await sign_up(page, "ben@example.com")
        await page.get_by_label("New note").fill("Remember the milk")
        await page.get_by_role("button", name="Save note").click()
        await expect(page.locator("#list")).to_contain_text("Remember the milk")
        await ask(page)

        html = tmp_path / "notes" / "index.html"
        html.write_text(html.read_text().replace("<title>notes", "<title>My notes"))
        capsule(run, tmp_path / "notes", "deploy")
        await page.reload()
        await expect(page).to_have_title("My notes")
        await expect(page.locator("#list")).to_contain_text("Remember the milk")

        assert await run.stop() == 0
        again = await start_run(run.folder, run.port)
        run.process, run.said = again.process, again.said
        assert "is being built" not in run.said
        await paste_curl(run)

        async def answers() -> bool:
            response = await page.goto(address)
            return response is not None and response.ok

        await wait_until(answers, 30)
        await expect(page.locator("#list")).to_contain_text("Remember the milk")
        await ask(page)
    await context.close()


def capsule(run: Run, folder: Path, *arguments: str) -> str:
    """Returns the output of the command line in the folder, with the printed key."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "CAPSULE_URL": f"http://localhost:{run.port}",
        "CAPSULE_API_KEY": run.api_key,
    }
    command = [Path(sys.executable).with_name("capsule"), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.asynccontextmanager
async def visiting(browser: Browser, address: str, context: BrowserContext | None = None) -> AsyncIterator[Page]:
    """Opens the app as a new user, or in a browser that has been there."""
    page = await (context or browser).new_page()
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    await page.goto(address)
    yield page
    await page.close()
    assert not broken


async def sign_up(page: Page, email: str) -> None:
    await page.get_by_role("button", name="Create an account").click()
    await page.get_by_label("Name").fill("Somebody")
    await page.get_by_label("E-mail").fill(email)
    await page.get_by_label("Password").fill("correct horse battery")
    await page.get_by_label("Password").press("Enter")
    await expect(page.get_by_role("heading", name="Notes", exact=True)).to_be_visible()


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


@pytest.mark.parametrize("name", ["keys.json", "user-token"])
async def test_only_the_user_can_read_the_keys(run: Run, name: str) -> None:
    assert stat.S_IMODE((run.folder / name).stat().st_mode) == 0o600


async def test_a_second_run_names_the_first(run: Run) -> None:
    second = await start(run.port, run.folder)
    await second.read()
    assert await second.process.wait() == 1
    assert second.said.startswith(f"Already running at {run.demo}")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize(
    ("offset", "who"),
    [(0, "gateway"), (1, "apps"), (2, "model stand-in"), (3, "database"), (4, "app of a folder")],
)
async def test_a_port_in_use_prints_one_line(address: str, offset: int, who: str, tmp_path: Path) -> None:
    first = five_free_ports()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    message = rf"^Port {first + offset} is in use, and the {who} needs it\. [^\n]+$"
    with socket.create_server((address, first + offset), family=family), pytest.raises(StartFailed, match=message):
        await dev.run_service(Layout(first, tmp_path), write_template)


async def test_a_failed_start_prints_one_line(tmp_path: Path) -> None:
    first = five_free_ports()
    with socket.create_server(("127.0.0.1", first)):
        run = await start(first, tmp_path)
        await run.read()
        assert await run.process.wait() == 1
    assert run.said.startswith(f"Port {first} is in use, and the gateway needs it.")
    assert len(run.said.splitlines()) == 1


async def test_ctrl_c_lets_a_running_answer_end_twice_does_not_and_a_restart_keeps_key_and_account() -> None:
    with passable_folder() as folder:
        await end_twice(folder)


async def end_twice(folder: Path) -> None:
    port = five_free_ports()
    keys = []
    for numbers, whole in (([signal.SIGINT], True), ([signal.SIGTERM, signal.SIGINT], False)):
        run = await start(port, folder)
        await run.read(until="Press Ctrl-C to stop.")
        keys.append(run.api_key)
        shell = await asyncio.create_subprocess_shell(f"{run.curl} -s", stdout=asyncio.subprocess.PIPE)
        assert shell.stdout
        output = await shell.stdout.readline()
        for number in numbers:
            run.process.send_signal(number)
            await run.read(until="Stopping")
        output += await asyncio.wait_for(shell.stdout.read(), 20)
        assert (b"\nevent: done\n" in output) is whole
        assert await run.stop() == 0
        assert run.said.endswith("Stopped.\n")
        assert not [n for n in range(port, port + 5) if _listens(n)]
        await shell.wait()
    assert keys[0] == keys[1]


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

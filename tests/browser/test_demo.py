"""`capsule dev`: its demo app in a real browser, the printed curl line, and the end of a run."""

import asyncio
import contextlib
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
from playwright.async_api import Browser, Page, expect

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
    stream = await asyncio.create_subprocess_shell(f"{run.curl} -s", stdout=asyncio.subprocess.PIPE)
    output = await read_end(stream)
    assert output.startswith(b'data: {"token":"I"}\n\n')
    assert b"\nevent: done\n" in output


async def test_the_demo_app_is_the_template_and_a_restart_keeps_its_data(browser: Browser, run: Run) -> None:
    await run.read(until="demo answers at", seconds=BUILD_SECONDS)
    assert "could not be served" not in run.said, (run.folder / "logs" / "workers.log").read_text()
    async with visiting(browser, run.demo) as page:
        await sign_up(page, "ana@example.com")
        await page.get_by_label("New note").fill("Remember the milk")
        await page.get_by_role("button", name="Save note").click()
        await expect(page.locator("#list")).to_contain_text("Remember the milk")
        await ask(page)

        key, stream = run.api_key, await begin_stream(run)
        run.process.send_signal(signal.SIGINT)
        await run.read(until="Stopping")
        assert b"\nevent: done\n" in await read_end(stream), "a running answer ends"
        assert await run.stop() == 0
        again = await start_run(run.folder, run.port)
        run.process, run.said = again.process, again.said
        assert "is being built" not in run.said
        assert run.api_key == key
        await paste_curl(run)

        async def answers() -> bool:
            response = await page.goto(run.demo)
            return response is not None and response.ok

        await wait_until(answers, 30)
        await expect(page.locator("#list")).to_contain_text("Remember the milk")
        await ask(page)


async def begin_stream(run: Run) -> asyncio.subprocess.Process:
    stream = await asyncio.create_subprocess_shell(f"{run.curl} -s", stdout=asyncio.subprocess.PIPE)
    assert stream.stdout
    assert await stream.stdout.readline()
    return stream


async def read_end(stream: asyncio.subprocess.Process) -> bytes:
    output, _ = await asyncio.wait_for(stream.communicate(), 20)
    return output


@contextlib.asynccontextmanager
async def visiting(browser: Browser, address: str) -> AsyncIterator[Page]:
    """Opens the app as a new user."""
    page = await browser.new_page()
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
    for name in ("keys.json", "user-token"):  # only the user can read them
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


async def test_a_second_ctrl_c_ends_a_running_answer() -> None:
    with passable_folder() as folder:
        run = await start_run(folder)
        stream = await begin_stream(run)
        for number in (signal.SIGTERM, signal.SIGINT):
            run.process.send_signal(number)
            await run.read(until="Stopping")
        assert b"\nevent: done\n" not in await read_end(stream)
        assert await run.stop() == 0
        assert run.said.endswith("Stopped.\n")
        assert not [port for port in range(run.port, run.port + 5) if _listens(port)]


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

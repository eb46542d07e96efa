"""`capsule dev` and its demo page in a real browser, the printed curl line, a restart, and the end of a run.

The tests save screenshots in the folder that SCREENSHOTS names.
"""

import asyncio
import contextlib
import json
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

from gateway.dev import run as dev
from gateway.dev.children import StartFailed
from gateway.dev.layout import Layout
from tests.browser.axe import assert_accessible
from tests.support.dev_process import RATE, Run, start
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.programs import require
from tests.support.redis_servers import five_free_ports

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run() -> AsyncIterator[Run]:
    with passable_folder() as folder:
        async with running(folder / "a folder") as run:
            yield run


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Run]:
    run = await start(five_free_ports(), folder)
    await run.read(until="Press Ctrl-C to stop.")
    assert not run.ended, run.said
    yield run
    if not run.ended:  # the last test takes it down
        assert await run.stop() == 0, run.said


@contextlib.asynccontextmanager
async def visiting(browser: Browser, run: Run, **options) -> AsyncIterator[Page]:
    """Opens the demo page as a new user."""
    context = await browser.new_context(**options)
    page = await context.new_page()
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    await page.goto(run.demo)
    yield page
    await context.close()
    assert not broken


async def state(page: Page, name: str) -> None:
    await expect(page.locator(f"main[data-state={name}]")).to_be_visible(timeout=15_000)


@pytest.mark.parametrize(
    ("scheme", "width", "height"), [("light", 1280, 860), ("dark", 390, 780)], ids=["desktop-light", "phone-dark"]
)
async def test_the_page_streams(browser: Browser, run: Run, scheme, width: int, height: int, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    size = {"width": width, "height": height}
    async with visiting(browser, run, viewport=size, color_scheme=scheme) as page:

        async def shoot(name: str) -> None:
            await page.screenshot(path=folder / f"{scheme}-{width}-{name}.png")
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"the page scrolls sideways while {name}"

        await shoot("empty")
        await page.get_by_role("button", name="What is a capsule?").click()
        await state(page, "answering")
        await expect(page.get_by_role("button", name="Stop")).to_be_in_viewport()
        await shoot("answering")
        await state(page, "done")
        await expect(page.locator("#answer")).to_contain_text("I am not a language model.")
        await expect(page.locator("#answer")).to_contain_text("a euro (€).")
        await expect(page.locator("#figures")).to_have_text(
            re.compile(r"^\d+ tokens · first after \d+ ms · \d+ per second$")
        )
        await expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
        await shoot("done")
        for n in range(RATE):
            await page.get_by_label("Your question").fill(f"Question {n}")
            await page.keyboard.press("Enter")
            await state(page, "failed" if n == RATE - 1 else "answering")
            await page.keyboard.press("Escape")
        await shoot("limited")


async def test_addresses_that_the_service_shows_work(run: Run) -> None:
    bearer = {"Authorization": f"Bearer {run.api_key}"}
    async with httpx.AsyncClient(base_url=f"http://localhost:{run.port}", headers=bearer, trust_env=False) as http:

        async def live() -> dict[str, str] | None:
            apps = [app for app in (await http.get("/account/apps")).json() if app["status"] == "live"]
            return {app["name"]: app["url"] for app in apps} if len(apps) == 2 else None

        urls = await wait_until(live, 60)
        assert urls["demo"] == run.demo
        operator = {"Authorization": f"Bearer {json.loads((run.folder / 'keys.json').read_text())['operator_token']}"}
        listed = (await http.get("/platform/apps", headers=operator)).json()["apps"]
        assert {app["name"]: app["url"] for app in listed} == urls
        nowhere = urls["demo"].replace("demo", "none")
        for url, words in ((urls["demo"], "<title>"), (urls["hello"], "Hello from a capsule."), (nowhere, "")):
            headers = {"Host": url.removeprefix("http://"), "Connection": "close"}
            page = await http.get(f"http://127.0.0.1:{run.port + 1}/", headers=headers)
            assert (page.status_code, words in page.text) == (404 if url == nowhere else 200, True), url


def played(*tokens: str, finish: str = "stop") -> str:
    """Returns a complete answer of the gateway, in one piece."""
    end = {"model": "m", "finishReason": finish, "usage": {"inputTokens": 1, "outputTokens": len(tokens)}}
    return "".join(f"data: {json.dumps({'token': token})}\n\n" for token in tokens) + (
        f"event: done\ndata: {json.dumps(end)}\n\n"
    )


async def ask(page: Page, answer: str) -> None:
    headers = {"Content-Type": "text/event-stream", "Access-Control-Allow-Origin": "*"}
    await page.route("**/ai", lambda route: route.fulfill(body=answer, headers=headers))
    await page.get_by_label("Your question").fill("Why?")
    await page.keyboard.press("Enter")


async def test_markdown_shows_and_markup_stays_text(browser: Browser, run: Run) -> None:
    hostile = "<img src=x onerror='window.hit = 1'> [a](javascript:alert(1)) [b](https://example.com/b)"
    text = (
        "# Rivers\n\n- **Seine**, *slow*\n- `Loire`\n\n2. two\n3. three\n\n```js\n<b>1 * 2 * 3</b>\n\n```\n\n"
        f"{hostile}\na * b * c\n\nשלום"
    )
    async with visiting(browser, run) as page:
        await ask(page, played(*text))
        await state(page, "done")
        answer = page.locator("#answer")
        await expect(answer.get_by_role("heading", name="Rivers")).to_be_visible()
        await expect(answer.locator("ul > li")).to_have_text(["Seine, slow", "Loire"])
        await expect(answer.locator("li strong")).to_have_text("Seine")
        await expect(answer.locator("li em")).to_have_text("slow")
        await expect(answer.locator("ol")).to_have_attribute("start", "2")
        await expect(answer.locator("pre code")).to_have_text("<b>1 * 2 * 3</b>")
        await expect(answer.get_by_role("link")).to_have_text(["b"])
        await expect(answer.locator("p").first).to_have_text(
            "<img src=x onerror='window.hit = 1'> [a](javascript:alert(1)) b\na * b * c", use_inner_text=True
        )
        assert await page.evaluate("window.hit") is None
        assert await answer.locator("p").last.evaluate("(p) => getComputedStyle(p).direction") == "rtl"


async def test_the_page_is_accessible(browser: Browser, run: Run) -> None:
    async with visiting(browser, run) as page:
        await assert_accessible(page)
        await ask(page, played("# Rivers\n\n- [one](https://example.com)\n\n```\n1 * 2\n```\n\nend"))
        await state(page, "done")
        await assert_accessible(page)
        await page.unroute("**/ai")
        await page.route("**/ai", lambda route: route.abort())
        await page.get_by_label("Your question").fill("Why?")
        await page.keyboard.press("Enter")
        await state(page, "failed")
        await assert_accessible(page)


async def test_an_answer_is_copied_as_the_model_wrote_it(browser: Browser, run: Run) -> None:
    async with visiting(browser, run, permissions=["clipboard-read", "clipboard-write"]) as page:
        await ask(page, played("**One**", "\n\n", "two"))
        await page.get_by_role("button", name="Copy").click()
        await expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert await page.evaluate("navigator.clipboard.readText()") == "**One**\n\ntwo"


async def test_a_cut_answer_shows_the_limit(browser: Browser, run: Run) -> None:
    async with visiting(browser, run) as page:
        await ask(page, played("One", finish="length"))
        await expect(page.locator("#figures")).to_contain_text("Cut at the length limit · 1 token")


async def test_two_thousand_tokens_at_once_keep_the_page_responsive(browser: Browser, run: Run) -> None:
    async with visiting(browser, run) as page:
        await page.evaluate(
            """() => {
                window.tasks = [];
                const note = (list) => tasks.push(...list.getEntries().map((entry) => entry.duration));
                new PerformanceObserver(note).observe({ type: "longtask" });
            }"""
        )
        await ask(page, played(*(f"word{n} **strong** \n\n" if n % 20 == 0 else f"word{n} " for n in range(2000))))
        await state(page, "done")
        await expect(page.locator("#figures")).to_contain_text("2000 tokens")
        await page.wait_for_timeout(200)
        # On an idle machine, the longest task takes 50 ms.
        assert await page.evaluate("Math.max(0, ...tasks)") < 400
        await page.evaluate("setTimeout(() => { for (const end = Date.now() + 500; Date.now() < end; ); })")
        await page.wait_for_function("Math.max(0, ...tasks) > 400", timeout=5_000)  # the observer reports long tasks


async def test_stopping_with_only_the_keyboard(browser: Browser, run: Run) -> None:
    async with visiting(browser, run) as page:
        await page.keyboard.type("Who are you?")
        await page.keyboard.press("Enter")
        await state(page, "answering")
        await page.keyboard.press("Escape")
        await state(page, "stopped")
        await expect(page.locator("#figures")).to_contain_text("Stopped, charged as a full-length answer · ")
        await expect(page.get_by_label("Your question")).to_be_focused()


async def test_the_wait_is_counted_down_and_then_over(browser: Browser, run: Run) -> None:
    async with visiting(browser, run) as page:
        # The page's clock; the gateway's own window stays full.
        await page.clock.install()
        for _ in range(RATE):
            await page.evaluate(
                """async () => (await import("/lib/ai.js")).streamComplete("?", () => { throw 0 }).catch(() => {})"""
            )
        await page.get_by_label("Your question").fill("One more?")
        await page.keyboard.press("Enter")
        await state(page, "failed")
        await expect(page.get_by_role("alert")).to_contain_text("That was a lot of questions")
        again = page.locator("#again")
        await expect(again).to_be_disabled()
        await expect(again).to_have_text(re.compile(r"^Try again in \d\d s$"))
        await expect(page.get_by_role("button", name="Ask", exact=True)).to_be_disabled()
        await expect(page.get_by_label("Your question")).to_have_value("One more?")
        await page.clock.run_for(61_000)
        await expect(again).to_be_enabled()
        await expect(again).to_have_text("Try again")


async def test_switched_off(browser: Browser, run: Run) -> None:
    off = run.folder / "inference.off"
    off.touch()
    try:
        async with visiting(browser, run) as page:
            await page.get_by_label("Your question").fill("Anyone?")
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("alert")).to_contain_text("The model is switched off")
            await expect(page.locator("#again")).to_be_hidden()
    finally:
        off.unlink()


async def test_the_page_has_one_address(run: Run) -> None:
    """At another host name the page would have another origin, which the gateway refuses."""
    async with httpx.AsyncClient(trust_env=False) as http:
        response = await http.get(f"http://localhost:{run.port + 1}/")
    assert (response.status_code, response.headers["Location"]) == (302, run.demo)


async def test_the_curl_line_streams_when_pasted(run: Run) -> None:
    require("curl")
    shell = await asyncio.create_subprocess_shell(f"{run.curl} -s", stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(shell.communicate(), 20)
    assert output.startswith(b'data: {"token":"I"}\n\n')
    assert b"\nevent: done\n" in output


async def test_the_printed_key_is_the_accounts(run: Run) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"Authorization": f"Bearer {run.api_key}"}
        response = await http.get(f"http://localhost:{run.port}/account/apps", headers=headers)
    assert [app["name"] for app in response.json()] == ["demo", "hello"]


async def test_only_the_user_can_read_the_keys(run: Run) -> None:
    assert stat.S_IMODE((run.folder / "keys.json").stat().st_mode) == 0o600


async def test_a_second_run_names_the_first(run: Run) -> None:
    second = await start(run.port, run.folder)
    await second.read()
    assert await second.process.wait() == 1
    assert second.said.startswith(f"Already running at {run.demo}")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize(
    ("offset", "who"),
    [(0, "gateway"), (1, "demo app"), (2, "model stand-in"), (3, "database"), (4, "hosted apps")],
)
async def test_a_port_in_use_prints_one_line(address: str, offset: int, who: str, tmp_path: Path) -> None:
    first = five_free_ports()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    message = rf"^Port {first + offset} is in use, and the {who} needs it\. [^\n]+$"
    with socket.create_server((address, first + offset), family=family), pytest.raises(StartFailed, match=message):
        await dev.run_service(Layout(first, tmp_path))


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

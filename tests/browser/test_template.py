"""The templates as an app's users see them: built, served at the app's address, with the real gateway."""

import asyncio
import os
import re
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, Route, expect

from capsule_gateway.cli.folders import write_template
from gateway.deploys.templates import TEMPLATES
from tests.browser.axe import DESKTOP, EVERY_LOOK, assert_accessible, assert_fits
from tests.browser.packages import require
from tests.browser.visitor import Folder
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.fakes.server import HANG, answer
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import DOMAIN, App, Gateway
from tests.support.programs import miss
from tests.support.redis_servers import free_port
from workers.sandbox.tools import find_node

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "network")
BUILD_SECONDS = 300  # packages are downloaded
PASSWORD = "correct horse battery"
RIVERS = "# Rivers\n\n- **Seine**, *slow*\n- [Loire](https://example.com/loire)\n\n```js\n<b>1 * 2</b>\n```\n\nשלום"


@dataclass
class Notes:
    """The template `full` in use: the folder, the address of its pages, and the app at the gateway."""

    folder: Path
    address: str
    app: App


@module_fixture
async def notes(gw: Gateway, backend: FakeAppBackend, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Notes]:
    folder, port = tmp_path_factory.mktemp("notes") / "app", free_port()
    account = await gw.account()
    app = await account.app(backend, auth={"kind": "jwks", "url": f"http://127.0.0.1:{port}/api/auth/jwks"})
    write_template(app.name, "full", folder)
    path = find_node(os.environ["PATH"], tmp_path_factory.mktemp("node"))
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]}
    await asyncio.to_thread(build, folder, {**environment, "VITE_SERVICE_AI_URL": gw.address + app.path})
    address = f"http://{app.name}.{DOMAIN}:{port}"
    environment |= {"HOST": "127.0.0.1", "PORT": str(port), "DATA_DIR": str(folder / "data"), "APP_URL": address}
    with serve(folder, environment):
        yield Notes(folder, address, app)


def build(folder: Path, environment: dict[str, str]) -> None:
    for command in ("npm ci", "npm run build", "npm test"):
        done = subprocess.run(
            command.split(), cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS
        )
        output = done.stdout + done.stderr
        if command == "npm ci" and done.returncode and any(word in output for word in UNREACHABLE):
            miss("npm")
        assert done.returncode == 0, output


@contextmanager
def serve(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Runs the app. It must end at once, and without an error, when it is told to."""
    with subprocess.Popen(["node", "server.ts"], cwd=folder, env=environment, stdout=subprocess.PIPE) as app:
        try:
            assert app.stdout
            assert app.stdout.readline().startswith(b"Listening on ")
            yield
        finally:
            app.terminate()
            assert app.wait(10) == 0


@asynccontextmanager
async def visiting(browser: Browser, address: str) -> AsyncIterator[Page]:
    """Opens the app as a new person. Its scripts must not fail."""
    context = await browser.new_context(permissions=["clipboard-write"])
    forwarded = f"192.0.2.{secrets.randbelow(256)}"  # as the host would: each address may sign in only so often

    async def forward(route: Route) -> None:
        await route.continue_(headers={**route.request.headers, "x-forwarded-for": forwarded})

    await context.route("**/api/auth/sign-*/*", forward)
    page = await context.new_page()
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    await page.goto(address)
    yield page
    await context.close()
    assert not broken


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, notes: Notes) -> AsyncIterator[Page]:
    async with visiting(browser, notes.address) as page:
        await sign_up(page)
        yield page


async def sign_up(page: Page) -> str:
    """Creates an account by keyboard, and returns its e-mail."""
    email = f"{secrets.token_hex(4)}@example.com"
    await page.get_by_role("button", name="Create an account").press("Enter")
    await expect(page.get_by_label("Name")).to_be_focused()
    for text in ("Ana", email, PASSWORD):
        await page.keyboard.type(text)
        await page.keyboard.press("Tab" if text != PASSWORD else "Enter")
    await expect(page.get_by_role("heading", name="Notes")).to_be_focused()
    return email


async def ask(page: Page, prompt: str) -> Locator:
    """Asks by keyboard, and returns the turn of the conversation."""
    await page.get_by_label("Your question").fill(prompt)
    await page.keyboard.press("Enter")
    return page.locator("article").last


async def look(page: Page, view: str = "") -> None:
    """Checks the page in every look. A phone shows only the view."""
    await page.evaluate("(view) => (location.hash = view)", view)
    await assert_accessible(page, EVERY_LOOK)
    await assert_fits(page, 1440, 390)
    await page.set_viewport_size(DESKTOP)


async def test_people_sign_up_out_and_in(browser: Browser, notes: Notes) -> None:
    async with visiting(browser, notes.address) as page:
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        await look(page)
        email = await sign_up(page)
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_label("E-mail")).to_be_visible()
        for password in ("wrong password", PASSWORD):
            await page.get_by_label("E-mail").fill(email)
            await page.get_by_label("Password").fill(password)
            await page.keyboard.press("Enter")
            if password != PASSWORD:
                await expect(page.get_by_role("alert")).to_have_text("The e-mail or the password is not right.")
        await expect(page.get_by_role("heading", name="Notes")).to_be_visible()


async def test_notes_stay_change_and_come_back(page: Page) -> None:
    text, items = page.get_by_label("New note"), page.locator("#list li")
    await expect(page.locator("#none")).to_be_visible()
    for words in ("Call Ana", "Buy <b>milk</b>"):
        await text.fill(words)
        await page.get_by_role("button", name="Save note").click()
        await expect(items.first).to_contain_text(words)
    await page.reload()
    await expect(items).to_have_count(2)
    await items.last.get_by_role("button", name="Edit").click()
    await page.get_by_label("Change the note").fill("Call Ben")
    await page.keyboard.press("Control+Enter")
    await expect(items.first).to_contain_text("Call Ben")
    await items.first.get_by_role("button", name="Delete").click()
    await expect(items).to_have_count(1)
    await page.get_by_role("button", name="Undo").click()
    await expect(items.first).to_contain_text("Call Ben")
    await look(page)


async def test_an_answer_streams_and_becomes_a_note(page: Page, provider: FakeProvider) -> None:
    await look(page, "#ask")
    go_on = asyncio.Event()
    prompt = provider.plays(ROLE, chunk("Bon"), go_on, chunk("jour"), chunk(finish="stop", usage=(1, 2)), DONE)
    turn = await ask(page, prompt)
    await expect(turn.locator(".answer")).to_have_text("Bon")
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    go_on.set()
    await expect(turn.locator(".answer")).to_have_text("Bonjour")
    await expect(turn.locator(".answer")).to_have_attribute("aria-busy", "false")
    await turn.get_by_role("button", name="Save as note").click()
    await expect(page.locator("#list li").first).to_contain_text("Bonjour")
    await page.get_by_role("button", name="New conversation").click()
    await expect(page.locator("article")).to_have_count(0)


async def test_markdown_shows_and_markup_stays_text(page: Page, provider: FakeProvider) -> None:
    hostile = "<img src=x onerror='window.hit = 1'> [a](javascript:alert(1))"
    turn = await ask(page, provider.plays(tokens(*re.split(r"(?<= )", f"{RIVERS}\n\n{hostile}"))))
    shown = turn.locator(".answer")
    await expect(shown.get_by_role("heading", name="Rivers")).to_be_visible()
    await expect(shown.locator("ul > li")).to_have_text(["Seine, slow", "Loire"])
    await expect(shown.locator("pre code")).to_have_text("<b>1 * 2</b>")
    await expect(shown.get_by_role("link")).to_have_text(["Loire"])
    await expect(shown.locator("p").last).to_have_text(hostile)
    assert await page.evaluate("window.hit") is None
    await look(page, "#ask")


async def test_stop_keeps_what_has_arrived(page: Page, provider: FakeProvider) -> None:
    for way in ("button", "key"):
        prompt = provider.plays(ROLE, chunk("Bon"), HANG)
        turn = await ask(page, prompt)
        await expect(turn.locator(".answer")).to_have_text("Bon")
        stop = page.get_by_role("button", name="Stop")
        await (stop.click() if way == "button" else page.keyboard.press("Escape"))
        await expect(turn).to_contain_text("Stopped")
        await expect(turn.locator(".answer")).to_have_text("Bon")
        await expect(page.get_by_role("button", name="Ask", exact=True)).to_be_visible()
        await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), 5)


async def test_a_failure_is_explained_and_tried_again_and_a_limit_says_when(page: Page, provider: FakeProvider) -> None:
    prompt = provider.plays(answer(500))
    turn = await ask(page, prompt)
    await expect(turn.get_by_role("alert")).to_have_text(re.compile("The model failed.*It could not finish", re.DOTALL))
    await look(page, "#ask")
    provider.plays(tokens("Better"), prompt=prompt)
    await turn.get_by_role("button", name="Try again").click()
    await expect(turn.locator(".answer")).to_have_text("Better")
    await expect(turn.get_by_role("alert")).to_be_hidden()

    body = '{"error": {"code": "USER_RATE_LIMITED", "message": "Wait."}}'
    headers = {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": "Retry-After", "Retry-After": "3"}
    await page.route("**/ai", lambda route: route.fulfill(status=429, body=body, headers=headers))
    turn = await ask(page, "Why?")
    await expect(turn.get_by_role("alert")).to_contain_text("That was a lot of questions")
    await expect(turn.get_by_role("button", name=re.compile(r"^Try again in \d s$"))).to_be_disabled()
    await expect(turn.get_by_role("button", name="Try again", exact=True)).to_be_enabled()


async def test_without_the_model_or_the_backend(page: Page) -> None:
    await page.route("**/api/**", lambda route: route.abort())
    await page.get_by_label("New note").fill("Lost?")
    await page.get_by_role("button", name="Save note").click()
    await expect(page.locator("#write").get_by_role("alert")).to_contain_text("The app does not answer.")
    await expect(page.get_by_label("New note")).to_have_value("Lost?")
    turn = await ask(page, "Why?")
    await expect(turn.get_by_role("alert")).to_contain_text("You are not signed in")
    await page.reload()
    await expect(page.get_by_role("heading", name="The app does not answer")).to_be_visible()


async def test_the_types_hold(notes: Notes) -> None:
    check_types("-p", notes.folder)


async def test_the_types_of_static_hold(tmp_path: Path) -> None:
    write_template("notes", "static", tmp_path)
    strict = ["--allowJs", "--checkJs", "--strict", "--noUncheckedIndexedAccess", "--noEmit", "--types", ""]
    modern = ["--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"]
    check_types(*strict, *modern, tmp_path / "site" / "page.js", TEMPLATES / "env.d.ts")


def check_types(*arguments: str | Path) -> None:
    command = [require(".bin/tsc"), *arguments]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert checked.returncode == 0, checked.stdout


async def test_static_asks_with_the_token_of_a_backend_elsewhere(
    browser: Browser, gw: Gateway, backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    app = await gw.app(backend)
    write_template(app.name, "static", tmp_path / "app")
    environment = {**os.environ, "VITE_SERVICE_AI_URL": gw.address + app.path}
    subprocess.run(["sh", "build.sh"], cwd=tmp_path / "app", env=environment, check=True, timeout=10)
    async with Folder(tmp_path / "app" / "dist") as site:
        address = f"http://{app.name}.{DOMAIN}:{site.port}"
        async with visiting(browser, address) as page:
            await expect(page).to_have_title(app.name)
            await look(page)
            prompt = provider.plays(tokens(*re.split(r"(?<= )", RIVERS)))
            await page.get_by_label("Your question").fill(prompt)
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("alert")).to_contain_text("You are not signed in")
            await look(page)
            source = site.folder / "auth.js"
            source.write_text(source.read_text().replace('BACKEND = ""', f'BACKEND = "{address}"'))
            site.token = app.token()
            await page.reload()
            await page.get_by_label("Your question").fill(prompt)
            await page.keyboard.press("Enter")
            await expect(page.locator("#answer").get_by_role("heading", name="Rivers")).to_be_visible()
            await expect(page.locator("main[data-state=done]")).to_be_visible()
            await look(page)

"""From the public page to an answer of the model, without an operator: a real browser, a real shell, a real deploy."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from gateway.api.client_wheel import client_wheel
from tests.browser.axe import assert_accessible
from tests.browser.dashboard import EXPECTED, HURRY
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import Account, App
from tests.support.deployment import Host, hosting
from tests.support.gateway_process import Gateway
from tests.support.wheel import link_requirements

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def host(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    folder = tmp_path_factory.mktemp("onboarding")
    async with hosting(provider, folder, GATEWAY_REGISTRATIONS_PER_DAY="1") as host:
        await host.worker("deploys")
        yield host


async def paste(commands: str, folder: Path, given: str = "", **environment: str) -> str:
    """Returns the output of a shell that runs these lines. `given` is its standard input."""
    path = f"{folder / '.local' / 'bin'}:{os.environ['PATH']}"
    variables = {"PATH": path, "HOME": str(folder), **environment}
    shell = ["bash", "-e", "-c", commands]
    done = await asyncio.to_thread(
        subprocess.run, shell, cwd=folder, env=variables, input=given, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (commands, done.stdout, done.stderr)
    return done.stdout


async def test_a_newcomer_needs_no_operator(
    browser: Browser, host: Host, backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    gw = host.gateway
    context = await browser.new_context(viewport={"width": 390, "height": 780}, reduced_motion="reduce")
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = await context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.set_default_timeout(15_000)
    await page.add_init_script(HURRY)

    key = await register(page, gw)
    steps = page.get_by_role("region", name="Get started")
    await expect(steps).to_contain_text("0 of 3 done")
    await assert_accessible(page)

    # Create an app: the page shows the service's error, then the service accepts the name.
    await steps.get_by_label("Name").fill("No Name")
    await page.keyboard.press("Enter")
    await expect(steps.get_by_role("alert")).to_contain_text("a DNS label")
    await steps.get_by_label("Name").fill("newcomer")
    await page.keyboard.press("Enter")
    await expect(steps).to_contain_text("1 of 3 done")
    await expect(steps.get_by_role("heading", name="Publish it")).to_be_focused()

    # Publish it, with the commands from the page.
    await paste(await copied(page, steps, "Install the command line"), tmp_path, PIP_NO_DEPS="1", PIP_NO_INDEX="1")
    wheel = tmp_path / client_wheel().name
    wheel.write_bytes(client_wheel().content)
    assert not link_requirements(wheel, tmp_path / ".local" / "share" / "capsule" / "environment")
    commands = await copied(page, steps, "Publish with the command line")
    assert gw.address in commands
    assert "capsule new newcomer\ncd newcomer\ncapsule deploy" in commands
    commands = commands.replace("new newcomer", "new newcomer --template static")  # needs no packages
    done = await paste(commands, tmp_path, given=f"{key}\n")
    assert "Live at https://newcomer.apps.localhost" in done, done
    assert "newcomer</title>" in await host.page("newcomer")
    await expect(steps).to_contain_text("2 of 3 done", timeout=20_000)
    await assert_accessible(page)

    # Set how tokens are verified, then call the model.
    await steps.get_by_role("link", name="set how their tokens are verified").click()
    await page.get_by_label("URL of the key set").fill(backend.jwks_url)
    await page.locator("#save-tokens").click()
    await expect(page.get_by_role("status")).to_have_text("Saved.")
    await expect(page.get_by_text("The key set has")).to_be_visible()
    await page.get_by_label("Check a token").fill(backend.token())
    await page.locator("#check").click()
    await expect(page.get_by_text("Valid. The user is ana.").first).to_be_visible()
    await page.get_by_label("Check a token").fill(backend.token(expires=-60))
    await page.locator("#check").click()
    await expect(page.get_by_text("Not valid: it has expired.").first).to_be_visible()
    await page.goto(f"{gw.address}/dashboard#/")
    ask = await copied(page, steps, "From a terminal")
    app = App(Account(gw, "", key), "newcomer", backend)
    output = await paste(ask, tmp_path, USER_TOKEN=app.token())
    assert "event: done" in output, output
    assert "What is a capsule?" in provider.prompts
    done_steps = page.get_by_role("region", name="You are all set")
    await expect(done_steps).to_contain_text("3 of 3 done", timeout=20_000)
    await done_steps.get_by_role("button", name="Dismiss").click()
    await page.reload()
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await expect(page.locator(".steps")).to_have_count(0)

    # The free plan has room for one app.
    await page.get_by_role("link", name="New app").click()
    await expect(page.get_by_role("heading", name="New app")).to_be_focused()
    await assert_accessible(page)
    await page.get_by_label("Name").fill("second")
    await page.keyboard.press("Enter")
    refusal = "Your plan allows 1 app; delete one, or choose a larger plan."
    await expect(page.get_by_role("main").get_by_role("alert")).to_have_text(refusal)
    await page.get_by_role("link", name="Overview").click()

    await delete(page)
    await expect(page.get_by_text("No apps yet")).to_be_visible()
    assert (await gw.platform("GET", "apps/newcomer")).status_code == 404
    gw.confidential |= {cookie["value"] for cookie in await context.cookies()}
    assert key not in str(await context.storage_state())
    await context.close()
    assert not [text for text in complaints if EXPECTED not in text]


async def register(page: Page, gw: Gateway) -> str:
    """Registers with only the keyboard, from the public page to the dashboard. Returns the key."""
    await page.goto(f"{gw.address}/#begin")
    await page.get_by_label("Your name").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#refusal")).to_contain_text("Enter a name")
    await page.keyboard.type("Newcomer & Sons <b>")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Your API key")).to_be_focused()
    key = await page.locator("#key code").inner_text()
    gw.confidential.add(key)
    await assert_accessible(page)
    await page.set_viewport_size({"width": 390, "height": 780})
    await page.get_by_role("button", name="Copy", exact=True).focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Copied")).to_be_focused()
    assert await page.evaluate("navigator.clipboard.readText()") == key
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await expect(page).to_have_url(f"{gw.address}/dashboard")
    await expect(page.locator("#account")).to_have_text("Newcomer & Sons <b>")
    return key


async def copied(page: Page, steps: Locator, label: str) -> str:
    await steps.get_by_role("button", name=f"Copy: {label}").click()
    text: str = await page.evaluate("navigator.clipboard.readText()")
    return text


async def delete(page: Page) -> None:
    """Deletes the app, and checks that nothing happens until its name is typed."""
    await page.get_by_role("link", name="newcomer", exact=True).click()
    await page.get_by_role("link", name="Settings", exact=True).click()
    await page.get_by_role("link", name="Delete", exact=True).click()
    await page.get_by_role("button", name="Delete the app").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("To confirm, type newcomer")).to_be_focused()
    await assert_accessible(page)
    await page.keyboard.type("newcome")
    await page.keyboard.press("Enter")
    await expect(dialog).to_be_visible()
    await page.keyboard.type("r")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()


async def test_a_days_registrations_that_are_used_up(browser: Browser, host: Host) -> None:
    """The page shows it when it opens, and when the last registration was used meanwhile."""
    gw = host.gateway
    page = await browser.new_page()
    first = await page.request.post(f"{gw.address}/register", data={"name": "First"})
    assert first.status in (201, 429)  # 429 if the test above has registered
    await page.goto(gw.address)
    await expect(page.get_by_text("Registration opens again at 00:00 UTC")).to_be_visible()
    await expect(page.get_by_label("Your name")).to_be_hidden()
    await page.evaluate("document.querySelector('#register').hidden = false")
    await page.get_by_label("Your name").fill("Late")
    await page.keyboard.press("Enter")
    await expect(page.locator("#refusal")).to_contain_text("registrations are used up")
    await page.close()


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://newcomer.apps.localhost"])
async def test_another_sites_page_registers_nobody(host: Host, origin: str) -> None:
    answer = await host.gateway.http.post("/register", json={"name": "x"}, headers={"Origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "CSRF_REFUSED")
    assert "without an Origin header" in answer.json()["error"]["message"]

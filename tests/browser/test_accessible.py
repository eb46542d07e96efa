"""Every page meets WCAG 2.2 AA as far as a program can check it.

That is by axe-core, in both color schemes, on a desktop and a phone; and with zoom and a keyboard.
"""

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.axe import EVERY_LOOK, assert_accessible, assert_fits, assert_usable, open_view
from tests.browser.dashboard import SECTIONS, VIEWS, Holder, visiting
from tests.fakes import FakeAppBackend
from tests.fakes.receiver import FakeReceiver
from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.polling import wait_until
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def assert_good(page: Page) -> None:
    await assert_accessible(page, EVERY_LOOK)
    await assert_usable(page)


async def test_the_dashboard(
    browser: Browser, gw: Gateway, worker: Worker, backend: FakeAppBackend, receiver: FakeReceiver
) -> None:
    async with visiting(browser, gw) as holder:
        page, shown = holder.page, await fill(holder, backend, receiver)
        await holder.go()
        await expect(page.get_by_label("API key")).to_be_visible()
        await assert_good(page)
        await holder.log_in()
        await assert_good(page)
        views = {**VIEWS, **shown, "new-app": "New app"}
        del views[""]  # the login has opened it
        for view, heading in views.items():
            await open_view(page, view)
            await expect(holder.heading(heading)).to_be_visible()
            await assert_good(page)
        await page.evaluate("location.hash = '#/hooks'")
        await holder.button("Revoke Nightly").click()
        await expect(page.get_by_role("dialog")).to_be_visible()
        await assert_accessible(page, EVERY_LOOK)


async def fill(holder: Holder, backend: FakeAppBackend, receiver: FakeReceiver) -> dict[str, str]:
    """Creates requests, a hook, deploys and deliveries. Returns the detail views and their headings."""
    account = holder.account
    app = await account.app(backend, repository={"url": "https://git.example.com/a", "branch": "main"})
    await app.ask("x")
    await account.call("POST", f"/account/apps/{app.name}/hooks", {"name": "Nightly"})
    failed, queued = await holder.deploy(app.name), await holder.deploy(app.name, "preview")
    await holder.report(failed, "build", ok=False, reason="exit status 1")
    holder.log(queued, "1782979200000\x1fnpm run build\n")
    await holder.suffer(app.name)
    await account.set_webhook(receiver.url())
    sent = (await account.call("POST", "/account/webhook/test", {"type": "app.crashed"})).json()["id"]
    await wait_until(lambda: account.get("/account/deliveries"), holds=lambda answer: answer.json())
    return {
        f"deploys/{failed}": f"Deploy of {app.name}",
        f"deploys/{queued}": f"Deploy of {app.name}",
        f"apps/{app.name}": app.name,
        f"apps/{app.name}/deploys": "Deploys",
        f"apps/{app.name}/requests": "Requests",
        f"apps/{app.name}/usage": "Usage",
        f"apps/{app.name}/data": "Data",
        f"apps/{app.name}/try": f"Try {app.name}",
        **{f"apps/{app.name}/settings/{section}": "Settings" for section in SECTIONS},
        "account": "Account",
        f"webhooks/{sent}": "app.crashed",
    }


async def test_the_operators_page(browser: Browser, gw: Gateway, backend: FakeAppBackend) -> None:
    context = await browser.new_context(base_url=gw.address)
    page = await context.new_page()
    await page.goto("/ops")
    await expect(page.get_by_label("Operator token")).to_be_focused()
    await assert_good(page)
    await page.get_by_label("Operator token").fill(OPERATOR)
    await page.keyboard.press("Enter")
    await expect(page.locator("#live")).to_have_text("Live")
    await assert_good(page)
    app = await gw.app(backend)
    await app.ask("x")
    views = ("?period=24h", "accounts", f"accounts/{app.account.id}", "apps", f"apps/{app.name}")
    for view in (*views, "deploys", "spending", "system", "audit"):
        await open_view(page, view)
        await assert_good(page)
        if view == "system":
            await expect(page.locator("#workers")).not_to_be_empty()
            await expect(page.get_by_role("heading", name="Pods")).to_be_hidden()  # they are Kubernetes'
    gw.confidential |= {cookie["value"] for cookie in await context.cookies()}
    await context.close()


@pytest.mark.parametrize("path", ["", "/docs", "/docs/deploys", "/docs/reference"])
async def test_the_public_pages(browser: Browser, gw: Gateway, path: str) -> None:
    page = await browser.new_page()
    await page.goto(gw.address + path)
    await expect(page.get_by_role("heading").first).to_be_visible()
    await assert_good(page)
    await assert_fits(page, 980, 1440)
    await page.close()

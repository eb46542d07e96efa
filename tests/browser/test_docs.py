"""The documentation in a real browser: search by keyboard, copying code, the reader's app, and accessibility."""

import pytest
from playwright.async_api import Page, expect

from tests.browser.axe import assert_accessible
from tests.browser.dashboard import Holder, withholding
from tests.fakes import FakeAppBackend
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_search_by_keyboard(page: Page, gw: Gateway) -> None:
    """A search that was cleared finds nothing, also if the index arrives only then."""
    await page.goto(f"{gw.address}/docs")
    field = page.get_by_role("combobox", name="Search the documentation")
    async with page.expect_event("requestfinished"), withholding(page, "**/docs/search.json") as answered:
        await field.fill("webhook")
        await answered.wait()
        await field.fill("")
    await page.evaluate("new Promise(requestAnimationFrame)")
    await expect(page.locator("#found")).to_be_hidden()

    await page.goto(f"{gw.address}/docs")
    await page.keyboard.press("/")
    await expect(field).to_be_focused()
    await field.press_sequentially("rotate the secret")
    await expect(page.get_by_role("option").first).to_be_visible()
    await assert_accessible(page)
    await page.keyboard.press("ArrowDown")
    await expect(page.get_by_role("option").first).to_have_attribute("aria-selected", "true")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/docs/*")


async def test_code_can_be_copied_and_a_link_to_an_operation_unfolds_it(page: Page, gw: Gateway) -> None:
    await page.goto(f"{gw.address}/docs/webhooks")
    block = page.locator(".code").first
    await block.get_by_role("button", name="Copy").click()
    await expect(block.get_by_role("button")).to_have_text("Copied")
    assert await page.evaluate("navigator.clipboard.readText()") == await block.locator("pre").text_content()
    await page.goto(f"{gw.address}/docs/reference#get-account")
    await expect(page.locator("#get-account pre")).to_contain_text(f"curl -X GET '{gw.address}/account'")


async def test_examples_name_the_readers_app(holder: Holder, backend: FakeAppBackend) -> None:
    app = await holder.account.app(backend)
    await holder.log_in()
    await holder.page.goto(f"{holder.gateway.address}/docs/api")
    await expect(holder.page.locator("main code").filter(has_text=f"/capsule/{app.name}/").first).to_be_visible()

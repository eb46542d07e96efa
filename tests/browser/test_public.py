"""The public page, the page for unknown addresses and the documentation in a real browser."""

import pytest
from playwright.async_api import Page, expect

from tests.browser.axe import EVERY_LOOK, assert_accessible
from tests.browser.conftest import EXAMPLE
from tests.browser.dashboard import Holder
from tests.fakes import FakeAppBackend
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

END = "its pages, its backend and its data."


async def test_reduced_motion_shows_the_whole_answer_and_code_can_be_copied(page: Page, gw: Gateway) -> None:
    await page.emulate_media(reduced_motion="reduce")
    await page.goto(gw.address)
    answer = page.locator("#answer p")
    await answer.scroll_into_view_if_needed()
    await expect(answer).to_contain_text(END)
    await expect(page.locator(".rest")).to_have_count(0)
    for name, start in (("Code", "import { streamComplete }"), ("How to register", "curl -X POST")):
        await page.get_by_role("button", name=f"Copy: {name}").click()
        copied: str = await page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith(start)
        assert "Copy" not in copied


async def test_the_page_shows_what_the_settings_say(page: Page, gw: Gateway) -> None:
    await page.goto(gw.address)
    link = page.get_by_role("link", name="Open the live example")
    assert await link.get_attribute("href") == EXAMPLE
    limits = ("30 requests per minute", "50 registrations per day")
    for text in ("€0.15", "€10.00", *limits, "never writes prompts or completions"):
        await expect(page.get_by_text(text).first).to_be_visible()
    await page.get_by_role("link", name="Log in", exact=True).click()
    await expect(page.get_by_label("API key")).to_be_focused()


async def test_an_unknown_address(page: Page, gw: Gateway) -> None:
    await page.goto(f"{gw.address}/nothing")
    await expect(page.get_by_role("heading", name="There is no page at this address")).to_be_visible()
    await expect(page.locator("main")).to_have_css("max-width", "512px")  # the style applies
    await assert_accessible(page, EVERY_LOOK)
    await page.get_by_role("link", name="Go to the home page").click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("Three things")


async def test_search_by_keyboard(page: Page, gw: Gateway) -> None:
    await page.goto(f"{gw.address}/docs")
    field = page.get_by_role("combobox", name="Search the documentation")
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

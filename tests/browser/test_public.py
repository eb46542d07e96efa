"""The public page in a real browser: its example, its copy buttons, its links; and the page for unknown addresses."""

import pytest
from playwright.async_api import Page, expect

from tests.browser.axe import EVERY_LOOK, assert_accessible
from tests.browser.conftest import EXAMPLE
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

END = "its pages, its backend and its data."


async def test_the_example_plays_token_by_token(page: Page, gw: Gateway) -> None:
    await page.goto(gw.address)
    answer = page.locator("#answer p")
    whole = await answer.text_content()
    await answer.scroll_into_view_if_needed()
    await expect(page.locator(".rest")).not_to_be_empty()
    assert await answer.text_content() == whole, "nothing moves while it plays"
    await expect(page.locator(".rest")).to_be_empty()
    await page.get_by_role("button", name="Play again").click()
    await expect(page.locator(".rest")).not_to_be_empty()
    await expect(page.locator(".rest")).to_be_empty()
    assert await answer.text_content() == whole


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


async def test_the_picture_follows_the_color_scheme(page: Page, gw: Gateway) -> None:
    await page.goto(gw.address)
    picture = page.locator("picture img")
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        await page.wait_for_function(
            "(name) => document.querySelector('picture img').currentSrc.includes(name)", arg=f"overview-{scheme}"
        )
        await page.wait_for_function("document.querySelector('picture img').naturalWidth === 1200")
    assert await picture.get_attribute("alt")


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

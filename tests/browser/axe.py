"""Runs axe-core in a page: the checks of WCAG 2.2 AA that a program can make."""

from typing import Any

from playwright.async_api import Page, expect

from tests.browser.packages import require

DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 780}
LOOKS = [("light", DESKTOP), ("dark", PHONE)]
EVERY_LOOK = [*LOOKS, ("light", PHONE), ("dark", DESKTOP)]
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
FAULTS = """async (tags) => {
    const { violations } = await axe.run(document, { runOnly: tags });
    const about = ({ target, failureSummary }) => `${target}: ${failureSummary}`;
    return violations.map(({ id, nodes }) => [id, ...nodes.map(about)]);
}"""


async def open_view(page: Page, view: str) -> None:
    """Marks the present heading, which may have the same words and the focus, and waits for that of the view."""
    address = f"#/{view}"
    await page.locator("h1").evaluate("(h1, address) => { h1.dataset.old = ''; location.hash = address }", address)
    await expect(page.locator("h1:not([data-old])")).to_be_focused()


async def assert_accessible(page: Page, looks: list[Any] = LOOKS) -> None:
    """Checks the page in each look: a color scheme and a size of the window."""
    for scheme, size in looks:
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await page.set_viewport_size(size)
        # Of a transition that is canceled, `finished` rejects.
        await page.evaluate("Promise.allSettled(document.getAnimations().map((each) => each.finished))")
        if not await page.evaluate("typeof axe === 'object'"):
            await page.evaluate(require("axe-core/axe.min.js").read_text())
        faults: list[Any] = await page.evaluate(FAULTS, TAGS)
        assert not faults, (page.url, scheme, size["width"], faults)

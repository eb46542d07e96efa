"""Checks of WCAG 2.2 AA that a program can make: those of axe-core, and zoom and the keyboard."""

from typing import Any

from playwright.async_api import Page, expect

from tests.browser.packages import require

DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 780}
LOOKS = [("light", DESKTOP), ("dark", PHONE)]
EVERY_LOOK = [*LOOKS, ("light", PHONE), ("dark", DESKTOP)]
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
OF_COLORS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}
FAULTS = """async (runOnly) => {
    const { violations } = await axe.run(document, { runOnly });
    const about = ({ target, failureSummary }) => `${target}: ${failureSummary}`;
    return violations.map(({ id, nodes }) => [id, ...nodes.map(about)]);
}"""

ZOOMED, NARROW = {"width": 640, "height": 430}, {"width": 320, "height": 640}  # a desktop at 200 %, and at 400 %
# What is wider than the page, or beyond its edge and not in a part that scrolls.
CUT = """() => {
    const { scrollWidth, clientWidth } = document.documentElement;
    const scrolls = (it) => it && (getComputedStyle(it).overflowX !== "visible" || scrolls(it.parentElement));
    const beyond = [...document.querySelectorAll("a, button, input, select, textarea, summary")].filter((it) => {
        const { left, right } = it.getBoundingClientRect();
        return it.checkVisibility() && (left < -1 || right > clientWidth + 1) && !scrolls(it.parentElement);
    });
    const wide = scrollWidth > clientWidth ? [`${scrollWidth} > ${clientWidth}`] : [];
    return [...wide, ...beyond.map((it) => it.outerHTML)];
}"""
# The controls that Tab must reach. A group of radio buttons is one stop.
MARK_CONTROLS = """() => {
    const scope = document.querySelector("dialog[open]") ?? document;
    const controls = scope.querySelectorAll("a[href], button, input:not([type=radio]), select, textarea, summary");
    const stops = [...controls].filter((it) => it.checkVisibility() && !it.disabled && it.tabIndex >= 0);
    stops.forEach((it) => (it.dataset.stop = ""));
    return stops.length;
}"""
REACHED = """() => {
    const { activeElement: it } = document;
    const { outlineStyle, outlineWidth } = getComputedStyle(it);
    delete it.dataset.stop;
    const left = [...document.querySelectorAll("[data-stop]")].map((each) => each.outerHTML);
    return [it === document.body || (outlineStyle === "solid" && outlineWidth === "2px") || it.outerHTML, left];
}"""


async def open_view(page: Page, view: str) -> None:
    """Marks the present heading, which may have the same words and the focus, and waits for that of the view."""
    address = f"#/{view}"
    await page.locator("h1").evaluate("(h1, address) => { h1.dataset.old = ''; location.hash = address }", address)
    await expect(page.locator("h1:not([data-old])")).to_be_focused()


async def assert_accessible(page: Page, looks: list[Any] = LOOKS) -> None:
    """Checks the page in each look: a color scheme and a size of the window.

    In a further scheme at the same size, only colors differ.
    """
    widths = set()
    for scheme, size in looks:
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await page.set_viewport_size(size)
        # Of a transition that is canceled, `finished` rejects.
        await page.evaluate("Promise.allSettled(document.getAnimations().map((each) => each.finished))")
        if not await page.evaluate("typeof axe === 'object'"):
            await page.evaluate(require("axe-core/axe.min.js").read_text())
        faults: list[Any] = await page.evaluate(FAULTS, OF_COLORS if size["width"] in widths else TAGS)
        widths.add(size["width"])
        assert not faults, (page.url, scheme, size["width"], faults)


async def assert_fits(page: Page, *widths: int) -> None:
    """Checks that nothing is wider than a window of these widths."""
    for width in widths:
        await page.set_viewport_size({"width": width, "height": 900})
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, (page.url, width)


async def assert_usable(page: Page) -> None:
    """Checks the page at 200 % and 400 %, on a phone, and by keyboard."""
    for size in (ZOOMED, PHONE, NARROW):
        await page.set_viewport_size(size)
        cut = await page.evaluate(CUT)
        assert not cut, (page.url, size["width"], cut)
    await page.set_viewport_size(DESKTOP)
    left = ["all"]
    for _ in range(2 * await page.evaluate(MARK_CONTROLS) + 5):
        await page.keyboard.press("Tab")
        visible, left = await page.evaluate(REACHED)
        assert visible is True, (page.url, "has no visible focus", visible)
        if not left:
            break
    assert not left, (page.url, "cannot be reached", left)

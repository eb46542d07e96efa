"""Previews in the dashboard, and what its pages say of a deploy, in a real browser. The test is the deploy engine."""

from urllib.parse import urlencode

import pytest
from playwright.async_api import expect

from tests.browser.axe import EVERY_LOOK, assert_accessible
from tests.browser.dashboard import Holder

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = {"name": "index.html", "mimeType": "text/html", "buffer": b"<!doctype html><title>Shop</title>"}
WIDTHS = (1440, 390)


async def look(holder: Holder) -> None:
    """Checks the page at both widths."""
    for width in WIDTHS:
        await holder.page.set_viewport_size({"width": width, "height": 900})
        assert await holder.width() <= width
    await holder.page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    await assert_accessible(holder.page, EVERY_LOOK)


async def upload(holder: Holder, app: str, **described: object) -> str:
    path = f"/account/apps/{app}/source?{urlencode(described)}"
    queued = await holder.account.call("PUT", path, content=PAGE["buffer"])
    deploy: str = queued.json()["deployId"]
    return deploy


async def test_a_preview_is_published_found_and_ended(holder: Holder) -> None:
    page, app = holder.page, await holder.app("shop-1", repository=None)
    await holder.app("blog-1")
    await holder.log_in("deploys")
    await holder.button("Publish a preview").click()
    await expect(page.get_by_role("alert").filter(has_text="Choose an app first.")).to_be_visible()
    await page.get_by_label("App", exact=True).select_option(app)
    await holder.button("Publish a preview").click()
    sheet = page.get_by_role("dialog", name=f"Publish a preview of {app}")
    await expect(sheet.get_by_text("https://shop-1--p-preview.apps.localhost")).to_be_visible()
    await expect(sheet.get_by_role("button", name="Publish this branch")).to_have_count(0)
    await sheet.get_by_label("Branch").fill("Fix/The Checkout of Everybody")
    url = "https://shop-1--p-fix-the-checkout-of.apps.localhost"
    await expect(sheet.get_by_text(url)).to_be_visible()
    await sheet.get_by_label("What has changed").fill("Take cards again")
    await look(holder)
    await sheet.get_by_label("Choose a file").and_(sheet.locator("input")).set_input_files(PAGE)
    await expect(holder.heading(f"Deploy of {app}")).to_be_visible()
    await expect(sheet).to_have_count(0)
    deploy = page.url.rpartition("/")[2]
    await holder.report(deploy, "build", "health")
    for fact in ("Preview", "Take cards again", "Fix/The Checkout of Everybody", "first"):
        await expect(page.get_by_role("definition").filter(has_text=fact).first).to_be_visible()
    await expect(page.get_by_role("link", name=url.removeprefix("https://"))).to_be_visible()
    await look(holder)
    await holder.confirm("End preview")
    await expect(page.get_by_text("Ended", exact=True)).to_be_visible()
    await expect(holder.button("End preview")).to_have_count(0)

    app = await holder.app()  # with a repository
    await holder.go(f"apps/{app}/deploys")
    await holder.button("Publish a preview").click()
    sheet = page.get_by_role("dialog", name=f"Publish a preview of {app}")
    await sheet.get_by_label("Branch").fill("-x")
    await sheet.get_by_role("button", name="Publish this branch of the repository").click()
    await expect(sheet.get_by_role("alert").first).to_contain_text("branch: ")
    await sheet.get_by_label("Branch").fill("feature/login")
    await sheet.get_by_role("button", name="Publish this branch of the repository").click()
    await expect(holder.heading(f"Deploy of {app}")).to_be_visible()
    for fact in ("Preview", "Branch", "feature/login"):
        await expect(page.get_by_role("definition").filter(has_text=fact).first).to_be_visible()


async def test_rows_can_be_told_apart(holder: Holder) -> None:
    page, app = holder.page, await holder.app("shop-2", repository=None)
    commit = "0123456789abcdef0123456789abcdef01234567"
    for message, dirty in (("Sell more", False), ("Take cards again, and answer by mail to everybody who asks", True)):
        deploy = await upload(holder, app, message=message, commit=commit, branch="main", dirty=str(dirty).lower())
        await holder.report(deploy, "build", "health", "canary")
    preview = await upload(holder, app, message="Try a dark theme", preview="dark")
    await holder.report(preview, "build", "health")
    await holder.log_in("deploys")
    for message, state, described in (
        ("Sell more", "Replaced", "upload · main · 0123456 · first"),
        ("Take cards again", "Live", "upload · main · 0123456 with changes · first"),
        ("Try a dark theme", "Live", "Preview · upload · dark · first"),
    ):
        row = holder.row(message)
        await expect(row).to_contain_text(described)
        await expect(row.locator("[data-name=State]")).to_have_text(state)
    assert "Live ·" not in await page.locator("main").inner_text()
    assert "asksupload" not in await page.locator("main").inner_text()
    await look(holder)

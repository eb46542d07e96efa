"""The dashboard tells the owner of a suspended account or app the reason."""

import pytest
from playwright.async_api import expect

from tests.browser.axe import EVERY_LOOK, assert_accessible
from tests.browser.dashboard import Holder

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_suspension_is_seen_with_its_reason(holder: Holder) -> None:
    page, gw = holder.page, holder.gateway
    app = await holder.app()
    await gw.platform("PUT", f"apps/{app}/suspension", {"reason": "Sends mail to strangers"})
    await holder.log_in()
    await expect(page.get_by_text("Sends mail to strangers")).to_be_visible()
    await page.get_by_role("link", name=app, exact=True).click()
    await expect(holder.heading(app)).to_be_focused()
    await expect(page.get_by_text("Suspended", exact=True)).to_be_visible()
    await gw.platform("DELETE", f"apps/{app}/suspension")
    await gw.platform("PUT", f"accounts/{holder.account.id}/suspension", {"reason": "Has not paid"})
    await page.reload()
    banner = page.locator("#banner")
    await expect(banner).to_contain_text("Your account is suspended. Has not paid")
    await assert_accessible(page, EVERY_LOOK)
    await gw.platform("DELETE", f"accounts/{holder.account.id}/suspension")
    await page.reload()
    await expect(page.get_by_role("heading", level=1)).to_be_visible()
    await expect(banner).to_be_hidden()


async def test_the_account_is_deleted_and_kept(holder: Holder) -> None:
    page, account = holder.page, holder.account
    name = (await account.get()).json()["name"]
    await holder.log_in("account")
    await page.get_by_label("to confirm").fill(name)
    await holder.confirm("Delete", "Delete the account")
    await expect(page.locator("#banner strong")).to_be_visible()
    await assert_accessible(page, EVERY_LOOK)
    assert "deletesAt" in (await account.get()).json()
    await holder.button("Keep the account").click()
    await expect(page.locator("#banner strong")).to_be_hidden()
    assert "deletesAt" not in (await account.get()).json()

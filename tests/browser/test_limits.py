"""An account holder sets limits of an app at the dashboard, and they apply to the app's users."""

import pytest
from playwright.async_api import Browser, expect

from tests.browser.axe import assert_accessible
from tests.browser.dashboard import visiting
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_account_holder_limits_an_app(
    browser: Browser, gw: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    async with visiting(browser, gw) as holder:
        page, app = holder.page, await holder.account.app(backend)
        prompt = provider.plays(tokens("x", usage=(1000, 100_000)))
        assert (await app.ask(prompt, maxTokens=2000)).status_code == 200
        await holder.log_in(f"apps/{app.name}/settings/limits")
        day, user = page.get_by_label("Euros per day", exact=True), page.get_by_label("Requests per minute and user")
        card = page.locator("section").filter(has=holder.heading("Limits", 2))
        await expect(card).to_contain_text("of €2.00 today")
        await expect(day).to_have_accessible_description("The plan allows €2.00.")

        await day.fill("a lot")
        await holder.button("Save limits").click()
        await expect(day).to_be_focused()
        await expect(day).to_have_accessible_description(
            "Enter an amount in euros, such as 0.02, or leave the field empty for the plan’s limit."
        )
        await day.fill("2.01")
        await page.keyboard.press("Enter")
        await expect(day).to_have_accessible_description("The plan allows at most 2.00 euro per day.")
        await expect(day).to_have_attribute("aria-invalid", "true")
        await assert_accessible(page)

        await day.fill("0,001")
        await user.fill("2")
        await holder.button("Save limits").click()
        await expect(card).to_contain_text("Saved. The limits apply within a second.")
        await expect(day).to_have_value("0.001")
        await expect(card).to_contain_text("of €0.001 today")
        path = f"/account/apps/{app.name}/limits"
        limits = (await holder.account.get(path)).json()
        assert (limits["dailyEuro"], limits["userDailyEuro"], limits["userRequestsPerMinute"]) == ("0.001", None, 2)

        async def is_full() -> bool:
            return (await app.ask("x", token=app.token("ben"))).json().get("error", {}).get("code") == "APP_CAP_REACHED"

        await wait_until(is_full, 2, 0.2)
        await day.fill("")
        await page.keyboard.press("Enter")
        await expect(card).to_contain_text("of €2.00 today")
        limits = (await holder.account.get(path)).json()
        assert (limits["dailyEuro"], limits["userRequestsPerMinute"]) == (None, 2)

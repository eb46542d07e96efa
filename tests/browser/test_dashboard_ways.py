"""The dashboard with the keyboard, on a phone, with hostile names, and while the service fails."""

from functools import partial
from typing import Any

import pytest
from playwright.async_api import Browser, Route, expect

from tests.browser.axe import assert_fits
from tests.browser.dashboard import VIEWS, Holder, visiting, withholding
from tests.support.gateway_process import Gateway
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = '<img src=x onerror="window.hit = 1">' + "W" * 60
CODES = {429: "DEPLOY_QUOTA_REACHED", 503: "BACKBONE_UNAVAILABLE", 500: "INTERNAL"}


async def test_hooks_with_only_the_keyboard(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    await holder.log_in()  # types the key and presses Enter

    reach = holder.reach
    await reach("Skip to the content", backwards=True)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("main")).to_be_focused()
    await reach("Deploy hooks", backwards=True)
    await page.keyboard.press("Enter")
    await expect(holder.heading("Deploy hooks")).to_be_focused()
    await expect(page.get_by_role("link", name="Deploy hooks")).to_have_attribute("aria-current", "page")
    await reach("Name", "textbox")
    await page.keyboard.type("By hand")
    await page.keyboard.press("Enter")
    await expect(holder.heading(f"“By hand” rebuilds {app}", 2)).to_be_focused()
    await reach("I have stored it", "button")
    await page.keyboard.press("Space")
    await expect(holder.heading("Deploy hooks")).to_be_focused()
    await reach("Revoke By hand", "button")
    await page.keyboard.press("Enter")
    await expect(holder.button("Keep it")).to_be_focused()
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("status")).to_have_text("Revoked the hook By hand.")
    await reach("Log out", "button", backwards=True)
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("API key")).to_be_focused()


async def test_hostile_names_stay_text_and_do_not_widen_the_page(browser: Browser, gw: Gateway, worker: Worker) -> None:
    dark: Any = {"viewport": {"width": 320, "height": 780}, "color_scheme": "dark", "reduced_motion": "reduce"}
    async with visiting(browser, gw, HOSTILE, **dark) as holder:
        page, app = holder.page, await holder.app("w" * 53, customDomain="w.example", customDomainVerified=True)
        for path, body in ((f"apps/{app}/hooks", {"name": HOSTILE}), ("webhook/test", {"type": "app.crashed"})):
            await holder.account.call("POST", f"/account/{path}", body)
        await holder.account.set_webhook(f"http://127.0.0.1:9/{'w' * 80}")
        deploy = await holder.deploy(app)
        holder.log(deploy, HOSTILE + "\n")
        failed = await holder.deploy(app)
        await holder.report(failed, "build", ok=False, reason=HOSTILE)
        await holder.log_in()
        own = {f"apps/{app}": app, f"apps/{app}/requests": "Requests", f"apps/{app}/settings/hooks": "Settings"}
        # The heading of each view differs from that of the view before.
        for view in (*VIEWS, f"deploys/{deploy}", *own, f"deploys/{failed}"):
            await page.evaluate(f"location.hash = '#/{view}'")
            await expect(holder.heading({**VIEWS, **own}.get(view, f"Deploy of {app}"))).to_be_focused()
            if view == "webhooks":
                await expect(holder.row("app.crashed")).to_be_visible()
            await expect(page.get_by_role("main")).not_to_contain_text("Loading")
            shown = await page.get_by_role("main").inner_text()
            assert (HOSTILE in shown) == (view.rpartition("/")[2] not in ("webhooks", "usage", "requests")), view
            assert await page.locator("img[src=x]").count() == 0
            assert await page.evaluate("document.getAnimations().length") == 0
            await assert_fits(page, 390, 320)
        assert await page.evaluate("window.hit") is None


async def refuse(status: int, route: Route) -> None:
    if status == 0:
        return await route.abort()
    error = {"code": CODES[status], "message": "A message.", "requestId": "r-1"}
    await route.fulfill(status=status, json={"error": error}, headers={"Retry-After": "7"})


async def test_a_failing_service_shows_an_error_and_is_retried(holder: Holder) -> None:
    page, alert = holder.page, holder.page.get_by_role("alert")
    deploys, none_yet = "**/account/deploys*", holder.page.get_by_text("No deploys yet")
    await page.clock.install()
    await page.route("**/account/changes", lambda route: route.abort())  # so that views poll
    await holder.log_in()
    for status, message in ((0, "No connection"), (503, "unavailable"), (429, "Limit reached"), (500, "A message.")):
        await page.route(deploys, partial(refuse, status))
        await page.get_by_role("link", name="Deploys").click()
        await expect(alert).to_contain_text(message)
        await expect(alert.get_by_role("heading")).to_be_focused()
        if status in (429, 503):
            await expect(alert).to_contain_text("in 7 seconds")
        await page.unroute(deploys)
        await holder.button("Try again").click()
        await expect(none_yet).to_be_visible()

        # Later failures keep the view and add a line above it.
        await page.route(deploys, partial(refuse, status))
        late = page.get_by_text("Out of date: the service does not respond.")
        await page.clock.run_for(31_100)
        await expect(late).to_be_visible()
        await expect(none_yet).to_be_visible()
        await page.unroute(deploys)
        await page.clock.run_for(6_100)
        await expect(late).to_be_hidden()
        await page.get_by_role("link", name="Overview").click()
        await expect(holder.heading("Overview")).to_be_focused()


async def test_a_start_and_a_logout_without_the_service_and_a_slow_view(holder: Holder) -> None:
    page, main = holder.page, holder.page.get_by_role("main")
    await holder.log_in("deploys")
    await page.route("**/account", lambda route: route.abort())
    await page.reload()
    await expect(page.get_by_role("alert")).to_contain_text("No connection")
    await page.unroute("**/account")
    await holder.button("Try again").click()
    await expect(holder.heading("Deploys")).to_be_focused()

    async with withholding(page, "**/account/hooks") as answered:
        await page.get_by_role("link", name="Deploy hooks").click()
        await expect(page.locator(".bone").first).to_be_visible()
        await expect(main).to_have_attribute("aria-busy", "true")
        await answered.wait()
    await expect(page.get_by_text("No hooks yet")).to_be_visible()
    await expect(main).not_to_have_attribute("aria-busy", "true")

    await page.route("**/dashboard/session", lambda route: route.abort())
    await holder.button("Log out").click()
    await expect(page.get_by_role("alert")).to_contain_text("You are still logged in.")


async def test_unknown_addresses_link_back_to_the_overview(holder: Holder) -> None:
    await holder.log_in()
    for view in ("nowhere", "deploys/%F0%28", "deploys/dep_unknown"):
        await holder.page.evaluate(f"location.hash = '#/{view}'")
        await expect(holder.heading("Not found")).to_be_focused()
        await holder.page.get_by_role("link", name="Go to the overview").click()
        await expect(holder.heading("Overview")).to_be_focused()

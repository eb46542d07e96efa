"""The dashboard with the keyboard, on a phone, with hostile names, and while the service fails."""

import re

import pytest
from playwright.async_api import Browser, Route, expect

from tests.browser.dashboard import VIEWS, Holder, visiting
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
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


async def test_usage_deploys_and_the_webhook_with_only_the_keyboard(holder: Holder) -> None:
    page, app, reach = holder.page, await holder.app(), holder.reach
    deploy = await holder.deploy(app)
    await holder.report(deploy, "build", ok=False, reason="broken")
    await holder.log_in()

    await reach("Usage", backwards=True)
    await page.keyboard.press("Enter")
    await expect(holder.heading("Usage")).to_be_focused()
    await reach("Range", "combobox")
    await page.keyboard.press("ArrowDown")
    await expect(holder.heading("Last 7 days", 2)).to_be_visible()

    await reach("Overview", backwards=True)
    await page.keyboard.press("Enter")
    await expect(holder.heading("Overview")).to_be_focused()
    await reach(app)
    await page.keyboard.press("Enter")
    await expect(holder.heading(app)).to_be_focused()
    await reach("Settings", backwards=True)
    await page.keyboard.press("Enter")
    await expect(holder.heading("Settings")).to_be_focused()
    await reach("Limits")
    await page.keyboard.press("Enter")
    await expect(holder.heading("Settings")).to_be_focused()
    await reach("Euros per day", "textbox")
    await page.keyboard.type("0.01")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Saved. The limits apply within a second.")).to_be_visible()

    await reach("Deploys", backwards=True)
    await page.keyboard.press("Enter")
    await expect(holder.heading("Deploys")).to_be_focused()
    await reach(f"{app}, deploy {deploy}")
    await page.keyboard.press("Enter")
    await expect(holder.heading(f"Deploy of {app}")).to_be_focused()
    await reach("Redeploy", "button")
    await page.keyboard.press("Enter")
    await expect(holder.button("Not now")).to_be_focused()
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page).not_to_have_url(re.compile(deploy))
    await expect(holder.heading(f"Deploy of {app}")).to_be_focused()

    await reach("Webhooks", backwards=True)
    await page.keyboard.press("Enter")
    await reach("URL", "textbox")
    await page.keyboard.type("http://127.0.0.1:9/events")
    await page.keyboard.press("Enter")
    await reach("I have stored it", "button")
    await page.keyboard.press("Enter")
    await reach("Rotate secret", "button")
    await page.keyboard.press("Enter")
    await expect(holder.button("Keep it")).to_be_focused()
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(holder.heading("Your new signing secret", 2)).to_be_focused()


@pytest.mark.parametrize("width", [390, 320])
async def test_hostile_names_stay_text_and_do_not_widen_the_page(
    browser: Browser, gw: Gateway, worker: Worker, width: int
) -> None:
    scheme = "dark" if width == 320 else "light"
    size = {"width": width, "height": 780}
    async with visiting(browser, gw, HOSTILE, viewport=size, color_scheme=scheme, reduced_motion="reduce") as holder:
        page, app = (
            holder.page,
            await holder.app("w" * 50 + str(width), customDomain=f"a{width}.example", customDomainVerified=True),
        )
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
            assert await holder.width() == width, view
            shown = await page.get_by_role("main").inner_text()
            assert (HOSTILE in shown) == (view.rpartition("/")[2] not in ("webhooks", "usage", "requests")), view
            assert await page.locator("img[src=x]").count() == 0
            assert await page.evaluate("document.getAnimations().length") == 0
        assert await page.evaluate("window.hit") is None


@pytest.mark.parametrize(
    ("status", "message"), [(0, "No connection"), (503, "unavailable"), (429, "Limit reached"), (500, "A message.")]
)
async def test_a_failing_service_shows_an_error_and_is_retried(holder: Holder, status: int, message: str) -> None:
    page = holder.page

    async def refuse(route: Route) -> None:
        if status == 0:
            return await route.abort()
        error = {"code": CODES[status], "message": "A message.", "requestId": "r-1"}
        await route.fulfill(status=status, json={"error": error}, headers={"Retry-After": "7"})

    await page.clock.install()
    await page.route("**/account/changes", refuse)  # so that views poll
    await holder.log_in()
    await page.route("**/account/deploys*", refuse)
    await page.get_by_role("link", name="Deploys").click()
    alert = page.get_by_role("alert")
    await expect(alert).to_contain_text(message)
    await expect(alert.get_by_role("heading")).to_be_focused()
    if status in (429, 503):
        await expect(alert).to_contain_text("in 7 seconds")
    await page.unroute("**/account/deploys*")
    await holder.button("Try again").click()
    await expect(page.get_by_text("No deploys yet")).to_be_visible()

    # Later failures keep the view and add a line above it.
    await page.route("**/account/deploys*", refuse)
    late = page.get_by_text("Out of date: the service does not respond.")
    await page.clock.run_for(31_100)
    await expect(late).to_be_visible()
    await expect(page.get_by_text("No deploys yet")).to_be_visible()
    await page.unroute("**/account/deploys*")
    await page.clock.run_for(6_100)
    await expect(late).to_be_hidden()


async def test_a_gateway_that_hangs_shows_an_error(holder: Holder) -> None:
    await holder.log_in("hooks")
    await holder.hurry(deadlines=True)  # after the login, which is not repeated
    await holder.page.reload()
    await expect(holder.page.get_by_text("No hooks yet")).to_be_visible()
    with holder.gateway.paused():
        await expect(holder.page.get_by_text("Out of date: the service does not respond.")).to_be_visible()
        await holder.page.get_by_role("link", name="Deploys").click()
        await expect(holder.page.get_by_role("alert")).to_contain_text("No connection")
    await expect(holder.heading("Deploys")).to_be_visible()  # the page has tried again by itself


async def test_a_start_without_the_service(holder: Holder) -> None:
    await holder.log_in("hooks")
    await holder.page.route("**/account", lambda route: route.abort())
    await holder.page.reload()
    await expect(holder.page.get_by_role("alert")).to_contain_text("No connection")
    await holder.page.unroute("**/account")
    await holder.button("Try again").click()
    await expect(holder.heading("Deploy hooks")).to_be_focused()


async def test_a_slow_view_shows_a_skeleton(holder: Holder) -> None:
    await holder.log_in()
    held: list[Route] = []
    await holder.page.route("**/account/hooks", lambda route: held.append(route))
    await holder.page.get_by_role("link", name="Deploy hooks").click()
    await expect(holder.page.locator(".bone").first).to_be_visible()
    await expect(holder.page.get_by_role("main")).to_have_attribute("aria-busy", "true")
    await wait_until(lambda: held)
    await held[0].continue_()
    await expect(holder.page.get_by_text("No hooks yet")).to_be_visible()
    await expect(holder.page.get_by_role("main")).not_to_have_attribute("aria-busy", "true")


async def test_a_failed_logout_shows_an_error(holder: Holder) -> None:
    await holder.log_in()
    await holder.page.route("**/dashboard/session", lambda route: route.abort())
    await holder.button("Log out").click()
    await expect(holder.page.get_by_role("alert")).to_contain_text("You are still logged in.")


async def test_times_have_the_exact_time_in_their_title(holder: Holder) -> None:
    await holder.app()
    await holder.log_in("hooks")
    await holder.page.get_by_label("Name").fill("Now")
    await holder.button("Create").click()
    time = holder.row("Now").get_by_role("time")
    await expect(time).to_have_text("just now")
    assert re.search(r"\d+ \w+ \d{4}.*\d\d:\d\d:\d\d", await time.get_attribute("title") or "")


async def test_unknown_addresses_link_back_to_the_overview(holder: Holder) -> None:
    await holder.log_in()
    for view in ("nowhere", "deploys/%F0%28", "deploys/dep_unknown"):
        await holder.page.evaluate(f"location.hash = '#/{view}'")
        await expect(holder.heading("Not found")).to_be_focused()
        await holder.page.get_by_role("link", name="Go to the overview").click()
        await expect(holder.heading("Overview")).to_be_focused()


async def test_the_public_page(holder: Holder) -> None:
    page = holder.page
    await page.goto(holder.gateway.address)
    for words in (
        "€0.15",
        "€10.00",
        "30 requests per minute",
        "50 registrations per day",
        "never writes prompts or completions",
    ):
        await expect(page.get_by_text(words).first).to_be_visible()
    for width in (1180, 320):
        await page.set_viewport_size({"width": width, "height": 800})
        assert await holder.width() == width
    await page.get_by_role("link", name="Log in", exact=True).click()
    await expect(page.get_by_label("API key")).to_be_focused()

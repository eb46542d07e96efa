"""The dashboard for everybody and in bad times: keyboard, phone, hostile names, a service that fails."""

import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Route, expect

from tests.browser.dashboard import VIEWS, Holder, visiting
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

Visit = Callable[..., AbstractAsyncContextManager[Holder]]
fixture = pytest_asyncio.fixture(loop_scope="session")

HOSTILE = '<img src=x onerror="window.hit = 1">' + "W" * 60
CODES = {429: "DEPLOY_QUOTA_REACHED", 503: "BACKBONE_UNAVAILABLE", 500: "INTERNAL"}


@fixture
async def visit(browser: Browser, gw: Gateway) -> Visit:
    return partial(visiting, browser, gw)


@fixture
async def holder(visit: Visit) -> AsyncIterator[Holder]:
    async with visit() as holder:
        yield holder


async def test_everything_with_the_keyboard_alone(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    await holder.log_in()  # types the key and presses Enter

    reach = holder.reach
    await reach("Skip to the content", backwards=True)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("main")).to_be_focused()
    await reach("Hooks", backwards=True)
    await page.keyboard.press("Enter")
    await expect(holder.heading("Deploy hooks")).to_be_focused()
    await expect(page.get_by_role("link", name="Hooks")).to_have_attribute("aria-current", "page")
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
    await expect(page.get_by_role("status")).to_have_text("The hook By hand is revoked.")
    await reach("Log out", "button", backwards=True)
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("API key")).to_be_focused()


async def test_money_deploys_and_the_webhook_with_the_keyboard_alone(holder: Holder) -> None:
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
    await reach("The app, euro per day", "textbox")
    await page.keyboard.type("0.01")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Saved. It applies within a second.")).to_be_visible()

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

    await reach("Notifications", backwards=True)
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
async def test_hostile_names_stay_text_and_a_phone_scrolls_one_way(visit: Visit, worker: Worker, width: int) -> None:
    scheme = "dark" if width == 320 else "light"
    size = {"width": width, "height": 780}
    async with visit(HOSTILE, viewport=size, color_scheme=scheme, reduced_motion="reduce") as holder:
        page, app = (
            holder.page,
            await holder.app("w" * 50 + str(width), customDomain=f"a{width}.example", customDomainVerified=True),
        )
        bearer = {"Authorization": f"Bearer {holder.account.key}"}
        for path, body in ((f"apps/{app}/hooks", {"name": HOSTILE}), ("webhook/test", {"type": "app.crashed"})):
            await holder.gateway.http.post(f"/account/{path}", json=body, headers=bearer)
        url = f"http://127.0.0.1:9/{'w' * 80}"
        set_ = await holder.gateway.http.put("/account/webhook", json={"url": url}, headers=bearer)
        holder.gateway.confidential.add(set_.json()["secret"])
        deploy = await holder.deploy(app)
        holder.log(deploy, HOSTILE + "\n")
        failed = await holder.deploy(app)
        await holder.report(failed, "build", ok=False, reason=HOSTILE)
        await holder.log_in()
        for view in (*VIEWS, f"deploys/{deploy}", f"deploys/{failed}", f"apps/{app}"):
            await page.evaluate(f"location.hash = '#/{view}'")
            await expect(
                holder.heading(VIEWS.get(view, app if view == f"apps/{app}" else f"Deploy of {app}"))
            ).to_be_focused()
            if view == "notifications":
                await expect(holder.row("app.crashed")).to_be_visible()
            assert await holder.width() == width, view
            shown = await page.get_by_role("main").inner_text()
            assert (HOSTILE in shown) == (view not in ("notifications", "usage", "requests")), view
            assert await page.locator("img[src=x]").count() == 0
            assert await page.evaluate("document.getAnimations().length") == 0
        assert await page.evaluate("window.hit") is None


@pytest.mark.parametrize(
    ("status", "told"), [(0, "No connection"), (503, "not ready"), (429, "too much"), (500, "Told.")]
)
async def test_a_service_that_fails_is_told_and_asked_again(holder: Holder, status: int, told: str) -> None:
    page = holder.page

    async def refuse(route: Route) -> None:
        if status == 0:
            return await route.abort()
        error = {"code": CODES[status], "message": "Told.", "requestId": "r-1"}
        await route.fulfill(status=status, json={"error": error}, headers={"Retry-After": "7"})

    await page.clock.install()
    await holder.log_in()
    await page.route("**/account/deploys*", refuse)
    await page.get_by_role("link", name="Deploys").click()
    alert = page.get_by_role("alert")
    await expect(alert).to_contain_text(told)
    await expect(alert.get_by_role("heading")).to_be_focused()
    if status in (429, 503):
        await expect(alert).to_contain_text("in 7 seconds")
    await page.unroute("**/account/deploys*")
    await holder.button("Try again").click()
    await expect(page.get_by_text("No deploys yet")).to_be_visible()

    # Later, what is shown stays, with a line above it.
    await page.route("**/account/deploys*", refuse)
    late = page.get_by_text("Not current: the service does not answer.")
    await page.clock.run_for(3_100)
    await expect(late).to_be_visible()
    await expect(page.get_by_text("No deploys yet")).to_be_visible()
    await page.unroute("**/account/deploys*")
    await page.clock.run_for(6_100)
    await expect(late).to_be_hidden()


async def test_a_gateway_that_stands_still_is_told(holder: Holder) -> None:
    await holder.hurry(deadlines=True)
    await holder.log_in("hooks")
    assert holder.gateway.process
    os.kill(holder.gateway.process.pid, signal.SIGSTOP)
    try:
        await expect(holder.page.get_by_text("Not current: the service does not answer.")).to_be_visible()
        await holder.page.get_by_role("link", name="Deploys").click()
        await expect(holder.page.get_by_role("alert")).to_contain_text("No connection")
    finally:
        os.kill(holder.gateway.process.pid, signal.SIGCONT)
    await holder.button("Try again").click()
    await expect(holder.heading("Deploys")).to_be_visible()


async def test_a_start_without_the_service(holder: Holder) -> None:
    await holder.log_in("hooks")
    await holder.page.route("**/account", lambda route: route.abort())
    await holder.page.reload()
    await expect(holder.page.get_by_role("alert")).to_contain_text("No connection")
    await holder.page.unroute("**/account")
    await holder.button("Try again").click()
    await expect(holder.heading("Deploy hooks")).to_be_focused()


async def test_what_takes_time_shows_its_shape(holder: Holder) -> None:
    await holder.log_in()
    held: list[Route] = []
    await holder.page.route("**/account/hooks", lambda route: held.append(route))
    await holder.page.get_by_role("link", name="Hooks").click()
    await expect(holder.page.locator(".bone").first).to_be_visible()
    await expect(holder.page.get_by_role("main")).to_have_attribute("aria-busy", "true")
    await wait_until(lambda: held)
    await held[0].continue_()
    await expect(holder.page.get_by_text("No hooks yet")).to_be_visible()
    await expect(holder.page.get_by_role("main")).not_to_have_attribute("aria-busy", "true")


async def test_a_log_out_that_did_not_work_says_so(holder: Holder) -> None:
    await holder.log_in()
    await holder.page.route("**/dashboard/session", lambda route: route.abort())
    await holder.button("Log out").click()
    await expect(holder.page.get_by_role("alert")).to_contain_text("You are still logged in.")


async def test_times_show_exactly_when(holder: Holder) -> None:
    await holder.app()
    await holder.log_in("hooks")
    await holder.page.get_by_label("Name").fill("Now")
    await holder.button("Create").click()
    time = holder.row("Now").get_by_role("time")
    await expect(time).to_have_text("just now")
    assert re.search(r"\d+ \w+ \d{4}.*\d\d:\d\d:\d\d", await time.get_attribute("title") or "")


async def test_an_address_that_is_none_leads_back(holder: Holder) -> None:
    await holder.log_in()
    for view in ("nowhere", "deploys/%F0%28", "deploys/dep_unknown"):
        await holder.page.evaluate(f"location.hash = '#/{view}'")
        await expect(holder.heading("There is nothing here")).to_be_focused()
        await holder.page.get_by_role("link", name="To the overview").click()
        await expect(holder.heading("Overview")).to_be_focused()


async def test_the_public_page(holder: Holder) -> None:
    page = holder.page
    await page.goto(holder.gateway.address)
    for words in ("€0.15", "€10.00", "30 requests a minute", "50 a day", "No prompt and no completion is ever written"):
        await expect(page.get_by_text(words).first).to_be_visible()
    for width in (1180, 320):
        await page.set_viewport_size({"width": width, "height": 800})
        assert await holder.width() == width
    await page.get_by_role("link", name="Log in", exact=True).click()
    await expect(page.get_by_label("API key")).to_be_focused()

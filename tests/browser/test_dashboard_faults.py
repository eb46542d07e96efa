"""The dashboard with hostile names, while the service fails or is late, after a session, and as things change."""

import asyncio
import json
import time
from functools import partial
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Request, Route, expect

from tests.browser.axe import assert_fits
from tests.browser.dashboard import VIEWS, Holder, visiting, withholding
from tests.fakes import FakeAppBackend
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = '<img src=x onerror="window.hit = 1">' + "W" * 60
LATE = "Out of date: the service does not respond."
CODES = {429: "DEPLOY_QUOTA_REACHED", 503: "BACKBONE_UNAVAILABLE", 500: "INTERNAL"}


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
        late = page.get_by_text(LATE)
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


async def test_a_late_answer_does_not_replace_the_view(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    await holder.log_in(f"apps/{app}/settings/delete")
    async with withholding(page, "**/account/**", "DELETE") as answered:
        await holder.button("Delete the app").click()
        await page.get_by_label("To confirm").fill(app)
        await holder.button("Delete it").click()
        await answered.wait()
        await page.evaluate("location.hash = '#/webhooks'")
        await expect(holder.heading("Webhooks")).to_be_focused()
    await expect(page.locator("#status")).to_have_text(f"Deleted the app {app}.")
    assert page.url.endswith("#/webhooks")


async def test_a_confirmation_ends_with_its_view(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    dialog = page.get_by_role("dialog")
    await holder.log_in()
    for view, heading in (("new-app", "New app"), ("hooks", "Deploy hooks")):  # the first is drawn without a request
        await page.evaluate(f"location.hash = '#/{view}'")
        await expect(holder.heading(heading)).to_be_focused()
        await page.evaluate(f"location.hash = '#/apps/{app}/settings/delete'")
        await holder.button("Delete the app").click()
        await expect(dialog).to_be_visible()
        await page.go_back()
        await expect(holder.heading(heading)).to_be_focused()
        await expect(dialog).to_be_hidden()
    assert (await holder.account.get(f"/account/apps/{app}")).is_success


async def test_dialogs_end_with_the_session(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    await holder.log_in()
    for view, button in ((f"apps/{app}/settings/delete", "Delete the app"), (f"apps/{app}", "Publish")):
        await page.evaluate(f"location.hash = '#/{view}'")
        await holder.button(button, exact=True).click()
        await expect(page.get_by_role("dialog")).to_be_visible()
        await page.evaluate("dispatchEvent(new Event('session-ended'))")
        await expect(page.get_by_label("API key")).to_be_focused()
        await expect(page.get_by_role("dialog")).to_be_hidden()
        await page.reload()


SECRET = "a secret of more than 32 characters"
# By view of the settings, the controls of each of its forms, and the button to press then.
FORMS: dict[str, list[tuple[dict[str, str], str]]] = {
    "source": [
        ({"repository": "https://name:password@git.example.com/kept", "branch": "kept"}, "Save source and build")
    ],
    "tokens": [
        ({"kind": "secret", "auth-secret": SECRET, "issuer": "me", "user-claim": "id"}, "Save users’ tokens"),
        ({"check-token": "a.b.c"}, "Check"),
    ],
    "environment": [
        ({"variable": "KEPT", "value": SECRET}, "Set"),
        ({"variables": f"KEPT={SECRET}"}, "Set all"),
        ({"preview-variable": "KEPT", "preview-value": SECRET}, "Set for previews"),
        ({"preview-variables": f"KEPT={SECRET}"}, "Set all for previews"),
    ],
}


@pytest.mark.parametrize("view", FORMS)
async def test_what_was_typed_is_there_after_the_next_log_in(holder: Holder, view: str) -> None:
    page, app = holder.page, await holder.app()
    await holder.log_in()
    address = f"#/apps/{app}/settings/{view}"
    for fields, button in FORMS[view]:
        await page.evaluate(f"location.hash = '{address}'")
        await expect(page.locator("h1")).not_to_have_text(VIEWS[""])
        await expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
        await page.locator("main details").evaluate_all("all => all.forEach((it) => (it.open = true))")
        for name, value in fields.items():
            control = page.locator(f"#{name}")
            if name == "kind":
                await control.select_option(value)
            else:
                await control.fill(value)
        await page.context.clear_cookies()
        await page.get_by_role("main").get_by_role("button", name=button, exact=True).click()
        await expect(page.get_by_label("API key")).to_be_focused()
        assert page.url.endswith(address)
        await page.get_by_label("API key").fill(holder.account.key)
        await page.keyboard.press("Enter")
        for name, value in fields.items():
            await expect(page.locator(f"#{name}")).to_have_value(value)
        await expect(page.locator("h1")).not_to_have_text("Not found")
        assert page.url.endswith(address)
        await page.reload()  # and nothing of it stays
        await expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
        assert SECRET not in await page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")


async def test_another_account_gets_nothing_of_it(holder: Holder, gw: Gateway) -> None:
    page = holder.page
    await holder.log_in("hooks")
    await page.evaluate("location.hash = '#/new-app'")
    await page.get_by_label("Name").fill("of-the-first")
    await page.context.clear_cookies()
    await holder.button("Create app").click()
    await page.get_by_label("API key").fill((await gw.account()).key)
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Name")).to_have_value("")
    assert page.url.endswith("#/new-app")


def record(holder: Holder, page: Page | None = None) -> list[str]:
    """Returns the paths that the page requests from now on."""
    paths: list[str] = []

    def note(request: Request) -> None:
        paths.append(request.url.removeprefix(holder.gateway.address))

    (page or holder.page).on("request", note)
    return paths


async def settle(paths: list[str], seconds: float = 4) -> None:
    """Waits until the page has made no requests for so long."""
    async with asyncio.timeout(60):
        before = -1
        while len(paths) != before:
            before = len(paths)
            await asyncio.sleep(seconds)


async def test_idle_views_make_no_requests(holder: Holder, browser: Browser) -> None:
    """Each view in a browser of its own, because one keeps few connections to a host."""
    await holder.log_in()
    session = await holder.page.context.storage_state()

    async def rest(view: str) -> list[str]:
        async with await browser.new_context(storage_state=session) as context:
            paths, began = record(holder, page := await context.new_page()), time.monotonic()
            await page.goto(f"{holder.gateway.address}/dashboard#/{view}")
            await expect(page.get_by_role("heading", name=VIEWS[view], level=1, exact=True)).to_be_visible()
            await wait_until(lambda: "/account/changes" in paths)
            # A view that was slow to load rests four times as long before it loads what changed meanwhile.
            await settle(paths, 4 + 4 * (time.monotonic() - began))
            paths.clear()
            await asyncio.sleep(4)
            return paths

    assert await asyncio.gather(*map(rest, VIEWS)) == [[]] * len(VIEWS)


async def test_a_view_shows_what_changed_elsewhere(holder: Holder, backend: FakeAppBackend) -> None:
    paths = record(holder)
    app = await holder.account.app(backend)
    await holder.log_in("hooks")
    await wait_until(lambda: "/account/changes" in paths)
    await settle(paths)
    response = await holder.account.call("POST", f"/account/apps/{app.name}/hooks", {"name": "elsewhere"})
    holder.gateway.confidential.add(response.json()["url"].rpartition("/")[2])
    await expect(holder.row("elsewhere")).to_be_visible(timeout=4_000)
    assert paths.count("/account/changes") == 1


async def test_without_the_stream_views_poll_and_then_follow_again(holder: Holder, backend: FakeAppBackend) -> None:
    page = holder.page
    app = await holder.account.app(backend)
    await holder.hurry()

    async def refuse_viewer(route: Route) -> None:
        error = {"code": "VIEWERS_LIMITED", "message": "Too many viewers.", "requestId": "r-1"}
        await route.fulfill(status=429, body=json.dumps({"error": error}), content_type="application/json")

    await page.route("**/account/changes", refuse_viewer)
    await holder.log_in("hooks")
    await holder.account.call("POST", f"/account/apps/{app.name}/hooks", {"name": "polled"})
    await expect(holder.row("polled")).to_be_visible()
    await page.unroute("**/account/changes")
    async with page.expect_request("**/account/changes"):
        pass
    await holder.account.call("POST", f"/account/apps/{app.name}/hooks", {"name": "followed"})
    await expect(holder.row("followed")).to_be_visible()


async def test_a_service_that_hangs_is_noticed(holder: Holder) -> None:
    """Its connections stay open, and nothing comes any more."""
    page, paths = holder.page, record(holder)
    await holder.log_in("hooks")
    await wait_until(lambda: "/account/changes" in paths)
    with holder.gateway.paused():
        await expect(page.get_by_text(LATE)).to_be_visible()
        await page.get_by_role("link", name="Deploys").click()
        await expect(page.get_by_role("alert")).to_contain_text("No connection", timeout=20_000)
    await expect(holder.heading("Deploys")).to_be_visible()  # the page has tried again by itself

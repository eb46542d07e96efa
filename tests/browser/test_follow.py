"""The dashboard follows the stream of changes: views refresh upon changes only, and recover from outages."""

import asyncio
import json
import time

import pytest
from playwright.async_api import Browser, Page, Request, Route, expect

from tests.browser.dashboard import VIEWS, Holder
from tests.fakes import FakeAppBackend
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

LATE = "Out of date: the service does not respond."


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


async def test_what_changes_while_a_view_loads_is_shown(holder: Holder, backend: FakeAppBackend) -> None:
    page, app = holder.page, await holder.account.app(backend)
    paths = record(holder)
    await holder.log_in()
    await wait_until(lambda: "/account/changes" in paths)
    await settle(paths)

    async def delay(route: Route) -> None:
        response = await route.fetch()
        created = await holder.account.call("POST", f"/account/apps/{app.name}/hooks", {"name": "meanwhile"})
        holder.gateway.confidential.add(created.json()["url"].rpartition("/")[2])
        await asyncio.sleep(2)  # the change is reported
        await route.fulfill(response=response)

    await page.route("**/account/hooks", delay, times=1)
    await holder.go("hooks")
    await expect(holder.row("meanwhile")).to_be_visible(timeout=20_000)  # a slow view rests longer


async def test_without_the_stream_views_poll_and_then_follow_again(holder: Holder, backend: FakeAppBackend) -> None:
    page = holder.page
    app = await holder.account.app(backend)
    await holder.hurry()

    async def refuse(route: Route) -> None:
        error = {"code": "VIEWERS_LIMITED", "message": "Too many viewers.", "requestId": "r-1"}
        await route.fulfill(status=429, body=json.dumps({"error": error}), content_type="application/json")

    await page.route("**/account/changes", refuse)
    await holder.log_in("hooks")
    await holder.account.call("POST", f"/account/apps/{app.name}/hooks", {"name": "polled"})
    await expect(holder.row("polled")).to_be_visible()
    await page.unroute("**/account/changes")
    async with page.expect_request("**/account/changes"):
        pass
    await holder.account.call("POST", f"/account/apps/{app.name}/hooks", {"name": "followed"})
    await expect(holder.row("followed")).to_be_visible()


async def test_an_output_that_is_followed_again_is_not_called_out_of_date(holder: Holder) -> None:
    page = holder.page
    app = await holder.app(build={"start": "exec node server.js"})
    logs = f"**/account/apps/{app}/logs*"
    await page.route(logs, lambda route: route.abort())
    await holder.log_in(f"apps/{app}")
    await expect(page.get_by_text(LATE)).to_be_visible()
    await page.unroute(logs)
    await expect(page.get_by_text(LATE)).to_be_hidden()


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

"""Answers that arrive late: after the user has left the view, has chosen something else, or has clicked again."""

import re
from collections.abc import Awaitable, Callable

import pytest
from playwright.async_api import expect

from tests.browser.axe import open_view
from tests.browser.dashboard import Holder, withholding
from tests.fakes import FakeAppBackend
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


# -- a view that the user has left -------------------------------------------------------------------------------


async def create_app(holder: Holder, app: str) -> None:
    await holder.page.get_by_label("Name").fill(f"{app}-2")
    await holder.button("Create app").click()


async def delete_app(holder: Holder, app: str) -> None:
    await holder.button("Delete the app").click()
    await holder.page.get_by_label("To confirm").fill(app)
    await holder.button("Delete it").click()


async def revoke_key(holder: Holder, app: str) -> None:
    await holder.confirm("Revoke laptop", "Revoke")


@pytest.mark.parametrize(
    ("view", "act", "method", "text"),
    [
        ("new-app", create_app, "POST", "Created the app {app}-2."),
        ("apps/{app}/settings/delete", delete_app, "DELETE", "Deleted the app {app}."),
        ("account", revoke_key, "DELETE", "Revoked laptop."),
    ],
)
async def test_a_late_answer_does_not_replace_the_view(
    holder: Holder, view: str, act: Callable[[Holder, str], Awaitable[None]], method: str, text: str
) -> None:
    page, app = holder.page, await holder.app()
    made = await holder.account.call("POST", "/account/keys", {"name": "laptop"})
    holder.gateway.confidential.add(made.json()["key"])
    await holder.log_in()
    await page.evaluate(f"location.hash = '#/{view.format(app=app)}'")
    async with withholding(page, "**/account/**", method) as answered:
        await act(holder, app)
        await answered.wait()
        await page.evaluate("location.hash = '#/webhooks'")
        await expect(holder.heading("Webhooks")).to_be_focused()
    await expect(page.locator("#status")).to_have_text(text.format(app=app))
    assert page.url.endswith("#/webhooks")


# -- dialogs ------------------------------------------------------------------------------------------------------


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


async def test_the_focus_returns_to_a_list_that_was_drawn_again(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    hooks = f"/account/apps/{app}/hooks"
    urls = [(await holder.account.call("POST", hooks, {"name": "first"})).json()["url"]]
    await holder.log_in("hooks")
    await holder.button("Revoke first").click()
    urls.append((await holder.account.call("POST", hooks, {"name": "second"})).json()["url"])
    await expect(page.get_by_role("row", include_hidden=True).filter(has_text="second")).to_have_count(1)
    await page.keyboard.press("Escape")
    await expect(holder.button("Revoke first")).to_be_focused()
    holder.gateway.confidential |= {url.rpartition("/")[2] for url in urls}


# -- another choice -----------------------------------------------------------------------------------------------


async def test_a_failed_choice_is_reported_until_the_rows_arrive(holder: Holder) -> None:
    page, path = holder.page, "**/account/*?*"
    app, _ = await holder.app(), await holder.app()
    await page.add_init_script("Object.defineProperty(document, 'hidden', { get: () => window.away ?? false })")
    await holder.log_in()
    for view, label, option in (
        ("usage", "Range", "Last 7 days"),
        ("deploys", "Show", app),
        ("webhooks", "All outcomes", "Failed"),
        ("requests", "Outcome", "Refused"),
    ):
        await open_view(page, view)
        await page.route(path, lambda route: route.abort())
        await page.get_by_label(label, exact=True).select_option(option)
        failure = page.get_by_role("alert").filter(has_text="The service cannot be reached.")
        await expect(failure).to_be_visible()
        await page.unroute(path)
        for away in ("true", "false"):  # a page that is seen again refreshes
            await page.evaluate(f"window.away = {away}; document.dispatchEvent(new Event('visibilitychange'))")
        await expect(failure).to_be_hidden()


# -- another click ------------------------------------------------------------------------------------------------


async def test_a_double_click_opens_one_request(holder: Holder, backend: FakeAppBackend) -> None:
    page, app = holder.page, await holder.account.app(backend)
    answer = await app.ask("x", token="no.token.at.all")
    request, sheet = answer.headers["X-Request-Id"], page.get_by_role("dialog", name="Request")
    await wait_until(lambda: holder.account.get("/account/requests"), 15, holds=lambda rows: rows.json())
    await holder.log_in("requests")
    row = holder.row("TOKEN_INVALID")
    async with withholding(page, f"**/account/requests/{request}") as answered:
        await row.click()
        await answered.wait()
        await row.click()
        await page.get_by_label("Request id").fill(request)
        await page.keyboard.press("Enter")
    await expect(sheet).to_be_visible()
    await page.mouse.down(click_count=2)  # of a double click whose first click has opened the sheet
    await page.mouse.up(click_count=2)
    await expect(sheet).to_have_count(1)
    await page.mouse.down()
    await page.mouse.up()
    await expect(sheet).to_have_count(0)


# -- another state ------------------------------------------------------------------------------------------------


async def test_a_list_that_changes_during_a_press_is_drawn_after_the_click(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    deploy = await holder.deploy(app)
    await holder.log_in("deploys")
    link = page.get_by_role("link", name=f"{app}, deploy {deploy}")

    async def press_until_changed(phase: str) -> None:
        async with withholding(page, "**/account/deploys?*") as answered:
            await holder.report(deploy, phase)
            await answered.wait()
            await link.hover()
            await page.mouse.down()
        await page.wait_for_timeout(300)  # in which the list would be drawn

    await press_until_changed("build")
    await page.mouse.move(5, 5)
    await page.mouse.up()
    await expect(page.get_by_role("row").filter(has=link)).to_contain_text("Checking")
    await press_until_changed("health")
    await page.mouse.up()
    await expect(page).to_have_url(re.compile(f"#/deploys/{deploy}$"))


async def test_a_refresh_that_began_before_a_change_of_the_domain_is_ignored(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    await holder.log_in()
    await page.evaluate(f"location.hash = '#/apps/{app}/settings/domain'")
    await page.get_by_label("Domain").fill(f"{app}.example")
    old = page.expect_event("requestfinished", lambda request: request.url.endswith(f"/account/apps/{app}/domains"))
    async with old, withholding(page, f"**/account/apps/{app}/domains", only_first=True) as answered:
        await holder.app(app, build={"output": "dist"})
        await answered.wait()
        await holder.button("Add domain").click()
        await expect(page.locator(f"[id='domain {app}.example']")).to_be_focused()
    await page.evaluate("new Promise(requestAnimationFrame)")
    await expect(page.locator(f"[id='domain {app}.example']")).to_be_focused()

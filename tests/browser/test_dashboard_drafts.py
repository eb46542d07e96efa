"""A session that ends while a form is sent: after the next log-in, the view is open with what was typed."""

from collections.abc import Mapping

import pytest
from playwright.async_api import expect

from tests.browser.axe import open_view
from tests.browser.dashboard import VIEWS, Holder
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

Fields = Mapping[str, str]  # by the ids of the controls
OPENS = "+"  # begins the name of a button that opens the form
SECRET = "a secret of more than 32 characters"
HOOK = ({"name": "nightly"}, ["Create"])
# By view, the controls of each of its forms, and the buttons to press then.
FORMS: dict[str, list[tuple[Fields, list[str]]]] = {
    "": [],
    "new-app": [({"app-name": "kept"}, ["Create app"])],
    "deploys": [
        ({"app": "{app}", "message": "A new title"}, ["Choose a file"]),
        (
            {"app": "{app}", "branch": "drafts", "preview-message": "Try it"},
            ["+Publish a preview", "Publish this branch of the repository"],
        ),
    ],
    "hooks": [({"app": "{app}", **HOOK[0]}, HOOK[1])],
    "webhooks": [
        ({"type": "app.crashed"}, ["Send"]),
        ({"since": "2026-11-01T10:00"}, ["Redeliver all …"]),
        ({"url": "https://receiver.example/events"}, ["+Change", "Save"]),
        ({}, ["Rotate secret", "Rotate"]),
    ],
    "requests": [({"request-id": "kept"}, ["Find"])],
    "account": [
        ({"account-name": "Kept"}, ["Save"]),
        ({"member": "ada@example.com", "role": "viewer"}, ["Invite"]),
        ({"key-name": "laptop", "key-scope": "read", "key-app": "{app}"}, ["Create"]),
        ({"leaving-name": "kept"}, ["Delete", "Delete the account"]),
        ({}, ["Log out everywhere", "Log out"]),
    ],
    "apps/{app}": [({"message": "A new title"}, ["+Publish", "Choose a file"])],
    "apps/{app}/try": [({"prompt": "Kept?", "maximum": "7", "effort": "low"}, ["Ask"])],
    "apps/{app}/settings/source": [
        (
            {
                "repository": "https://name:password@git.example.com/kept",
                "branch": "kept",
                "build-command": "make",
                "output": "out",
                "start": "serve",
                "health": "/up",
            },
            ["Save source and build"],
        )
    ],
    "apps/{app}/settings/tokens": [
        ({"kind": "secret", "auth-secret": SECRET, "issuer": "me", "user-claim": "id"}, ["Save users’ tokens"]),
        ({"check-token": "a.b.c"}, ["Check"]),
    ],
    "apps/{app}/settings/environment": [
        ({"variable": "KEPT", "value": SECRET}, ["Set"]),
        ({"variables": f"KEPT={SECRET}"}, ["Set all"]),
        ({"preview-variable": "KEPT", "preview-value": SECRET}, ["Set for previews"]),
        ({"preview-variables": f"KEPT={SECRET}"}, ["Set all for previews"]),
    ],
    "apps/{app}/settings/domain": [({"domain": "kept.example"}, ["Add domain"])],
    "apps/{app}/settings/limits": [({"limit-dailyEuro": "0.01", "limit-requestsPerMinute": "5"}, ["Save limits"])],
    "apps/{app}/settings/hooks": [HOOK],
    "apps/{app}/settings/delete": [({}, ["Delete the app", "Delete it"])],
    "apps/{app}/data": [],
    "usage": [],
}


@pytest.mark.parametrize("view", FORMS)
async def test_what_was_typed_is_there_after_the_next_log_in(holder: Holder, view: str) -> None:
    page, app = holder.page, await holder.app()
    await holder.account.set_webhook("https://example.com/hooks")
    await holder.log_in()
    address = f"/dashboard#/{view.format(app=app)}"
    await open_view(page, "new-app?of")  # another view, so that the view is drawn
    await open_view(page, view.format(app=app))
    forms = page.locator("main form").filter(has=page.locator("[id]:is(input, select, textarea)"))
    ids = await forms.evaluate_all("forms => forms.map((form) => [...form.elements].map(({ id }) => id))")
    known = {name for fields, _ in FORMS[view] for name in fields}
    assert all(known & set(names) for names in ids), ids
    for fields, buttons in FORMS[view]:
        await page.evaluate(f"location.hash = '{address.partition('#')[2]}'")
        await expect(page.locator("h1")).not_to_have_text(VIEWS[""])
        await expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
        typed = {name: value.format(app=app) for name, value in fields.items()}
        await fill(holder, typed, buttons)
        await page.context.clear_cookies()
        await send(holder, buttons, app)
        await expect(page.get_by_label("API key")).to_be_focused()
        assert page.url.endswith(address)
        await page.get_by_label("API key").fill(holder.account.key)
        await page.keyboard.press("Enter")
        for name, value in typed.items():
            await expect(page.locator(f"#{name}")).to_have_value(value)
        await expect(page.locator("h1")).not_to_have_text("Not found")
        assert page.url.endswith(address)
        await page.reload()  # and nothing of it stays
        await expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
        assert SECRET not in await page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")


async def fill(holder: Holder, fields: Fields, buttons: list[str]) -> None:
    page = holder.page
    await page.locator("main details").evaluate_all("all => all.forEach((it) => (it.open = true))")
    opener = next((name for name in buttons if name.startswith(OPENS)), None)
    for name, value in fields.items():
        control = page.locator(f"#{name}")
        if opener and not await control.count():
            await holder.button(opener.removeprefix(OPENS), exact=True).click()
        if await control.evaluate("it => it.tagName") == "SELECT":
            await control.select_option(value)
        else:
            await control.fill(value)


async def send(holder: Holder, buttons: list[str], app: str) -> None:
    page = holder.page
    for name in buttons:
        if name == "Choose a file":
            file = {"name": "index.html", "mimeType": "text/html", "buffer": b"<!doctype html><title>x</title>"}
            await page.get_by_label(name).and_(page.locator("input")).last.set_input_files(file)
        elif not name.startswith(OPENS):
            if name == "Delete it":
                await page.get_by_label("To confirm").fill(app)
            place = page.get_by_role("dialog")
            place = place if await place.count() else page.get_by_role("main")
            await place.get_by_role("button", name=name, exact=True).last.click()


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

"""The dashboard says what is wrong, and its forms work, with optional parts empty and with many apps."""

import pytest
from playwright.async_api import expect

from tests.browser.axe import EVERY_LOOK, assert_accessible, open_view
from tests.browser.dashboard import Holder
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_build_of_an_app_without_a_repository(holder: Holder) -> None:
    account, app = holder.account, await holder.app(repository=None)
    await holder.log_in(f"apps/{app}/settings")
    source = holder.card("Source and build")
    build: dict[str, str] = {}
    for label, name, value in (
        ("Build command", "command", "npm run build"),
        ("Start command", "start", "node server.js"),
        ("Health check path", "health", "/up"),
        ("Branch", "", "main"),
    ):
        await source.get_by_label(label).fill(value)
        await source.get_by_role("button", name="Save source and build").click()
        await expect(source.get_by_text("Saved.")).to_be_visible()
        build |= {name: value} if name else {}
        settings = (await account.get(f"/account/apps/{app}/settings")).json()
        assert settings.get("repository") is None
        assert {name: value for name, value in settings["build"].items() if value} == build
    for field in ("Build command", "Folder to serve", "Start command", "Health check path", "Branch"):
        await source.get_by_label(field).fill("")
    await source.get_by_role("button", name="Save source and build").click()
    await expect(source.get_by_text("Saved.")).to_be_visible()
    assert (await account.get(f"/account/apps/{app}/settings")).json().get("build") is None

    await source.get_by_label("Repository").fill("https://git.example.com/a")
    await source.get_by_role("button", name="Save source and build").click()
    await expect(source.get_by_label("Branch")).to_have_value("")
    await holder.go(f"apps/{app}")
    await expect(holder.page.get_by_text("git.example.com/a at its default branch")).to_be_visible()


async def test_every_other_form_of_an_app_with_its_optional_parts_empty(holder: Holder) -> None:
    page, account = holder.page, holder.account
    app = await holder.app(repository=None)
    await holder.log_in(f"apps/{app}/settings/tokens")
    verification = holder.card("Users’ tokens")
    for kind, required in (("jwks", {}), ("secret", {"Secret": "s" * 32}), ("backend", {"URL": "/api/me"})):
        await verification.get_by_label("Verification").select_option(kind)
        for label in ("URL", "Secret", "Issuer", "Audience", "Claim"):
            if await (field := verification.get_by_label(label)).is_visible():
                await field.fill(required.get(label, ""))
        await verification.get_by_role("button", name="Save users’ tokens").click()
        await expect(verification.get_by_text("Saved.")).to_be_visible()
        assert (await account.get(f"/account/apps/{app}/settings")).json()["auth"]["kind"] == kind
    await page.get_by_role("link", name="Limits", exact=True).click()
    limits = holder.card("Limits")
    await limits.get_by_role("button", name="Save limits").click()
    await expect(limits.get_by_text("Saved. The limits apply")).to_be_visible()
    await page.get_by_role("link", name="Environment", exact=True).click()
    await page.get_by_label("Name", exact=True).fill("EMPTY")
    await page.get_by_role("button", name="Set", exact=True).click()
    await expect(holder.row("EMPTY")).to_be_visible()


async def test_what_needs_attention(holder: Holder, backend: FakeAppBackend) -> None:
    page, gw, account = holder.page, holder.gateway, holder.account
    app = await account.app(backend)
    await holder.log_in()
    strip = page.get_by_role("region", name="Needs attention")
    await expect(strip).to_be_hidden()
    await account.call("PUT", f"/account/apps/{app.name}/limits", {"dailyEuro": "0"})
    assert (await app.ask("x")).status_code == 402
    assert (await app.ask("x", token="no.token.at.all")).status_code == 401
    failing = await holder.app()
    await holder.report(await holder.deploy(failing), "build", ok=False, reason="npm ended with status 1")
    await expect(strip).to_contain_text(f"{app.name} has reached its limit")
    await expect(strip).to_contain_text("1 request got 402 today: €0.00 of €0.00 is spent.")
    await expect(strip).to_contain_text(f"{app.name} gets invalid tokens")
    await expect(strip).to_contain_text("Build: npm ended with status 1")
    await assert_accessible(page, EVERY_LOOK)
    await strip.get_by_role("link", name="See the log").click()
    await expect(page.get_by_text("Build: npm ended with status 1")).to_be_visible()
    await holder.go()
    await expect(strip).to_be_visible()
    await gw.platform("PUT", "inference", {"enabled": False})
    try:
        await expect(strip).to_contain_text("Inference is off")
    finally:
        await gw.platform("PUT", "inference", {"enabled": True})
    await expect(strip.get_by_text("Inference is off")).to_be_hidden()


async def test_the_accounts_name_and_keys(holder: Holder) -> None:
    page, account, name = holder.page, holder.account, await holder.app()
    for number in range(2):
        await account.set_webhook(f"https://receiver.example.com/{number}")
    await holder.log_in()
    await page.get_by_role("link", name="Ana’s workshop").click()
    await expect(holder.heading("Account")).to_be_focused()
    await expect(page.get_by_text("Maker")).to_be_visible()
    await page.get_by_label("Account name").fill("<b>Ben</b> & Co")
    await holder.button("Save").click()
    await expect(page.locator("#account")).to_have_text("<b>Ben</b> & Co")
    await expect(page.get_by_role("main").get_by_text("<b>Ben</b> & Co", exact=True)).to_be_visible()
    assert (await account.get("/account")).json()["name"] == "<b>Ben</b> & Co"

    await expect(page.get_by_label("With", exact=True)).to_be_disabled()
    await page.get_by_label("May do").select_option("Publish and follow deploys")
    await page.get_by_label("With", exact=True).select_option(name)
    await page.get_by_label("Name", exact=True).fill("pipeline")
    await holder.button("Create").click()
    panel = holder.card("The key “pipeline”")
    await expect(panel).to_contain_text(f"Publish and follow deploys, only {name}")
    holder.gateway.confidential.add(await panel.locator("pre").inner_text())
    await assert_accessible(page, EVERY_LOOK)
    await panel.get_by_role("button", name="Copy").click()
    await panel.get_by_role("button", name="I have stored it").click()
    await expect(holder.row("pipeline")).to_contain_text(f"Publish and follow deploys, only {name}")
    listed = (await account.get("/account/keys")).json()[0]
    assert (listed["name"], listed["scope"], listed["app"]) == ("pipeline", "deploy", name)
    await holder.confirm("Revoke pipeline", "Revoke")
    await expect(holder.row("pipeline")).to_have_count(0)
    assert len((await account.get("/account/keys")).json()) == 1
    changes = holder.card("Changes").get_by_role("row")
    await expect(changes.nth(1)).to_contain_text("Revoke key")
    await expect(changes.nth(2)).to_contain_text("Create key")
    await expect(changes.nth(2)).to_contain_text("session")
    await expect(changes.filter(has_text="Set webhook")).to_contain_text("Set webhook, 2 times")
    await assert_accessible(page, EVERY_LOOK)


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


async def test_an_account_holder_limits_an_app(holder: Holder, backend: FakeAppBackend, provider: FakeProvider) -> None:
    page, app = holder.page, await holder.account.app(backend)
    prompt = provider.plays(tokens("x", usage=(1000, 100_000)))
    assert (await app.ask(prompt, maxTokens=2000)).status_code == 200
    await holder.log_in(f"apps/{app.name}/settings/limits")
    day, user = page.get_by_label("Euros per day", exact=True), page.get_by_label("Requests per minute and user")
    card = holder.card("Limits")
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


async def test_many_apps(holder: Holder) -> None:
    page, prefix = holder.page, holder.account.id[-6:].lower()
    names = [await holder.app(f"shop-{prefix}-{n:03}") for n in range(20)]
    await holder.log_in()
    cards = page.locator(".apps > li")
    await page.get_by_label("Order").select_option("By name")
    await expect(cards.get_by_role("heading")).to_have_text(names[:9])
    await holder.button("Show more").click()
    await expect(cards).to_have_count(20)
    await page.get_by_label("Find an app").fill(names[15][-3:])
    await expect(cards.get_by_role("heading")).to_have_text([names[15]])
    await page.reload()
    await expect(page.get_by_label("Find an app")).to_have_value(names[15][-3:])
    await expect(cards).to_have_count(1)

    await page.keyboard.press("Control+k")
    dialog = page.get_by_role("dialog", name="Switch app")
    await expect(dialog.get_by_role("link")).to_have_count(13)
    await expect(dialog.get_by_role("status")).to_have_text("And 8 more apps. Type a part of the name.")
    await assert_accessible(page, EVERY_LOOK)
    await page.keyboard.type(names[7][-6:])
    await expect(dialog.get_by_role("link")).to_have_text([names[7]])
    await page.keyboard.press("Enter")
    await expect(holder.heading(names[7])).to_be_focused()
    await holder.button(names[7]).click()
    await dialog.get_by_role("link", name="All apps").click()
    await expect(holder.heading("Overview")).to_be_focused()

    # A choice of one among many, with the mouse and with the keyboard.
    await open_view(page, "deploys")
    select, dialog = page.get_by_label("Show", exact=True), page.get_by_role("dialog", name="Choose an app")
    await select.click()
    await page.keyboard.type(names[15][-6:])
    await dialog.get_by_role("button", name=names[15]).click()
    await expect(dialog).to_be_hidden()
    await expect(select).to_have_value(names[15])
    await expect(select).to_be_focused()
    await page.keyboard.press("Space")
    await expect(dialog.get_by_label("Find an app")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(select).to_have_value(names[15])

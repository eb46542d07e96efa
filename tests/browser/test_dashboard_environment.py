"""The environment of an app, and the page of a deploy that failed."""

import re

import pytest
from playwright.async_api import expect

from tests.browser.axe import EVERY_LOOK, PHONE, assert_accessible, assert_fits
from tests.browser.dashboard import Holder

pytestmark = pytest.mark.asyncio(loop_scope="session")

LINES = 300
QUEUED = 1_782_979_200_000


async def test_a_pasted_file_and_a_redeploy(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    deploy = await holder.deploy(app)
    await holder.report(deploy, "build", "health", "canary")
    await holder.log_in(f"apps/{app}/settings/environment")
    for name in ("lower", "TOKEN"):
        await page.get_by_label("Name", exact=True).fill(name)
        await page.get_by_label("Value", exact=True).fill("a value")
        await holder.button("Set", exact=True).click()
        if name == "lower":
            await expect(page.get_by_role("alert").filter(has_text="a name consists of")).to_be_visible()
    await expect(page.get_by_label("Value", exact=True)).to_have_value("")
    await holder.confirm("Remove TOKEN", "Remove")
    await expect(page.get_by_text("No variables yet")).to_be_visible()
    await page.get_by_text("Paste a .env file", exact=True).click()
    lines = page.get_by_label("Lines of the file", exact=True)
    await lines.fill("GOOD=1\nnothing secret")
    await holder.button("Set all", exact=True).click()
    await expect(page.get_by_role("alert").filter(has_text="line 2: use NAME=value.")).to_be_visible()
    await expect(lines).to_have_value("GOOD=1\nnothing secret")
    await lines.fill("# a comment\nexport GOOD='1 2'\nOTHER=x\n")
    await assert_accessible(page, EVERY_LOOK)
    await holder.button("Set all", exact=True).click()
    await expect(holder.row("GOOD")).to_be_visible()
    await expect(holder.row("OTHER")).to_be_visible()
    await expect(lines).to_have_value("")
    await holder.confirm("Redeploy now", "Redeploy")
    await expect(holder.heading(f"Deploy of {app}")).to_be_focused()
    deploys = (await holder.account.get(f"/account/deploys?app={app}")).json()
    assert len(deploys) == 2
    assert page.url.endswith(deploys[0]["id"])


async def test_previews_have_another_value_or_none(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    await holder.account.call("PUT", f"/account/apps/{app}/env", {"DATABASE": "live", "PAYMENTS": "live"})
    await holder.log_in(f"apps/{app}/settings/environment")
    previews = holder.card("Previews")
    await expect(previews.get_by_text("Previews have the variables of the live release.")).to_be_visible()
    await page.get_by_label("Name for previews").fill("DATABASE")
    await page.get_by_label("Value for previews").fill("test")
    await holder.button("Set for previews").click()
    await expect(previews.get_by_role("row", name="DATABASE another value")).to_be_visible()
    await page.get_by_label("Name for previews").fill("PAYMENTS")
    await previews.get_by_label("Previews do not have this variable").check()
    await expect(page.get_by_label("Value for previews")).to_be_disabled()
    await holder.button("Set for previews").click()
    await expect(previews.get_by_role("row", name="PAYMENTS none")).to_be_visible()
    await expect(page.get_by_label("Value for previews")).to_be_enabled()
    await assert_accessible(page, EVERY_LOOK)
    await previews.get_by_role("button", name="Remove DATABASE").click()
    await page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    await expect(previews.get_by_role("row", name="DATABASE")).to_have_count(0)
    listed = (await holder.account.get(f"/account/apps/{app}/env?kind=preview")).json()
    assert [(each["name"], each["inPreviews"]) for each in listed] == [("DATABASE", "same"), ("PAYMENTS", "none")]


async def test_a_failed_deploy_shows_the_line_what_is_served_and_what_to_do(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    first = await holder.deploy(app)
    await holder.report(first, "build", ok=False, reason="the build command ended with status 2")
    await holder.log_in(f"deploys/{first}")
    await expect(page.get_by_text("Its address serves nothing yet.")).to_be_visible()
    await expect(page.get_by_text("The log shows why the build failed.")).to_be_visible()
    phases = page.get_by_role("list", name="Phases")
    await expect(phases).to_have_text(re.compile(r"Build: failed.*Health check: not run"))
    await page.get_by_role("main").get_by_role("link", name="Source and build").click()
    await expect(page.get_by_label("Build command")).to_be_visible()
    before = await holder.deploy(app)
    await holder.report(before, "build", "health", "canary")
    deploy = await holder.deploy(app)
    lines = [f"step {n}" for n in range(LINES)] + ["KeyError: 'DATABASE_URL'"] + ["  at b.ts"] * 30
    holder.log(deploy, "".join(f"{QUEUED + n}\x1f{line}\n" for n, line in enumerate(lines)))
    await holder.report(deploy, "build", ok=False, reason="the start command ended with status 1")
    for size in (PHONE, {"width": 1440, "height": 900}):
        await page.set_viewport_size(size)
        await holder.go(f"deploys/{deploy}")
        failing = page.locator(".log .failing")
        await expect(failing).to_contain_text("KeyError")
        log = page.get_by_role("log")
        top = await failing.evaluate(
            "it => it.getBoundingClientRect().top - it.parentElement.getBoundingClientRect().top"
        )
        assert 0 < top < await log.evaluate("it => it.clientHeight")
        await expect(holder.button("Follow")).to_have_attribute("aria-pressed", "false")
        await page.reload()
    await expect(page.locator("main")).to_contain_text(f"Its address still serves {before}.")
    await expect(page.get_by_role("link", name=before)).to_have_attribute("href", f"#/deploys/{before}")
    await expect(page.get_by_text(f"capsule env set {app} DATABASE_URL")).to_be_visible()
    await assert_fits(page, 1440, 390)
    await assert_accessible(page, EVERY_LOOK)
    await page.get_by_role("link", name="Set DATABASE_URL").click()
    await expect(holder.heading("Environment variables", 2).or_(holder.heading("Environment", 2)).first).to_be_visible()


async def test_a_log_opens_at_its_end(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    deploy = await holder.deploy(app)
    holder.log(deploy, "".join(f"{QUEUED + n}\x1fstep {n}\n" for n in range(LINES)))
    await holder.report(deploy, "build", "health", "canary")
    await holder.log_in(f"deploys/{deploy}")
    log = page.get_by_role("log")
    await expect(log.locator(".line")).to_have_count(LINES)
    assert await log.evaluate("it => it.scrollTop + it.clientHeight >= it.scrollHeight - 8")
    await expect(holder.button("Follow")).to_have_attribute("aria-pressed", "true")

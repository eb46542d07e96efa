"""The pages of an app and of deploys show the gateway's data, and their buttons work."""

import asyncio
import re
import time
from pathlib import Path

import pytest
from playwright.async_api import expect

from gateway.accounts.domain_observations import Certificate, write_certificates
from gateway.data.commands import DataAnswer, DataCommands
from gateway.data.records import DataRecords, DataStatus, Snapshot, snapshot_key
from gateway.ids import now_iso
from gateway.keys import certificate_key, deploy_key, deploys_key, partition_tag
from gateway.storage import FolderStorage
from tests.browser.axe import EVERY_LOOK, PHONE, assert_accessible, assert_fits
from tests.browser.dashboard import Holder
from tests.support.dns_server import DnsServer
from tests.support.polling import wait_until
from tests.support.stores import opened

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def live(holder: Holder, app: str) -> str:
    deploy = await holder.deploy(app)
    await holder.report(deploy, "build", "health", "canary")
    return deploy


async def test_the_page_of_an_app(holder: Holder) -> None:
    page, gw = holder.page, holder.gateway
    await holder.hurry()
    app = await holder.app(build={"start": "exec node server.js"}, customDomain="a.example", customDomainVerified=True)
    await holder.log_in(f"apps/{app}")
    await expect(holder.button("Publish")).to_be_visible()
    await expect(page.get_by_role("link", name="Visit")).to_have_count(0)
    deploy = await live(holder, app)
    await expect(page.get_by_role("link", name="Visit")).to_be_visible()
    await holder.suffer(app)
    certificate = Certificate("f", int((time.time() + 6 * 86_400) * 1000), "An Authority")
    with gw.redis.client() as client:
        key = certificate_key(partition_tag(holder.account.id), app)
        client.hset(key, mapping=write_certificates({"a.example": certificate}))
    output = gw.data_folder / "running" / f"{deploy}.output"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("listening\nGET /one 200\n")
    hook = (await holder.account.call("POST", f"/account/apps/{app}/hooks", {"name": "Nightly"})).json()
    gw.confidential.add(hook["url"].rpartition("/")[2])

    await holder.go()
    await expect(page.locator("ul.apps").get_by_role("listitem")).to_contain_text("Certificate expires in 6 days")
    await page.get_by_role("link", name="1 red finding").click()
    await expect(holder.heading(app)).to_be_focused()
    for words in ("issued by An Authority, expires in 6 days", "Down for 2 min 0 s in 1 outage in 3", "Process exited"):
        await expect(page.get_by_text(words)).to_be_visible()
    await expect(page.get_by_role("link", name="a.example")).to_have_attribute("href", "https://a.example")
    days = page.get_by_role("list", name="Health, day by day").get_by_role("listitem")
    await expect(days).to_have_count(90)
    both = [re.compile(r": down for 1 min 0 s in 1 outage$"), re.compile(r": down for 1 min 0 s$")]
    await expect(days.filter(has_text="down for")).to_have_text(both)
    await expect(days.last).to_contain_text("no outage")
    await expect(days.first).to_contain_text("not probed")
    for words in ("CVE-2026-31337", "example@1.0.0", "1.0.1", "in 7 days"):
        await expect(holder.row("CVE-2026")).to_contain_text(words)
    await page.get_by_text("Last output").click()
    await expect(page.get_by_label("Last output")).to_have_text("GET / 200\nabout to end")
    await expect(holder.row("operator")).to_contain_text("Live")

    log = page.get_by_role("log", name="Output")
    await expect(log).to_contain_text("GET /one 200")
    with output.open("a") as file:
        file.write("GET /two 500\n")
    await expect(log).to_contain_text("GET /two 500")
    await page.get_by_label("Filter: Output").fill("two")
    await expect(page.locator("#status")).to_have_text("1 match in 3 lines")
    await expect(log.get_by_text("GET /one 200")).to_be_hidden()
    await page.get_by_role("link", name=f"All deploys of {app}").click()
    await expect(holder.heading("Deploys")).to_be_focused()
    await expect(holder.row(app)).to_have_count(1)
    await page.get_by_role("link", name="Settings", exact=True).click()
    await page.get_by_role("link", name="Deploy hooks", exact=True).click()
    await expect(holder.row("Nightly")).to_contain_text("Never")


async def test_the_data_of_an_app(holder: Holder) -> None:
    """The test is the host that has them."""
    page, account = holder.page, holder.account
    app = await holder.app(build={"start": "exec node server.js"})
    deploy = await live(holder, app)
    at = f"/account/apps/{app}/data"
    async with opened(holder.gateway.redis.url) as store:
        records, commands = DataRecords(store), DataCommands(store)
        first = Snapshot("snp_1", now_iso(), 3 << 20, "deploy", deploy)
        await records.write_statuses([(account.id, app, DataStatus(250 << 20, "full", "Clear the data."))])
        await records.add_snapshot(account.id, app, first)
        storage = FolderStorage(holder.gateway.data_folder)
        await storage.put(snapshot_key(app, "snp_1"), b"packed")

        async def carry_out(action: str) -> None:
            [command] = await wait_until(commands.list_commands)
            assert command.action == action
            made = Snapshot("snp_2", now_iso(), 5 << 20, "manual")
            await records.add_snapshot(account.id, app, made)
            await commands.answer(command, DataAnswer(made))

        await holder.log_in(f"apps/{app}/data")
        card = page.locator("main")
        await expect(card).to_contain_text(f"250 MB of {(await account.get(at)).json()['limitBytes'] >> 30} GB")
        await expect(card).to_contain_text("Clear the data.")
        await expect(card.get_by_text("Full")).to_be_visible()
        await assert_accessible(page, EVERY_LOOK)
        async with page.expect_download() as downloading:
            await card.get_by_role("link", name="Download snp_1").click()
        assert Path(await (await downloading.value).path()).read_bytes() == b"packed"
        await card.get_by_role("button", name="Make a snapshot").click()
        await carry_out("snapshot")
        await expect(card.get_by_role("row")).to_have_count(3)
        await expect(page.get_by_role("status")).to_have_text("Made a snapshot of 5 MB.")
        await card.get_by_role("button", name="Clear").click()
        await page.get_by_role("dialog").get_by_role("button", name="Clear").click()
        await carry_out("clear")
        await expect(page.get_by_role("status")).to_have_text("Cleared the data.")
        await card.get_by_role("button", name="Restore snp_1").click()
        await page.get_by_role("dialog").get_by_role("button", name="Restore").click()
        await page.wait_for_url("**/dashboard#/deploys/*")
        [newest, _] = (await account.get(f"/account/deploys?app={app}")).json()
        assert (newest["trigger"], newest["release"]) == ("restore", deploy)


async def test_custom_domains_from_the_first_record_to_their_removal(holder: Holder, resolver: DnsServer) -> None:
    page, app = holder.page, await holder.app()
    await holder.log_in(f"apps/{app}/settings/domain")
    card = holder.card("Custom domains")
    await card.get_by_label("Domain").fill("not a domain")
    await card.get_by_role("button", name="Add domain").click()
    await expect(card.get_by_role("alert").first).to_contain_text("a host name such as app.example.com")
    await card.get_by_label("Domain").fill(" Shop.Example. ")
    await page.keyboard.press("Enter")
    shop, state = (
        card.get_by_role("region", name="shop.example", exact=True),
        page.locator("[id='domain shop.example']"),
    )
    await expect(state).to_be_focused()
    await expect(state).to_have_text("shop.examplePrimaryNot verified")
    await assert_accessible(page, EVERY_LOOK)

    await shop.get_by_role("button", name="Copy: Name of the TXT record").click()
    assert await holder.clipboard() == "_capsule.shop.example"
    await shop.get_by_role("button", name="Copy: Value of the CNAME record").click()
    assert await holder.clipboard() == f"{app}.apps.localhost"
    await shop.get_by_role("button", name="Copy: Value of the TXT record").click()
    token = await holder.clipboard()

    verify = shop.get_by_role("button", name="Verify")
    for texts, words in (
        ([], "There is no TXT record at _capsule.shop.example."),
        (["x"], "The TXT record at _capsule.shop.example has another value."),
    ):
        resolver.sets("_capsule.shop.example", *texts)
        await verify.click()
        await expect(shop.get_by_text(words)).to_be_visible()
        await expect(page.get_by_role("status")).to_have_text(words)
        await expect(verify).to_be_focused()
    resolver.sets("_capsule.shop.example", token)
    await verify.click()
    await expect(state).to_have_text("shop.examplePrimaryVerified")
    await expect(state).to_be_focused()
    await expect(verify).to_have_count(0)
    await expect(card.get_by_text("another value")).to_have_count(0)
    await card.get_by_text("Records in its DNS").click()
    await assert_accessible(page, EVERY_LOOK)

    # Up to five, in the order of their addition after the primary one.
    added = ["www.shop.example", "xn--e28h.example", "three.example", "four.example"]
    for written, name in zip(["www.shop.example", "😀.example", *added[2:]], added, strict=True):
        await card.get_by_label("Domain").fill(written)
        await page.keyboard.press("Enter")
        await expect(page.locator(f"[id='domain {name}']")).to_be_focused()
    await expect(card.get_by_label("Domain")).to_be_hidden()
    await card.get_by_role("button", name="Make primary www.shop.example").click()
    await expect(page.locator("[id='domain www.shop.example']")).to_be_focused()
    names = [each.get_attribute("aria-label") for each in await card.get_by_role("region").all()]
    assert await asyncio.gather(*names) == ["www.shop.example", "shop.example", *added[1:]]
    await holder.go(f"apps/{app}")
    await expect(page.get_by_text("www.shop.example (not verified)")).to_be_visible()
    await holder.go(f"apps/{app}/settings/domain")

    for name in ("shop.example", *added):
        await card.get_by_role("button", name=f"Remove {name}", exact=True).click()
        await page.get_by_role("dialog").get_by_role("button", name="Remove").click()
        await expect(card.get_by_label("Domain")).to_be_focused()
    await expect(card.get_by_text("The app has no domain of its own.")).to_be_visible()
    resolver.sets("_capsule.shop.example")


async def test_deploys_from_the_list_to_the_end(holder: Holder, tmp_path: Path) -> None:
    page, app, other = holder.page, await holder.app(), await holder.app()
    await holder.hurry()
    first, second = await live(holder, app), await live(holder, app)
    failed = await holder.deploy(other)
    await holder.report(failed, "build", ok=False, reason="exit status 1 of npm-run")
    with holder.gateway.redis.client() as client:  # a year of deploys; the newest ones are real
        older = {f"dep_0{n:03}": n for n in range(60)}
        fields = {"app": other, "appId": other, "account": holder.account.id, "kind": "live", "trigger": "hook"}
        for name in older:
            key = deploy_key(holder.account.id, name)
            client.hset(
                key, mapping={**fields, "id": name, "state": "canceled", "createdAt": "2026-01-01T00:00:00.000Z"}
            )
            client.expire(key, 600)
        client.zadd(deploys_key(holder.account.id), older)
    await holder.log_in("deploys")
    await expect(holder.row("Replaced")).to_have_count(1)
    await expect(holder.row("Build: exit status 1 of npm-run")).to_have_count(1)
    for rows in (30, 60):
        await expect(page.locator("tbody tr")).to_have_count(rows)
        await holder.button("Older", exact=True).click()
    await expect(page.locator("tbody tr")).to_have_count(63)
    await expect(holder.button("Older", exact=True)).to_have_count(0)
    await page.get_by_label("Show").select_option(app)
    await expect(page.locator("tbody tr")).to_have_count(2)

    await page.get_by_role("link", name=f"{app}, deploy {second}").click()
    await expect(holder.heading(f"Deploy of {app}")).to_be_focused()
    await page.go_back()
    await expect(page.get_by_label("Show")).to_have_value(app)  # the address keeps it
    await expect(page.locator("tbody tr")).to_have_count(2)
    await page.get_by_role("link", name=f"{app}, deploy {second}").click()
    await expect(page.locator("main").get_by_text("Live", exact=True).first).to_be_visible()
    await expect(holder.button("Roll back to this release")).to_have_count(0)
    await holder.button("Redeploy").click()
    await holder.button("Not now").click()
    await expect(holder.button("Redeploy")).to_be_focused()
    await holder.confirm("Redeploy")
    await expect(page.get_by_role("definition").filter(has_text="Redeploy")).to_be_visible()
    await expect(page).not_to_have_url(re.compile(f"{second}$"))
    again = page.url.rpartition("/")[2]
    assert again.startswith("dep_")
    assert again not in (first, second)

    stamped = "".join(
        f"{int(time.time() * 1000)}\x1f{line}\n" for line in ("npm run build", "built in 3 s", "all done")
    )
    holder.log(again, stamped)
    await holder.report(again, "build")
    log = page.get_by_role("log")
    await expect(log.get_by_role("time")).to_have_count(3)
    await expect(page.get_by_role("status")).to_have_text("The deploy is checking.")
    await page.get_by_label("Filter: Build log").fill("BUIL")
    await expect(page.get_by_role("status")).to_have_text("2 matches in 3 lines")
    await expect(log.get_by_text("all done")).to_be_hidden()
    timer = page.get_by_role("list", name="Phases").get_by_role("time")
    before = await timer.inner_text()
    await expect(timer).not_to_have_text(before)
    async with page.expect_download() as download:
        await holder.button("Download").click()
    await (await download.value).save_as(tmp_path / "log")
    assert [line.partition(" ")[2] for line in (tmp_path / "log").read_text().splitlines()] == [
        "npm run build",
        "built in 3 s",
        "all done",
    ]
    await expect(page).to_have_title(f"Checking: deploy of {app} · Capsule")


LINES = 300
QUEUED = 1_782_979_200_000


async def test_a_pasted_env_file_and_a_redeploy(holder: Holder) -> None:
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


PAGE = {"name": "index.html", "mimeType": "text/html", "buffer": b"<!doctype html><title>Shop</title>"}


async def look(holder: Holder) -> None:
    await assert_fits(holder.page, 390, 1440)
    await assert_accessible(holder.page, EVERY_LOOK)


async def test_a_preview_is_published_found_and_ended(holder: Holder) -> None:
    page, app = holder.page, await holder.app("shop-1", repository=None)
    await holder.app("blog-1")
    await holder.log_in("deploys")
    await holder.button("Publish a preview").click()
    await expect(page.get_by_role("alert").filter(has_text="Choose an app first.")).to_be_visible()
    await page.get_by_label("App", exact=True).select_option(app)
    await holder.button("Publish a preview").click()
    sheet = page.get_by_role("dialog", name=f"Publish a preview of {app}")
    await expect(sheet.get_by_text("https://shop-1--p-preview.apps.localhost")).to_be_visible()
    await expect(sheet.get_by_role("button", name="Publish this branch")).to_have_count(0)
    await sheet.get_by_label("Branch").fill("Fix/The Checkout of Everybody")
    url = "https://shop-1--p-fix-the-checkout-of.apps.localhost"
    await expect(sheet.get_by_text(url)).to_be_visible()
    await sheet.get_by_label("What has changed").fill("Take cards again")
    await look(holder)
    await sheet.get_by_label("Choose a file").and_(sheet.locator("input")).set_input_files(PAGE)
    await expect(holder.heading(f"Deploy of {app}")).to_be_visible()
    await expect(sheet).to_have_count(0)
    deploy = page.url.rpartition("/")[2]
    await holder.report(deploy, "build", "health")
    for fact in ("Preview", "Take cards again", "Fix/The Checkout of Everybody", "first"):
        await expect(page.get_by_role("definition").filter(has_text=fact).first).to_be_visible()
    await expect(page.get_by_role("link", name=url.removeprefix("https://"))).to_be_visible()
    await look(holder)
    await holder.confirm("End preview")
    await expect(page.get_by_text("Ended", exact=True)).to_be_visible()
    await expect(holder.button("End preview")).to_have_count(0)

    app = await holder.app()  # with a repository
    await holder.go(f"apps/{app}/deploys")
    await holder.button("Publish a preview").click()
    sheet = page.get_by_role("dialog", name=f"Publish a preview of {app}")
    await sheet.get_by_label("Branch").fill("-x")
    await sheet.get_by_role("button", name="Publish this branch of the repository").click()
    await expect(sheet.get_by_role("alert").first).to_contain_text("branch: ")
    await sheet.get_by_label("Branch").fill("feature/login")
    await sheet.get_by_role("button", name="Publish this branch of the repository").click()
    await expect(holder.heading(f"Deploy of {app}")).to_be_visible()
    for fact in ("Preview", "Branch", "feature/login"):
        await expect(page.get_by_role("definition").filter(has_text=fact).first).to_be_visible()

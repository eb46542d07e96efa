"""The dashboard's flows, each to its end, with the gateway, a worker and a receiver."""

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import expect

from gateway.keys import deliveries_key
from tests.browser.axe import assert_accessible
from tests.browser.dashboard import Holder
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.receiver import FakeReceiver, verified
from tests.fakes.server import answer
from tests.support.accounts import App
from tests.support.polling import wait_until
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")


fixture = pytest_asyncio.fixture(loop_scope="session")


@fixture
async def receiver() -> AsyncIterator[FakeReceiver]:
    async with FakeReceiver() as receiver:
        yield receiver


# -- in and out ----------------------------------------------------------------------------------------------


async def test_a_wrong_key_the_right_one_and_out_again(holder: Holder) -> None:
    page = holder.page
    await holder.go("hooks")
    key = page.get_by_label("API key")
    await expect(key).to_be_focused()
    await key.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("Paste your API key. It begins with csk_.")
    await key.fill("csk_wrong")
    await key.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("This key is not valid.")
    await expect(key).to_be_focused()
    await expect(key).to_have_attribute("aria-invalid", "true")
    await key.fill(f"  {holder.account.key} ")
    await key.press("Enter")
    await expect(holder.heading("Deploy hooks")).to_be_focused()
    assert await page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]") == ["", 0, 0]
    await page.reload()
    await expect(holder.heading("Deploy hooks")).to_be_visible()
    await holder.button("Log out").click()
    await expect(page.get_by_text("You are logged out.")).to_be_visible()
    await expect(page.get_by_role("navigation")).to_be_hidden()
    await page.reload()
    await expect(key).to_be_focused()


async def test_a_session_that_ends_comes_back_to_the_same_view(holder: Holder) -> None:
    page = holder.page
    await holder.hurry()
    await holder.log_in("webhooks")
    await page.context.clear_cookies()
    await expect(page.get_by_text("Your session has ended.")).to_be_visible()
    await page.get_by_label("API key").fill(holder.account.key)
    await holder.button("Log in").click()
    await expect(holder.heading("Webhooks")).to_be_visible()

    await holder.button("Log out").click()
    for n in range(10):
        body = {"data": {"apiKey": f"csk_{n}"}, "headers": {"Origin": holder.gateway.address}}
        assert (await page.request.post(f"{holder.gateway.address}/dashboard/session", **body)).status == 401
    await page.get_by_label("API key").fill(holder.account.key)
    await holder.button("Log in").click()
    refusal = re.compile(r"^Too many failed logins from your address. Try again in \d+ seconds?\.$")
    await expect(page.get_by_role("alert")).to_have_text(refusal)


# -- overview ------------------------------------------------------------------------------------------------


async def test_the_overview_counts_what_was_asked_and_spent(
    holder: Holder, provider: FakeProvider, backend: FakeAppBackend
) -> None:
    page = holder.page
    await holder.log_in()
    for words in ("Ana’s workshop, on the Maker plan.", "No requests yet", "No apps yet", "Operational"):
        await expect(page.get_by_text(words)).to_be_visible()
    await expect(page.get_by_role("img", name="€0.00 settled, €0.00 reserved, €2.00 left of €2.00")).to_be_visible()
    await page.get_by_role("link", name="Account", exact=True).click()
    await expect(page.get_by_text("0 of 200")).to_be_visible()

    name = await holder.app(auth={"kind": "jwks", "url": backend.jwks_url})
    app = App(holder.account, name, backend)
    prompt = provider.plays(tokens("x", usage=(100, 2000)), prompt="Count the tokens of this.")
    assert (await app.ask(prompt)).status_code == 200
    assert (await app.ask("")).status_code == 400
    assert await holder.account.settled() == 100 * 150 + 2000 * 600

    async def counted() -> bool:
        usage = (await holder.account.get("/account/usage")).json()
        return usage[-1]["requests"] + usage[-2]["requests"] == 2

    await wait_until(counted, 10)
    await holder.go()
    answers = "Requests: 1 answered, 1 refused, 0 failed, 0 interrupted in 24 hours"
    await expect(page.get_by_role("img", name=answers)).to_be_visible()
    await expect(page.locator(".figure")).to_have_text("€0.0012 of €2.00")
    link = page.get_by_role("link", name=f"{name}.apps.localhost")
    await expect(link).to_have_attribute("href", f"https://{name}.apps.localhost")
    await page.get_by_role("link", name="Usage", exact=True).click()
    await expect(page.get_by_role("img", name="Tokens: 100 in, 2K out in 24 hours")).to_be_visible()


# -- webhooks ------------------------------------------------------------------------------------------------


async def test_a_webhook_from_its_setting_to_its_clearing(
    holder: Holder, worker: Worker, receiver: FakeReceiver
) -> None:
    page = holder.page
    await holder.hurry()
    await holder.log_in("webhooks")
    await expect(page.get_by_text("No webhook is set")).to_be_visible()
    await expect(page.get_by_text("No deliveries yet")).to_be_visible()

    await page.get_by_label("URL").fill("ftp://example.com/")
    await holder.button("Save").click()
    await expect(page.get_by_role("alert").filter(has_text="url: ")).to_be_visible()
    await expect(page.get_by_label("URL")).to_have_value("ftp://example.com/")
    await page.get_by_label("URL").fill(receiver.url())
    await holder.button("Save").click()
    await expect(holder.heading("Your signing secret", 2)).to_be_focused()
    await holder.button("Copy").click()
    await expect(holder.button("Copied")).to_be_visible()
    secret = await holder.clipboard()
    assert re.fullmatch(r"whsec_[\w+/=]{44}", secret)
    holder.gateway.confidential.add(secret)
    await holder.button("I have stored it").click()
    await expect(holder.heading("Webhooks")).to_be_focused()
    await page.reload()
    await expect(page.get_by_text(receiver.url())).to_be_visible()
    assert secret not in await page.content()

    await page.get_by_label("Test event").select_option("app.crashed")
    await holder.button("Send").click()
    await expect(holder.row("app.crashed")).to_contain_text("Delivered status 204")
    [exchange] = receiver.got()
    assert verified(exchange, secret)["data"]["sample"] is True

    await holder.button("Redeliver app.crashed").click()
    await expect(holder.row("app.crashed")).to_have_count(2)
    assert list(receiver.ids().values()) == [2]
    verified(receiver.got()[1], secret)
    await expect(holder.button("Redeliver app.crashed").last).to_be_focused()

    receiver.plays("/events", answer(500))
    await page.get_by_label("Test event").select_option("deploy.failed")
    await holder.button("Send").click()
    await expect(holder.row("deploy.failed")).to_contain_text(re.compile(r"Failed status 500(?!,)"))

    await holder.button("Change").click()
    await expect(page.get_by_label("URL")).to_have_value(receiver.url())
    await page.get_by_label("URL").fill(receiver.url("/elsewhere"))
    await holder.button("Save").click()
    another = await page.locator(".once code").inner_text()
    assert another != secret

    await holder.button("Clear").click()
    await holder.button("Keep it").click()
    await expect(holder.button("Clear")).to_be_focused()
    assert (await holder.account.get("/account/webhook")).status_code == 200
    await holder.confirm("Clear")
    await expect(page.get_by_text("No webhook is set")).to_be_visible()
    assert (await holder.account.get("/account/webhook")).status_code == 404


async def test_deliveries_are_examined_and_repeated(holder: Holder, worker: Worker, receiver: FakeReceiver) -> None:
    page = holder.page
    await holder.hurry()
    secret = await holder.account.set_webhook(receiver.url())
    receiver.plays("/events", answer(500, b"<b>not as markup</b>", {"X-Trace": "t1"}))
    for kind in ("app.crashed", "deploy.failed"):
        await holder.account.call("POST", "/account/webhook/test", {"type": kind})
    await holder.log_in("webhooks")
    await expect(holder.row("deploy.failed")).to_have_count(1)
    await expect(holder.row("app.crashed")).to_have_count(1)

    await page.get_by_label("All events").select_option("app.crashed")
    await expect(page).to_have_url(re.compile(r"#/webhooks\?type=app\.crashed$"))
    await page.reload()
    await expect(page.get_by_label("All events")).to_have_value("app.crashed")
    await expect(holder.row("deploy.failed")).to_have_count(0)
    await expect(holder.row("app.crashed")).to_have_count(1)
    await page.get_by_label("All outcomes").select_option("delivered")
    await expect(page.get_by_text("No such deliveries")).to_be_visible()
    await page.get_by_label("All outcomes").select_option("failed")

    await holder.row("app.crashed").get_by_role("link").click()
    await expect(holder.heading("app.crashed")).to_be_focused()
    await expect(page.get_by_text(receiver.url(), exact=True)).to_be_visible()
    await expect(holder.heading("Response, status 500", 2)).to_be_visible()
    await expect(page.get_by_text("<b>not as markup</b>")).to_be_visible()
    await expect(page.get_by_text("X-Trace: t1")).to_be_visible()
    await expect(page.get_by_text("X-Service-Event: app.crashed")).to_be_visible()
    await expect(page.get_by_text('"type": "app.crashed"')).to_be_visible()
    await holder.button("Copy").click()
    await expect(holder.button("Copied")).to_be_visible()
    assert await holder.clipboard() in {exchange.body.decode() for exchange in receiver.got()}, "the very bytes"
    assert secret not in await page.content()
    await holder.button("Redeliver").click()
    await wait_until(lambda: len(receiver.got()) == 3)
    await expect(page.get_by_role("link", name="Attempt 2")).to_be_visible()
    await page.get_by_role("link", name="All deliveries").click()
    await expect(holder.row("app.crashed")).to_have_count(2)

    receiver.plays("/events")
    since, all_failed = page.get_by_label("Failed events since"), holder.button("Redeliver all …")
    await since.fill("2100-01-01T00:00")
    await all_failed.click()
    await expect(page.get_by_text("No event has failed since then.")).to_be_visible()
    await since.fill("2020-01-01T00:00")
    await all_failed.click()
    await expect(page.get_by_role("dialog", name="Redeliver 2 events?")).to_be_visible()
    await holder.button("Cancel").click()
    assert len(receiver.got()) == 3
    await holder.confirm("Redeliver all …", "Redeliver")
    await expect(page.get_by_text("2 events are queued again.")).to_be_visible()
    await expect(holder.row("Redelivery").filter(has_text="Delivered")).to_have_count(2)
    assert sorted(receiver.ids().values()) == [2, 3]
    await since.fill("2020-01-01T00:00")
    await all_failed.click()
    await expect(page.get_by_text("No event has failed since then.")).to_be_visible()


async def test_an_uncopied_secret_needs_a_confirmation_to_leave(holder: Holder) -> None:
    """Leaving the view, the page or the session asks first."""
    page = holder.page
    before = await holder.account.set_webhook("http://127.0.0.1:9/events")
    await holder.log_in("webhooks")
    await holder.button("Rotate secret").click()
    dialog = page.get_by_role("dialog", name="Rotate the signing secret?")
    await expect(dialog).to_contain_text("For 24 hours")
    await holder.button("Keep it").click()
    await expect(holder.button("Rotate secret")).to_be_focused()
    await holder.button("Rotate secret").click()
    await dialog.get_by_role("button", name="Rotate").click()
    await expect(holder.heading("Your new signing secret", 2)).to_be_focused()
    await expect(page.get_by_text("The previous secret also signs and expires")).to_be_visible()
    secret = await page.locator(".once code").inner_text()
    holder.gateway.confidential |= {before, secret}
    assert secret != before
    await assert_accessible(page)

    leaving = page.get_by_role("dialog", name="Leave without copying?")
    for leave in (page.get_by_role("link", name="Deploy hooks"), holder.button("Log out")):
        await leave.click()
        await expect(leaving).to_be_visible()
        await holder.button("Stay").click()
        await expect(page.get_by_text(secret)).to_be_visible()
        await expect(page).to_have_url(re.compile("#/webhooks$"))
    questions = []
    page.once("dialog", lambda question: questions.append(question.type) or asyncio.ensure_future(question.accept()))
    await page.reload()
    assert questions == ["beforeunload"]
    await expect(page.get_by_text("The previous secret also signs and expires")).to_be_visible()

    await holder.button("Rotate secret").click()
    await expect(dialog).to_contain_text("The previous secret stops signing immediately.")
    await dialog.get_by_role("button", name="Rotate").click()
    holder.gateway.confidential.add(await page.locator(".once code").inner_text())
    await holder.button("Copy").click()
    await expect(holder.button("Copied")).to_be_visible()
    await page.get_by_role("link", name="Deploy hooks").click()
    await expect(holder.heading("Deploy hooks")).to_be_focused()


async def test_older_deliveries(holder: Holder) -> None:
    key = deliveries_key(holder.account.id)
    with holder.gateway.redis.client() as client:
        now = int(client.time()[0]) * 1000
        for number in range(40):
            row = {"id": f"evt_{number}", "type": "app.crashed", "app": f"app-{number:03}", "at": now}
            client.xadd(key, {**row, "durationMs": 1, "outcome": "dropped", "status": "", "error": "no-receiver"})
        client.expire(key, 600)
    await holder.log_in("webhooks")
    await expect(holder.row("app-")).to_have_count(30)
    await holder.button("Older", exact=True).click()
    await expect(holder.row("app-")).to_have_count(40)
    await expect(holder.row("app-000")).to_have_count(1)
    await expect(holder.button("Older", exact=True)).to_have_count(0)


# -- deploy hooks --------------------------------------------------------------------------------------------


async def test_a_hook_from_its_creation_to_its_revocation(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    await holder.hurry()
    await holder.log_in("hooks")
    await expect(page.get_by_text("No hooks yet")).to_be_visible()
    # The URL may go to a code host, of which every event would be a build.
    hosts = holder.card("From GitHub, GitLab or Gitea")
    await expect(hosts).to_contain_text("uses up one of your plan’s deploys of the day")
    for name in ("GitHub", "GitLab", "Gitea, Forgejo"):
        await expect(hosts.get_by_role("term").filter(has_text=name)).to_be_visible()
    await page.get_by_label("Name").fill("Content system")
    await holder.button("Create").click()
    await expect(holder.heading(f"“Content system” rebuilds {app}", 2)).to_be_focused()
    await expect(page.locator(".once")).to_have_css("border-top-width", "1px")
    await holder.button("Copy").click()
    await expect(holder.button("Copied")).to_be_visible()
    url = await holder.clipboard()
    holder.gateway.confidential.add(url.rpartition("/")[2])
    [hook] = (await holder.account.get("/account/hooks")).json()
    await expect(holder.row("Content system")).to_contain_text(hook["id"])
    await expect(holder.row("Content system")).to_contain_text("Never")
    created = holder.row("Content system").get_by_role("time")
    await expect(created).to_have_text("just now")
    assert re.search(r"\d+ \w+ \d{4}.*\d\d:\d\d:\d\d", await created.get_attribute("title") or "")

    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        assert (await http.post(url)).status_code == 202
        await expect(holder.row("Content system")).not_to_contain_text("Never")
        await page.reload()
        await expect(holder.row("Content system")).to_be_visible()
        assert url not in await page.content()

        await holder.button("Revoke Content system").click()
        await expect(page.get_by_role("dialog", name="Revoke “Content system”?")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(holder.button("Revoke Content system")).to_be_focused()
        assert (await http.post(url)).status_code == 202
        await holder.confirm("Revoke Content system", "Revoke")
        await expect(page.get_by_text("No hooks yet")).to_be_visible()
        await expect(holder.heading("Deploy hooks")).to_be_focused()
        assert (await http.post(url)).status_code == 404


# -- deploys -------------------------------------------------------------------------------------------------


async def test_a_deploy_is_followed_to_its_end(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    await holder.hurry()
    await holder.log_in("deploys")
    await expect(page.get_by_text("No deploys yet")).to_be_visible()
    deploy = await holder.deploy(app)
    await expect(holder.row(app)).to_contain_text("Queued")
    await page.get_by_role("link", name=f"{app}, deploy {deploy}").click()
    await expect(holder.heading(f"Deploy of {app}")).to_be_focused()
    log, phases = page.get_by_role("log"), page.get_by_role("list", name="Phases")
    await expect(log).to_have_text("No log output yet.")

    holder.log(deploy, "npm run build\n")
    await expect(log).to_contain_text("npm run build")
    await holder.report(deploy, "build")
    await expect(phases).to_have_text(re.compile(r"Build: done.*Health check: running.*Canary: waiting$"))
    await holder.report(deploy, "health", "canary")
    await expect(page.get_by_role("status")).to_have_text("The deploy is live.")
    await expect(phases).to_contain_text("Canary: done")
    await expect(page.get_by_role("link", name=f"{app}.apps.localhost")).to_be_visible()


async def test_hidden_pages_and_finished_deploys_send_no_requests(holder: Holder) -> None:
    page, deploy = holder.page, await holder.deploy(await holder.app())
    await page.add_init_script("Object.defineProperty(document, 'hidden', { get: () => window.away ?? false })")
    requests: list[str] = []
    page.on(
        "request", lambda request: requests.append(request.url) if f"/account/deploys/{deploy}" in request.url else None
    )
    await page.clock.install()
    await holder.log_in()
    await page.evaluate(f"location.hash = '#/deploys/{deploy}'")
    await expect(page.get_by_role("log")).to_be_visible()
    await page.evaluate("window.away = true")
    before = len(requests)
    await page.clock.run_for(20_000)
    assert len(requests) == before
    await page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    await wait_until(lambda: len(requests) > before)
    await holder.report(deploy, "build", ok=False, reason="no")
    await page.clock.run_for(2_000)
    await expect(page.get_by_text("Build: no")).to_be_visible()
    before = len(requests)
    await page.clock.run_for(20_000)
    assert len(requests) == before


async def test_a_deploy_is_canceled_a_release_comes_back_and_a_preview_is_promoted(holder: Holder) -> None:
    page, app = holder.page, await holder.app()
    first, second = "", ""
    for _ in range(2):
        first, second = second, await holder.deploy(app)
        await holder.report(second, "build", "health", "canary")
    waiting = await holder.deploy(app)
    await holder.log_in("deploys")
    await page.get_by_role("link", name=f"{app}, deploy {waiting}").click()
    await expect(page.get_by_text("The deploy engine")).to_be_visible()
    await holder.confirm("Cancel")
    await expect(page.get_by_text("Canceled on request")).to_be_visible()
    await expect(holder.button("Cancel")).to_have_count(0)
    await page.evaluate(f"location.hash = '#/deploys/{first}'")
    await holder.confirm("Roll back to this release")
    await expect(page.get_by_role("link", name=first)).to_be_visible()
    await expect(page.get_by_text("Rollback", exact=True)).to_be_visible()
    preview = await holder.deploy(app, "preview")
    await holder.report(preview, "build", "health")
    await page.evaluate(f"location.hash = '#/deploys/{preview}'")
    await holder.confirm("Promote")
    await expect(page.get_by_role("link", name=preview)).to_be_visible()

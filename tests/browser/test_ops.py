"""The operators' page in a real browser: login, live figures, the switch, and errors."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from gateway.deploys.pods import NodeLoad, PodReport, PodStates, WaitingPod, write_pod_report
from gateway.ids import now_iso
from gateway.keys import spend_by_provider_key, spenders_key
from tests.browser.axe import EVERY_LOOK, assert_accessible, assert_fits, open_view
from tests.browser.conftest import SOON
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import answer, tokens
from tests.support.gateway_process import OPERATOR, Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.prices import EURO
from tests.support.providers import several_providers, states
from tests.support.stores import opened

fixture = pytest_asyncio.fixture(loop_scope="session")
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gw(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Starts a gateway whose apps run on Kubernetes."""
    folder = tmp_path_factory.mktemp("ops")
    settings = {"GATEWAY_APPS_ENGINE": "kubernetes", "GATEWAY_STORAGE_URL": f"file://{folder}/storage"}
    async with gateway_with_redis(provider, folder, SOON, **settings) as running:
        yield running


@asynccontextmanager
async def visiting(browser: Browser, gw: Gateway, *, logged_in: bool) -> AsyncIterator[Page]:
    """Opens /ops. At the end, the page must have no errors and no violation of its content policy."""
    context = await browser.new_context(base_url=gw.address)
    if logged_in:
        answer = await context.request.post("/ops/session", data={"token": OPERATOR}, headers={"Origin": gw.address})
        assert answer.status == 204
    page = await context.new_page()
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.on("console", lambda line: broken.append(line.text) if "Content Security" in line.text else None)
    await page.goto("/ops")
    yield page
    for cookie in await context.cookies():
        gw.confidential.add(cookie["value"])
    await context.close()
    assert broken == []


@fixture
async def page(browser: Browser, gw: Gateway) -> AsyncIterator[Page]:
    async with visiting(browser, gw, logged_in=False) as page:
        yield page


@fixture
async def inside(browser: Browser, gw: Gateway) -> AsyncIterator[Page]:
    async with visiting(browser, gw, logged_in=True) as page:
        await expect(page.locator("#live")).to_have_text("Live")
        yield page


async def view(page: Page, name: str) -> None:
    await page.get_by_role("navigation").get_by_role("link", name=name).click()
    await expect(page.get_by_role("heading", level=1)).to_be_focused()


async def act(at: Page | Locator, button: str, answer: str, reason: str = "") -> None:
    """Presses a button, and in its dialog the button `answer`, after a reason is typed."""
    await at.get_by_role("button", name=button).click()
    dialog = (at.page if isinstance(at, Locator) else at).get_by_role("dialog")
    if reason:
        await dialog.get_by_label("Reason").fill(reason)
    await dialog.get_by_role("button", name=answer).click()


async def log_in(page: Page, token: str = OPERATOR) -> None:
    await page.get_by_label("Operator token").fill(token)
    await page.keyboard.press("Enter")


async def test_the_login_shows_errors(page: Page) -> None:
    field = page.get_by_label("Operator token")
    await expect(field).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("Paste the operator token.")
    await log_in(page, "wrong")
    await expect(page.get_by_role("alert")).to_contain_text("This token is not valid.")
    await expect(field).to_be_focused()
    await expect(field).to_have_attribute("aria-invalid", "true")
    await log_in(page)
    await expect(page.locator("#inference")).to_have_text("Operational")
    cookies = await page.context.cookies()
    assert [cookie["httpOnly"] for cookie in cookies] == [True]
    await page.reload()
    await expect(page.locator("#live")).to_have_text("Live")


async def test_figures_follow_what_happens(inside: Page, gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend)
    for _ in range(20):
        await app.events("x")
    await app.ask("x")
    await app.post({"prompt": "x"}, headers={})
    await expect(inside.locator("#glance")).to_contain_text(re.compile(r"Requests, last hour\s*22"))
    await expect(inside.locator(".codes")).to_contain_text("USER_RATE_LIMITED1")
    spender = inside.get_by_role("row").filter(has_text=app.account.id)
    await expect(spender).to_contain_text("max")
    await expect(spender.get_by_role("rowheader")).to_have_text(re.compile(rf"^Account \w+ {app.account.id}$"))
    await expect(spender.locator(".bar .settled")).to_be_visible()
    await expect(inside.get_by_role("img", name="Requests per minute: 20 answered, 1 invalid")).to_be_visible()
    await expect(inside.locator("#attention")).to_contain_text("No worker running: webhooks, deploys")
    await expect(inside.locator("#models")).to_contain_text("gpt-oss-120b")
    glance = inside.locator("#glance")
    await expect(glance).to_contain_text("refused: 1 invalid, 1 over a limit")
    await expect(glance).to_contain_text("100%")
    await view(inside, "System")
    await expect(inside.locator("#workers")).to_contain_text("No worker is running")


async def test_dead_letters_and_storage(inside: Page, gw: Gateway, backend: FakeAppBackend) -> None:
    await view(inside, "System")
    await expect(inside.get_by_role("heading", name="Dead letters")).to_be_hidden()
    app = await gw.app(backend)
    account = app.account.id
    for _ in range(3):
        await gw.platform("POST", f"apps/{app.name}/crashes", {"reason": "oom"})
    with gw.redis.client() as client:
        letter = {"stream": "events", "entry": "1-1", "reason": "KeyError: 'id'", "fields": '{"garbage": "<b>x</b>"}'}
        client.xadd("{p32}:dead", letter)
        client.expire("{p32}:dead", 600)
    await expect(inside.get_by_role("heading", name="Dead letters")).to_be_visible()
    await expect(inside.locator("#dead-letters")).to_contain_text(
        "1 entry of the last 30 days that no worker could process"
    )
    row = inside.get_by_role("row").filter(has_text="KeyError: 'id'")
    await expect(row).to_contain_text("garbage=<b>x</b>")
    await expect(inside.locator("#storage").get_by_role("row").filter(has_text=account)).to_contain_text("MiB")


async def test_the_switch_works_by_keyboard_and_needs_a_confirmation(
    inside: Page, gw: Gateway, backend: FakeAppBackend
) -> None:
    app = await gw.app(backend)
    button = inside.locator("#switch")
    await button.focus()
    await inside.keyboard.press("Enter")
    dialog = inside.get_by_role("dialog")
    await expect(dialog).to_contain_text("Turn inference off?")
    await inside.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    assert (await gw.platform("GET", "inference")).json()["enabled"]
    await button.click()
    await expect(dialog.get_by_label("Reason")).to_be_focused()
    await dialog.get_by_role("button", name="Turn off").click()
    await expect(dialog.get_by_role("alert")).to_have_text("Give a reason.")
    assert (await gw.platform("GET", "inference")).json()["enabled"]
    await dialog.get_by_label("Reason").fill("Überlastung:\nprovider is down, 100% errors")
    await dialog.get_by_role("button", name="Turn off").click()
    await expect(inside.locator("#inference")).to_have_text("Off")
    await expect(inside.locator("#attention")).to_contain_text("Inference: Off")
    await expect(inside.locator("#inference-why")).to_contain_text("the switch is off")
    await expect(inside.get_by_role("status")).to_have_text("Inference: Off")
    assert not (await gw.platform("GET", "inference")).json()["enabled"]
    assert (await app.ask("x")).status_code == 503
    refused = inside.locator("#requests .key li").filter(has_text="refused while off")
    await expect(refused).to_have_text("1refused while off")
    await expect(button).to_have_text("Turn on")
    await expect(button).to_be_focused()
    await inside.keyboard.press("Enter")
    await dialog.get_by_role("button", name="Turn on").click()
    await expect(inside.locator("#inference")).to_have_text("Operational")
    await view(inside, "Audit")
    row = inside.get_by_role("row").filter(has_text="enabled false")
    await expect(row.first).to_contain_text("Überlastung: provider is down, 100% errors")


async def test_without_redis_the_last_figures_stay(inside: Page, gw: Gateway) -> None:
    gw.redis.freeze()
    try:
        await expect(inside.get_by_role("alert").first).to_contain_text("Redis does not respond")
        await expect(inside.locator("#glance")).to_contain_text("Open streams")
    finally:
        gw.redis.thaw()
    await expect(inside.locator("#live")).to_have_text("Live")
    await expect(inside.locator("#trouble")).to_be_hidden()


async def test_a_session_that_ended_asks_again_and_logging_out_ends_it(inside: Page) -> None:
    await inside.context.clear_cookies()
    await act(inside, "Turn off", "Turn off", "An exercise")
    await expect(inside.get_by_text("Your session has ended.")).to_be_visible()
    await log_in(inside)
    await inside.get_by_role("button", name="Log out").click()
    await expect(inside.get_by_text("You are logged out.")).to_be_visible()
    await inside.reload()
    await expect(inside.get_by_label("Operator token")).to_be_focused()


async def test_the_workplace(inside: Page, gw: Gateway, backend: FakeAppBackend) -> None:
    """An operator finds an account, changes its plan and creates a key; the audit trail shows all of it."""
    made = (await gw.platform("POST", "accounts", {"name": "Café <b>Vreni</b>", "plan": "free"})).json()
    gw.confidential.add(made["apiKey"])
    record = {"account": made["id"], "auth": {"kind": "jwks", "url": backend.jwks_url}}
    await gw.platform("PUT", "apps/vrenis-cafe", record)
    dialog = inside.get_by_role("dialog")

    await view(inside, "Accounts")
    await inside.get_by_label("Name or id").fill("vreni")
    await inside.keyboard.press("Enter")
    await expect(inside.get_by_role("status")).to_have_text("1 account.")
    await inside.get_by_label("Plan").select_option("max")
    await inside.get_by_role("button", name="Search").click()
    await expect(inside.get_by_text("No account has “vreni” in its name or id.")).to_be_visible()
    await inside.get_by_label("Plan").select_option("free")
    await inside.get_by_role("button", name="Search").click()
    await inside.get_by_role("link", name="Café <b>Vreni</b>").click()
    await expect(inside.get_by_role("heading", level=1)).to_have_text("Café <b>Vreni</b>")
    await expect(inside.get_by_role("row").filter(has_text="vrenis-cafe")).to_contain_text("Never live")
    await expect(inside.get_by_role("row").filter(has_text="first")).to_contain_text("never")

    await inside.get_by_label("Plan", exact=True).select_option("maker")
    await inside.get_by_role("button", name="Change plan").click()
    await expect(dialog).to_contain_text("moves from free to maker")
    await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    await dialog.get_by_role("button", name="Change plan").click()
    await expect(inside.get_by_role("status")).to_have_text("The account is on the maker plan.")
    await expect(inside.get_by_label("Plan", exact=True)).to_have_value("maker")

    await act(inside, "Create key", "Create key")
    await expect(inside.get_by_role("heading", name="The new API key")).to_be_focused()
    key = await inside.locator(".once pre").inner_text()
    gw.confidential.add(key)
    account = await gw.http.get("/account", headers={"Authorization": f"Bearer {key}"})
    assert account.json()["plan"] == "maker"

    await view(inside, "Apps")
    await inside.get_by_label("App, domain or account").fill(made["id"])
    await inside.keyboard.press("Enter")
    await expect(inside.get_by_role("row").filter(has_text="vrenis-cafe")).to_be_visible()
    await inside.get_by_role("link", name="Show unhealthy apps").click()
    await expect(inside.get_by_text("All probed apps are healthy.")).to_be_visible()
    await view(inside, "Deploys")
    await expect(inside.get_by_text("No deploy has failed")).to_be_visible()

    await view(inside, "Audit")
    rows = inside.get_by_role("row").filter(has_text=made["id"])
    await expect(rows.first).to_contain_text("Create key for")
    await expect(rows.nth(1)).to_contain_text("Change account")
    await expect(rows.nth(1)).to_contain_text("plan maker")
    await expect(rows.nth(1)).to_contain_text("Done")
    assert key not in await inside.inner_text("main")
    await inside.get_by_role("link", name="Show the reports").click()
    await expect(inside.get_by_text("Reports of watchdogs")).to_be_visible()
    await inside.go_back()
    await expect(rows.first).to_be_visible()


async def test_the_approval_is_given_by_typing_the_services_name(inside: Page, gw: Gateway) -> None:
    button, dialog = inside.locator("#approval"), inside.get_by_role("dialog")
    for action, approved in (("Withdraw", False), ("Approve", True)):
        await button.click()
        field = dialog.get_by_label("to confirm")
        await expect(field).to_be_focused()
        await field.fill("yes")
        await inside.keyboard.press("Enter")
        await expect(dialog.get_by_role("alert")).to_contain_text("to continue")
        assert (await gw.platform("GET", "inference")).json()["approved"] is not approved
        await field.fill(gw.address.removeprefix("http://"))
        await dialog.get_by_label("Reason").fill("An exercise")
        await dialog.get_by_role("button", name=action).click()
        await expect(button).to_have_text("Withdraw approval" if approved else "Approve processing", timeout=10_000)
        assert (await gw.platform("GET", "inference")).json()["approved"] is approved
    await gw.switch(approved=False)  # elsewhere
    await expect(inside.locator("#inference-why")).to_contain_text("processing is not approved", timeout=10_000)
    await gw.switch(approved=True)
    await expect(inside.locator("#inference")).to_have_text("Operational", timeout=10_000)


async def test_an_account_and_an_app_are_suspended_with_a_reason(
    inside: Page, gw: Gateway, backend: FakeAppBackend
) -> None:
    app = await gw.app(backend)
    account = app.account
    await inside.goto(f"/ops#/accounts/{account.id}")
    top = inside.locator(".heading")
    await expect(top).to_contain_text("Active")
    await top.get_by_role("button", name="Suspend").click()
    dialog = inside.get_by_role("dialog")
    await dialog.get_by_role("button", name="Suspend").click()  # without a reason
    await expect(dialog).to_be_visible()
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(top).to_contain_text("Active")
    await act(top, "Suspend", "Suspend", "Sends mail to strangers")
    await expect(top).to_contain_text("Suspended")
    await expect(inside.get_by_text("Suspended for a moment · Sends mail to strangers", exact=True)).to_be_in_viewport()
    assert (await account.get()).json()["suspension"]["reason"] == "Sends mail to strangers"
    row = inside.get_by_role("row").filter(has_text=app.name)
    await expect(row).to_contain_text("Account suspended")
    await act(top, "Resume", "Resume")
    await expect(top).to_contain_text("Active")
    await act(row, f"Suspend {app.name}", "Suspend", "This app alone")
    await expect(row).to_contain_text("This app alone")
    assert (await app.ask("x")).status_code == 403
    await act(row, f"Resume {app.name}", "Resume")
    await expect(row.get_by_role("button", name=f"Suspend {app.name}")).to_be_visible()
    assert (await app.ask("x")).status_code == 200


async def test_the_cap_the_keys_and_the_end_of_an_account(inside: Page, gw: Gateway) -> None:
    account = await gw.account()
    await inside.goto(f"/ops#/accounts/{account.id}")
    cap = inside.get_by_label("Daily cap in euro")
    for text, expected in (("2.5", 2_500_000_000), ("", 10_000_000_000)):
        await cap.fill(text)
        await act(inside, "Change cap", "Change cap")
        await expect(inside.get_by_role("heading", level=1)).to_be_focused()
        await expect(cap).to_have_value(text)
        assert (await account.spend())["cap"] == expected
    await cap.fill("much")
    await act(inside, "Change cap", "Change cap")
    await expect(inside.get_by_role("alert").filter(has_text="dailyEuro")).to_be_visible()

    name = (await account.get()).json()["name"]
    await inside.get_by_role("button", name="Delete account").click()
    dialog = inside.get_by_role("dialog")
    await dialog.get_by_label("to confirm").fill("another")
    await dialog.get_by_label("Reason").fill("It left")
    await dialog.get_by_role("button", name="Delete account").click()
    await expect(dialog.get_by_role("alert")).to_have_text(f"Type {name} to continue.")
    assert "deletesAt" not in (await account.get()).json()
    await dialog.get_by_label("to confirm").fill(name)
    await dialog.get_by_role("button", name="Delete account").click()
    await expect(inside.get_by_text("Being deleted").first).to_be_visible()
    await expect(inside.get_by_role("button", name="Delete account")).to_have_count(0)
    assert (await account.get()).json()["deletesAt"]

    await act(inside, "Revoke first", "Revoke key", "Found in a public repository")
    await expect(inside.get_by_text("The account has no API keys.")).to_be_visible()
    assert (await account.get()).status_code == 401
    await inside.goto(f"/ops#/audit?target={account.id}")
    await expect(inside.get_by_role("row").filter(has_text="It left")).to_be_visible()


async def test_the_page_of_an_app_shows_its_usage_and_deletes_it(
    inside: Page, gw: Gateway, backend: FakeAppBackend
) -> None:
    app = await gw.app(backend)
    await app.ask("x")
    await app.post({"prompt": "x"}, headers={})
    dialog = inside.get_by_role("dialog")

    async def recorded() -> bool:
        return len((await gw.platform("GET", f"accounts/{app.account.id}/requests")).json()) == 2

    await wait_until(recorded)
    await inside.goto(f"/ops#/accounts/{app.account.id}")
    usage = inside.get_by_role("region", name="Usage, 24 hours")
    await expect(
        usage.get_by_role("img", name="Requests by hour: 1 answered, 1 refused, 0 failed, 0 interrupted")
    ).to_be_visible()
    await expect(usage.get_by_role("row").filter(has_text="gpt-oss-120b")).to_contain_text("1")
    await expect(usage.get_by_role("row").filter(has_text="TOKEN_MISSING")).to_contain_text("1")
    await usage.get_by_role("link", name="7 days").click()
    week = inside.get_by_role("region", name="Usage, 7 days")
    await expect(week).to_contain_text("gpt-oss-120b")
    await week.get_by_role("link", name=app.name).click()
    await expect(inside.get_by_role("heading", level=1)).to_have_text(app.name)
    await expect(inside.get_by_role("link", name=re.compile("^Account "))).to_be_visible()
    await expect(inside.get_by_text("No deploys yet.")).to_be_visible()
    await assert_fits(inside, 320, 390, 980, 1440)
    await inside.get_by_role("button", name="Delete app").click()
    await dialog.get_by_label("to confirm").fill(app.name)
    await dialog.get_by_role("button", name="Delete app").click()
    await expect(dialog.get_by_role("alert")).to_have_text("Give a reason.")
    await dialog.get_by_label("Reason").fill("Its owner asked for it")
    await dialog.get_by_role("button", name="Delete app").click()
    await expect(inside.get_by_text("The account has no apps.")).to_be_visible()
    await inside.goto(f"/ops#/audit?action=delete_app&target={app.name}")
    await expect(inside.get_by_role("status")).to_have_text("1 record.")
    await expect(inside.get_by_role("row").filter(has_text=app.name)).to_contain_text("Its owner asked for it")
    await inside.get_by_label("Operator").fill("nobody")
    await inside.keyboard.press("Enter")
    await expect(inside.get_by_text("No record matches.")).to_be_visible()
    assert "operator=nobody" in inside.url


async def test_a_view_that_arrives_during_a_press_takes_no_click_away(inside: Page) -> None:
    box = await inside.get_by_role("link", name="24 hours").bounding_box()
    assert box is not None
    await inside.mouse.move(box["x"] + 5, box["y"] + 5)
    await inside.mouse.down()
    async with inside.expect_response("**/platform/usage*"):
        await inside.evaluate("location.hash = '#/?period=7d'")
    await inside.wait_for_timeout(300)  # in which the view would be drawn
    await inside.mouse.up()
    await expect(inside).to_have_url(re.compile("period=24h"))
    await expect(inside.get_by_role("img", name=re.compile("in 24 hours"))).to_have_count(2)


async def test_providers_are_shown_and_switched(
    browser: Browser, backend: FakeAppBackend, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with several_providers(tmp_path_factory.mktemp("providers"), SOON) as (gw, providers):
        app, prompt = await gw.app(backend), providers[0].plays(answer(500))
        providers[1].plays(tokens("two"), prompt=prompt)
        await app.ask(prompt)
        async with visiting(browser, gw, logged_in=True) as page:
            rows = page.locator("#providers tbody tr")
            await expect(rows.nth(0)).to_contain_text("one fr-par")
            await expect(rows.nth(0).locator(".badge").nth(1)).to_have_text("1")
            await expect(rows.nth(2)).to_contain_text("Operational")
            await expect(rows.nth(0)).not_to_contain_text("Passed over")
            limited = providers[0].plays(answer(429, {"error": {"message": "slow down"}}, {"Retry-After": "60"}))
            providers[1].plays(tokens("two"), prompt=limited)
            await app.ask(limited)
            await expect(rows.nth(0)).to_contain_text(re.compile(r"Operational\s*Passed over until \d\d:\d\d:\d\d"))
            await act(rows.nth(0), "Disable", "Disable", "drill")
            await expect(rows.nth(0).locator(".badge").first).to_have_text("Disabled")
            assert not (await states(gw))["one"]["enabled"]
            await act(rows.nth(0), "Enable", "Enable")
            await expect(rows.nth(0).locator(".badge").first).to_have_text("Operational")


async def test_pods_are_shown(inside: Page, gw: Gateway, backend: FakeAppBackend) -> None:
    async with opened(gw.redis.url) as store:
        app, pods = await gw.app(backend), inside.get_by_role("region", name="Pods")
        app_id = (await gw.platform("GET", f"apps/{app.name}")).json()["id"]
        await view(inside, "System")
        await expect(pods).to_contain_text("No worker reports the pods")

        await write_pod_report(store, PodReport(now_iso()))
        await expect(pods).to_contain_text("The cluster runs no pods of apps.")

        nodes = [NodeLoad("node-1", 60, 12 << 30, 45 << 30)]
        reason = (
            "0/1 nodes are available: 1 node(s) had untolerated taint {dedicated: <b>x</b>}, 1 Insufficient memory."
        )
        waiting = [WaitingPod(app_id, f"dep_019b3c5a7d4abcdef{n:04}", now_iso(), reason) for n in range(3)]
        counts = PodStates(
            running=61, starting=1, waitingForRelease=2, waitingForRoom=4, failing=3, stopping=1, ended=5
        )
        failures = {"ImagePullBackOff": 1, "CrashLoopBackOff": 2}
        await write_pod_report(store, PodReport(now_iso(), 77, counts, failures, nodes, waiting))
        await expect(pods).to_contain_text(
            "No node has room for 4 pods. Add nodes, or stop apps. These 3 have waited longest."
        )
        await expect(pods).to_contain_text("Failures by reason: CrashLoopBackOff 2, ImagePullBackOff 1.")
        await expect(pods.get_by_role("row").filter(has_text="node-1")).to_have_text("node-16012.0 GiB45.0 GiB")
        row = pods.get_by_role("row").filter(has_text="dep_019b3c5a7d4abcdef0001")
        await expect(row).to_contain_text("for a moment")
        await expect(row).to_contain_text(reason)
        await assert_fits(inside, 320, 390, 760, 980, 1440)
        await assert_accessible(inside, EVERY_LOOK)
        await row.get_by_role("link").click()
        await expect(inside.get_by_role("heading", level=1)).to_have_text(app.name)


async def test_spending_is_read_on_any_dates(
    browser: Browser, gw: Gateway, backend: FakeAppBackend, tmp_path: Path
) -> None:
    app = await gw.app(backend)
    await app.ask("x")
    account = app.account.id
    with gw.redis.client() as client:
        for day, spent in (("2026-05-31", 2 * EURO), ("2026-06-01", 3 * EURO), ("2026-06-30", 4 * EURO)):
            client.zadd(spenders_key(day), {"total": spent, account: spent})
            client.hset(spend_by_provider_key(day), "paris-2/gpt-oss-120b/nanoEuro", spent)
            for key in (spenders_key(day), spend_by_provider_key(day)):
                client.expire(key, 600)
    async with visiting(browser, gw, logged_in=True) as page:
        await view(page, "Spending")
        await page.get_by_label("From").fill("2026-05-31")
        await page.get_by_label("To", exact=True).fill("2026-06-30")
        await page.get_by_role("button", name="Show", exact=True).click()
        rows = page.get_by_role("table", name="Spending", exact=True).locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text(re.compile(rf"June 2026.*{account}.*€7\.00"))
        await expect(rows.nth(1)).to_contain_text(re.compile(rf"May 2026.*{account}.*€2\.00"))
        await expect(page.get_by_text("€9.00")).to_be_visible()
        await page.get_by_label("Split by").select_option("Provider")
        await page.get_by_label("Period").select_option("Day")
        await page.get_by_role("button", name="Show", exact=True).click()
        await expect(rows).to_have_count(3)
        await expect(rows.first).to_contain_text(re.compile(r"30 Jun 2026.*paris-2.*€4\.00"))
        await expect(page.get_by_role("img", name=re.compile("^Spending by day: €9.00"))).to_be_visible()
        async with page.expect_download() as downloading:
            await page.get_by_role("button", name="Download CSV").click()
        await (await downloading.value).save_as(tmp_path / "spending.csv")
        assert len((tmp_path / "spending.csv").read_text().splitlines()) == 4
        await assert_accessible(page, EVERY_LOOK)
        await assert_fits(page, 320, 390, 760, 980, 1440)

        await open_view(page, f"accounts/{account}")
        await page.get_by_role("link", name="Spending on any dates").click()
        await expect(page.get_by_label("Account id")).to_have_value(account)
        await expect(rows.first).to_contain_text(app.name)

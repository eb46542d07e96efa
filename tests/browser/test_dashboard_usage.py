"""The dashboard's figures on money and requests, on a day with stopped answers up to the cap."""

import asyncio
import re
import secrets
import time
from datetime import datetime, timedelta

import msgspec
import pytest
from playwright.async_api import Browser, expect

from gateway.keys import requests_key
from gateway.telemetry.usage import LoggedRequest
from tests.browser.axe import assert_accessible, assert_fits
from tests.browser.dashboard import Holder, visiting, withholding
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk
from tests.fakes.server import HANG
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.prices import EURO, max_cost

pytestmark = pytest.mark.asyncio(loop_scope="session")

QWEN = "qwen3.6-35b-a3b"


async def stop(app: App, prompt: str, times: int) -> None:
    """Starts streams and leaves each after its first token."""

    async def leave() -> None:
        async with app.stream(prompt, model=QWEN) as source:
            await anext(source.aiter_sse())

    await asyncio.gather(*(leave() for _ in range(times)))


async def wait_for_requests(holder: Holder, number: int) -> None:
    await wait_until(
        lambda: holder.account.get("/account/requests"), 15, holds=lambda answer: len(answer.json()) == number
    )


async def hours_with_requests(holder: Holder) -> list[str]:
    return [row["hour"] for row in (await holder.account.get("/account/usage")).json() if row["requests"]]


async def test_from_the_first_stop_to_the_cap(
    holder: Holder, gw: Gateway, provider: FakeProvider, backend: FakeAppBackend
) -> None:
    page = holder.page
    banner = page.get_by_role("region", name="Spending")
    app = await holder.account.app(backend)
    await gw.platform("PATCH", f"accounts/{holder.account.id}", {"plan": "free"})
    prompt = provider.plays(ROLE, chunk("a"), HANG)
    each = max_cost(prompt, model=QWEN)
    await stop(app, prompt, 14)
    assert await holder.account.settled() == 14 * each
    await wait_for_requests(holder, 14)

    await holder.hurry()
    await holder.log_in()
    await expect(banner).to_contain_text(f"{14 * each * 100 // (EURO // 20)}% of today’s spending cap is used.")
    await expect(banner).to_contain_text("including €0.04 for 14 interrupted answers")
    answered = page.get_by_role("img", name="Requests: 0 answered, 0 refused, 0 failed, 14 interrupted in 24 hours")
    await expect(answered).to_be_visible()

    await stop(app, prompt, 2)
    await holder.account.settled()
    assert (await app.ask(prompt, model=QWEN)).status_code == 402
    await wait_for_requests(holder, 17)
    await expect(banner).to_contain_text("Today’s spending cap is reached.")
    await expect(banner).to_contain_text(re.compile(r"\(1 request today\)\. The cap resets\s+(in|tomorrow)"))

    await banner.get_by_role("link", name="See usage").click()
    await expect(holder.heading("Usage")).to_be_focused()
    await expect(page.get_by_text("16, €0.05")).to_be_visible()
    await expect(holder.row(app.name)).to_contain_text("171610")
    await page.get_by_label("Group by").select_option("Model")
    await expect(holder.row(QWEN)).to_contain_text("€0.05")
    await page.get_by_label("Range").select_option("This month")
    await expect(
        page.get_by_role("img", name=re.compile(r"^Cost: €0\.00 complete answers, €0\.05 int.* this month"))
    ).to_be_visible()
    rows = await holder.download_csv()
    assert sum(int(row["interruptedNanoEuro"]) for row in rows) == 16 * each

    await page.get_by_role("link", name="Requests", exact=True).click()
    await expect(holder.heading("Requests")).to_be_focused()
    await expect(banner).to_be_visible()
    await expect(holder.requests.filter(has_text="200 CLIENT_GONE")).to_have_count(16)
    await expect(page.get_by_text("First token").first.locator("..")).to_contain_text("p50")
    await holder.requests.filter(has_text="402 SPEND_CAP_REACHED").click()
    sheet = page.get_by_role("dialog", name="Request")
    await expect(sheet).to_contain_text("could have exceeded the account’s daily spending cap")
    await expect(sheet.get_by_role("row").filter(has_text="Account’s cap")).to_contain_text("€0.05")
    await assert_accessible(page)
    await page.keyboard.press("Escape")
    await expect(sheet).to_be_hidden()
    await page.get_by_label("Outcome").select_option("Refused")
    await expect(holder.requests.filter(has_text="CLIENT_GONE")).to_have_count(0)
    stranger = await app.ask("x", token="no.token.at.all")
    row = holder.requests.filter(has_text="401 TOKEN_INVALID")  # it appears by itself
    await row.get_by_role("button").press("Enter")
    await expect(sheet).to_contain_text(stranger.headers["X-Request-Id"])
    await expect(sheet).to_contain_text("Token: not a usable JWT")
    await sheet.get_by_role("button", name="Close").click()
    await page.get_by_label("Model").select_option(QWEN)
    await expect(holder.requests.filter(has_text="402 SPEND_CAP_REACHED")).to_have_count(1)
    await expect(holder.requests).to_have_count(1)
    await page.get_by_label("Outcome").select_option("Answered")
    await expect(page.get_by_text("No such requests")).to_be_visible()
    await holder.button("Clear filters").click()
    await expect(holder.requests).to_have_count(18)
    await assert_accessible(page)
    await holder.button("Log out").click()
    await expect(banner).to_be_hidden()


async def test_filters_are_in_the_address_and_details_open_by_id(holder: Holder, backend: FakeAppBackend) -> None:
    page = holder.page
    first, second = await holder.account.app(backend), await holder.account.app(backend)
    await first.ask("x")
    answer = await second.ask("x", token="no.token.at.all")
    await wait_for_requests(holder, 2)
    await holder.log_in("requests")
    await expect(holder.requests).to_have_count(2)
    await page.get_by_role("group", name="Errors by code").get_by_role("button", name="TOKEN_INVALID").click()
    await expect(holder.requests).to_have_count(1)
    await expect(page).to_have_url(re.compile(r"#/requests\?code=TOKEN_INVALID$"))
    await page.get_by_label("App", exact=True).select_option(second.name)
    await expect(page).to_have_url(re.compile(rf"#/requests\?app={second.name}&code=TOKEN_INVALID$"))
    await page.reload()
    await expect(page.get_by_label("Code", exact=True)).to_have_value("TOKEN_INVALID")
    await expect(holder.requests).to_have_count(1)
    rows = await holder.download_csv()
    assert [(row["app"], row["code"]) for row in rows] == [(second.name, "TOKEN_INVALID")]

    request = answer.headers["X-Request-Id"]
    sheet = page.get_by_role("dialog", name="Request")
    await page.get_by_label("Request id").fill("nonsense")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("None of the last 1,000 requests has this id.")).to_be_visible()
    await page.get_by_label("Request id").fill(request)
    await page.keyboard.press("Enter")
    await expect(sheet).to_contain_text(request)
    await page.mouse.click(10, 10)  # the backdrop
    await expect(sheet).to_be_hidden()
    await expect(page.get_by_label("Request id")).to_be_focused()
    await holder.go(f"requests?id={request}")
    await expect(sheet).to_contain_text("TOKEN_INVALID")
    await page.keyboard.press("Escape")

    await holder.go(f"apps/{first.name}/requests")
    await expect(holder.requests).to_have_count(1)
    await expect(page.get_by_label("App", exact=True)).to_be_hidden()
    await page.get_by_label("Live").uncheck()
    await first.ask("x", token="no.token.at.all")
    await wait_for_requests(holder, 3)
    await page.get_by_label("Live").check()
    await expect(holder.requests).to_have_count(2)


async def test_a_refused_model_is_named_only_if_it_is_one(holder: Holder, backend: FakeAppBackend) -> None:
    page, app = holder.page, await holder.account.app(backend)
    name = secrets.token_hex(8)
    answer = await app.ask("x", model=name)
    await wait_for_requests(holder, 1)
    await holder.log_in("requests")
    await holder.go(f"requests?id={answer.headers['X-Request-Id']}")
    sheet = page.get_by_role("dialog", name="Request")
    await expect(sheet).to_contain_text("None that the service knows, so its name is not kept")
    await expect(sheet).to_contain_text(f"Available: gpt-oss-120b, {QWEN}")
    assert name not in await page.content()


async def test_charts_are_read_by_keyboard_pointer_and_touch(
    browser: Browser, gw: Gateway, backend: FakeAppBackend
) -> None:
    async with visiting(browser, gw, has_touch=True) as holder:
        page = holder.page
        app = await holder.account.app(backend)
        await app.ask("x")
        await wait_for_requests(holder, 1)
        hours: list[str] = await wait_until(lambda: hours_with_requests(holder), 15)
        # The chart ends with the hour of the request, even if another one has begun.
        await page.clock.set_fixed_time(datetime.fromisoformat(hours[0]) + timedelta(minutes=59))
        await holder.log_in("usage")
        chart = page.get_by_role("figure").filter(has=page.get_by_role("heading", name="Requests"))
        slider = page.get_by_role("slider", name="Requests, bar by bar")
        await expect(chart.locator(".tip")).to_be_hidden()
        await holder.reach("Requests, bar by bar", "slider")
        await expect(slider).to_have_attribute("aria-valuetext", re.compile("1 answered$"))
        await expect(chart.locator(".tip")).to_contain_text("Press Enter to see the requests")
        await page.keyboard.press("ArrowLeft")
        await expect(slider).to_have_attribute("aria-valuetext", re.compile("no requests$"))
        await page.keyboard.press("Home")
        await expect(slider).to_have_attribute("aria-valuenow", "0")
        await page.keyboard.press("Escape")
        await expect(chart.locator(".tip")).to_be_hidden()
        await expect(chart.get_by_role("table")).to_contain_text("Time")
        box = await slider.bounding_box()
        assert box
        await page.mouse.move(box["x"] + 3, box["y"] + 20)
        await expect(chart.locator(".tip")).to_contain_text("No requests")
        await page.mouse.move(0, 0)
        await expect(chart.locator(".tip")).to_be_hidden()
        last = box["x"] + box["width"] - 3, box["y"] + 20
        await page.touchscreen.tap(*last)
        await expect(chart.locator(".tip")).to_contain_text("Tap again to see the requests")
        assert await page.evaluate("location.hash") == "#/usage"
        await page.touchscreen.tap(*last)
        await expect(holder.heading("Requests")).to_be_focused()
        await expect(page).to_have_url(re.compile(r"#/requests\?from=\d+.*&to="))
        await expect(holder.requests).to_have_count(1)
        await assert_accessible(page)


async def test_figures_and_csv_are_of_all_requests(holder: Holder, gw: Gateway, backend: FakeAppBackend) -> None:
    """The page loads a part of the log, and its figures and filters are of all."""
    page, account = holder.page, holder.account
    app, never_asked = await account.app(backend), await account.app(backend)
    now = round(time.time() * 1000)
    logged: dict[bytes, int] = {}
    for n in range(1_000):
        code, took = ("TOKEN_INVALID", 1) if n % 4 else ("", 1_000 + n)
        name, at = (app.name, now - 30_000 * n) if n < 900 else ("deleted-app", now - 30_000 * n)
        each = LoggedRequest(f"r{n}", at, name, "gpt", 401 if code else 200, code, 1, 2, 3, None, took)
        logged[msgspec.json.encode(each)] = at
    with gw.redis.client() as client:
        client.zadd(requests_key(account.id), logged)
        client.expire(requests_key(account.id), 600)
    await holder.log_in("requests")
    await expect(page.get_by_text("20 of 1,000 requests", exact=True)).to_be_visible()
    await expect(page.get_by_role("img", name=re.compile("^Requests: 250 answered, 750 invalid"))).to_be_visible()
    codes = page.get_by_role("group", name="Errors by code")
    await expect(codes.get_by_role("button")).to_have_text("TOKEN_INVALID750")
    await expect(page.get_by_text("Full answer").locator("..")).to_contain_text("p50 1.5 s · p95 1.9 s · p99 2.0 s")
    for name in (app.name, never_asked.name, "deleted-app"):
        await expect(page.get_by_label("App", exact=True).locator("option", has_text=name)).to_have_count(1)
    older = "**/account/requests?*before=*"
    async with page.expect_response(older, timeout=40_000), withholding(page, older) as answered:
        for number in range(20, 201, 20):
            await expect(holder.requests).to_have_count(number)
            await holder.button("Load older").click()
        await answered.wait()
        await page.get_by_label("App", exact=True).select_option("deleted-app")
        await page.get_by_label("Outcome").select_option("Answered")
        await expect(holder.requests).to_have_count(20)
    await page.evaluate("new Promise(requestAnimationFrame)")
    await expect(holder.requests).to_have_count(20)  # the older ones of all are not shown
    await expect(page.get_by_text("20 of 25 requests that match, of 100 in the log", exact=True)).to_be_visible()
    await holder.button("Load older").click()
    await expect(page.get_by_role("row").filter(has_text="deleted-app")).to_have_count(25)
    await expect(holder.button("Load older")).to_be_hidden()
    rows = await holder.download_csv()
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(900, 1_000, 4)]
    await assert_accessible(page)
    await assert_fits(page, 320, 390, 1440)

"""The dashboard's figures on money and requests, on a day with stopped answers up to the cap."""

import asyncio
import csv
import io
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.browser.axe import assert_accessible
from tests.browser.dashboard import Holder, visiting
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


async def test_from_the_first_stop_to_the_cap(
    browser: Browser, gw: Gateway, provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path
) -> None:
    async with visiting(browser, gw, accept_downloads=True) as holder:
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
        answered = page.get_by_role("img", name="Requests: 0 answered, 0 refused, 14 interrupted in 24 hours")
        await expect(answered).to_be_visible()

        await stop(app, prompt, 2)
        await holder.account.settled()
        assert (await app.ask(prompt, model=QWEN)).status_code == 402
        await wait_for_requests(holder, 17)
        await expect(banner).to_contain_text("Today’s spending cap is reached.", timeout=15_000)
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
        async with page.expect_download() as downloading:
            await holder.button("Download CSV").click()
        download = await downloading.value
        assert download.suggested_filename == "usage-by-day.csv"
        await download.save_as(tmp_path / "usage.csv")
        rows = list(csv.DictReader(io.StringIO((tmp_path / "usage.csv").read_text())))
        assert sum(int(row["interruptedNanoEuro"]) for row in rows) == 16 * each

        await page.get_by_role("link", name="Requests", exact=True).click()
        await expect(holder.heading("Requests")).to_be_focused()
        await expect(banner).to_be_visible()
        await expect(holder.row("status 200, CLIENT_GONE")).to_have_count(16)
        await expect(holder.row("SPEND_CAP_REACHED").filter(has_text="could have exceeded")).to_have_count(1)
        await expect(holder.row("First token").filter(has_text="16")).to_have_count(1)
        await page.get_by_label("Outcome").select_option("Refused")
        await expect(holder.row("CLIENT_GONE")).to_have_count(0)
        await expect(page.get_by_text("Nothing to measure")).to_be_visible()
        stranger = await app.ask("x", token="no.token.at.all")
        await expect(holder.row(stranger.headers["X-Request-Id"])).to_be_visible()  # by itself
        await expect(holder.row(stranger.headers["X-Request-Id"])).to_contain_text("Token: not a usable JWT")
        await page.get_by_label("Model").select_option(QWEN)
        await expect(holder.row("status 402, SPEND_CAP_REACHED")).to_have_count(1)
        await page.get_by_label("Outcome").select_option("Answered")
        await expect(page.get_by_text("No such requests")).to_be_visible()
        await page.get_by_label("Outcome").select_option("All outcomes")
        await assert_accessible(page)
        await holder.button("Log out").click()
        await expect(banner).to_be_hidden()

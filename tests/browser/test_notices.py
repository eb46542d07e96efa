"""A member chooses notices on the account's page, and ends them with the link of a message."""

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from gateway.accounts.sessions import ACCOUNT
from gateway.accounts.vault import Vault
from gateway.events.notices import EndLink, seal_link
from tests.fakes import FakeProvider
from tests.support.gateway_process import gateway_with_redis
from tests.support.processes import ENCRYPTION_KEY
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")

ADA = "ada@example.com"
MAIL = {"GATEWAY_SMTP_URL": "smtp://127.0.0.1:9", "GATEWAY_MAIL_FROM": "notices@example.com"}


async def test_a_member_chooses_and_ends_notices(browser: Browser, provider: FakeProvider, tmp_path: Path) -> None:
    async with gateway_with_redis(provider, tmp_path, **MAIL) as gw:
        account = await gw.account()
        member = Visitor(gw)
        async with await browser.new_context() as context, member.http:
            await member.join(account, ADA, "developer")
            await context.add_cookies([{"name": ACCOUNT, "value": member.token, "url": gw.address}])
            page = await context.new_page()
            complaints: list[str] = []
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            await page.goto(f"{gw.address}/dashboard#/account")
            box = page.get_by_label("A deploy fails")
            await box.check()
            await page.get_by_role("button", name="Save the notices").click()
            await expect(page.get_by_text("Saved.", exact=True)).to_be_visible()
            await page.reload()
            await expect(box).to_be_checked()
            await page.goto(f"{gw.address}/unsubscribe/{seal_link(Vault(ENCRYPTION_KEY), EndLink(ADA, 'notices'))}")
            assert (await member.call("GET", "/account/notices")).json()["deployFailed"] is True
            await page.get_by_role("button", name="End all notices").click()
            await expect(page.get_by_role("heading", name="Your notices have ended")).to_be_visible()
            assert (await member.call("GET", "/account/notices")).json()["deployFailed"] is False
            assert complaints == []

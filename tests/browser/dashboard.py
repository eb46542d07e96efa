"""An account holder who uses the dashboard in a real browser, and the events that the gateway gets meanwhile."""

import asyncio
import csv
import io
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Locator, Page, Route, expect

from gateway.ids import day_of, now_iso
from gateway.keys import crashes_key, deploy_log_key, health_days_key, partition_tag
from gateway.monitors import history
from tests.support.accounts import Account
from tests.support.deploys import report_phases
from tests.support.gateway_process import Gateway
from tests.support.visitor import new_address

VIEWS = {"": "Overview", "deploys": "Deploys", "hooks": "Deploy hooks", "webhooks": "Webhooks"}
VIEWS |= {"usage": "Usage", "requests": "Requests"}
SECTIONS = ("source", "tokens", "environment", "domain", "limits", "hooks", "delete")  # of an app's settings
# The browser itself reports every refused request to the console.
EXPECTED = "Failed to load resource"
HURRY = "const later = window.setTimeout; window.setTimeout = (work, wait) => later(work, wait / 10);"
# Values that a page shows only by mistake.
SLIPS = {"false", "null", "undefined", "NaN", "[object Object]"}


class Holder:
    def __init__(self, page: Page, account: Account) -> None:
        self.page, self.account, self.gateway = page, account, account.gateway

    async def go(self, view: str = "") -> None:
        await self.page.goto(f"{self.gateway.address}/dashboard#/{view}")

    async def log_in(self, view: str = "") -> None:
        await self.go(view)
        await self.page.get_by_label("API key").fill(self.account.key)
        await self.page.keyboard.press("Enter")
        await expect(self.heading(VIEWS.get(view))).to_be_focused()

    async def hurry(self) -> None:
        """Makes the page refresh ten times as often."""
        await self.page.add_init_script(HURRY)

    def heading(self, name: str | None = None, level: int = 1) -> Locator:
        return self.page.get_by_role("heading", name=name, level=level, exact=True)

    def button(self, name: str, **options: Any) -> Locator:
        return self.page.get_by_role("button", name=name, **options)

    async def confirm(self, name: str, answer: str = "") -> None:
        """Presses a button, and the one in its dialog, which is called `answer` or the same."""
        await self.button(name).click()
        await self.page.get_by_role("dialog").get_by_role("button", name=answer or name).click()

    def row(self, text: str) -> Locator:
        return self.page.get_by_role("row").filter(has_text=text)

    def card(self, title: str) -> Locator:
        return self.page.locator("section").filter(has=self.heading(title, 2))

    @property
    def requests(self) -> Locator:
        """The rows of the table of requests."""
        return self.page.get_by_role("table", name="Requests", exact=True).locator("tbody").get_by_role("row")

    async def reach(self, name: str, role: Any = "link", backwards: bool = False) -> None:
        """Moves the focus to the element with Tab, and checks that the focus is visible."""
        wanted = self.page.get_by_role(role, name=name, exact=True).first
        await expect(wanted).to_be_visible()
        for _ in range(60):
            await self.page.keyboard.press("Shift+Tab" if backwards else "Tab")
            if await wanted.evaluate("it => it === document.activeElement"):
                assert await wanted.evaluate("it => getComputedStyle(it).outlineStyle") == "solid"
                return
        raise AssertionError(f"{name} cannot be reached")

    async def download_csv(self) -> list[dict[str, str]]:
        async with self.page.expect_download() as downloading:
            await self.button("Download CSV").click()
        file = await downloading.value
        assert file.suggested_filename.endswith(".csv")
        return list(csv.DictReader(io.StringIO(Path(await file.path()).read_text())))

    async def clipboard(self) -> str:
        return await self.page.evaluate("navigator.clipboard.readText()")

    async def app(self, name: str | None = None, **fields: Any) -> str:
        name = name or f"app-{secrets.token_hex(4)}"
        body = {"account": self.account.id, "repository": {"url": "https://git.example.com/a", "branch": "main"}}
        response = await self.gateway.platform("PUT", f"apps/{name}", {**body, **fields})
        assert response.status_code == 200, response.text
        return name

    # -- an external deploy engine -----------------------------------------------------------------------------

    async def deploy(self, app: str, kind: str = "live") -> str:
        return (await self.gateway.platform("POST", f"apps/{app}/deploys", {"kind": kind})).json()["deployId"]

    async def report(self, deploy: str, *phases: str, ok: bool = True, reason: str = "") -> None:
        await report_phases(self.gateway, deploy, *phases, ok=ok, reason=reason)

    async def suffer(self, app: str) -> None:
        """Creates a finding, a crash with its last output, and an outage over the midnight three days ago."""
        tag, now = partition_tag(self.account.id), int(time.time() * 1000)
        found = {"cve": "CVE-2026-31337", "component": "example@1.0.0", "severity": "high", "fixedIn": "1.0.1"}
        assert (await self.gateway.platform("POST", f"apps/{app}/findings", {"findings": [found]})).is_success
        crash = {"at": now_iso(), "reason": "exit", "exitCode": 7, "lines": ["GET / 200", "about to end"]}
        began = (now // history.DAY_MS - 3) * history.DAY_MS
        days = dict(history.split_outage(began - 60_000, began + 60_000))
        with self.gateway.redis.client() as client:
            client.xadd(crashes_key(tag, app), {"event": "evt_1", "crash": json.dumps(crash)})
            client.hset(health_days_key(tag, app), mapping={**days, f"{day_of(now)}:down": 0})
            for key in (crashes_key(tag, app), health_days_key(tag, app)):
                client.expire(key, 600)

    def log(self, deploy: str, text: str) -> None:
        with self.gateway.redis.client() as client:
            key = deploy_log_key(self.account.id, deploy)
            client.append(key, text)
            client.expire(key, 3600)


@asynccontextmanager
async def withholding(
    page: Page, path: str, method: str = "GET", *, only_first: bool = False
) -> AsyncIterator[asyncio.Event]:
    """Withholds the answers to matching requests until the block ends. The event is set once there is one."""
    answered, release = asyncio.Event(), asyncio.Event()

    async def withhold(route: Route) -> None:
        if route.request.method != method or (only_first and answered.is_set()):
            return await route.fallback()
        response = await route.fetch()
        answered.set()
        await release.wait()
        await route.fulfill(response=response)

    await page.route(path, withhold)
    try:
        yield answered
    finally:
        release.set()


@asynccontextmanager
async def visiting(browser: Browser, gateway: Gateway, name: str = "", **options: Any) -> AsyncIterator[Holder]:
    """Yields a visitor with an account and a client address of its own. The console must be clean at the end."""
    made = await gateway.platform("POST", "accounts", {"name": name or "Ana’s workshop", "plan": "maker"})
    account = Account(gateway, made.json()["id"], made.json()["apiKey"])
    gateway.confidential.add(account.key)
    context = await browser.new_context(extra_http_headers={"X-Forwarded-For": new_address()}, **options)
    await context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = await context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.set_default_timeout(8_000)
    yield Holder(page, account)
    assert not SLIPS & set((await page.inner_text("body")).splitlines())
    cookies = await context.cookies()
    gateway.confidential |= {cookie["value"] for cookie in cookies if cookie["value"]}
    await context.close()
    assert not [text for text in complaints if EXPECTED not in text]

"""Takes the screenshots in docs/img, and of every view in every state in docs/img/states: `make screenshots`.

The gateway, the webhook worker and the database are real, and driven over HTTP. Only the provider, the receiver and the
past day are simulated.
"""

import asyncio
import base64
import json
import math
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from playwright.async_api import Browser, Page

from gateway.accounts.domain_observations import Certificate, write_certificates
from gateway.deploys.line_times import stamp_line
from gateway.ids import day_of, now_iso
from gateway.keys import (
    certificate_key,
    deploy_key,
    deploy_log_key,
    deploys_key,
    health_days_key,
    health_key,
    hour_key,
    minute_key,
    partition_tag,
    requests_key,
    spend_key,
    spenders_key,
    unhealthy_key,
    usage_key,
)
from gateway.monitors import history
from gateway.telemetry.usage import LoggedRequest
from tests.browser.dashboard import SECTIONS
from tests.browser.visitor import chromium
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.receiver import FakeReceiver
from tests.fakes.server import answer
from tests.support.accounts import Account, App
from tests.support.deploys import report_phases
from tests.support.gateway_process import OPERATOR, Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.worker_process import Worker

API = "https://api.example.com"
FOLDER = Path(__file__).parent / "img"
PUBLIC = Path(__file__).parents[1] / "gateway/pages/public"
SCALE = 1.25
DESKTOP, PHONE = {"width": 1180, "height": 820}, {"width": 390, "height": 820}
VIEWS = ("", "usage", "requests", "deploys", "hooks", "webhooks", "account", "new-app", "nothing-here", "apps/notes")
VIEWS += tuple(f"apps/notes/{view}" for view in ("deploys", "requests", "usage", "data", "try"))
VIEWS += tuple(f"apps/notes/settings/{section}" for section in SECTIONS)
OPERATIONS = ("", "?period=24h", "accounts", "apps", "apps/shop", "deploys", "system", "audit", "nothing-here")
LOG = """\
Cloning https://git.example.com/ana/notes.git at main
Running: npm ci && npm run build
added 214 packages in 6s
vite v7.1.2 building for production...
transforming...
✓ 318 modules transformed.
dist/index.html                  0.61 kB
dist/assets/index-DkT3yP0m.css  14.20 kB
dist/assets/index-C8f2hVqS.js  168.44 kB
✓ built in 3.12s
"""


class Scene:
    """An account with a day of activity."""

    def __init__(self, gw: Gateway, account: Account, app: App) -> None:
        self.gw, self.account, self.app = gw, account, app
        self.deploy = ""

    async def call(self, method: str, path: str, body: object = None) -> Any:
        response = (await self.account.call(method, path, body)).raise_for_status()
        return response.json() if response.content else None

    async def deployed(self, app: str, *phases: str, ok: bool = True, reason: str = "", kind: str = "live") -> str:
        deploy: str = (await self.gw.platform("POST", f"apps/{app}/deploys", {"kind": kind})).json()["deployId"]
        await report_phases(self.gw, deploy, *phases, ok=ok, reason=reason)
        return deploy

    async def play(self, receiver: FakeReceiver, backend: FakeAppBackend) -> None:
        phases = ("build", "health", "canary")
        await self.call("PUT", "/account/webhook", {"url": receiver.url("/events")})
        for kind in ("deploy.succeeded", "app.unhealthy"):
            await self.delivered(kind)
        receiver.plays("/events", answer(503))
        await self.delivered("security.finding")
        receiver.plays("/events")
        await self.deployed("notes", *phases)
        await self.deployed("shop", "build", ok=False, reason="the build command ended with status 1")
        await self.deployed("notes", *phases[:2], kind="preview")
        self.deploy = await self.deployed("notes", phases[0])
        await self.deployed("shop", *phases)
        finding = {"cve": "CVE-2026-31337", "component": "example@1.0.0", "severity": "high", "fixedIn": "1.0.1"}
        (await self.gw.platform("POST", "apps/shop/findings", {"findings": [finding]})).raise_for_status()
        (await self.gw.platform("POST", "apps/shop/crashes", {"reason": "oom", "exitCode": 137})).raise_for_status()
        for app, name in (("notes", "Content system"), ("shop", "Nightly prices")):
            hook = await self.call("POST", f"/account/apps/{app}/hooks", {"name": name})
            if app == "shop":
                await self.gw.http.post(hook["url"].removeprefix(API))
        for _ in range(3):
            await self.app.ask("What is a capsule?")
        await self.the_past()

    async def delivered(self, kind: str) -> None:
        event = await self.call("POST", "/account/webhook/test", {"type": kind})
        log = partial(self.call, "GET", "/account/deliveries")
        await wait_until(log, holds=lambda rows: any(row["id"] == event["id"] for row in rows))

    async def the_past(self) -> None:
        """Write the records that a day of use leaves in the database."""
        now = time.time()
        with self.gw.redis.client() as client:
            self.used_before(client, now)
            self.asked_before(client, now)
            today = day_of(int(now * 1000))
            client.hset(spend_key(self.account.id, today), mapping={"settled": 741_300_000, "reserved": 96_000_000})
            spenders = spenders_key(today)
            client.zadd(spenders, {"total": 741_300_000, self.account.id: 741_300_000})
            client.expire(spenders, 48 * 3600)
            for app, state, since in (("notes", "healthy", 260_000), ("shop", "unhealthy", 700)):
                seen = {"version": 1, "state": json.dumps({"status": state, "since": int((now - since) * 1000)})}
                client.hset(health_key(partition_tag(self.account.id), app), mapping=seen)
            client.zadd(unhealthy_key(partition_tag(self.account.id)), {"shop": int((now - 700) * 1000)})
            certificate = Certificate("f", int((now + 5_300_000) * 1000))
            known = write_certificates({"notes.example.com": certificate})
            client.hset(certificate_key(partition_tag(self.account.id), "notes"), mapping=known)
            days = {f"{day_of(int(now * 1000) - ago * history.DAY_MS)}:down": 0 for ago in range(1, 71)}
            began = int((now - 700) * 1000) - 20 * history.DAY_MS
            days |= history.split_outage(began, began + 1_560_000)
            health_days = health_days_key(partition_tag(self.account.id), "shop")
            client.hset(health_days, mapping=days)
            client.expire(health_days, 3600)
            # The newest deploy is running. The others ended a while ago, and took realistic times.
            deploys = client.zrevrange(deploys_key(self.account.id), 0, -1)
            for n, deploy in enumerate(deploys):
                at = now - (40 if n < 3 else 3000 * n * n)
                record = deploy_key(self.account.id, deploy.decode())
                client.hset(record, "createdAt", now_iso(at))
                if client.hexists(record, "durationMs"):
                    client.hset(record, "durationMs", 42_000 + 7_300 * n)
            for ago in range(1, 60):
                at = time.gmtime(now - 60 * ago)
                asked = int(130 + 40 * math.sin(ago / 9) + secrets.randbelow(24))
                fields = {"requests": asked, "streams": asked // 2, "ttft:200": asked // 3, "ttft:500": asked // 7}
                fields |= {"code:USER_RATE_LIMITED": secrets.randbelow(5), "code:TOKEN_INVALID": secrets.randbelow(4)}
                if 21 < ago < 25:
                    fields["code:PROVIDER_UNREACHABLE"] = asked // 4
                for model, part, slow in (("gpt-oss-120b", 2, 300), ("llama-3.3-70b-instruct", 5, 500)):
                    fields[f"model:{model}:requests"] = asked // part
                    fields |= {f"model:{model}:ttft:{slow}": asked // part, f"model:{model}:ttft:1000": 1}
                    fields[f"model:{model}:errors"] = fields.get("code:PROVIDER_UNREACHABLE", 0) // part
                key = minute_key(time.strftime("%Y-%m-%dT%H:%M", at))
                client.hset(key, mapping=fields)
                client.expire(key, 7200)
            for ago in range(1, 15 * 24):
                asked = int(5000 + 3000 * math.sin(ago / 24 * math.tau) + secrets.randbelow(900))
                key = hour_key(time.strftime("%Y-%m-%dT%H", time.gmtime(now - 3600 * ago)))
                fields = {"requests": asked, "code:USER_RATE_LIMITED": asked // 70, "code:CLIENT_GONE": asked // 40}
                client.hset(key, mapping={**fields, "settled": asked * 290_000})
                client.expire(key, 7200)
            log = deploy_log_key(self.account.id, self.deploy)
            lines = enumerate(LOG.splitlines())
            client.set(
                log, "".join(stamp_line(line, int(now * 1000) - 30_000 + 1_700 * n) for n, line in lines), ex=3600
            )

    def used_before(self, client: Any, now: float) -> None:
        """Write usage by hour and by day, for two apps and two models."""
        periods = [(3600 * ago, "%Y-%m-%dT%H", 1) for ago in range(1, 7 * 24)]
        periods += [(86_400 * ago, "%Y-%m-%d", 20) for ago in range(1, 60)]
        for before, name, times in periods:
            at = time.gmtime(now - before)
            key = usage_key(self.account.id, time.strftime(name, at))
            for app, model, share in (
                ("notes", "gpt-oss-120b", 1.0),
                ("shop", "gpt-oss-120b", 0.4),
                ("shop", "qwen3.6-35b-a3b", 0.15),
            ):
                asked = int(
                    (60 + 50 * math.sin(before / 86_400 * math.tau - 2) + secrets.randbelow(14)) * share * times
                )
                left = asked // 23
                counts = {
                    "requests": asked,
                    "refused": asked // 17,
                    "failed": asked // 100,
                    "interrupted": left,
                    "inputTokens": asked * 310,
                    "outputTokens": asked * 420,
                    "nanoEuro": asked * 298_500 + left * 1_250_000,
                    "interruptedNanoEuro": left * 1_250_000,
                }
                client.hset(key, mapping={f"{app}/{model}/{name}": count for name, count in counts.items()})
            client.expire(key, 3600)

    def asked_before(self, client: Any, now: float) -> None:
        """Write the log of requests of the last quarter of an hour."""
        key = requests_key(self.account.id)
        for n in range(240):
            code, status, tokens = "", 200, (310, 180 + secrets.randbelow(400))
            cost = tokens[0] * 150 + tokens[1] * 600
            ttft: int | None = 160 + secrets.randbelow(220)
            if n % 13 == 4:
                code, tokens, cost = "CLIENT_GONE", (0, 0), 1_284_900
            elif n % 17 == 3:
                code, status, tokens, cost, ttft = "USER_RATE_LIMITED", 429, (0, 0), 0, None
            elif n % 61 == 7:
                code, status, tokens, cost, ttft = "PROVIDER_TIMEOUT", 504, (0, 0), 0, None
            took = 3 if status == 429 else 900 + secrets.randbelow(2600)
            app, model = ("shop", "qwen3.6-35b-a3b") if n % 5 == 0 else ("notes", "gpt-oss-120b")
            at = int((now - (240 - n) * 4) * 1000)
            request = LoggedRequest(secrets.token_hex(10), at, app, model, status, code, *tokens, cost, ttft, took)
            client.zadd(key, {msgspec.json.encode(request): at})
        client.expire(key, 3600)


@asynccontextmanager
async def visiting(
    browser: Browser,
    scene: Scene,
    scheme: Any = "light",
    size: Any = DESKTOP,
    at: str = "dashboard",
    scale: float = SCALE,
) -> AsyncIterator[Page]:
    """Opens the dashboard, or the operators' page at "ops", logged in; or another page."""
    context = await browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=scale)
    page = await context.new_page()
    await page.goto(f"{scene.gw.address}/{at}")
    if at == "dashboard":
        await log_in(page, "API key", scene.account.key, "Overview")
    elif at == "ops":
        await log_in(page, "Operator token", OPERATOR, "Spending today")
    yield page
    await context.close()


async def log_in(page: Page, label: str, credential: str, heading: str) -> None:
    await page.get_by_label(label).fill(credential)
    await page.keyboard.press("Enter")
    await page.get_by_role("heading", name=heading).first.wait_for()


async def shoot(page: Page, name: str, whole: bool = True) -> None:
    (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
    await page.wait_for_timeout(300)  # for fonts and the last transition
    await page.screenshot(path=FOLDER / f"{name}.png", full_page=whole)
    print(f"docs/img/{name}.png", (FOLDER / f"{name}.png").stat().st_size // 1024, "KB")


async def open_view(page: Page, name: str, title: str) -> None:
    await page.get_by_role("link", name=name, exact=True).click()
    await page.get_by_role("heading", name=title, level=1).wait_for()


async def take(browser: Browser, scene: Scene) -> None:
    async with visiting(browser, scene) as page:
        await shoot(page, "overview")
        await open_view(page, "Usage", "Usage")
        await shoot(page, "usage")
        await open_view(page, "Requests", "Requests")
        await shoot(page, "requests", whole=False)
        await open_view(page, "Webhooks", "Webhooks")
        await shoot(page, "webhooks")
        await open_view(page, "Deploy hooks", "Deploy hooks")
        await page.get_by_label("App", exact=True).select_option("notes")
        await page.get_by_label("Name").fill("Editorial calendar")
        await page.get_by_role("button", name="Create").click()
        await page.get_by_role("heading", name="Editorial calendar").wait_for()
        await shoot(page, "hooks")
    async with visiting(browser, scene) as page:  # the former would ask whether the URL has been saved
        await open_view(page, "shop", "shop")
        await shoot(page, "app")
    for name, path in (("log-in", "dashboard#/"), ("public", "")):
        async with visiting(browser, scene, at=path) as page:
            await shoot(page, name, whole=name == "log-in")
    async with visiting(browser, scene, "dark") as page:
        await open_view(page, "Usage", "Usage")
        await shoot(page, "usage-dark", whole=False)
        await open_view(page, "Deploys", "Deploys")
        await shoot(page, "deploys-dark")
        await page.goto(f"{scene.gw.address}/dashboard#/deploys/{scene.deploy}")
        await page.get_by_role("log").get_by_text("built in").first.wait_for()
        await shoot(page, "deploy-dark")
    async with visiting(browser, scene, size=PHONE) as page:
        await shoot(page, "overview-phone")
        await open_view(page, "Requests", "Requests")
        await shoot(page, "requests-phone", whole=False)
        await open_view(page, "Webhooks", "Webhooks")
        await shoot(page, "webhooks-phone", whole=False)


async def picture_dashboard(browser: Browser, scene: Scene) -> None:
    """Take the pictures of the dashboard that the public page shows."""
    for scheme in ("light", "dark"):
        async with visiting(browser, scene, scheme, {"width": 1200, "height": 750}, scale=1) as page:
            await page.wait_for_timeout(500)
            session = await page.context.new_cdp_session(page)
            shot = await session.send("Page.captureScreenshot", {"format": "webp", "quality": 82})
            (PUBLIC / f"overview-{scheme}.webp").write_bytes(base64.b64decode(shot["data"]))


async def begin(browser: Browser, scene: Scene) -> None:
    """Take screenshots of a new user's first steps."""
    async with visiting(browser, scene, at="#begin") as page:
        await page.get_by_label("Your name").fill("Ben’s diary")
        await shoot(page, "register", whole=False)
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="I have stored it").click()
        await page.get_by_label("Name").fill("diary")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Copy: Publish with the command line").wait_for()
        await shoot(page, "first-steps", whole=False)
        await page.goto(f"{scene.gw.address}/dashboard#/apps/diary/settings")
        await page.get_by_role("heading", name="Source and build").wait_for()
        await shoot(page, "app-settings")


async def crowd(browser: Browser, scene: Scene) -> None:
    """Take screenshots of a large account."""
    made = (await scene.gw.platform("POST", "accounts", {"name": "Harbour studio", "plan": "max"})).json()
    large = Scene(scene.gw, Account(scene.gw, made["id"], made["apiKey"]), scene.app)
    names = [f"{name}-{n:02}" for n in range(20) for name in ("booking", "gallery", "menu")]
    for name in names:
        repository = {"url": f"https://git.example.com/harbour/{name}.git", "branch": "main"}
        app = {"account": large.account.id, "repository": repository}
        (await scene.gw.platform("PUT", f"apps/{name}", app)).raise_for_status()
    for name in names[:9]:
        await large.deployed(name, "build", ok=name in names[:2], reason="git.example.com cannot be resolved")
    for name, size in (("overview-large", DESKTOP), ("overview-large-phone", PHONE)):
        async with visiting(browser, large, size=size) as page:
            await shoot(page, name)


async def operate(browser: Browser, scene: Scene) -> None:
    for name, scheme, size in (("ops", "light", DESKTOP), ("ops-dark", "dark", DESKTOP), ("ops-phone", "light", PHONE)):
        async with visiting(browser, scene, scheme, size, "ops") as page:
            await shoot(page, name, whole=name == "ops")
            if name == "ops":
                await open_view(page, "Accounts", "Accounts")
                await page.get_by_role("link", name="Ana’s workshop").click()
                await page.get_by_role("heading", name="Ana’s workshop", level=1).wait_for()
                await shoot(page, "ops-account")
                await open_view(page, "Audit", "Audit trail")
                await shoot(page, "ops-audit", whole=False)


async def shoot_views(page: Page, views: Sequence[str], name: str) -> None:
    for view in views:
        await page.evaluate(f"location.hash = '#/{view}'")
        await page.wait_for_timeout(500)
        await shoot(page, f"states/{name}-{view.replace('/', '-').replace('?period=', '') or 'overview'}")


async def show_states(browser: Browser, scene: Scene) -> None:
    """Take screenshots of every state, to check before a release. The documentation does not use them."""
    made = await scene.gw.platform("POST", "accounts", {"name": "Nobody yet", "plan": "free"})
    nobody = Scene(scene.gw, Account(scene.gw, made.json()["id"], made.json()["apiKey"]), scene.app)
    failed = [f"deploys/{row['id']}" for row in await scene.call("GET", "/account/deploys") if row["state"] == "failed"]
    sent = [f"webhooks/{row['id']}" for row in await scene.call("GET", "/account/deliveries?limit=1")]
    views = [*VIEWS, f"deploys/{scene.deploy}", *failed, *sent]
    for scheme, size, kind in (("light", DESKTOP, "desktop"), ("dark", PHONE, "phone")):
        for who, each in (("full", scene), ("empty", nobody)):
            async with visiting(browser, each, scheme, size) as page:
                await shoot_views(page, views if each is scene else VIEWS, f"{kind}-{who}")
        async with visiting(browser, scene, scheme, size, "ops") as page:
            await shoot_views(page, OPERATIONS, f"{kind}-ops")
        for path in ("", "docs"):
            async with visiting(browser, scene, scheme, size, path) as page:
                await shoot(page, f"states/{kind}-{path or 'public'}", whole=not path)
    with scene.gw.redis.client() as client:
        spend = spend_key(scene.account.id, day_of(int(time.time() * 1000)))
        for state, settled in (("near-the-cap", 1_700_000_000), ("at-the-cap", 2_000_000_000)):
            client.hset(spend, mapping={"settled": settled, "reserved": 0})
            async with visiting(browser, scene) as page:
                await page.wait_for_timeout(500)
                await shoot(page, f"states/{state}", whole=False)
                if state == "at-the-cap":
                    scene.gw.redis.freeze()
                    await page.wait_for_timeout(12_000)
                    await shoot(page, "states/without-redis", whole=False)
                    scene.gw.redis.thaw()


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            FakeProvider() as provider,
            FakeAppBackend() as backend,
            FakeReceiver() as receiver,
            chromium() as browser,
            gateway_with_redis(provider, folder, GATEWAY_DEPLOY_ENGINE="external", GATEWAY_API_URL=API) as gw,
        ):
            provider.default = tokens("A", " capsule", ".", usage=(5, 119))
            made = await gw.platform("POST", "accounts", {"name": "Ana’s workshop", "plan": "maker"})
            account = Account(gw, made.json()["id"], made.json()["apiKey"])
            for app in ("notes", "shop", "journal"):
                fields = {"account": account.id, "auth": {"kind": "jwks", "url": backend.jwks_url}}
                if app == "notes":
                    fields |= {"customDomain": "notes.example.com", "customDomainVerified": True}
                fields |= {"repository": {"url": f"https://git.example.com/ana/{app}.git", "branch": "main"}}
                (await gw.platform("PUT", f"apps/{app}", fields)).raise_for_status()
            worker = await Worker(gw.redis.url, folder).start()
            try:
                scene = Scene(gw, account, App(account, "notes", backend))
                await scene.play(receiver, backend)
                await picture_dashboard(browser, scene)
                await take(browser, scene)
                await begin(browser, scene)
                await crowd(browser, scene)
                await operate(browser, scene)
                await show_states(browser, scene)
            finally:
                await worker.stop()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

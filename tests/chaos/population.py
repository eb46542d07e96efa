"""Creates accounts and apps in generations, sends their events, and deploys their apps.

The load uses only the latest generation, so a fault makes the spend of only a few accounts inexact.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import jwt

from gateway.events.catalog import SAMPLES
from gateway.keys import partition_tag
from tests.chaos.books import Ended
from tests.chaos.load import Generation, LoadedApp
from tests.fakes.backend import jwk, private_key
from tests.support.deployment import packed

ACCOUNTS, APPS, USERS = 10, 3, 3  # accounts in a generation, apps of each, users of each app
CAPPED, HOT = 2, 1  # accounts that reach their cap, and accounts whose apps reach their rate limit
HOT_WEIGHT = 4.0
EVENTS_PER_SECOND, DEPLOYS_PER_SECOND = 2.0, 0.2


@dataclass
class Account:
    id: str
    key: str
    plan: str
    webhook_secret: str = ""
    apps: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Deploy:
    account: Account
    app: str
    page: str
    at: float


class Issuer:
    """The issuer of all users' tokens, which it signs with one key."""

    def __init__(self) -> None:
        self._key, self._kid = private_key("ES256"), f"chaos-{secrets.token_hex(8)}"
        self.keys = {"keys": [jwk("ES256", self._key, self._kid)]}
        self.header = self.sign_token("app", "user").partition(".")[
            0
        ]  # the beginning of every token, found nowhere else

    def sign_token(self, app: str, user: str) -> str:
        claims = {"sub": user, "iss": f"https://{app}.test", "exp": int(time.time()) + 86_400}
        return jwt.encode(claims, self._key, algorithm="ES256", headers={"kid": self._kid})


class Population:
    """All accounts, and the accepted events and deploys with their times."""

    def __init__(self, gateways: Sequence[str], operator: str, outside: str, seed: int) -> None:
        self._gateways, self._operator, self._outside = list(gateways), operator, outside
        self._chance = random.Random(seed)
        self.issuer = Issuer()
        self.accounts: dict[str, Account] = {}
        self.current: list[Account] = []
        self.account_of: dict[str, str] = {}  # by app
        self.events: dict[str, float] = {}  # time of each accepted event
        self.deploys: dict[str, Deploy] = {}
        self.published: Counter[str] = Counter()  # attempts by app
        self._republishable: list[tuple[Account, str]] = []  # apps whose last attempt was accepted
        self.unexpected: list[str] = []

    async def __aenter__(self) -> Population:
        timeout = aiohttp.ClientTimeout(total=8)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    # -- calls -----------------------------------------------------------------------------------------------

    async def call(self, method: str, path: str, key: str, **options: Any) -> tuple[int, Any]:
        """Calls one of the gateways. Returns the status, 0 without an answer, and the body."""
        headers = {"authorization": f"Bearer {key}"}
        url = self._chance.choice(self._gateways) + path
        try:
            async with self._session.request(method, url, headers=headers, **options) as response:
                body = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return 0, None
        if response.status >= 500 and response.status != 503:
            self.unexpected.append(f"{method} {path.split('?')[0]} got {response.status}")
        return response.status, body

    async def _call_until_done(self, method: str, path: str, key: str, **options: Any) -> Any:
        """Repeats the call until it succeeds, because a fault may make the service unavailable."""
        async with asyncio.timeout(120):
            while True:
                status, body = await self.call(method, path, key, **options)
                if 200 <= status < 300:
                    return body
                if 400 <= status < 500 and status != 429:
                    raise RuntimeError(f"{method} {path} got {status}: {body}")
                await asyncio.sleep(0.3)

    # -- generations -----------------------------------------------------------------------------------------

    async def create_probe_apps(
        self, shards: int, shard: Callable[[str], Awaitable[int]], apps: int
    ) -> list[list[tuple[str, str]]]:
        """Creates apps of one account in each shard, each with a user's token. `shard`: returns a partition's shard."""
        found: dict[int, Account] = {}
        while len(found) < shards:
            account = await self.create_account("max", apps=0)
            found.setdefault(await shard(partition_tag(account.id)), account)
        await asyncio.gather(*(self._add_apps(account, apps) for account in found.values()))
        return [[(app, self.issuer.sign_token(app, "probe")) for app in account.apps] for account in found.values()]

    async def create_account(self, plan: str, apps: int = APPS) -> Account:
        body = await self._call_until_done(
            "POST", "/platform/accounts", self._operator, json={"name": "chaos", "plan": plan}
        )
        account = Account(body["id"], body["apiKey"], plan)
        self.accounts[account.id] = account
        for attempt in range(20):  # the secret is shown once, so after a lost answer the account sets another address
            url = f"{self._outside}/events/{account.id}?n={attempt}"
            body = await self._call_until_done("PUT", "/account/webhook", account.key, json={"url": url})
            if "secret" in body:
                account.webhook_secret = body["secret"]
                break
        await self._add_apps(account, apps)
        return account

    async def _add_apps(self, account: Account, apps: int) -> None:
        for _ in range(apps):
            name = f"chaos-{secrets.token_hex(5)}"
            auth = {"kind": "jwks", "url": f"{self._outside}/keys", "issuer": f"https://{name}.test"}
            fields = {"account": account.id, "auth": auth}
            await self._call_until_done("PUT", f"/platform/apps/{name}", self._operator, json=fields)
            account.apps.append(name)
            self.account_of[name] = account.id

    async def create_generation(self) -> Generation:
        plans = ["free"] * CAPPED + ["max"] * (ACCOUNTS - CAPPED)
        accounts = await asyncio.gather(*(self.create_account(plan) for plan in plans))
        self.current = list(accounts)
        return Generation(
            self._gateways,
            [
                LoadedApp(
                    app,
                    account.id,
                    [self.issuer.sign_token(app, f"user-{n}") for n in range(USERS)],
                    HOT_WEIGHT if account in accounts[-HOT:] else 1.0,
                )
                for account in accounts
                for app in account.apps
            ],
        )

    async def emit_events(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._chance.expovariate(EVENTS_PER_SECOND))
                if self.current:
                    tasks.create_task(self._emit(self._chance.choice(self.current)))

    async def _emit(self, account: Account) -> None:
        kind, began = self._chance.choice(list(SAMPLES)), time.monotonic()
        status, body = await self.call("POST", "/account/webhook/test", account.key, json={"type": kind})
        if status == 202:
            self.events[body["id"]] = began

    async def publish_apps(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._chance.expovariate(DEPLOYS_PER_SECOND))
                if self._republishable and self._chance.random() < 0.5:
                    tasks.create_task(self._publish(*self._republishable.pop()))
                elif self.current:
                    account = self._chance.choice(self.current)
                    if new := [app for app in account.apps if not self.published[app]]:
                        tasks.create_task(self._publish(account, self._chance.choice(new)))

    async def _publish(self, account: Account, app: str) -> None:
        deploy = Deploy(account, app, secrets.token_hex(8), time.monotonic())
        self.published[deploy.app] += 1
        source = packed({"index.html": deploy.page})
        status, body = await self.call("PUT", f"/account/apps/{deploy.app}/source", account.key, data=source)
        if status == 202:
            self.deploys[body["deployId"]] = deploy
            self._republishable.append((account, app))

    async def read_end(self, deploy: str) -> Ended | None:
        """Returns how a deploy ended, or None if it does not exist."""
        account, offset = self.deploys[deploy].account, time.monotonic() - time.time()
        with contextlib.suppress(RuntimeError):
            row = await self._call_until_done("GET", f"/account/deploys/{deploy}", account.key)
            begin, end = (
                datetime.datetime.fromisoformat(row.get(name) or row["createdAt"]).timestamp() + offset
                for name in ("startedAt", "finishedAt")
            )
            return Ended(row["state"], begin, end, row.get("error") or "")
        return None

    async def fetch_page(self, host: str, app: str) -> str:
        """Returns the app's page from one of the hosts, or else the status or the error."""
        try:
            async with self._session.get(f"http://{host}/", headers={"Host": f"{app}.apps.localhost"}) as response:
                return await response.text() if response.status == 200 else f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__

    async def list_failed_events(self, account: Account) -> set[str]:
        """Returns the events that the account's log lists as not delivered."""
        rows = await self._call_until_done("GET", "/account/deliveries?limit=1000", account.key)
        return {row["id"] for row in rows if row["outcome"] != "delivered"}

"""Accounts and apps that come in generations, each for a minute or so, and what their holders do: events and deploys.

A generation that is over is not used any more, so a fault blurs the books of the accounts that met it and of no others.
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
from gateway.redis.partitions import partition_tag
from tests.chaos.books import Ended
from tests.chaos.load import Generation, LoadedApp
from tests.fakes.backend import jwk, private_key
from tests.support.deployment import packed

ACCOUNTS, APPS, USERS = 10, 3, 3  # accounts in a generation, apps of each, users of each app
CAPPED, HOT = 2, 1  # accounts at their cap, and at their rates
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
    """Signs the tokens of all users of all apps, with one key."""

    def __init__(self) -> None:
        self._key, self._kid = private_key("ES256"), f"chaos-{secrets.token_hex(8)}"
        self.keys = {"keys": [jwk("ES256", self._key, self._kid)]}
        self.header = self.token("app", "user").partition(".")[0]  # of every token, and of nothing else

    def token(self, app: str, user: str) -> str:
        claims = {"sub": user, "iss": f"https://{app}.test", "exp": int(time.time()) + 86_400}
        return jwt.encode(claims, self._key, algorithm="ES256", headers={"kid": self._kid})


class Population:
    """`accounts` holds all of them; `events` and `deploys` what was accepted, and when."""

    def __init__(self, gateways: Sequence[str], operator: str, outside: str, seed: int) -> None:
        self._gateways, self._operator, self._outside = list(gateways), operator, outside
        self._chance = random.Random(seed)
        self.issuer = Issuer()
        self.accounts: dict[str, Account] = {}
        self.current: list[Account] = []
        self.account_of: dict[str, str] = {}  # by app
        self.events: dict[str, tuple[float, str]] = {}  # when each was accepted, and its account
        self.deploys: dict[str, Deploy] = {}
        self.published: Counter[str] = Counter()  # attempts, by app
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
        """At one of the gateways. Status 0: no answer."""
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

    async def _insist(self, method: str, path: str, key: str, **options: Any) -> Any:
        """Asks until it is done: the service may be away for as long as a fault lasts."""
        async with asyncio.timeout(120):
            while True:
                status, body = await self.call(method, path, key, **options)
                if 200 <= status < 300:
                    return body
                if 400 <= status < 500 and status != 429:
                    raise RuntimeError(f"{method} {path} got {status}: {body}")
                await asyncio.sleep(0.3)

    # -- generations -----------------------------------------------------------------------------------------

    async def callers(
        self, shards: int, shard: Callable[[str], Awaitable[int]], apps: int
    ) -> list[list[tuple[str, str]]]:
        """Apps of one account in each shard, with a user's token each. `shard`: of a partition."""
        found: dict[int, Account] = {}
        while len(found) < shards:
            account = await self.account("max", apps=0)
            found.setdefault(await shard(partition_tag(account.id)), account)
        await asyncio.gather(*(self._add_apps(account, apps) for account in found.values()))
        return [[(app, self.issuer.token(app, "probe")) for app in account.apps] for account in found.values()]

    async def account(self, plan: str, apps: int = APPS) -> Account:
        body = await self._insist("POST", "/platform/accounts", self._operator, json={"name": "chaos", "plan": plan})
        account = Account(body["id"], body["apiKey"], plan)
        self.accounts[account.id] = account
        for attempt in range(20):  # the secret shows once, so a lost answer takes another address
            url = f"{self._outside}/events/{account.id}?n={attempt}"
            body = await self._insist("PUT", "/account/webhook", account.key, json={"url": url})
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
            await self._insist("PUT", f"/platform/apps/{name}", self._operator, json=fields)
            account.apps.append(name)
            self.account_of[name] = account.id

    async def generation(self) -> Generation:
        plans = ["free"] * CAPPED + ["max"] * (ACCOUNTS - CAPPED)
        accounts = await asyncio.gather(*(self.account(plan) for plan in plans))
        self.current = list(accounts)
        return Generation(
            self._gateways,
            [
                LoadedApp(
                    app,
                    account.id,
                    [self.issuer.token(app, f"user-{n}") for n in range(USERS)],
                    HOT_WEIGHT if account in accounts[-HOT:] else 1.0,
                )
                for account in accounts
                for app in account.apps
            ],
        )

    # -- events and deploys ----------------------------------------------------------------------------------

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
            self.events[body["id"]] = began, account.id

    async def publish_apps(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._chance.expovariate(DEPLOYS_PER_SECOND))
                if self.current:
                    tasks.create_task(self._publish(self._chance.choice(self.current)))

    async def _publish(self, account: Account) -> None:
        deploy = Deploy(account, self._chance.choice(account.apps), secrets.token_hex(8), time.monotonic())
        self.published[deploy.app] += 1
        source = packed({"index.html": deploy.page})
        status, body = await self.call("PUT", f"/account/apps/{deploy.app}/source", account.key, data=source)
        if status == 202:
            self.deploys[body["deployId"]] = deploy

    async def ended(self, deploy: str) -> Ended | None:
        """None: there is no such deploy."""
        account, offset = self.deploys[deploy].account, time.monotonic() - time.time()
        with contextlib.suppress(RuntimeError):
            row = await self._insist("GET", f"/account/deploys/{deploy}", account.key)
            begin, end = (
                datetime.datetime.fromisoformat(row.get(name) or row["createdAt"]).timestamp() + offset
                for name in ("startedAt", "finishedAt")
            )
            return Ended(row["state"], begin, end, row.get("error") or "")
        return None

    async def page(self, host: str, app: str) -> str:
        """What a visitor of the app sees at one of the hosts; or the status, or the error."""
        try:
            async with self._session.get(f"http://{host}/", headers={"Host": f"{app}.apps.localhost"}) as response:
                return await response.text() if response.status == 200 else f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__

    async def failed_events(self, account: Account) -> set[str]:
        """Whose delivery the account's log says was in vain."""
        rows = await self._insist("GET", "/account/deliveries?limit=1000", account.key)
        return {row["id"] for row in rows if row["outcome"] != "delivered"}

"""An account that manages its webhook over HTTP."""

from collections import Counter
from typing import Any

import httpx

from gateway.keys import bodies_key, deliveries_key, partition_tag, stream_key
from tests.fakes.receiver import FakeReceiver
from tests.support.accounts import Account
from tests.support.polling import wait_until

WEBHOOK, DELIVERIES = "/account/webhook", "/account/deliveries"


def write_deliveries(account: Account, *deliveries: tuple[str, str], app: str = "shop") -> None:
    """Writes deliveries into the log as a worker does, oldest first: event and outcome. Each event's data is stored."""
    log, bodies = deliveries_key(account.id), bodies_key(account.id)
    with account.gateway.redis.client() as client:
        now = int(client.time()[0]) * 1000
        for number, (event, outcome) in enumerate(deliveries):
            fields = {"id": event, "type": "app.crashed", "app": app, "at": now, "durationMs": 1}
            client.xadd(log, {**fields, "outcome": outcome, "status": "", "error": ""}, id=f"{now}-{number + 1}")
        for event, entries in Counter(event for event, _ in deliveries).items():
            client.hset(bodies, event, '{"n":1}')
            if entries > 1:
                client.hset(bodies, f"{event}:more", entries - 1)
        client.expire(log, 600)
        client.expire(bodies, 600)


def read_queue(account: Account) -> list[dict[str, str]]:
    """Returns the account's events that wait for delivery, oldest first."""
    with account.gateway.redis.client() as client:
        entries = client.xrange(stream_key(partition_tag(account.id), "events"))
    own = [fields for _, fields in entries if fields[b"account"] == account.id.encode()]
    return [{name.decode(): value.decode() for name, value in fields.items()} for fields in own]


class Holder:
    """An account with its own `path` at the receiver."""

    def __init__(self, account: Account, receiver: FakeReceiver) -> None:
        self.account, self.id, self.path = account, account.id, f"/{account.id}"
        self.url = receiver.url(self.path)
        self.secret = ""

    async def call(self, method: str, path: str = WEBHOOK, body: Any = None) -> httpx.Response:
        return await self.account.call(method, path, body)

    async def set(self, url: str | None = None) -> dict[str, str]:
        response = await self.call("PUT", body={"url": url or self.url})
        assert response.status_code == 200, response.text
        shown = response.json()
        if "secret" in shown:
            self.secret = shown["secret"]
            self.account.gateway.confidential.add(self.secret)
        return shown

    async def test(self, kind: str = "app.crashed") -> str:
        response = await self.call("POST", f"{WEBHOOK}/test", {"type": kind})
        assert response.status_code == 202, response.text
        assert response.json().keys() == {"id"}
        return response.json()["id"]

    async def log(self, query: str = "") -> list[dict[str, Any]]:
        response = await self.call("GET", DELIVERIES + query)
        assert response.status_code == 200, response.text
        return response.json()

    async def logged(self, count: int) -> list[dict[str, Any]]:
        rows = await wait_until(self.log, 10, holds=lambda rows: len(rows) >= count)
        assert len(rows) == count
        return rows

"""An account that manages its webhook over HTTP."""

from typing import Any

import httpx

from tests.fakes.receiver import FakeReceiver
from tests.support.accounts import Account
from tests.support.polling import wait_until

WEBHOOK, DELIVERIES = "/account/webhook", "/account/deliveries"


class Holder:
    """An account with its own `path` at the receiver."""

    def __init__(self, account: Account, receiver: FakeReceiver) -> None:
        self.account, self.id, self.path = account, account.id, f"/{account.id}"
        self.url = receiver.url(self.path)
        self.secret = ""

    async def call(self, method: str, path: str = WEBHOOK, body: Any = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.account.key}"}
        return await self.account.gateway.http.request(method, path, json=body, headers=headers)

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
        async def enough() -> list[dict[str, Any]] | None:
            rows = await self.log()
            return rows if len(rows) >= count else None

        rows = await wait_until(enough, 10)
        assert len(rows) == count
        return rows

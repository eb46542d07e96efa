"""The stream of an account's changes: what it reports, what it costs, its limits, and its end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx_sse
import pytest

from gateway.accounts.changes import COMMENT_SECONDS, STREAM_SECONDS, Changes
from gateway.accounts.viewers import CHANGES
from gateway.errors import BackboneUnavailable
from tests.fakes import FakeAppBackend
from tests.support.accounts import Account, App
from tests.support.background import in_background
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused
from tests.support.virtual_time import virtual_time

session = pytest.mark.asyncio(loop_scope="session")


class Seen:
    """The events of a stream, in the background."""

    def __init__(self) -> None:
        self.topics: list[str] = []

    async def read(self, source: httpx_sse.EventSource) -> None:
        async for event in source.aiter_sse():
            assert event.data == event.event
            self.topics.append(event.event)

    async def reports(self, topic: str) -> None:
        await wait_until(lambda: topic in self.topics)


@asynccontextmanager
async def watching(account: Account, gw: Gateway | None = None) -> AsyncIterator[Seen]:
    at = gw or account.gateway
    headers = {"Authorization": f"Bearer {account.key}"}
    async with httpx_sse.aconnect_sse(at.http, "GET", "/account/changes", headers=headers) as source:
        assert source.response.headers["cache-control"] == "no-store"
        seen = Seen()
        async with in_background(seen.read(source)):
            await seen.reports("ready")
            seen.topics.clear()
            yield seen


async def change(account: Account, method: str, path: str, body: Any = None) -> None:
    response = await account.call(method, path, body)
    assert response.status_code < 300, response.text


# -- what it reports -----------------------------------------------------------------------------------------


@session
async def test_each_kind_of_change_is_reported(gw: Gateway, twin: Gateway, app: App) -> None:
    """Also one through another process, and a switch that is back before the next read: a viewer may have seen it."""
    account, path = app.account, f"/account/apps/{app.name}"
    async with watching(account, twin) as seen:
        await change(account, "POST", "/account/keys", {"name": "second"})
        await seen.reports("keys")
        assert seen.topics == ["keys"]
        await change(account, "POST", f"{path}/hooks", {"name": "a hook"})
        await seen.reports("hooks")
        await account.set_webhook("https://receiver.example.com/")
        await seen.reports("deliveries")
        await gw.switch(enabled=False)
        await gw.switch(enabled=True)
        await seen.reports("service")
        assert set(seen.topics) == {"keys", "hooks", "deliveries", "service"}
        await change(account, "PUT", f"{path}/limits", {"dailyEuro": "0.50"})
        await seen.reports("apps")
        await app.events("x")
        await seen.reports("requests")
        await seen.reports("usage")
        seen.topics.clear()
        await gw.platform("POST", f"apps/{app.name}/crashes", {"reason": "oom"})
        await seen.reports("apps")


@session
async def test_other_accounts_changes_are_not_reported(gw: Gateway, app: App, backend: FakeAppBackend) -> None:
    other = await gw.app(backend)
    async with watching(other.account) as seen, watching(app.account) as own:
        await app.events("x")
        await own.reports("usage")
        await asyncio.sleep(1.2)  # a read later
        assert seen.topics == []
        suspended = await gw.platform("PUT", f"accounts/{other.account.id}/suspension", {"reason": "abuse"})
        assert suspended.status_code < 300
        await seen.reports("apps")
    async with watching(other.account):
        pass  # a suspended account may watch


# -- access, limits and the end ------------------------------------------------------------------------------


@session
async def test_one_caller_leaves_streams_to_others_of_its_account(gw: Gateway) -> None:
    """A key that may only read cannot keep the account's owner from following it."""
    account, half = await gw.account(), CHANGES.limit_of_account // 2
    headers = {"Authorization": f"Bearer {(await account.add_key(scope='read')).key}"}
    async with AsyncExitStack() as viewers:
        for _ in range(half):
            response = await viewers.enter_async_context(gw.http.stream("GET", "/account/changes", headers=headers))
            assert response.status_code == 200
        refused(await gw.http.get("/account/changes", headers=headers), 429, "VIEWERS_LIMITED")
        await viewers.enter_async_context(watching(account))
        async with watching(await gw.account()):
            pass
        # A stream that its viewer has left is counted until the gateway notices.
        await wait_until(partial(read_metrics, gw), holds=lambda text: f"gateway_change_viewers {half + 1:.1f}" in text)
    await wait_until(partial(read_metrics, gw), holds=lambda text: "gateway_change_viewers 0.0" in text)


async def read_metrics(gw: Gateway) -> str:
    return (await gw.http.get("/metrics")).text


# -- what it costs -------------------------------------------------------------------------------------------


class FakeStore:
    def __init__(self) -> None:
        self.reads: list[int] = []
        self.away = False
        self.names: dict[str, Any] = {}

    async def read_each(self, items: list[Any], read: Any) -> list[Any]:
        if self.away:
            raise BackboneUnavailable
        self.reads.append(len(items))
        await asyncio.sleep(0)
        return [self.names.get(topic, []) for topic, _ in items]


class FakeRegistry:
    def __init__(self) -> None:
        self.store = FakeStore()

    async def app(self, name: str) -> None:
        return None

    async def account(self, account_id: str) -> str:
        return account_id


def make() -> tuple[Changes, FakeStore]:
    registry = FakeRegistry()
    return Changes(registry, lambda: "on"), registry.store  # type: ignore[arg-type]


@virtual_time
async def test_all_viewers_share_a_read_and_without_viewers_there_is_none() -> None:
    changes, store = make()
    viewers = [changes.stream_events("acc_1", lambda: False) for _ in range(10)]
    for viewer in viewers:
        assert await anext(viewer) == b"event: ready\ndata: ready\n\n"
    before = len(store.reads)
    store.names["keys"] = ["new"]
    events = {await asyncio.wait_for(anext(viewer), 2) for viewer in viewers}
    assert events == {b"event: keys\ndata: keys\n\n"}
    assert len(store.reads) - before <= 3
    for viewer in viewers:
        await viewer.aclose()
    idle = len(store.reads)
    await asyncio.sleep(COMMENT_SECONDS)
    assert len(store.reads) == idle


@virtual_time
async def test_a_quiet_stream_has_comments_and_ends() -> None:
    changes, _ = make()
    ready, *comments = [event async for event in changes.stream_events("acc_1", lambda: False)]
    assert ready.startswith(b"event: ready")
    assert STREAM_SECONDS / (COMMENT_SECONDS + 2) <= len(comments) <= STREAM_SECONDS / COMMENT_SECONDS
    assert set(comments) == {b": waiting\n\n"}


@virtual_time
async def test_a_fault_ends_all_streams_of_the_account() -> None:
    changes, store = make()
    for _ in range(2):  # and then there are new ones
        viewers = [changes.stream_events("acc_1", lambda: False) for _ in range(3)]
        for viewer in viewers:
            assert await anext(viewer) == b"event: ready\ndata: ready\n\n"
        store.away = True
        for viewer in viewers:
            assert await asyncio.wait_for(anext(viewer, None), 2) is None
        assert [event async for event in changes.stream_events("acc_1", lambda: False)] == []
        store.away = False

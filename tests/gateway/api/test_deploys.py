"""Lists of deploys in pages, over HTTP. The test is the deploy engine."""

from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.accounts.viewers import LOGS
from tests.fakes import FakeAppBackend
from tests.support.accounts import App
from tests.support.deploys import a_hook, publish, report_phases
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def listed(app: App, query: str) -> Any:
    return (await app.account.get(f"/account/deploys?{query}")).json()


async def test_pages_of_deploys(hosted: App) -> None:
    other = await hosted.account.app(hosted.backend, repository={"url": "https://git.example/x.git", "branch": "main"})
    names = [other.name if n % 3 else hosted.name for n in range(13)]
    body = {"account": hosted.account.id, "repository": {"url": "https://git.example/y.git", "branch": "main"}}
    assert (await hosted.gateway.platform("PUT", f"apps/{hosted.name}", body)).is_success
    for name in names:
        assert (await hosted.gateway.platform("POST", f"apps/{name}/deploys", {"kind": "live"})).is_success
    everything = await listed(hosted, "limit=1000")
    assert [row["app"] for row in everything] == names[::-1]
    for query, rows in (
        ("", everything),
        ("&app=", everything),
        (f"&app={other.name}", [row for row in everything if row["app"] == other.name]),
    ):
        pages, before = [], ""
        while page := await listed(hosted, f"limit=4{query}{before}"):
            pages.append(page)
            before = f"&before={page[-1]['id']}"
        assert [len(page) for page in pages[:-1]] == [4] * (len(pages) - 1)
        assert [row["id"] for page in pages for row in page] == [row["id"] for row in rows]
    refused = await listed(hosted, "before=dep_none")
    assert refused["error"]["message"].startswith("before: there is no deploy of this id")
    assert "limit: must be at least 1" in (await listed(hosted, "limit=0"))["error"]["message"]
    await check_current(hosted)


async def test_lists_after_an_operator_has_renamed_an_app(hosted: App) -> None:
    """Hooks have its present name, and end with it. Deploys are found by the new name, the former one and the id."""
    await a_hook(hosted.account, hosted.name)
    queued = await publish(hosted.account, hosted.name)
    body = {"account": hosted.account.id, "name": f"{hosted.name}-2"}
    assert (await hosted.gateway.platform("PUT", f"apps/{hosted.name}", body)).is_success
    assert [hook["app"] for hook in (await hosted.account.get("/account/hooks")).json()] == [f"{hosted.name}-2"]
    for name in (hosted.name, f"{hosted.name}-2"):
        assert [row["id"] for row in await listed(hosted, f"app={name}")] == [queued.json()["deployId"]]
    assert await listed(hosted, "app=another") == []
    assert (await hosted.gateway.platform("DELETE", f"apps/{hosted.name}-2")).is_success
    assert (await hosted.account.get("/account/hooks")).json() == []


async def test_a_preview_of_a_branch_without_a_repository(hosted: App) -> None:
    """It is built from the stored source."""
    published = (await publish(hosted.account, hosted.name)).json()["deployId"]
    await report_phases(hosted.gateway, published, "build", "health", "canary")
    body = {"kind": "preview", "branch": "Fix/The Thing"}
    preview = (await hosted.gateway.platform("POST", f"apps/{hosted.name}/deploys", body)).json()["deployId"]
    await report_phases(hosted.gateway, preview, "build", "health")
    (row,) = [row for row in await listed(hosted, f"app={hosted.name}") if row["id"] == preview]
    assert (row["state"], row["url"]) == ("live", f"https://{hosted.name}--p-fix-the-thing.apps.localhost")
    live = {**body, "kind": "live"}
    answer = await hosted.gateway.platform("POST", f"apps/{hosted.name}/deploys", live)
    assert answer.json()["error"]["message"].startswith("branch: only previews")


async def check_current(hosted: App) -> None:
    async def deployed(*phases: str) -> str:
        queued = await hosted.gateway.platform("POST", f"apps/{hosted.name}/deploys", {"kind": "live"})
        deploy: str = queued.json()["deployId"]
        await report_phases(hosted.gateway, deploy, *phases)
        return deploy

    first, second = [await deployed("build", "health", "canary") for _ in range(2)]
    waiting = await deployed()
    current = {row["id"]: row["current"] for row in await listed(hosted, "limit=3")}
    assert current == {waiting: False, second: True, first: False}
    shown = (await hosted.account.get(f"/account/deploys/{second}")).json()
    assert (shown["current"], [phase["state"] for phase in shown["phases"]]) == (True, ["done"] * 3)


async def test_one_key_leaves_streams_of_logs_to_others(gw: Gateway, backend: FakeAppBackend) -> None:
    account = await gw.account()
    app = await account.app(backend, build={"command": "make", "start": "./serve"})
    reader = (await account.add_key(scope="read")).key
    statuses = []
    async with AsyncExitStack() as streams:
        for key in [reader] * (LOGS.limit_of_account // 2 + 1) + [account.key]:
            headers = {"Authorization": f"Bearer {key}", "Accept": "text/event-stream"}
            follows = gw.http.stream("GET", f"/account/apps/{app.name}/logs", headers=headers)
            statuses.append((await streams.enter_async_context(follows)).status_code)
    assert statuses == [200] * (LOGS.limit_of_account // 2) + [429, 200]

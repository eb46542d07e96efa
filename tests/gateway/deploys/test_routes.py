"""Lists of deploys in pages, over HTTP. The test is the deploy engine."""

from typing import Any

import pytest

from tests.support.accounts import App
from tests.support.deploys import report_phases

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

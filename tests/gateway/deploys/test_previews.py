"""Previews that accounts publish and end, over HTTP and with the records alone. The test is the external engine."""

import time
from typing import Any

import httpx
import pytest

from gateway.deploys.previews import Previews
from gateway.deploys.serving import Records, Wanted
from gateway.keys import previews_key
from gateway.redis.client import Store
from tests.support.accounts import Account
from tests.support.deploys import TARBALL, a_hook, an_app, publish, report_phase, report_phases, trigger
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

REPOSITORY = {"url": "https://git.example/shop.git", "branch": "main"}


async def publish_as(account: Account, app: str, query: str) -> httpx.Response:
    return await account.call("PUT", f"/account/apps/{app}/source?{query}", content=TARBALL)


async def show(account: Account, deploy: str) -> Any:
    return (await account.get(f"/account/deploys/{deploy}")).json()


async def go_live(gw: Gateway, account: Account, app: str, branch: str) -> str:
    deploy: str = (await publish_as(account, app, f"preview={branch}")).json()["deployId"]
    await report_phases(gw, deploy, "build", "health")
    return deploy


async def test_a_folder_becomes_a_preview_and_the_live_app_stays(gw: Gateway, account: Account, app: str) -> None:
    live = (await publish(account, app)).json()
    assert live["url"] == f"https://{app}.apps.localhost"
    await report_phases(gw, live["deployId"], "build", "health", "canary")
    published = await publish_as(account, app, "preview=Fix/The Thing")
    url = f"https://{app}--p-fix-the-thing.apps.localhost"
    assert (published.status_code, published.json()["url"]) == (202, url)
    preview = published.json()["deployId"]
    await report_phases(gw, preview, "build", "health")
    row, served = await show(account, preview), await show(account, live["deployId"])
    assert (row["kind"], row["branch"], row["url"]) == ("preview", "Fix/The Thing", url)
    assert (row["state"], row["current"], served["current"]) == ("live", True, True)
    newer = await go_live(gw, account, app, "fix the thing")
    assert not (await show(account, preview))["current"], "branches that differ in punctuation share an address"
    assert (await show(account, newer))["current"]


async def test_a_branch_of_the_repository(gw: Gateway, account: Account, app: str) -> None:
    body = {"kind": "preview", "branch": "feature/login"}
    refused = await account.call("POST", f"/account/apps/{app}/deploys", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "NO_DEPLOY_YET")
    connected = await an_app(account, repository=REPOSITORY)
    answer = await account.call("POST", f"/account/apps/{connected}/deploys", body)
    assert answer.status_code == 202
    assert answer.json()["url"] == f"https://{connected}--p-feature-login.apps.localhost"
    row = await show(account, answer.json()["deployId"])
    assert (row["kind"], row["branch"], row["trigger"], row["by"]) == ("preview", "feature/login", "branch", "first")
    for wrong in ({}, {"kind": "live", "branch": "x"}, {"kind": "preview"}, {**body, "branch": "--upload-pack=x"}):
        assert (await account.call("POST", f"/account/apps/{connected}/deploys", wrong)).status_code == 400


async def test_wrong_descriptions_are_refused_before_the_upload(account: Account, app: str) -> None:
    branch = "must be the name of a branch, such as feature/login, and not begin with -"
    for query, fault in (
        *(("preview=-x", branch), ("preview=", branch), ("branch=-x", branch), ("dirty=perhaps", "")),
        *(("message=a%0A", "must be one line"), (f"message={'x' * 201}", "must have at most 200 characters")),
        ("commit=0123abc%0A", "must be 7 to 64 characters of 0-9 and a-f"),
    ):
        answer = await publish_as(account, app, query)
        assert answer.status_code == 400, query
        assert answer.json()["error"]["message"].startswith(f"{query.partition('=')[0]}: {fault}"), query
    assert (await account.get("/account/deploys")).json() == []


async def test_an_end_of_a_preview(gw: Gateway, account: Account, app: str) -> None:
    path = f"/account/apps/{app}/previews"
    assert (await account.call("DELETE", f"{path}/x")).status_code == 404
    first = await go_live(gw, account, app, "x")
    building = (await publish_as(account, app, "preview=X!")).json()["deployId"]
    await report_phase(gw, building, "build")
    other = await go_live(gw, account, app, "y")
    assert (await account.call("DELETE", f"{path}/x")).status_code == 204
    canceled = await show(account, building)
    assert (canceled["state"], canceled["error"]) == ("canceled", "the preview was ended")
    assert not (await show(account, first))["current"]
    assert (await show(account, other))["current"]
    assert (await account.call("DELETE", f"{path}/x")).status_code == 404


async def test_the_previews_that_nobody_visits_make_room(gw: Gateway, account: Account, store: Store) -> None:
    """Those of all the account's apps count, by their last visit. A deploy counts as one, and is not interrupted."""
    shop, blog = await an_app(account), await an_app(account)
    records = Records(store)
    previews = Previews(store, records)
    oldest, visited = await go_live(gw, account, shop, "a"), await go_live(gw, account, shop, "b")
    newest = await go_live(gw, account, blog, "c")
    following = (await publish_as(account, shop, "preview=a")).json()["deployId"]
    await report_phase(gw, following, "build")
    await records.write("", Wanted(account.id, shop, "p-a", "check", following, served=oldest), "")
    await previews.note_visits({(account.id, shop, "p-b"): time.time() - 900})  # before its deploy
    await previews.make_room(account.id, 3)
    assert await currents(account) == {oldest, visited, newest}
    await previews.note_visits({(account.id, shop, "p-b"): time.time() + 60})
    await previews.make_room(account.id, 1)
    assert await currents(account) == {oldest, visited}
    await report_phase(gw, following, "health", ok=False)
    await previews.make_room(account.id, 1)
    assert await currents(account) == {visited}
    [(_, ended)] = (await records.read(account.id, shop)).values()
    assert ended.ends, "what serves the apps is told"
    assert (await gw.platform("DELETE", f"apps/{shop}")).is_success
    assert not await store.client.exists(previews_key(account.id))


async def currents(account: Account) -> set[str]:
    return {row["id"] for row in (await account.get("/account/deploys")).json() if row["current"]}


async def test_rows_after_a_failure(gw: Gateway, account: Account, app: str) -> None:
    def picked(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["state"], row.get("stillServed"), row.get("nextStep", {}).get("variable")

    live = (await publish(account, app)).json()["deployId"]
    assert picked(await show(account, live)) == ("queued", None, None)
    await report_phases(gw, live, "build", "health", "canary")
    failed = (await publish(account, app)).json()["deployId"]
    await report_phase(gw, failed, "build", ok=False, reason="KeyError: 'TOKEN'")
    assert picked(await show(account, failed)) == ("failed", live, "TOKEN")
    preview = (await publish_as(account, app, "preview=x")).json()["deployId"]
    await report_phase(gw, preview, "build", ok=False, reason="exit status 1")
    assert picked(await show(account, preview)) == ("failed", None, None), "the live app is at another address"


async def test_rows_say_who_queued_a_deploy(gw: Gateway, account: Account) -> None:
    app = await an_app(account)
    described = "message=Sell%20more&commit=0123abc&branch=main&dirty=true"
    first = (await publish_as(account, app, described)).json()["deployId"]
    await report_phases(gw, first, "build", "health", "canary")
    again = (await account.call("POST", f"/account/deploys/{first}/redeploy")).json()["deployId"]
    fields = {"message": "Sell more", "commit": "0123abc", "branch": "main", "dirty": True, "kind": "live"}
    for deploy in (first, again):
        row = await show(account, deploy)
        assert {**fields, "by": "first"}.items() <= row.items()
    by_hook = (await trigger(gw, await a_hook(account, app))).json()["deployId"]
    assert (await show(account, by_hook))["by"] == "ci"
    by_operator = (await gw.platform("POST", f"apps/{app}/deploys", {"kind": "live"})).json()["deployId"]
    assert (await show(account, by_operator))["by"] == "operator"

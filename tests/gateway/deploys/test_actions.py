"""Deploys are rolled back, promoted and canceled, or refused, over HTTP. The test is the external engine."""

from typing import Any

import pytest

from gateway.data.records import DataRecords, Snapshot
from gateway.deploys.release import Release
from gateway.deploys.serving import Records, Wanted
from gateway.redis.client import Store
from tests.support.accounts import Account
from tests.support.deploys import a_hook, an_app, publish, queued_events, report_phase, report_phases, trigger
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def live(gw: Gateway, account: Account, app: str) -> str:
    return await ended(gw, (await publish(account, app)).json()["deployId"])


async def ended(gw: Gateway, deploy: str, *, preview: bool = False) -> str:
    await report_phases(gw, deploy, *("build", "health") if preview else ("build", "health", "canary"))
    return deploy


async def preview(gw: Gateway, app: str) -> Any:
    return (await gw.platform("POST", f"apps/{app}/deploys", {"kind": "preview"})).json()["deployId"]


async def shown(account: Account, deploy: str) -> Any:
    return (await account.call("GET", f"/account/deploys/{deploy}")).json()


async def refused(account: Account, path: str, body: Any = None) -> tuple[int, str, str]:
    answer = await account.call("POST", path, body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def test_a_rollback_without_an_id_goes_to_the_release_before_the_live_one(
    gw: Gateway, account: Account, app: str
) -> None:
    status, code, _ = await refused(account, f"/account/apps/{app}/rollback")
    assert (status, code) == (409, "NO_DEPLOY_YET")
    first = await live(gw, account, app)
    assert (await refused(account, f"/account/apps/{app}/rollback"))[:2] == (409, "NO_DEPLOY_YET")
    await live(gw, account, app)
    back = (await account.call("POST", f"/account/apps/{app}/rollback", {})).json()["deployId"]
    assert (await shown(account, back))["release"] == first
    # Once a newer deploy is built, it counts as the live one.
    await ended(gw, back)
    coming = (await publish(account, app)).json()["deployId"]
    await report_phase(gw, coming, "build")
    again = (await account.call("POST", f"/account/apps/{app}/rollback")).json()["deployId"]
    record = await shown(account, again)
    assert (record["release"], record["trigger"], record["state"]) == (back, "rollback", "queued")


async def test_hooks_build_the_source_of_a_rollback(gw: Gateway, account: Account, app: str) -> None:
    await live(gw, account, app)
    [first] = gw.data_folder.rglob("*.tar.gz")
    await live(gw, account, app)
    await ended(gw, (await account.call("POST", f"/account/apps/{app}/rollback")).json()["deployId"])
    deploy = (await trigger(gw, await a_hook(account, app))).json()["deployId"]
    with gw.redis.client() as client:
        [key] = client.keys(f"*:deploy:{deploy}")
        assert client.hget(key, "source").decode() == first.name.removesuffix(".tar.gz")


async def test_refused_rollbacks(gw: Gateway, account: Account) -> None:
    app, other = await an_app(account), await an_app(account)
    path = f"/account/apps/{app}/rollback"
    first, second, elsewhere = [await live(gw, account, name) for name in (app, app, other)]
    failed = (await publish(account, app)).json()["deployId"]
    await report_phase(gw, failed, "build", ok=False)
    shot = await ended(gw, await preview(gw, app), preview=True)
    for deploy, status, words in (
        (second, 400, "already live"),
        (failed, 400, "failed"),
        (shot, 400, "promote"),
        (elsewhere, 404, "no such deploy"),
        ("dep_none", 404, "no such deploy"),
    ):
        answer = await refused(account, path, {"deployId": deploy})
        assert answer[0] == status
        assert words in answer[2]
    for body in ({"deployId": 1}, {"id": first}, [], "x"):
        assert (await refused(account, path, body))[:2] == (400, "REQUEST_MALFORMED")


async def test_only_a_live_preview_is_promoted(gw: Gateway, account: Account, app: str) -> None:
    first = await live(gw, account, app)
    assert (await refused(account, f"/account/deploys/{first}/promote"))[:2] == (400, "REQUEST_MALFORMED")
    shot = await preview(gw, app)
    assert "queued" in (await refused(account, f"/account/deploys/{shot}/promote"))[2]
    await ended(gw, shot, preview=True)
    deploy = (await account.call("POST", f"/account/deploys/{shot}/promote")).json()["deployId"]
    record = await shown(account, deploy)
    assert (record["kind"], record["trigger"], record["release"]) == ("live", "promote", shot)


async def test_a_canceled_deploy_ends_without_an_event(gw: Gateway, account: Account, app: str) -> None:
    deploy = (await publish(account, app)).json()["deployId"]
    answer = await account.call("POST", f"/account/deploys/{deploy}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (202, "canceled")
    record = await shown(account, deploy)
    assert (record["state"], record["error"]) == ("canceled", "canceled on request")
    assert record["finishedAt"]
    assert (await gw.platform("GET", "deploys?state=queued")).json() == []
    assert (await report_phase(gw, deploy, "build")).status_code == 400  # the engine abandons it
    assert queued_events(gw) == []
    status, code, message = await refused(account, f"/account/deploys/{deploy}/cancel")
    assert (status, code) == (400, "REQUEST_MALFORMED")
    assert "canceled" in message
    checked = (await publish(account, app)).json()["deployId"]
    await report_phase(gw, checked, "build")
    assert "roll back" in (await refused(account, f"/account/deploys/{checked}/cancel"))[2]


async def test_a_release_that_no_record_names_is_refused_at_once(gw: Gateway, account: Account, store: Store) -> None:
    """Without any record, as with an external engine, it may be kept."""
    name, records = await an_app(account), Records(store)
    first, second = await live(gw, account, name), await live(gw, account, name)
    pruned = Wanted(account.id, name, "live", "live", second, first, {second: Release("digest", 1)})
    await records.write("", pruned, "")
    body = {"deployId": first}
    assert (await refused(account, f"/account/apps/{name}/rollback", body))[:2] == (410, "TARBALL_GONE")
    assert (await refused(account, f"/account/apps/{name}/rollback"))[:2] == (409, "NO_DEPLOY_YET")
    await records.forget(pruned)
    assert (await account.call("POST", f"/account/apps/{name}/rollback", body)).status_code == 202


async def test_a_redeploy_builds_the_same_source_at_the_same_address(gw: Gateway, account: Account, app: str) -> None:
    first = await live(gw, account, app)
    failed = (await publish(account, app)).json()["deployId"]
    await report_phase(gw, failed, "build", ok=False)
    for deploy, source in ((first, 0), (failed, 1)):
        again = (await account.call("POST", f"/account/deploys/{deploy}/redeploy")).json()["deployId"]
        record = await shown(account, again)
        assert (record["kind"], record["trigger"], record["state"]) == ("live", "redeploy", "queued")
        stored = sorted(file.name.removesuffix(".tar.gz") for file in gw.data_folder.rglob("*.tar.gz"))
        with gw.redis.client() as client:
            [key] = client.keys(f"*:deploy:{again}")
            assert client.hget(key, "source").decode() == stored[source]
    await gw.platform("DELETE", f"apps/{app}/source")
    assert (await refused(account, f"/account/deploys/{first}/redeploy"))[:2] == (410, "TARBALL_GONE")


async def test_nothing_builds_an_older_source_once_the_repository_is_gone(gw: Gateway, account: Account) -> None:
    app = await an_app(account, repository={"url": "https://git.example/x.git"})
    hook, uploaded = await a_hook(account, app), await live(gw, account, app)
    cloned = await ended(gw, (await trigger(gw, hook)).json()["deployId"])
    assert (await account.call("PATCH", f"/account/apps/{app}", {"repository": None})).is_success
    answer = await trigger(gw, hook)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "TARBALL_GONE")
    again = await account.call("POST", f"/account/deploys/{uploaded}/redeploy")
    await ended(gw, again.json()["deployId"])
    assert (await refused(account, f"/account/deploys/{cloned}/redeploy"))[:2] == (410, "TARBALL_GONE")
    assert (await trigger(gw, hook)).status_code == 202, "it builds the upload, which is live again"


async def test_a_restore_does_not_replace_a_release_that_is_about_to_be_live(
    gw: Gateway, account: Account, store: Store
) -> None:
    app = await an_app(account)
    await DataRecords(store).add_snapshot(account.id, app, Snapshot("snp_1", "2026-07-02T10:00:00.000Z", 1, "manual"))
    restore = f"/account/apps/{app}/data/restore", {"snapshotId": "snp_1"}
    await live(gw, account, app)
    newer = (await publish(account, app)).json()["deployId"]
    for phase in ("build", "health"):
        await report_phase(gw, newer, phase)
        status, code, message = await refused(account, *restore)
        assert (status, code) == (400, "REQUEST_MALFORMED")
        assert newer in message
    await report_phase(gw, newer, "canary")
    restored = (await account.call("POST", *restore)).json()["deployId"]
    assert (await shown(account, restored))["release"] == newer

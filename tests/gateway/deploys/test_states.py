"""Deploy hooks, stored sources, the daily quota and an external engine, over HTTP."""

import asyncio
import json
import re

import httpx
import pytest

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.deploys.records import DeployRecords
from gateway.deploys.states import Deploys
from gateway.keys import deploy_key, partition_tag, stream_key
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.accounts import Account
from tests.support.deploys import TARBALL, a_hook, an_app, publish, queued_events, report_phase, report_phases, trigger
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_hook_is_shown_once_listed_and_revoked(gw: Gateway, account: Account) -> None:
    app = await an_app(account, repository={"url": "https://git.example/x.git"})
    hook = await a_hook(account, app)
    assert re.fullmatch(rf"{re.escape(gw.address)}/hooks/deploy/[\w-]{{43}}", hook["url"])
    listed = (await account.call("GET", "/account/hooks")).json()
    assert listed == [{k: hook[k] for k in ("id", "name", "app", "createdAt")} | {"lastUsedAt": None}]
    answer = await trigger(gw, hook)
    assert (answer.status_code, answer.json()["app"]) == (202, app)
    assert (await account.call("GET", "/account/hooks")).json()[0]["lastUsedAt"]
    assert (await account.call("DELETE", f"/account/hooks/{hook['id']}")).status_code == 204
    gone, unknown = await trigger(gw, hook), await gw.http.post("/no/such/path")
    assert (gone.status_code, gone.content) == (unknown.status_code, unknown.content) == (404, b"Not Found")
    assert set(gone.headers) == set(unknown.headers)
    with gw.redis.client() as client:
        token = hook["url"].rpartition("/")[2].encode()
        assert not any(token in key for key in client.scan_iter())


async def test_refusals_come_in_a_fixed_order(gw: Gateway) -> None:
    account = await gw.account("free")
    app = await an_app(account)
    hook = await a_hook(account, app)
    never = await trigger(gw, hook)
    assert (never.status_code, never.json()["error"]["code"]) == (409, "NO_DEPLOY_YET")
    deploy = (await publish(account, app)).json()["deployId"]
    assert (await trigger(gw, hook)).status_code == 409  # queued is not live
    await report_phases(gw, deploy, "build", "health", "canary")
    assert (await trigger(gw, hook)).status_code == 202
    await gw.platform("DELETE", f"apps/{app}/source")
    gone = await trigger(gw, hook)
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "TARBALL_GONE")
    for _ in range(2):  # the quota is four: two are left
        assert (await publish(account, app)).status_code == 202
    full = await publish(account, app)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "DEPLOY_QUOTA_REACHED")
    assert int(full.headers["Retry-After"]) <= 86_400
    for _ in range(2):
        assert (await trigger(gw, hook)).status_code == 410  # before the quota
    limited = await trigger(gw, hook)
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "HOOK_RATE_LIMITED")
    assert 0 < int(limited.headers["Retry-After"]) <= 60
    assert (await account.call("GET", "/account")).json()["deploysToday"] == 4


async def test_an_external_engine_reports_and_each_deploy_sends_one_event(gw: Gateway) -> None:
    account = await gw.account("starter")
    app = await an_app(account, repository={"url": "https://git.example/x.git", "branch": "main"})
    live, preview = [
        (await gw.platform("POST", f"apps/{app}/deploys", body)).json()["deployId"]
        for body in ({"kind": "live"}, {"kind": "preview", "branch": "Fix/The  Thing!"})
    ]
    waiting = (await gw.platform("GET", "deploys?state=queued")).json()
    assert [d["id"] for d in waiting] == [live, preview]
    assert waiting[0]["repository"] == {"url": "https://git.example/x.git", "branch": "main"}

    assert (await report_phase(gw, live, "health")).status_code == 400  # not its phase
    assert (await report_phase(gw, live, "build")).json()["state"] == "checking"
    assert (await report_phase(gw, live, "health")).json()["state"] == "canary"
    assert queued_events(gw) == []  # the canary is still open
    answers = await asyncio.gather(*[report_phase(gw, live, "canary") for _ in range(5)])
    assert sorted(a.status_code for a in answers) == [200, 400, 400, 400, 400]
    assert (await report_phase(gw, live, "canary", ok=False)).status_code == 400  # it never fails after that
    broken = (await gw.platform("POST", f"apps/{app}/deploys", {"kind": "live"})).json()["deployId"]
    for name in ("build", "health"):
        ended = await report_phase(gw, preview, name)
    assert (ended.json()["state"], ended.json()["url"]) == ("live", f"https://{app}--p-fix-the-thing.apps.localhost")
    assert (await report_phase(gw, broken, "build", ok=False, reason="no such file")).json()["state"] == "failed"
    assert (await gw.platform("GET", "deploys?state=queued")).json() == []

    with gw.redis.client() as client:
        record = client.hgetall(deploy_key(account.id, live))
    assert record[b"startedAt"] == record[b"checkingAt"] < record[b"canaryAt"] < record[b"finishedAt"]
    events = queued_events(gw)
    assert sorted(t for t, _ in events) == ["deploy.failed", "deploy.succeeded", "deploy.succeeded"]
    failure = next(data for kind, data in events if kind == "deploy.failed")
    assert '"phase":"build"' in failure
    assert '"reason":"no such file"' in failure
    assert any('"plan":"starter"' in data and '"kind":"live"' in data for _, data in events)
    shown = (await account.call("GET", f"/account/deploys/{broken}")).json()
    assert (shown["state"], shown["trigger"], shown["log"]) == ("failed", "operator", "")


async def test_a_body_is_not_received_once_the_quota_is_used_up(gw: Gateway) -> None:
    account = await gw.account("free")
    app = await an_app(account)
    for _ in range(4):
        assert (await publish(account, app)).status_code == 202
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.port)
    writer.write(
        f"PUT /account/apps/{app}/source HTTP/1.1\r\nHost: 127.0.0.1:{gw.port}\r\n"
        f"Authorization: Bearer {account.key}\r\nContent-Length: 104857600\r\n\r\n".encode()
    )
    # The body of 100 MiB never follows: the response does not wait for it.
    async with asyncio.timeout(20):
        assert b" 429 " in await reader.readline()
    writer.close()
    assert len(list(gw.data_folder.rglob("*.tar.gz"))) == 4


async def test_an_external_engine_gets_the_source_and_has_a_deadline(
    gw: Gateway, account: Account, app: str, store: Store
) -> None:
    deploy = (await publish(account, app)).json()["deployId"]
    [listed] = (await gw.platform("GET", "deploys?state=queued")).json()
    source = await gw.platform("GET", httpx.URL(listed["source"]).path.removeprefix("/platform/"))
    assert (source.content, source.headers["content-type"]) == (TARBALL, "application/gzip")
    assert (await report_phase(gw, deploy, "build")).json()["state"] == "checking"
    other = (await publish(account, await an_app(account))).json()["deployId"]
    await report_phases(gw, other, "build", "health")
    settings, registry = Settings(deploy_engine="external"), Registry(store, Vault(""))
    deploys = Deploys(settings, registry, DeployRecords(settings, registry))
    assert await deploys.fail_unreported() == 0
    for abandoned in (deploy, other):
        await store.client.hset(deploy_key(account.id, abandoned), "startedAt", "2026-01-01T00:00:00.000Z")
    assert [await deploys.fail_unreported() for _ in range(2)] == [2, 0]
    failed = (await account.call("GET", f"/account/deploys/{deploy}")).json()
    assert failed["error"] == "health: the engine reported no result within 2 hours; deploy again"
    assert failed["nextStep"]["text"].startswith("The service failed, not your app.")
    events = queued_events(gw)
    assert [event for event, _ in events] == ["deploy.failed"] * 2
    phases = {json.loads(data)["deployId"]: json.loads(data)["phase"] for _, data in events}
    assert phases == {deploy: "health", other: "canary"}, "each fails in its present phase"
    assert (await gw.platform("GET", "deploys?state=queued")).json() == []


async def test_sources_of_queued_deploys_are_kept_and_a_removed_one_does_not_return(
    gw: Gateway, account: Account, app: str
) -> None:
    started = (await publish(account, app)).json()["deployId"]
    with gw.redis.client() as client:  # an entry without an id refuses no publish
        [site] = client.scan_iter(match="*:site:*")
        fields = {"account": account.id, "app": site.decode().rpartition(":")[2]}
        client.xadd(stream_key(partition_tag(account.id), "builds"), fields)
    assert (await report_phase(gw, started, "build")).is_success
    for _ in range(11):
        queued = (await publish(account, app)).json()["deployId"]
    assert [deploy["id"] for deploy in (await gw.platform("GET", "deploys?state=queued")).json()] == [queued]
    for deploy in (started, queued):
        assert (await gw.platform("GET", f"deploys/{deploy}/source")).status_code == 200
    assert len(list(gw.data_folder.rglob("*.tar.gz"))) == 11
    hook = await a_hook(account, app)
    assert (await gw.platform("DELETE", f"apps/{app}/source")).status_code == 204
    for name in ("health", "canary"):
        assert (await report_phase(gw, started, name)).is_success
    assert (await trigger(gw, hook)).status_code == 410

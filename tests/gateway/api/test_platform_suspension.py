"""Operators suspend apps and accounts: what is refused then, who sees the reason, and what lifts a suspension."""

import asyncio
import json
import secrets
from typing import Any

import httpx
import pytest

from gateway.keys import partition_tag, suspended_key
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk
from tests.fakes.server import HANG
from tests.support.accounts import Account, App
from tests.support.deploys import a_hook, publish, trigger
from tests.support.gateway_process import Gateway
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import max_cost
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

REASON = "Sends mail to strangers, see ticket 4711"
SUSPENDED = (403, "APP_SUSPENDED")
REPOSITORY = {"url": "https://git.example/shop.git", "branch": "main"}


async def suspend(gw: Gateway, what: str, reason: Any = REASON) -> httpx.Response:
    return await gw.platform("PUT", f"{what}/suspension", {"reason": reason})


async def resume(gw: Gateway, what: str) -> None:
    answer = await gw.platform("DELETE", f"{what}/suspension")
    assert (answer.status_code, answer.text) == (204, "")


@pytest.mark.parametrize("what", ["app", "account"])
async def test_running_streams_end(
    gw: Gateway, twin: Gateway, backend: FakeAppBackend, provider: FakeProvider, what: str
) -> None:
    app, other, gate = await gw.app(backend), await gw.app(backend), asyncio.Event()
    whole = provider.plays(HANG)
    ask = asyncio.create_task(app.ask(whole))
    await wait_until(lambda: provider.asked(whole))
    prompt, untouched = provider.plays(ROLE, chunk("a"), HANG), provider.plays(ROLE, chunk("a"), gate, chunk("b"), DONE)
    async with app.at(twin).stream(prompt) as stream, other.at(twin).stream(untouched) as other_stream:
        events, others = stream.aiter_sse(), other_stream.aiter_sse()
        assert (await anext(events)).json() == (await anext(others)).json() == {"token": "a"}
        await suspend(gw, f"apps/{app.name}" if what == "app" else f"accounts/{app.account.id}")
        error = await asyncio.wait_for(anext(events), PATIENCE_SECONDS)
        assert (error.event, error.json()["error"]["code"]) == ("error", "APP_SUSPENDED")
        assert REASON not in error.data
        gate.set()
        assert (await anext(others)).json() == {"token": "b"}
    refused(await asyncio.wait_for(ask, PATIENCE_SECONDS), *SUSPENDED)
    assert await app.account.settled() == max_cost(prompt) + max_cost(whole), "the provider may charge for it"


def suspensions(gw: Gateway, account: Account) -> set[str]:
    """Returns the entries of the list for hosts."""
    with gw.redis.client() as client:
        fields = client.hgetall(suspended_key(partition_tag(account.id)))
    return {name.decode() for name in fields if account.id in name.decode() or name.startswith(b"app:")}


async def test_a_suspended_app_is_refused_everywhere(gw: Gateway, twin: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend)
    for process in (gw, twin):
        answered(await app.at(process).ask("hello"))
    answer = await suspend(gw, f"apps/{app.name}")
    assert answer.status_code == 200
    assert answer.json() == {"reason": REASON, "at": answer.json()["at"]}
    refused(await app.ask("hello"), *SUSPENDED)
    await wait_until(lambda: app.at(twin).ask("hello"), PATIENCE_SECONDS, holds=lambda seen: seen.status_code == 403)
    # Before the origin and the token are checked, and without the reason.
    for headers in ({}, {"Authorization": "Bearer x"}, app.headers(Origin="https://other.example")):
        answer = await app.post({"prompt": "hello"}, headers=headers)
        refused(answer, *SUSPENDED)
        assert REASON not in answer.text
    refused(await gw.http.get(f"{app.path}/models", headers=app.headers()), *SUSPENDED)
    # The app's page can read the code.
    answer = await app.post({"prompt": "hello"}, headers=app.headers(Origin=app.origin))
    refused(answer, *SUSPENDED)
    assert answer.headers["Access-Control-Allow-Origin"] == app.origin
    await resume(gw, f"apps/{app.name}")
    answered(await app.ask("hello"))


async def test_a_request_whose_app_is_suspended_meanwhile(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend)
    body = json.dumps({"prompt": "hello"}).encode()
    suspended = asyncio.Event()

    async def slow_body() -> Any:
        yield body[:5]
        await suspended.wait()
        yield body[5:]

    headers = {"Content-Type": "application/json", **app.headers()}
    asking = asyncio.create_task(gw.http.post(app.path, content=slow_body(), headers=headers))
    await asyncio.sleep(0.3)
    assert (await suspend(gw, f"apps/{app.name}")).is_success
    suspended.set()
    refused(await asking, *SUSPENDED)
    assert (await app.account.spend())["settled"] == 0


async def test_only_the_owner_and_operators_see_the_reason(gw: Gateway, backend: FakeAppBackend) -> None:
    app, other = await gw.app(backend), await gw.account()
    account = app.account
    for view in (await account.get(), await account.get("/account/apps")):
        assert "suspension" not in view.text
    await suspend(gw, f"apps/{app.name}")
    [mine] = (await account.get("/account/apps")).json()
    [found] = (await gw.platform("GET", f"apps?search={app.name}")).json()["apps"]
    own, record = await account.get(f"/account/apps/{app.name}"), await gw.platform("GET", f"apps/{app.name}")
    assert {view["suspension"]["reason"] for view in (mine, found, own.json(), record.json())} == {REASON}
    assert "suspension" not in (await account.get()).json()
    for view in (await other.get("/account/apps"), await gw.http.get(f"/capsule/{app.name}/ai/models")):
        assert REASON not in view.text
    await suspend(gw, f"accounts/{account.id}", "Has not paid")
    assert (await account.get()).json()["suspension"]["reason"] == "Has not paid"
    [mine] = (await account.get("/account/apps")).json()
    assert mine["suspension"]["reason"] == REASON, "that of the app itself comes first"
    assert (await gw.platform("GET", f"accounts/{account.id}")).json()["suspension"]["reason"] == "Has not paid"


async def test_a_suspended_app_deploys_nothing(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, repository=REPOSITORY)
    account, hook = app.account, await a_hook(app.account, app.name)
    queued = [(await publish(account, app.name)).json()["deployId"], (await trigger(gw, hook)).json()["deployId"]]
    await suspend(gw, f"apps/{app.name}")
    for deploy_id in queued:
        deploy = (await account.get(f"/account/deploys/{deploy_id}")).json()
        assert deploy["state"] == "canceled", deploy
    assert REASON not in json.dumps(deploy)
    path = f"/account/apps/{app.name}"
    for answer in (
        await publish(account, app.name),
        await trigger(gw, hook),
        await account.call("POST", f"{path}/rollback"),
        await account.call("POST", f"/account/deploys/{queued[0]}/redeploy"),
        await gw.platform("POST", f"apps/{app.name}/deploys", {"kind": "live"}),
    ):
        refused(answer, *SUSPENDED)
        assert REASON not in answer.text
    refused(await account.call("DELETE", path), *SUSPENDED)
    assert len((await account.get("/account/deploys")).json()) == len(queued)
    for _ in range(4):  # calls of its hook count
        refused(await trigger(gw, hook), *SUSPENDED)
    refused(await trigger(gw, hook), 429, "HOOK_RATE_LIMITED")
    await resume(gw, f"apps/{app.name}")
    assert (await publish(account, app.name)).status_code == 202


async def test_a_suspended_account_and_its_new_apps(gw: Gateway, backend: FakeAppBackend) -> None:
    app, other = await gw.app(backend), await gw.app(backend)
    account, hook = app.account, await a_hook(app.account, app.name)
    deploy = (await publish(account, app.name)).json()["deployId"]
    await suspend(gw, f"accounts/{account.id}")
    refused(await app.ask("hello"), *SUSPENDED)
    answered(await other.ask("hello"))
    assert (await account.get(f"/account/deploys/{deploy}")).json()["state"] == "canceled"
    refused(await trigger(gw, hook), *SUSPENDED)
    new = await account.call("POST", "/account/apps", {"name": f"own-{secrets.token_hex(5)}"})
    assert new.status_code == 201
    assert new.json()["suspension"]["reason"] == REASON
    refused(await publish(account, new.json()["name"]), *SUSPENDED)
    refused(await gw.http.post(f"/capsule/{new.json()['name']}/ai", json={"prompt": "x"}), *SUSPENDED)
    # Its key still changes what is not published.
    assert (await account.call("PATCH", f"/account/apps/{app.name}", {"build": {"output": "out"}})).status_code == 200
    # An app that is suspended itself stays so.
    await suspend(gw, f"apps/{app.name}", "the app itself")
    await resume(gw, f"accounts/{account.id}")
    refused(await app.ask("hello"), *SUSPENDED)
    assert "suspension" not in (await account.get()).json()
    assert (await publish(account, new.json()["name"])).status_code == 202
    await resume(gw, f"apps/{app.name}")
    answered(await app.ask("hello"))


async def test_only_its_own_delete_lifts_a_suspension(gw: Gateway, backend: FakeAppBackend) -> None:
    app, other = await gw.app(backend), await gw.account()
    await suspend(gw, f"apps/{app.name}")
    fields = {"account": app.account.id, "auth": {"kind": "jwks", "url": backend.jwks_url}}
    renamed = App(app.account, f"{app.name}-two", backend)
    for changes in ({}, {"name": renamed.name}, {"name": renamed.name, "account": other.id}):
        answer = await gw.platform("PUT", f"apps/{app.name}", {**fields, **changes})
        assert answer.json()["suspension"]["reason"] == REASON
    refused(await renamed.ask("hello"), *SUSPENDED)
    await gw.platform("PATCH", f"accounts/{other.id}", {"plan": "free"})
    await wait_until(lambda: f"app:{app.name}" in suspensions(gw, other), PATIENCE_SECONDS)
    if partition_tag(other.id) != partition_tag(app.account.id):
        assert f"app:{app.name}" not in suspensions(gw, app.account)
    await resume(gw, f"apps/{renamed.name}")
    await resume(gw, f"apps/{renamed.name}")
    assert f"app:{app.name}" not in suspensions(gw, other)
    answered(await renamed.ask("hello"))


async def test_suspensions_that_are_refused(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend)
    for what in (f"apps/{app.name}", f"accounts/{app.account.id}"):
        for reason in ("", " \n", "x" * 501, 5, None):
            assert "reason" in refused(await suspend(gw, what, reason), 400, "REQUEST_MALFORMED")["message"]
        for body in ({}, {"reason": "x", "until": "2030"}):
            refused(await gw.platform("PUT", f"{what}/suspension", body), 400, "REQUEST_MALFORMED")
        assert (await suspend(gw, what, "é" * 500)).status_code == 200
        await resume(gw, what)
        kind, _, target = what.partition("s/")
        trail = (await gw.platform("GET", "audit?limit=2")).json()
        assert [(each["action"], each["target"], each["details"]) for each in trail] == [
            (f"resume_{kind}", target, {"reason before": "é" * 500}),
            (f"suspend_{kind}", target, {"reason": "é" * 500}),
        ]
    for what in ("apps/nobody", "accounts/acc_nobody"):
        refused(await suspend(gw, what), 404, "NOT_FOUND")
        refused(await gw.platform("DELETE", f"{what}/suspension"), 404, "NOT_FOUND")
    answered(await app.ask("hello"))

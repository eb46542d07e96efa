"""Account holders create, change and delete their own apps, within their plan, and cannot affect others' apps."""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.accounts.app_changes import CHANGES
from gateway.keys import partition_tag
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import Account, App
from tests.support.deployment import packed
from tests.support.deploys import an_app, report_phases
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.key_leaks import find_keys
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hosting(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway at an address under the apps' domain, which refuses private ones. The test is its external engine."""
    settings = {"GATEWAY_BASE_URL": "http://api.apps.localhost", "GATEWAY_API_URL": "http://hooks.apps.localhost"}
    settings |= {"GATEWAY_DEPLOY_ENGINE": "external", "GATEWAY_ALLOW_PRIVATE_ADDRESSES": "false"}
    folder = tmp_path_factory.mktemp("hosting")
    async with gateway_with_redis(provider, folder, **settings) as running:
        yield running


def a_name() -> str:
    return f"own-{secrets.token_hex(5)}"


async def call(account: Account, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
    return await account.call(method, f"/account/apps{path}", body, **options)


async def create(account: Account, name: str, *, at: Gateway | None = None) -> httpx.Response:
    return await call(account, "POST", "", {"name": name}, at=at)


async def created(account: Account, name: str = "") -> str:
    answer = await create(account, name or a_name())
    assert answer.status_code == 201, answer.text
    return answer.json()["name"]


async def names(account: Account) -> list[str]:
    return [app["name"] for app in (await call(account, "GET", "")).json()]


def full(answer: httpx.Response) -> bool:
    return (answer.status_code, answer.json()["error"]["code"]) == (429, "APP_LIMIT_REACHED")


# -- creating ------------------------------------------------------------------------------------------------


async def test_an_own_app(gw: Gateway, backend: FakeAppBackend) -> None:
    account, name = await gw.account("free"), a_name()
    answer = await create(account, name)
    assert answer.status_code == 201, answer.text
    view = answer.json()
    assert [view] == (await call(account, "GET", "")).json()
    assert (view["name"], view["status"], view["customDomain"]) == (name, "never-live", None)
    assert view["url"] == f"https://{name}.apps.localhost"
    for path in (name, view["id"]):
        settings = (await call(account, "GET", f"/{path}/settings")).json()
        assert settings == {"auth": {"kind": "jwks"}, "repository": None, "build": None}
    changed = await call(account, "PATCH", f"/{name}", {"auth": {"kind": "jwks", "url": backend.jwks_url}})
    assert changed.json()["auth"] == {"kind": "jwks", "url": backend.jwks_url}
    answered(await App(account, name, backend).ask("what is a capsule?"))
    record = (await gw.platform("GET", f"apps/{name}")).json()
    assert (record["account"], record["id"]) == (account.id, view["id"])


async def test_invalid_names_and_fields(gw: Gateway) -> None:
    account = await gw.account()
    for name in ("", "Shop", "a--b", "a-", "ä", "a" * 64, "shop-preview"):
        assert "name" in refused(await create(account, name), 400, "REQUEST_MALFORMED")["message"], name
    for more in ("account", "id"):
        answer = await call(account, "POST", "", {"name": a_name(), more: "x"})
        assert more in refused(answer, 400, "REQUEST_MALFORMED")["message"]


async def test_a_name_belongs_to_one_app(gw: Gateway, twin: Gateway) -> None:
    """Be it the account's own, another account's or an operator's app, or an id that operators assigned."""
    one, two, name = await gw.account(), await gw.account(), a_name()
    app_id = (await create(one, name)).json()["id"]
    for account in (one, two):
        refused(await create(account, name), 409, "NAME_TAKEN")
    refused(await create(two, app_id), 409, "NAME_TAKEN")
    renamed = a_name()
    await gw.platform("PUT", f"apps/{renamed}", {"account": one.id})
    await gw.platform("PUT", f"apps/{renamed}", {"account": one.id, "name": f"{renamed}-2"})
    for taken in (renamed, f"{renamed}-2"):
        refused(await create(two, taken), 409, "NAME_TAKEN")
    assert await names(two) == []
    wanted = a_name()
    both = [create(account, wanted, at=at) for account in (one, two) for at in (gw, twin) for _ in range(3)]
    answers = Counter(answer.status_code for answer in await asyncio.gather(*both))
    assert answers == {201: 1, 409: 11}
    assert [wanted in await names(account) for account in (one, two)].count(True) == 1


async def test_a_plans_apps(gw: Gateway) -> None:
    account = await gw.account("starter")
    await gw.platform("PUT", f"apps/{a_name()}", {"account": account.id})
    for _ in range(2):
        await created(account)
    answer = await create(account, a_name())
    assert full(answer)
    assert "allows 3 app" in answer.json()["error"]["message"]
    await gw.platform("PATCH", f"accounts/{account.id}", {"plan": "max"})
    first = await created(account)
    await gw.platform("PATCH", f"accounts/{account.id}", {"plan": "starter"})
    assert (await call(account, "DELETE", f"/{first}")).status_code == 204
    assert full(await create(account, a_name()))


async def test_concurrent_creations_and_deletions_evade_no_limit(gw: Gateway, twin: Gateway) -> None:
    """A late deletion must not remove an app that was created after it, by the same account or by another one."""
    account, other, name = await gw.account("free"), await gw.account(), a_name()
    for owners in ([account], [account, other]):
        calls = [call(account, "DELETE", f"/{name}", at=at) for at in (gw, twin) for _ in range(20)]
        calls += [create(owner, name, at=at) for owner in owners for at in (gw, twin) for _ in range(20)]
        secrets.SystemRandom().shuffle(calls)
        if name not in await names(account):
            await created(account, name)
        codes = {answer.status_code for answer in await asyncio.gather(*calls)}
        assert codes <= {201, 204, 404, 409, 429}, codes
        found = [each.id for each in (account, other) if name in await names(each)]
        record = await gw.platform("GET", f"apps/{name}")
        assert found == ([record.json()["account"]] if record.status_code == 200 else [])
        if found == [account.id]:
            assert full(await create(account, a_name()))
        elif found:
            assert (await call(other, "GET", f"/{name}/settings")).status_code == 200


async def test_the_number_of_changes_per_minute_is_limited(hosting: Gateway) -> None:
    account, other = await hosting.account(), await hosting.account()
    name = await created(account)
    with hosting.redis.client() as client:
        assert client.incrby(CHANGES.key(account.id), CHANGES.limit - 3) == CHANGES.limit - 2
    assert (await call(account, "PATCH", f"/{name}", {"build": {"output": "out"}})).status_code == 200
    assert (await call(account, "DELETE", f"/{name}")).status_code == 204
    answer = await create(account, a_name())
    refused(answer, 429, "RATE_LIMITED")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    await created(other)


# -- changing ------------------------------------------------------------------------------------------------


async def test_each_field_is_changed_on_its_own_and_null_resets_it(gw: Gateway) -> None:
    account = await gw.account()
    name = await created(account)
    secret = secrets.token_hex(32)
    gw.confidential.add(secret)
    auth = {"kind": "secret", "secret": secret, "issuer": "https://issuer.example"}
    build = {"command": "make", "output": "out", "start": "node server.js", "health": "/up?deep=1"}
    repository = {"url": "https://user:hunter2-hunter2@git.example.com/a.git", "branch": "main"}
    gw.confidential.add("hunter2-hunter2")
    assert (await call(account, "PATCH", f"/{name}", {})).status_code == 200
    for field, value in (("auth", auth), ("build", build), ("repository", repository)):
        answer = await call(account, "PATCH", f"/{name}", {field: value})
        assert answer.status_code == 200, answer.text
        assert not {secret, "hunter2-hunter2"} & set(json.dumps(answer.json()).replace('"', " ").split())
    expected = {
        "auth": {"kind": "secret", "issuer": "https://issuer.example"},
        "repository": {"url": "https://git.example.com/a.git", "branch": "main", "hasCredentials": True},
        "build": build,
    }
    assert (await call(account, "GET", f"/{name}/settings")).json() == expected == answer.json()
    branch = {"repository": {"url": "https://git.example.com/a.git", "branch": "next"}}
    assert (await call(account, "PATCH", f"/{name}", branch)).json()["repository"]["hasCredentials"] is True
    elsewhere = {"repository": {"url": "https://evil.example.com/a.git"}}
    moved = {**elsewhere["repository"], "branch": None, "hasCredentials": False}
    assert (await call(account, "PATCH", f"/{name}", elsewhere)).json()["repository"] == moved
    cleared = await call(account, "PATCH", f"/{name}", {"auth": None, "build": None, "repository": None})
    assert cleared.json().pop("authCheck")["ok"] is False
    settings = (await call(account, "GET", f"/{name}/settings")).json()
    assert settings == {"auth": {"kind": "jwks"}, "repository": None, "build": None}


async def test_other_fields_cannot_be_set(gw: Gateway, app: App) -> None:
    before = (await gw.platform("GET", f"apps/{app.name}")).json()
    for body in (
        *({"account": "acc_1"}, {"customDomainVerified": True}, {"limits": {}}, []),
        {"auth": {"kind": "secret", "secret": "short"}},
        {"build": {"command": "a\0b", "output": "../.."}},
        {"build": {"start": "a", "health": "healthz"}},
        {"repository": {"url": "https://git.example.com/a", "branch": "--upload-pack=x"}},
    ):
        refused(await call(app.account, "PATCH", f"/{app.name}", body), 400, "REQUEST_MALFORMED")
    assert (await gw.platform("GET", f"apps/{app.name}")).json() == before


async def test_addresses_inside_the_services_network(hosting: Gateway) -> None:
    """And names whose address would be the service's own."""
    account = await hosting.account()
    for name in ("api", "hooks"):
        assert "own address" in refused(await create(account, name), 400, "REQUEST_MALFORMED")["message"]
    name = await created(account, "apis")
    for url in ("https://169.254.169.254/", "https://[::1]/"):
        answer = await call(account, "PATCH", f"/{name}", {"repository": {"url": url}})
        assert "repository.url" in refused(answer, 400, "REQUEST_MALFORMED")["message"]


async def test_concurrent_changes_are_all_kept(gw: Gateway, twin: Gateway) -> None:
    """Each change applies to the present record, not to the one that its request read."""
    account, other = await gw.account(), await gw.account()
    name = await created(account)
    bodies: list[dict[str, Any]] = [{"build": {"command": "make"}}, {"auth": {"kind": "jwks", "issuer": "i"}}]
    bodies.append({"repository": {"url": "https://git.example.com/a"}})
    answers = await asyncio.gather(
        *[call(account, "PATCH", f"/{name}", body, at=at) for body, at in zip(bodies, (gw, twin, gw), strict=True)]
    )
    assert {answer.status_code for answer in answers} == {200}
    settings = (await call(account, "GET", f"/{name}/settings")).json()
    assert settings["build"]["command"] == "make"
    assert settings["auth"]["issuer"] == "i"
    assert settings["repository"]["url"] == "https://git.example.com/a"
    move = gw.platform("PUT", f"apps/{name}", {"account": other.id})
    await asyncio.gather(move, *[call(account, "PATCH", f"/{name}", bodies[0], at=twin) for _ in range(10)])
    assert (await gw.platform("GET", f"apps/{name}")).json()["account"] == other.id


# -- deleting ------------------------------------------------------------------------------------------------


async def test_a_deletion_leaves_nothing(hosting: Gateway) -> None:
    """No hook, variable, source or deploy remains, of an own app or of an operator's."""
    gw, account = hosting, await hosting.account()
    for name, made in ((await created(account), "POST"), (await an_app(account), "PUT")):
        app_id = next(app["id"] for app in (await call(account, "GET", "")).json() if app["name"] == name)
        hook = (await call(account, "POST", f"/{name}/hooks", {"name": "ci"})).json()["url"]
        gw.confidential.add(hook.rpartition("/")[2])
        assert (await call(account, "PUT", f"/{name}/env", {"TOKEN": "x"})).is_success
        live, waiting = await publish(account, name), await publish(account, name)
        assert (await account.get(f"/account/deploys/{live}")).json()["state"] == "canceled"
        for phase in ("build", "health", "canary"):
            await gw.platform("POST", f"deploys/{waiting}/phases", {"phase": phase, "ok": True})
        queued = await publish(account, name)
        answer = (
            await call(account, "DELETE", f"/{name}") if made == "POST" else await gw.platform("DELETE", f"apps/{name}")
        )
        assert answer.status_code == 204, answer.text
        deploy = (await account.get(f"/account/deploys/{queued}")).json()
        assert (deploy["state"], deploy["error"]) == ("canceled", "the app was deleted")
        assert (await gw.http.post(httpx.URL(hook).path)).status_code == 404
        assert (await account.get("/account/hooks")).json() == []
        refused(await call(account, "GET", f"/{name}/settings"), 404, "NOT_FOUND")
        refused(await call(account, "DELETE", f"/{name}"), 404, "NOT_FOUND")
        kept = (":deploy:", ":builds", ":events", ":deliveries", ":audit:", ":deleted-apps:")
        with gw.redis.client() as client:
            left = {key for key in find_keys(client, app_id) if not any(word in key for word in kept)}
        withheld = {"former-name:" + name, f"{partition_tag(account.id)}:former-names:{account.id}"}
        assert left <= (withheld if app_id == name else set())
        assert not (gw.data_folder / "sources" / app_id).exists()


async def publish(account: Account, name: str) -> str:
    answer = await call(account, "PUT", f"/{name}/source", content=packed({"index.html": "x"}))
    assert answer.status_code == 202, answer.text
    return answer.json()["deployId"]


async def test_the_next_owner_inherits_nothing(hosting: Gateway) -> None:
    """Even if an attacker prepares a name and then gives it up."""
    gw, attacker, victim = hosting, await hosting.account(), await hosting.account()
    name = await created(attacker)
    hook = (await call(attacker, "POST", f"/{name}/hooks", {"name": "ci"})).json()["url"]
    gw.confidential.add(hook.rpartition("/")[2])
    await call(attacker, "PUT", f"/{name}/env", {"LD": "x"})
    await call(
        attacker, "PATCH", f"/{name}", {"build": {"command": "evil"}, "repository": {"url": "https://e.example"}}
    )
    running = await publish(attacker, name)
    await report_phases(gw, running, "build")
    assert (await call(attacker, "DELETE", f"/{name}")).status_code == 204
    await created(victim, name)
    await report_phases(gw, running, "health", "canary")  # the attacker's deploy continues
    assert (await gw.http.post(httpx.URL(hook).path)).status_code == 404
    assert (await call(victim, "GET", f"/{name}/env")).json() == []
    empty = {"auth": {"kind": "jwks"}, "repository": None, "build": None}
    assert (await call(victim, "GET", f"/{name}/settings")).json() == empty
    (view,) = (await call(victim, "GET", "")).json()
    assert view["status"] == "never-live"
    assert (await victim.get("/account/deploys")).json() == []
    refused(await call(victim, "POST", f"/{name}/rollback", {}), 409, "NO_DEPLOY_YET")
    # The attacker tries again, by name and by the former id.
    for path in (name, view["id"]):
        refused(await call(attacker, "DELETE", f"/{path}"), 404, "NOT_FOUND")
    again = await created(attacker)
    assert (await attacker.get("/account/hooks")).json() == []
    assert (await call(attacker, "GET", f"/{again}/env")).json() == []


async def test_the_name_of_a_live_app_stays_reserved_for_its_account(hosting: Gateway) -> None:
    gw, account, other = hosting, await hosting.account(), await hosting.account()
    name = await created(account)
    deploy = await publish(account, name)
    await report_phases(gw, deploy, "build", "health", "canary")
    assert (await call(account, "DELETE", f"/{name}")).status_code == 204
    refused(await create(other, name), 409, "NAME_TAKEN")
    await created(account, name)
    assert (await call(account, "DELETE", f"/{name}")).status_code == 204
    refused(await create(other, name), 409, "NAME_TAKEN")
    assert (await gw.platform("PUT", f"apps/{name}", {"account": other.id})).status_code == 200
    assert await names(other) == [name]

"""Account holders create, show, limit, change and delete their own apps, and cannot affect others' apps."""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.accounts.app_changes import CHANGES
from gateway.accounts.domain_observations import Certificate, write_certificates
from gateway.ids import day_of
from gateway.keys import certificate_key, health_days_key, health_key, partition_tag, site_key
from gateway.monitors import history
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import Account, App
from tests.support.command_line import Tool
from tests.support.deployment import packed
from tests.support.deploys import an_app, report_phases
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.key_leaks import find_keys
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

NO_SETTINGS = {"auth": {"kind": "jwks"}, "repository": None, "build": None}


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
        assert (await call(account, "GET", f"/{path}/settings")).json() == NO_SETTINGS
    changed = await call(account, "PATCH", f"/{name}", {"auth": {"kind": "jwks", "url": backend.jwks_url}})
    assert changed.json()["auth"] == {"kind": "jwks", "url": backend.jwks_url}
    answered(await App(account, name, backend).ask("what is a capsule?"))
    record = (await gw.platform("GET", f"apps/{name}")).json()
    assert (record["account"], record["id"]) == (account.id, view["id"])
    # The plan is full too, but what keeps a repeated call from success is the name.
    refused(await create(account, name), 409, "NAME_TAKEN")


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
    elsewhere = {"url": "https://evil.example.com/a.git"}
    moved = await call(account, "PATCH", f"/{name}", {"repository": elsewhere})
    assert moved.json()["repository"] == {**elsewhere, "branch": None, "hasCredentials": False}
    cleared = await call(account, "PATCH", f"/{name}", {"auth": None, "build": None, "repository": None})
    assert cleared.json().pop("authCheck")["ok"] is False
    assert (await call(account, "GET", f"/{name}/settings")).json() == NO_SETTINGS


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
    build, auth = {"build": {"command": "make"}}, {"auth": {"kind": "jwks", "issuer": "i"}}
    changes = [call(account, "PATCH", f"/{name}", body, at=at) for body, at in ((build, gw), (auth, twin))]
    assert {answer.status_code for answer in await asyncio.gather(*changes)} == {200}
    settings = (await call(account, "GET", f"/{name}/settings")).json()
    assert (settings["build"]["command"], settings["auth"]["issuer"]) == ("make", "i")
    move = gw.platform("PUT", f"apps/{name}", {"account": other.id})
    await asyncio.gather(move, *[call(account, "PATCH", f"/{name}", build, at=twin) for _ in range(10)])
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
        own = made == "POST"
        answer = await (call(account, "DELETE", f"/{name}") if own else gw.platform("DELETE", f"apps/{name}"))
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
    evil = {"build": {"command": "evil"}, "repository": {"url": "https://e.example"}}
    await call(attacker, "PATCH", f"/{name}", evil)
    running = await publish(attacker, name)
    await report_phases(gw, running, "build")
    assert (await call(attacker, "DELETE", f"/{name}")).status_code == 204
    await created(victim, name)
    await report_phases(gw, running, "health", "canary")  # the attacker's deploy continues
    assert (await gw.http.post(httpx.URL(hook).path)).status_code == 404
    assert (await call(victim, "GET", f"/{name}/env")).json() == []
    assert (await call(victim, "GET", f"/{name}/settings")).json() == NO_SETTINGS
    (view,) = (await call(victim, "GET", "")).json()
    assert view["status"] == "never-live"
    assert (await victim.get("/account/deploys")).json() == []
    refused(await call(victim, "POST", f"/{name}/rollback", {}), 409, "NO_DEPLOY_YET")
    # The attacker tries again, by name and by the former id.
    for path in (name, view["id"]):
        refused(await call(attacker, "DELETE", f"/{path}"), 404, "NOT_FOUND")


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


# -- details --------------------------------------------------------------------------------------------------


DAY_MS = 86_400_000


async def read(app: App, path: str = "") -> Any:
    answer = await app.account.get(f"/account/apps/{app.name}{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def live_through_a_bad_week(app: App) -> None:
    """An outage that ended, one that has not, a certificate, two crashes and three findings."""
    tag, now = partition_tag(app.account.id), int(time.time() * 1000)
    past = history.split_outage(now - 5 * DAY_MS, now - 5 * DAY_MS + 60_000)
    state = {"status": "unhealthy", "since": now - 120_000}
    with app.gateway.redis.client() as client:
        client.hset(health_days_key(tag, app.name), mapping={**past, f"{day_of(now - 3 * DAY_MS)}:down": 0})
        client.expire(health_days_key(tag, app.name), 600)
        client.hset(health_key(tag, app.name), mapping={"version": 1, "state": json.dumps(state)})
        client.hset(site_key(app.account.id, app.name), "live", "dep_1")
        certificates = {"a.example": Certificate("f", now + DAY_MS, "An Authority")}
        client.hset(certificate_key(tag, app.name), mapping=write_certificates(certificates))
    for crash in ({"reason": "exit", "exitCode": 3}, {"reason": "oom"}):
        assert (await app.gateway.platform("POST", f"apps/{app.name}/crashes", crash)).status_code == 202
    findings = [
        {"cve": cve, "component": "left-pad@1.0.0", "severity": severity, "fixedIn": fixed}
        for cve, severity, fixed in (("CVE-1", "low", None), ("CVE-2", "high", "1.0.1"), ("CVE-3", "critical", "2"))
    ]
    answer = await app.gateway.platform("POST", f"apps/{app.name}/findings", {"findings": findings})
    assert answer.status_code == 200, answer.text


async def test_an_app_after_a_bad_week(app: App, tmp_path: Path) -> None:
    await live_through_a_bad_week(app)
    shown = await read(app)
    [listed] = (await app.account.get("/account/apps")).json()
    assert {name: shown[name] for name in listed} == listed
    assert (shown["health"], shown["liveDeploy"]) == ("unhealthy", "dep_1")
    assert shown["openFindings"] == {"red": 2, "yellow": 1}
    assert shown["certificate"].items() >= {"domain": "a.example", "issuer": "An Authority"}.items()
    days = shown["healthDays"]
    assert sum(day["outages"] for day in days[-7:-2]) == 1
    assert sum(day["downMs"] or 0 for day in days[-7:-2]) == 60_000
    assert days[-4] == {"day": days[-4]["day"], "downMs": 0, "outages": 0}
    # The current outage counts until now: today and, just after midnight, also yesterday.
    assert 120_000 <= sum(day["downMs"] or 0 for day in days[-2:]) < 600_000

    findings = await read(app, "/findings")
    assert [each["cve"] for each in findings] == ["CVE-2", "CVE-3", "CVE-1"]
    assert findings[0]["deadlineAt"] > shown["createdAt"]
    assert [each["cve"] for each in await read(app, "/findings?limit=1")] == ["CVE-2"]
    crashes = await read(app, "/crashes")
    assert [(each["reason"], each["exitCode"]) for each in crashes] == [("oom", None), ("exit", 3)]

    capsule = Tool(app.gateway.address, app.account.key, tmp_path)
    text = (await capsule("apps", "show", app.name)).out
    for words in ("An Authority", "down 3 min", "in 2 outages", "CVE-2", "1.0.1", "out of memory", "exit code 3"):
        assert words in text
    assert "NOT_FOUND" in await capsule.refused("apps", "show", "somebody-elses")


# -- limits ---------------------------------------------------------------------------------------------------


NO_LIMITS = {"dailyEuro": None, "userDailyEuro": None, "requestsPerMinute": None, "userRequestsPerMinute": None}


async def put_limits(app: App, body: Any) -> httpx.Response:
    return await app.account.call("PUT", f"/account/apps/{app.name}/limits", body)


async def test_a_put_changes_the_limits_that_it_names(app: App) -> None:
    assert await read(app, "/limits") == NO_LIMITS
    for body in (
        {"dailyEuro": "0.50", "requestsPerMinute": 10},
        {"userDailyEuro": "0.000000001"},
        {"dailyEuro": None, "userRequestsPerMinute": 0},
        {},
        {"dailyEuro": "0"},
        NO_LIMITS,
    ):
        expected = {**await read(app, "/limits"), **body}
        response = await put_limits(app, body)
        assert (response.status_code, response.json()) == (200, expected)
        assert await read(app, "/limits") == expected


async def test_refused_limits(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, "free")
    for body, message in (
        ({"dailyEuro": "0.050000001"}, "dailyEuro: the plan allows at most 0.05 euro per day."),
        ({"userDailyEuro": "1"}, "userDailyEuro: the plan allows at most 0.05 euro per day."),
        ({"requestsPerMinute": 31}, "requestsPerMinute: from 0 to 30 "),
        ({"userRequestsPerMinute": 21}, "userRequestsPerMinute: from 0 to 20 "),
        ({"requestsPerMinute": -1}, "requestsPerMinute: must be at least 0"),
        ({"requestsPerMinute": True}, "requestsPerMinute: "),
        ({"dailyEuro": 0.01}, "dailyEuro: "),
        *(
            ({"dailyEuro": text}, "dailyEuro: an amount in euro as text")
            for text in ("", "-0.01", "1e-3", "0.0000000001", " 0.01", "00.01", "NaN", "٠", "0.01\n")
        ),
        ({"perDay": "0.01"}, "body: "),
    ):
        error = refused(await put_limits(app, body), 400, "REQUEST_MALFORMED")
        assert error["message"].startswith(message), error
    assert await read(app, "/limits") == NO_LIMITS
    for rate in (-1, 1_000_001, 1.5):
        fields = {"account": app.account.id, "limits": {"requestsPerMinute": rate}}
        error = refused(await gw.platform("PUT", f"apps/{app.name}", fields), 400, "REQUEST_MALFORMED")
        assert error["message"].startswith("limits.requestsPerMinute: ")


async def test_operators_limit_the_values(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, "starter", limits={"requestsPerMinute": 3000, "userRequestsPerMinute": None})
    shown = (await gw.platform("GET", f"apps/{app.name}")).json()["limits"]
    assert shown == {"requestsPerMinute": 3000}
    spend = await read(app, "/spend")
    widest = {"dailyEuro": "0.50", "userDailyEuro": "0.50", "requestsPerMinute": 3000, "userRequestsPerMinute": 20}
    assert spend["widest"] == widest
    assert (spend["settled"], spend["reserved"], spend["cap"]) == (0, 0, 500_000_000)
    assert (await put_limits(app, {"requestsPerMinute": 3000, "dailyEuro": "0.5"})).status_code == 200
    refused(await put_limits(app, {"requestsPerMinute": 3001}), 400, "REQUEST_MALFORMED")
    # With a smaller plan the limits stay, and the narrower ones apply.
    await gw.platform("PATCH", f"accounts/{app.account.id}", {"plan": "free"})
    assert (await read(app, "/limits"))["dailyEuro"] == "0.5"
    spend = await read(app, "/spend")
    assert (spend["cap"], spend["widest"]["dailyEuro"]) == (50_000_000, "0.05")


# -- an account's own cap ------------------------------------------------------------------------------------


async def cap(account: Account, value: str | None) -> dict[str, Any]:
    answer = await account.gateway.platform("PATCH", f"accounts/{account.id}", {"dailyEuro": value})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_an_accounts_own_cap_replaces_the_plans(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, "free")
    account = app.account
    assert "dailyEuro" not in await cap(account, None)
    assert (await cap(account, "3.5"))["dailyEuro"] == "3.5"
    assert (await account.spend())["cap"] == 3_500_000_000
    answered(await app.ask("hello"))
    # It stays when the plan changes, and limits of apps may go up to it.
    answer = await gw.platform("PATCH", f"accounts/{account.id}", {"plan": "starter"})
    assert (answer.json()["plan"], answer.json()["dailyEuro"]) == ("starter", "3.5")
    assert (await put_limits(app, {"dailyEuro": "3.5", "userDailyEuro": "3.4"})).status_code == 200
    spend = await read(app, "/spend")
    assert (spend["cap"], spend["widest"]["dailyEuro"]) == (3_500_000_000, "3.50")
    error = refused(await put_limits(app, {"dailyEuro": "3.500000001"}), 400, "REQUEST_MALFORMED")
    assert error["message"] == "dailyEuro: the account allows at most 3.50 euro per day."
    [row] = (await gw.platform("GET", f"accounts?search={account.id}")).json()["accounts"]
    assert (row["cap"], row["dailyEuro"]) == (3_500_000_000, "3.5")
    # A narrower one wins over the app's.
    await cap(account, "0.000000001")
    refused(await app.ask("hello"), 402, "SPEND_CAP_REACHED")
    await cap(account, "0")
    refused(await app.ask("hello"), 402, "SPEND_CAP_REACHED")
    refused(await app.post(content=b"{"), 402, "SPEND_CAP_REACHED")
    assert (await account.spend())["cap"] == 0
    await cap(account, None)
    assert (await account.spend())["cap"] == 500_000_000
    answered(await app.ask("hello"))


async def test_refused_caps(gw: Gateway) -> None:
    account = await gw.account()
    for value in ("-1", "1e3", "NaN", "0.0000000001", "1000000.01", 5, "1" * 33):
        answer = await gw.platform("PATCH", f"accounts/{account.id}", {"dailyEuro": value})
        assert "dailyEuro" in refused(answer, 400, "REQUEST_MALFORMED")["message"]
    refused(await gw.platform("PATCH", f"accounts/{account.id}", {"cap": "1"}), 400, "REQUEST_MALFORMED")
    refused(await gw.platform("PATCH", "accounts/acc_nobody", {"dailyEuro": "1"}), 404, "NOT_FOUND")
    await cap(account, "1000000")
    await cap(account, "0.5")
    record, *_ = (await gw.platform("GET", "audit?limit=1")).json()
    assert record["details"] == {"dailyEuro": "0.5", "dailyEuro before": "1000000"}

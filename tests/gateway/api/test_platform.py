"""The operators' API, the account's view, health, metrics and the log line."""

import json
import re
import secrets
import subprocess
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.accounts.app_fields import check_build
from gateway.accounts.records import BRANCH, Build
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.app import create_app
from gateway.settings import Settings
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.support.accounts import DOMAIN, App
from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.polling import wait_until
from tests.support.prices import EURO, cost
from tests.support.processes import ENCRYPTION_KEY
from tests.support.programs import require
from tests.support.responses import answered, refused
from tests.support.stores import opened

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_without_an_operator_token_the_api_is_closed() -> None:
    application = create_app(Settings())

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        await application({**scope, "state": {}}, receive, send)

    transport = httpx.ASGITransport(serve)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", verify=False) as http:
        for authorization in ("Bearer ", "Bearer None", f"Bearer {OPERATOR}"):
            headers = {"Authorization": authorization.strip()}
            body = {"name": "x", "plan": "free"}
            refused(await http.post("/platform/accounts", json=body, headers=headers), 401, "UNAUTHORIZED")


async def test_an_account(gw: Gateway) -> None:
    response = await gw.platform("POST", "accounts", {"name": "Café ☕", "plan": "starter"})
    assert response.status_code == 201
    created = response.json()
    assert created.keys() == {"id", "apiKey"}
    assert created["apiKey"].startswith("csk_")
    gw.confidential.add(created["apiKey"])
    response = await gw.http.get("/account", headers={"Authorization": f"Bearer {created['apiKey']}"})
    account = response.json()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", account["spend"].pop("day"))
    limits = {"requestsPerMinutePerApp": 30, "requestsPerMinutePerUser": 20, "maxRequestBytes": 102_400}
    limits |= {"maxOutputTokens": 2_000, "deploysPerDay": 50}
    assert account == {
        "id": created["id"],
        "name": "Café ☕",
        "plan": "starter",
        "limits": limits,
        "spend": {"settled": 0, "reserved": 0, "cap": EURO // 2},
        "deploysToday": 0,
        "storage": {"bytes": 0, "limit": 8_388_608},
    }


async def test_an_app(gw: Gateway) -> None:
    account, secret = await gw.account(), secrets.token_hex(20)
    gw.confidential.add(secret)
    body = {"account": account.id, "customDomain": "shop-one.example.org", "customDomainVerified": True}
    shown = {**body, "auth": {"kind": "secret"}}
    stored = await gw.platform("PUT", "apps/shop-one", {**body, "auth": {"kind": "secret", "secret": secret}})
    assert secret not in stored.text
    app = (await gw.platform("GET", "apps/shop-one")).json()
    assert {name: app[name] for name in shown} == shown
    (mine,) = (await account.get("/account/apps")).json()
    assert mine["url"] == f"https://shop-one.{DOMAIN}"
    assert (await gw.platform("DELETE", "apps/shop-one")).status_code == 204
    refused(await gw.platform("GET", "apps/shop-one"), 404, "NOT_FOUND")
    assert (await account.get("/account/apps")).json() == []


async def test_no_app_gets_the_address_of_anothers_previews(gw: Gateway, backend: FakeAppBackend) -> None:
    """Otherwise the other's preview could serve the keys of an app named `<other>-preview`. Nor does one get a name."""
    body = {"account": (await gw.account()).id, "auth": {"kind": "jwks", "url": backend.jwks_url}}
    for path, fields in (("shop-preview", {}), ("shop-preview", {"name": "shop"}), ("shop", {"name": "shop-preview"})):
        error = refused(await gw.platform("PUT", f"apps/{path}", body | fields), 400, "REQUEST_MALFORMED")
        assert "-preview" in error["message"]
    for name in ("preview", "shop-previews", "preview-shop"):
        assert (await gw.platform("PUT", f"apps/{name}", body)).status_code == 200
    refused(await gw.platform("PUT", "apps/preview", body | {"name": "a-preview"}), 400, "REQUEST_MALFORMED")
    refused(await gw.platform("PUT", "apps/another", body | {"name": "preview"}), 409, "NAME_TAKEN")
    refused(await gw.platform("GET", "apps/another"), 404, "NOT_FOUND")


async def test_malformed_bodies(gw: Gateway) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR}", "Content-Type": "application/json"}
    for content in (b"", b"{", b"null", b"\xff", b"[" * 50_000):
        response = await gw.http.put("/platform/inference", content=content, headers=headers)
        message = refused(response, 400, "REQUEST_MALFORMED")["message"]
        assert message.startswith(("body: ", "The body is nested too deeply."))
        assert content or message == "body: must not be empty"
    response = await gw.platform("POST", "accounts", {"name": "x" * 1_050_000, "plan": "free"})
    assert refused(response, 400, "REQUEST_MALFORMED")["message"] == "body: must have at most 1,024 KiB."
    account = await gw.account()
    auths: list[Any] = [{"kind": "magic"}, {"kind": "jwks", "url": "nonsense"}, {"kind": "secret"}, {"kind": "backend"}]
    auths += ["jwks", {"kind": "backend", "url": "http://127.0.0.1/x", "method": "BREW"}]
    auths += [{"kind": "jwks", "url": "http://127.0.0.1/x", "issuer": 5}]
    for method, path, body, field in (
        ("POST", "accounts", {"plan": "free"}, "name"),
        ("POST", "accounts", {"name": "\t", "plan": "free"}, "name"),
        ("PATCH", f"accounts/{account.id}", {"plan": "gold"}, "plan"),
        ("PATCH", f"accounts/{account.id}", {"plan": None}, "plan"),
        ("PUT", "apps/of-nobody", {}, "account"),
        ("PUT", "apps/of-nobody", {"account": "acc_nobody"}, "account"),
        *(("PUT", "inference", {"enabled": value}, "enabled") for value in (None, 1, "true")),
        ("PUT", "inference", {"approved": None}, "approved"),
        *(("PUT", "apps/of-nobody", {"account": account.id, "auth": auth}, "auth") for auth in auths),
    ):
        answer = await gw.platform(method, path, body)
        assert field in refused(answer, 400, "REQUEST_MALFORMED")["message"], body
    refused(await gw.platform("DELETE", "apps/of-nobody"), 404, "NOT_FOUND")


async def test_metrics(gw: Gateway, app: App) -> None:
    answered(await app.ask("x"))
    refused(await app.ask(""), 400, "REQUEST_MALFORMED")
    response = await gw.http.get("/metrics")
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "REQUEST_MALFORMED" in response.text
    assert "gen_ai_" in response.text
    assert not [secret for secret in gw.secrets if secret in response.text]


async def test_one_log_line_per_request(gw: Gateway, app: App, provider: FakeProvider) -> None:
    """It has no content: the harness searches the log for prompts and answers at its end."""
    response = await app.ask(provider.plays(tokens("x", usage=(41, 43))))
    answered(response)
    wrong = await app.ask("")
    await wait_until(lambda: wrong.headers["X-Request-Id"] in gw.log)
    lines = [json.loads(line) for line in gw.log.splitlines() if line.startswith("{")]

    def log_line(request_id: str) -> dict[str, Any]:
        (line,) = [x for x in lines if request_id in x.values() and x.get("level") != "debug"]
        return line

    line = log_line(response.headers["X-Request-Id"])
    for value in (app.name, "gpt-oss-120b", 200, 41, 43, cost(41, 43)):
        assert value in line.values()
    assert len([name for name in line if "ttft" in name.lower() or "duration" in name.lower()]) == 2
    for value in (app.name, 400, "REQUEST_MALFORMED"):
        assert value in log_line(wrong.headers["X-Request-Id"]).values()


async def test_a_repositorys_password_is_stored_apart_and_encrypted(gw: Gateway) -> None:
    account = await gw.account()
    gw.confidential.add("hunter2-of-bob")
    url = "https://bob:hunter2-of-bob@git.example/bob/x.git"
    put = {"account": account.id, "repository": {"url": url}}
    answer = await gw.platform("PUT", "apps/with-a-password", put)
    assert answer.json()["repository"] == {"url": "https://git.example/bob/x.git", "branch": None}
    assert "hunter2" not in (await gw.platform("GET", "apps/with-a-password")).text
    async with opened(gw.redis.url) as store:
        app = await Registry(store, Vault(ENCRYPTION_KEY)).find_app("with-a-password")
    assert app is not None
    assert app.repository is not None
    assert app.repository.clone_url(Vault(ENCRYPTION_KEY)) == url
    for wrong in ("git@git.example:bob/x.git", "ssh://git.example/x.git", "nonsense"):
        answer = await gw.platform("PUT", "apps/with-a-password", {**put, "repository": {"url": wrong}})
        assert refused(answer, 400, "REQUEST_MALFORMED")["message"].startswith("repository.url: ")


# -- lists ---------------------------------------------------------------------------------------------------


async def test_an_account_is_found_and_shown(gw: Gateway, backend: FakeAppBackend) -> None:
    word = secrets.token_hex(6)
    made = (await gw.platform("POST", "accounts", {"name": f"Café {word}", "plan": "maker"})).json()
    gw.confidential.add(made["apiKey"])
    body = {"account": made["id"], "auth": {"kind": "jwks", "url": backend.jwks_url}}
    assert (await gw.platform("PUT", f"apps/shop-{word}", body)).is_success
    (row,) = (page := (await gw.platform("GET", f"accounts?search=CAFÉ%20{word}")).json())["accounts"]
    assert (row["id"], row["name"], row["plan"], row["apps"]) == (made["id"], f"Café {word}", "maker", 1)
    assert (row["settled"], row["reserved"], row["cap"]) == (0, 0, 2_000_000_000)
    assert page["next"] is None

    details = (await gw.platform("GET", f"accounts/{made['id']}")).json()
    assert {name: details[name] for name in row} == row
    assert [app["name"] for app in details["appList"]] == [f"shop-{word}"]
    assert [(key["name"], "key" in key) for key in details["keys"]] == [("first", False)]
    assert (details["deploysToday"], details["deploysPerDay"]) == (0, 200)
    assert details["members"] == []
    deletion = (await gw.platform("DELETE", f"accounts/{made['id']}")).json()
    assert deletion == {"deletesAt": (await gw.platform("GET", f"accounts/{made['id']}")).json()["deletesAt"]}
    assert made["apiKey"] not in str(details)
    refused(await gw.platform("GET", "accounts/acc_nobody"), 404, "NOT_FOUND")
    # Apps are found by their account, too.
    for search in (f"shop-{word}", made["id"]):
        (shop,) = (await gw.platform("GET", f"apps?search={search}")).json()["apps"]
        assert (shop["name"], shop["account"], shop["accountName"]) == (f"shop-{word}", made["id"], f"Café {word}")
    assert (await gw.platform("GET", "apps?health=unhealthy")).json() == {"apps": [], "next": None}
    wrong = ("sort=name", "plan=gold", "suspended=perhaps", "limit=101", f"search={'x' * 201}")
    for query in (*(f"accounts?{each}" for each in wrong), "apps?limit=0", "apps?health=healthy"):
        refused(await gw.platform("GET", query), 400, "REQUEST_MALFORMED")


async def test_failed_deploys_are_listed(hosted: App) -> None:
    gw = hosted.gateway
    record = {"account": hosted.account.id, "repository": {"url": "https://git.example.com/a"}}
    await gw.platform("PUT", f"apps/{hosted.name}", record)
    deploy = (await gw.platform("POST", f"apps/{hosted.name}/deploys", {"kind": "live"})).json()["deployId"]
    before = (await gw.platform("GET", "deploys/failed")).json()
    assert deploy not in [row["id"] for row in before]
    await gw.platform("POST", f"deploys/{deploy}/phases", {"phase": "build", "ok": False, "reason": "exit status 1"})
    (failed,) = [row for row in (await gw.platform("GET", "deploys/failed")).json() if row not in before]
    assert (failed["id"], failed["account"], failed["error"]) == (deploy, hosted.account.id, "build: exit status 1")


# -- an account renames itself --------------------------------------------------------------------------------


async def test_an_account_renames_itself(gw: Gateway) -> None:
    account, other = await gw.account(), await gw.account()
    before = (await account.get("/account")).json()
    answer = await account.call("PATCH", "/account", {"name": " Ünïcode  &\n<b>"})
    assert answer.status_code == 200
    assert answer.json() == before | {"name": "Ünïcode & <b>"}
    assert (await account.get("/account")).json()["name"] == "Ünïcode & <b>"
    found = await gw.platform("GET", f"accounts/{account.id}")
    assert found.json()["name"] == "Ünïcode & <b>"
    assert (await other.get("/account")).json()["name"] != "Ünïcode & <b>"
    before = (await account.get("/account")).json()
    names = ({"name": name} for name in (" \n", "a\0", "x" * 201, None))
    for body in ({}, *names, {"name": "x", "plan": "max"}, []):
        for method, path in (("PATCH", "/account"), ("POST", "/register")):
            refused(await account.call(method, path, body), 400, "REQUEST_MALFORMED")
    assert (await account.get("/account")).json() == before


# -- fields that builds would misread ---------------------------------------------------------------------------


REPOSITORY_URL = "https://git.example.org/shop.git"

# Branches that git refuses, or takes for an option.
BRANCHES = ["--upload-pack=x", "-u", "", "a b", "a..b", "a~1", "a\\b", "a\nb", "a\x00b", "a\x7f", "/a", "a/", "a//b"]
BRANCHES += [".a", "a/.b", "a.", "a.lock", "a.lock/b", "@", "a@{b", "HEAD", "x" * 251]
GOOD_BRANCHES = ["main", "release/1.2", "feature/é-ü", "a@b", "a-b_c", "x" * 250, "head", "a.locks", "@a", "{a}"]


async def put(gw: Gateway, **fields: Any) -> Any:
    return await gw.platform("PUT", "apps/builds-badly", {"account": (await gw.account()).id, **fields})


async def test_a_branch_that_git_would_misread(gw: Gateway) -> None:
    for branch in ("--upload-pack=x", "", "a\nb", "a\x00b", "a\n", "x" * 251):
        response = await put(gw, repository={"url": REPOSITORY_URL, "branch": branch})
        assert refused(response, 400, "REQUEST_MALFORMED")["message"].startswith("repository.branch: ")
    refused(await gw.platform("GET", "apps/builds-badly"), 404, "NOT_FOUND")
    repository = {"url": REPOSITORY_URL, "branch": "feature/é-ü"}
    assert (await put(gw, repository=repository)).json()["repository"] == repository
    # With other invalid names, the deploy of a preview fails: every name has a slug.
    for branch in ("--upload-pack=x", "", "a\nb", "a\x00b", "x" * 251):
        response = await gw.platform("POST", "apps/builds-badly/deploys", {"kind": "preview", "branch": branch})
        assert "branch: " in refused(response, 400, "REQUEST_MALFORMED")["message"]
    assert (await gw.platform("DELETE", "apps/builds-badly")).status_code == 204


@settings(max_examples=60)
@given(st.text(st.sampled_from("ab./@{}-~^:?*[\\ \x01\x7fé"), max_size=8) | st.sampled_from(BRANCHES + GOOD_BRANCHES))
async def test_the_rule_matches_gits(branch: str) -> None:
    """It accepts only names that git accepts, except options and names of the current branch."""
    if "\0" in branch or len(branch) > 250:
        assert not BRANCH.fullmatch(branch)
        return
    command = [require("git"), "check-ref-format", f"refs/heads/{branch}"]
    by_git = subprocess.run(command, check=False, cwd="/").returncode == 0
    assert bool(BRANCH.fullmatch(branch)) == (by_git and branch not in ("HEAD", "@") and not branch.startswith("-"))


async def test_a_build_outside_the_source_or_that_no_process_can_have(gw: Gateway) -> None:
    outputs = ("..", "dist/../../etc", "/etc", "/", "dist/..", "dist\0")
    for field, value in (*(("output", each) for each in outputs), ("command", "make\0all"), ("start", "make\0all")):
        response = await put(gw, build={"command": "make", field: value})
        assert refused(response, 400, "REQUEST_MALFORMED")["message"].startswith(f"build.{field}: ")
    refused(await gw.platform("GET", "apps/builds-badly"), 404, "NOT_FOUND")
    for output in ("a/b", "./dist", "", ".", "a..b", "...", "dist/", "été"):
        assert check_build(Build(output=output)) == Build(output=output)
    assert check_build(None) is None

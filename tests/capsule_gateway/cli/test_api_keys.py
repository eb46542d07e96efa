"""`capsule keys` and `capsule accounts create-key`, against a running gateway."""

import re
from pathlib import Path

import pytest

from tests.support.accounts import Account, App
from tests.support.command_line import Tool

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = re.compile(r"csk_[\w-]{43}")


async def test_a_keys_life(capsule: Tool, account: Account, tmp_path: Path) -> None:
    made = await capsule("keys", "create", "nightly build")
    assert KEY.fullmatch(made.line)
    account.gateway.confidential.add(made.line)
    assert made.err.count("\n") == 1
    assert "is shown only once" in made.err

    headings, newest, first = (await capsule("keys", "list")).rows
    assert headings == ["NAME", "ID", "SCOPE", "CREATED", "BY", "LAST USED"]
    name, key_id, scope, created, by, used = newest
    assert (name, scope, created, used) == ("nightly build", "full", "just now", "never")
    assert key_id in made.err
    assert by == f"first ({first[1]})"
    assert first[0] == "first"

    new = Tool(account.gateway.address, made.line, tmp_path)
    assert account.id in (await new("account")).out
    revoked = (await capsule("keys", "remove", key_id)).line
    assert revoked == f"Revoked {key_id}. Requests with it now get 401, and its dashboard sessions have ended."
    assert "UNAUTHORIZED" in await new.refused("account")
    assert "NOT_FOUND" in await capsule.refused("keys", "remove", key_id)
    assert "LAST_KEY" in await capsule.refused("keys", "remove", first[1])


async def test_a_key_for_programs(capsule: Tool, account: Account) -> None:
    made = (await capsule("keys", "create", "ci", "--json")).json
    account.gateway.confidential.add(made["key"])
    assert made.keys() == {"id", "name", "scope", "app", "key", "createdAt", "by"}
    assert [key["name"] for key in (await capsule("keys", "list", "--json")).json] == ["ci", "first"]
    assert (await capsule("keys", "remove", made["id"], "--json")).json == {"revoked": made["id"]}


async def test_a_key_for_deploys(capsule: Tool, account: Account, app: App, tmp_path: Path) -> None:
    made = await capsule("keys", "create", "ci", "--scope", "deploy", "--app", app.name)
    account.gateway.confidential.add(made.line)
    assert "with the scope 'deploy'" in made.err
    assert (await capsule("keys", "list")).rows[1][2] == f"deploy {app.name}"
    ci = Tool(account.gateway.address, made.line, tmp_path)
    assert "does not show its account" in (await ci("whoami")).out
    assert "NOT_PERMITTED" in await ci.refused("apps", "list")
    assert "NOT_PERMITTED" in await ci.refused("keys", "create", "more")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.html").write_text("<h1>Here</h1>")
    (tmp_path / "site/capsule.toml").write_text(f'name = "{app.name}"\n')
    published = await ci("deploys", "publish", app.name, str(tmp_path / "site"))
    assert "Published" in published.out
    assert (await ci("deploys", "list", "--app", app.name)).rows[1:]
    assert "scope" in await capsule.refused("keys", "create", "x", "--app", app.name)


async def test_leaving(capsule: Tool, operator: Tool, account: Account) -> None:
    name = (await capsule("account", "--json")).json["name"]
    assert "REQUEST_MALFORMED" in await capsule.refused("account", "delete", "another")
    begun = (await capsule("account", "delete", name)).line
    assert begun.startswith("Stopped. The account is deleted at ")
    assert "deleted at" in (await capsule("account")).out
    assert "APP_SUSPENDED" in await capsule.refused("keys", "create", "x")
    assert "kept" in (await capsule("account", "keep")).line
    assert "NOT_FOUND" in await capsule.refused("account", "keep")
    assert "will be deleted at" in (await operator("accounts", "remove", account.id)).line
    await capsule("account", "keep")
    now = (await operator("accounts", "remove", account.id, "--now", "--json")).json
    assert now.keys() == {"deletesAt"}


async def test_the_changes_of_the_account(capsule: Tool, account: Account) -> None:
    await capsule("account", "--rename", "Ben & Co")
    headings, newest, *_ = (await capsule("audit")).rows
    assert headings == ["WHEN", "WHO", "BY", "ACTION"]
    assert "rename account" in newest
    assert (await capsule("audit", "--limit", "1", "--json")).json[0]["action"] == "rename_account"


async def test_some_changes_of_the_account(capsule: Tool, account: Account) -> None:
    for name in ("Ben", "Ben & Co"):
        await capsule("account", "--rename", name)
    made = (await capsule("keys", "create", "ci", "--json")).json
    account.gateway.confidential.add(made["key"])
    _, *rows = (await capsule("audit", "--action", "rename account")).rows
    assert len(rows) == 1
    assert "rename account (2 times)" in rows[0]
    who = (await capsule("audit", "--limit", "1", "--json")).json[0]["who"]
    by_key = (await capsule("audit", "--actor", who.rpartition("(")[2].rstrip(")"), "--json")).json
    assert [each["action"] for each in by_key] == ["create_key", "rename_account"]
    assert (await capsule("audit", "--actor", made["id"], "--json")).json == []


async def test_operators_add_a_key(operator: Tool, account: Account, tmp_path: Path) -> None:
    made = await operator("accounts", "create-key", account.id, "replacement")
    assert KEY.fullmatch(made.line)
    account.gateway.confidential.add(made.line)
    assert f"for {account.id}" in made.err
    assert account.id in (await Tool(account.gateway.address, made.line, tmp_path)("account")).out
    more = (await operator("accounts", "create-key", account.id, "another", "--json")).json
    account.gateway.confidential.add(more["key"])
    assert more["name"] == "another"
    assert "NOT_FOUND" in await operator.refused("accounts", "create-key", "acc_nobody", "x")


async def test_account_holders_cannot_add_a_key_for_others(capsule: Tool, account: Account) -> None:
    assert "UNAUTHORIZED" in await capsule.refused("accounts", "create-key", account.id, "x")


async def test_the_account_is_renamed(capsule: Tool, account: Account) -> None:
    shown = (await capsule("account", "--rename", "Ben & Co")).out
    assert f"Ben & Co ({account.id})" in shown
    assert (await capsule("account", "--json")).json["name"] == "Ben & Co"
    assert "name" in await capsule.refused("account", "--rename", "")

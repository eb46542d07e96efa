"""The operators' lists, and deleting an app, against a running gateway."""

import secrets
import time
from pathlib import Path

import msgspec
import pytest

from gateway.inference.health import HealthRecord
from gateway.keys import provider_key
from gateway.redis.scripts import CHANGES_CHANNEL
from tests.support.accounts import App
from tests.support.command_line import Tool
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.providers import states

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_accounts_are_listed_searched_and_shown(operator: Tool, gw: Gateway) -> None:
    word = secrets.token_hex(6)
    key = (await operator("accounts", "create", f"Vreni {word}", "--plan", "maker")).line
    gw.confidential.add(key)
    headings, row = (await operator("accounts", "list", "--search", word.upper())).rows
    assert headings == ["ACCOUNT", "NAME", "PLAN", "APPS", "SPENT TODAY", "CREATED"]
    account, *others = row
    assert others == [f"Vreni {word}", "maker", "0", "0.00 of 2.00 EUR", "just now"]
    shown = (await operator("accounts", "show", account)).out
    for text in (word, "maker", "0 of 200 today", "first (key_"):
        assert text in shown
    assert (await operator("accounts", "show", account, "--json")).json["appList"] == []
    everybody = (await operator("accounts", "list", "--json")).json
    assert account in [each["id"] for each in everybody]
    assert "No account has 'nobody here'" in (await operator("accounts", "list", "--search", "nobody here")).line
    assert "NOT_FOUND" in await operator.refused("accounts", "show", "acc_nobody")


async def test_all_apps_are_listed(operator: Tool, capsule: Tool, app: App) -> None:
    headings, row = (await operator("apps", "list", "--search", app.name)).rows
    assert headings == ["APP", "ACCOUNT", "ACCOUNT NAME", "STATUS", "ADDRESS"]
    assert [row[0], row[1], row[3]] == [app.name, app.account.id, "never-live"]
    assert app.name in [each["name"] for each in (await operator("apps", "list", "--all", "--json")).json]
    assert "UNAUTHORIZED" in await capsule.refused("apps", "list", "--all")


async def test_the_audit_trail(operator: Tool, app: App) -> None:
    await operator("accounts", "plan", app.account.id, "maker")
    headings, row, *_ = (await operator("audit")).rows
    assert headings == ["WHEN", "OPERATOR", "ACTION", "TARGET", "DETAILS", "RESULT"]
    assert row[2:] == [
        "change account",
        app.account.id,
        "plan maker, plan before max",
        "done",
    ]
    await operator.refused("accounts", "plan", "acc_nobody", "free")
    _, row, *_ = (await operator("audit", "--limit", "1")).rows
    assert row[-1] == "refused: 404 NOT_FOUND"
    found = (await operator("audit", "--action", "change account", "--actor", "operator", "--json")).json
    assert {(each["action"], each["operator"]) for each in found} == {("change_account", "operator")}
    assert (await operator("audit", "--actor", "nobody", "--json")).json == []
    assert {each["action"] for each in (await operator("audit", "--reports", "--json")).json} <= {
        "report_crash",
        "report_scan",
        "report_phase",
    }


async def test_deleting_an_app_needs_a_confirmation(operator: Tool, app: App) -> None:
    assert "--yes" in await operator.refused("apps", "remove", app.name, code=2)
    assert app.name in (await operator("apps", "show", app.name)).out
    assert "Deleted" in (await operator("apps", "remove", app.name, "--yes")).line


async def test_apps_and_accounts_are_suspended_and_resumed(operator: Tool, capsule: Tool, app: App) -> None:
    account = app.account.id
    for name, target in (("apps", app.name), ("accounts", account)):
        assert "--reason" in await operator.refused(name, "suspend", target, code=2)
        assert "suspended" in (await operator(name, "suspend", target, "--reason", "Sends mail")).line
        assert "Sends mail" in (await operator(name, "show", target)).out
        assert "Sends mail" in (await capsule("apps", "show", app.name)).out
        assert ("Sends mail" in (await capsule("account")).out) == (name == "accounts")
        assert "lifted" in (await operator(name, "resume", target)).line
        assert "Sends mail" not in (await operator(name, "show", target)).out
        assert (await operator(name, "suspend", target, "--reason", "x", "--json")).json["reason"] == "x"
        await operator(name, "resume", target)
    assert "NOT_FOUND" in await operator.refused("accounts", "suspend", "acc_nobody", "--reason", "x")
    assert "UNAUTHORIZED" in await capsule.refused("apps", "suspend", app.name, "--reason", "x")


async def test_a_cap_of_its_own_and_the_keys_of_an_account(operator: Tool, app: App) -> None:
    account = app.account.id
    assert "0.25 EUR" in (await operator("accounts", "set", account, "--daily-euro", "0.25")).line
    assert "of 0.25 EUR" in (await operator("accounts", "show", account)).out
    assert "plan's cap" in (await operator("accounts", "set", account, "--daily-euro", "none")).line
    assert "--daily-euro: an amount" in await operator.refused("accounts", "set", account, "--daily-euro", "1,5")
    headings, [name, key, *_] = (await operator("accounts", "keys", account)).rows
    assert (headings[:2], name) == (["NAME", "ID"], "first")
    assert key in (await operator("accounts", "remove-key", account, key)).line
    assert (await operator("accounts", "keys", account, "--json")).json == []
    assert (await app.account.get()).status_code == 401


async def test_reasons_and_usage(operator: Tool, app: App) -> None:
    account, reason = app.account.id, "Überlastung, 100% Fehler"
    await operator("accounts", "plan", account, "maker", "--reason", reason)
    (record, *_) = (await operator("audit", "--limit", "1", "--json")).json
    assert (record["target"], record["reason"]) == (account, reason)
    assert reason in (await operator("audit", "--limit", "1")).out
    assert "REQUEST_MALFORMED" in await operator.refused("accounts", "plan", account, "free", "--reason", "x" * 501)
    assert (await operator("apps", "remove", app.name, "--yes", "--reason", "Asked for it")).line
    (record, *_) = (await operator("audit", "--limit", "1", "--json")).json
    assert (record["action"], record["reason"]) == ("delete_app", "Asked for it")
    assert "No requests" in (await operator("accounts", "usage", account, "--days", "7", "--by", "app")).out
    assert "NOT_FOUND" in await operator.refused("accounts", "usage", "acc_nobody")


async def test_providers_are_listed_disabled_and_enabled(operator: Tool, gw: Gateway) -> None:
    headings, row = (await operator("providers", "list")).rows
    assert headings == ["PROVIDER", "REGION", "STATUS", "REQUESTS", "WAITING", "ATTEMPTS", "FAILOVERS", "MODELS"]
    assert row[:4] == ["default", "fr-par", "operational", "0 of 100"]
    try:
        disabled = await operator("providers", "disable", "default", "--reason", "drill")
        assert disabled.line == "default gets no new requests. Streams that run there go on."
        (row,) = (await operator("providers", "list", "--json")).json
        assert (row["name"], row["enabled"]) == ("default", False)
        assert (await operator("inference", "status", "--json")).json["managedInferenceStatus"] == "disabled"
    finally:
        assert (await operator("providers", "enable", "default", "--json")).json["enabled"]
    assert "NOT_FOUND" in await operator.refused("providers", "disable", "nobody")


async def test_a_pause_of_a_provider_is_listed(operator: Tool, gw: Gateway) -> None:
    def write(record: HealthRecord) -> None:
        with gw.redis.client() as client:
            client.set(provider_key(), msgspec.json.encode(record))
            client.publish(CHANGES_CHANNEL, provider_key())

    write(HealthRecord(passed_over_until=round((time.time() + 30) * 1000)))
    try:
        until = await wait_until(lambda: pause_of(gw))
        _, row = (await operator("providers", "list")).rows
        assert row[2] == f"operational, passed over until {until}"
    finally:
        write(HealthRecord())
        await wait_until(lambda: pause_of(gw), holds=lambda found: found is None)


async def pause_of(gw: Gateway) -> str | None:
    return (await states(gw))["default"]["passedOverUntil"]


async def test_a_providers_file_is_checked(operator: Tool, tmp_path: Path) -> None:
    path = tmp_path / "providers.toml"
    path.write_text('[[provider]]\nname = "one"\nurl = "https://a.example/v1"\nregion = "fr-par"\nkey_env = "ONE"\n')
    assert (await operator("providers", "check", str(path))).line.startswith("one: in fr-par, serves gpt-oss-120b, ")
    path.write_text(path.read_text().replace("fr-par", "us-east"))
    refusal = await operator.refused("providers", "check", str(path))
    assert f"GATEWAY_PROVIDERS_FILE: {path}: provider[0].region: 'us-east' is not one of" in refusal

"""The operators' lists, and deleting an app, against a running gateway."""

import re
import secrets
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from gateway.inference.health import HealthRecord
from gateway.keys import provider_key
from gateway.redis.scripts import CHANGES_CHANNEL
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.server import CLOSE
from tests.support.accounts import App
from tests.support.command_line import Run, Tool
from tests.support.gateway_process import OPERATOR, Gateway, gateway
from tests.support.polling import wait_until
from tests.support.providers import UNSET, states, write_providers
from tests.support.redis_servers import RedisServer
from tests.support.responses import answered, refused

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
    for text in (word, "maker", "0 of 200 today", "first (key_", "members"):
        assert text in shown
    assert (await operator("accounts", "show", account, "--json")).json["appList"] == []
    everybody = (await operator("accounts", "list", "--json")).json
    assert account in [each["id"] for each in everybody]
    assert "No account has 'nobody here'" in (await operator("accounts", "list", "--search", "nobody here")).line
    assert "NOT_FOUND" in await operator.refused("accounts", "show", "acc_nobody")


async def test_a_key_of_the_wrong_kind_says_what_to_use(operator: Tool, capsule: Tool) -> None:
    for command, instead in (
        (("usage",), "operators use 'capsule accounts usage ACCOUNT'"),
        (("keys", "list"), "operators use 'capsule accounts keys ACCOUNT'"),
        (("deploys", "list"), "operators use 'capsule accounts show ACCOUNT'"),
    ):
        refusal = await operator.refused(*command)
        assert instead in refusal
        assert "an account's API key, which begins with csk_" in refusal
    assert "operators' commands need the operator token" in await capsule.refused("accounts", "list")


async def test_a_suspension_stops_publishing_and_not_settings(operator: Tool, capsule: Tool, gw: Gateway) -> None:
    """As the help says."""
    account = (await capsule("whoami", "--json")).json["id"]
    assert "can still read and change settings, but publishes nothing" in " ".join(
        (await operator("accounts", "suspend", "-h")).out.split()
    )
    await operator("accounts", "suspend", account, "--reason", "Unpaid")
    name = f"shop-{secrets.token_hex(4)}"
    await capsule("apps", "create", name)
    assert (await capsule("apps", "show", name, "--json")).json["name"] == name
    assert (await gw.platform("POST", f"apps/{name}/deploys", {"kind": "live"})).status_code == 403
    await operator("accounts", "resume", account)


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


async def test_the_runbook_when_the_provider_is_down(
    backend: FakeAppBackend, valkey: RedisServer, tmp_path: Path
) -> None:
    """Carries out its commands in their order. The installation has one provider until then."""
    runbook = (Path(__file__).parents[3] / "docs/runbook.md").read_text()
    section = runbook.partition("\n### When the provider is down\n")[2].partition("\n## ")[0]
    commands = iter(re.findall(r"`capsule ([^`]+)`", section))
    constants = {"gateway.inference.health.PROBE_INTERVAL_SECONDS": 1}
    async with (
        FakeProvider() as down,
        FakeProvider() as other,
        gateway(valkey.url, down, tmp_path, constants) as gw,
    ):
        gw.confidential.add(other.key)
        operator, app = Tool(gw.address, OPERATOR, tmp_path), await gw.app(backend)
        file = str(write_providers(tmp_path, {"one": down, "two": other}))

        async def carry_out(command: str) -> Run:
            assert next(commands) == command
            run = await operator(*command.replace("NAME", "one").replace("FILE", file).split())
            assert run.code == 0, run
            return run

        async def list_statuses() -> dict[str, str]:
            return {row[0]: row[2] for row in (await carry_out("providers list")).rows[1:]}

        down.default = [CLOSE]
        for _ in range(4):
            refused(await app.ask("x"), 502, "PROVIDER_UNREACHABLE")
        await wait_until(lambda: states(gw), holds=lambda found: found["default"]["status"] == "provider-unreachable")
        assert await list_statuses() == {"default": "provider-unreachable"}
        await carry_out("inference off")
        refused(await app.ask("x"), 503, "INFERENCE_DISABLED")
        await carry_out("providers check FILE")
        await gw.stop()
        gw.environment = {name: value for name, value in gw.environment.items() if name not in UNSET}
        gw.environment["GATEWAY_PROVIDERS_FILE"] = file
        await gw.start()
        await carry_out("providers disable NAME")
        await carry_out("inference on")
        tried = len(down.prompts)
        for _ in range(4):
            answered(await app.ask("x"))
        assert len(down.prompts) == tried
        down.default = tokens("back")
        await carry_out("providers enable NAME")
        await wait_until(partial(app.ask, "x"), holds=lambda response: answered(response)["text"] == "back")
        assert await list_statuses() == {"one": "operational", "two": "operational"}
    assert not [*commands]


async def test_a_providers_file_is_checked(operator: Tool, tmp_path: Path) -> None:
    path = tmp_path / "providers.toml"
    path.write_text('[[provider]]\nname = "one"\nurl = "https://a.example/v1"\nregion = "fr-par"\nkey_env = "ONE"\n')
    assert (await operator("providers", "check", str(path))).line.startswith("one: in fr-par, serves gpt-oss-120b, ")
    path.write_text(path.read_text().replace("fr-par", "us-east"))
    refusal = await operator.refused("providers", "check", str(path))
    assert f"GATEWAY_PROVIDERS_FILE: {path}: provider[0].region: 'us-east' is not one of" in refusal


async def test_a_prices_file_is_checked(operator: Tool, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('[[price]]\nmodel = "gpt-oss-120b"\ninput = 0.175\noutput = 0.7\nsince = 2027-01-01\n')
    shown = await operator("prices", "check", str(path))
    assert shown.rows[0] == ["MODEL", "INPUT PER MILLION", "OUTPUT PER MILLION", "SINCE"]
    assert shown.rows[1][:3] == ["gpt-oss-120b", "0.15 EUR", "0.60 EUR"]
    assert shown.rows[-1] == ["gpt-oss-120b", "0.175 EUR", "0.70 EUR", "2027-01-01T00:00:00.000Z"]
    path.write_text(path.read_text().replace("0.7\n", "0.0001\n"))
    refusal = await operator.refused("prices", "check", str(path))
    assert f"GATEWAY_PRICES_FILE: {path}: price[0].output: must be" in refusal


async def test_a_providers_file_may_name_the_models_of_the_prices_file(
    operator: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices, path = tmp_path / "prices.toml", tmp_path / "providers.toml"
    prices.write_text('[[price]]\nmodel = "small-1"\ninput = 1\noutput = 1\nsince = 2027-01-01\n')
    path.write_text(
        '[[provider]]\nname = "one"\nurl = "https://a.example/v1"\nregion = "fr-par"\nkey_env = "ONE"\n'
        'models = { "small-1" = "vendor/small" }\n'
    )
    assert "models: 'small-1' has no price" in await operator.refused("providers", "check", str(path))
    monkeypatch.setenv("GATEWAY_PRICES_FILE", str(prices))
    assert (await operator("providers", "check", str(path))).line == "one: in fr-par, serves small-1"

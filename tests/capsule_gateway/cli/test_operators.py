"""Operators' commands: their reasons, the runbook, and the files that they check."""

import re
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.capsule_gateway.cli.conftest import Service
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.server import CLOSE, answer
from tests.support.command_line import Run, Tool
from tests.support.gateway_process import OPERATOR, gateway
from tests.support.polling import wait_until
from tests.support.providers import UNSET, states, write_providers
from tests.support.redis_servers import RedisServer
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_key_of_the_wrong_kind_says_what_to_use(operator: Tool, stubbed: Tool, service: Service) -> None:
    service.replies = [answer(401, {"error": {"code": "UNAUTHORIZED", "message": "No.", "requestId": "r1"}})]
    for command, instead in (
        (("usage",), "operators use 'capsule accounts usage ACCOUNT'"),
        (("keys", "list"), "operators use 'capsule accounts keys ACCOUNT'"),
        (("deploys", "list"), "operators use 'capsule accounts show ACCOUNT'"),
    ):
        refusal = await operator.refused(*command)
        assert instead in refusal
        assert "an account's API key, which begins with csk_" in refusal
    assert "operators' commands need the operator token" in await stubbed.refused("accounts", "list")


async def test_the_operator_token_lists_all_apps(operator: Tool, service: Service) -> None:
    service.answers["GET /platform/apps"] = {"apps": [{"name": "shop", "account": "acc_1"}], "next": None}
    assert "shop" in (await operator("apps", "list")).out
    assert [call.partition("?")[0] for call in service.calls] == ["GET /platform/apps"]


async def test_a_reason_is_quoted(operator: Tool, service: Service) -> None:
    reason = "Überlastung, 100% Fehler"
    await operator("accounts", "plan", "acc_1", "maker", "--reason", reason)
    header = service.exchanges[0].header("x-reason") or ""
    assert header.isascii()
    assert unquote(header) == reason


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


PROVIDERS = '[[provider]]\nname = "one"\nurl = "https://a.example/v1"\nregion = "fr-par"\nkey_env = "ONE"\n'


async def test_a_providers_file_is_checked(offline: Tool, tmp_path: Path) -> None:
    path, prices = tmp_path / "providers.toml", tmp_path / "prices.toml"
    path.write_text(PROVIDERS)
    assert (await offline("providers", "check", str(path))).line.startswith("one: in fr-par, serves gpt-oss-120b, ")
    path.write_text(PROVIDERS.replace("fr-par", "us-east"))
    refusal = await offline.refused("providers", "check", str(path))
    assert f"GATEWAY_PROVIDERS_FILE: {path}: provider[0].region: 'us-east' is not one of" in refusal
    # It may name the models of the prices file.
    path.write_text(PROVIDERS + 'models = { "small-1" = "vendor/small" }\n')
    assert "models: 'small-1' has no price" in await offline.refused("providers", "check", str(path))
    prices.write_text('[[price]]\nmodel = "small-1"\ninput = 1\noutput = 1\nsince = 2027-01-01\n')
    checked = await offline("providers", "check", str(path), GATEWAY_PRICES_FILE=str(prices))
    assert checked.line == "one: in fr-par, serves small-1"
    assert checked.err.startswith("capsule: no provider serves gpt-oss-120b, ")


async def test_a_prices_file_is_checked(offline: Tool, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('[[price]]\nmodel = "gpt-oss-120b"\ninput = 0.175\noutput = 0.7\nsince = 2027-01-01\n')
    shown = await offline("prices", "check", str(path))
    assert shown.rows[0] == ["MODEL", "INPUT PER MILLION", "OUTPUT PER MILLION", "SINCE"]
    assert shown.rows[1][:3] == ["gpt-oss-120b", "0.15 EUR", "0.60 EUR"]
    assert shown.rows[-1] == ["gpt-oss-120b", "0.175 EUR", "0.70 EUR", "2027-01-01T00:00:00.000Z"]
    path.write_text(path.read_text().replace("0.7\n", "0.0001\n"))
    refusal = await offline.refused("prices", "check", str(path))
    assert f"GATEWAY_PRICES_FILE: {path}: price[0].output: must be" in refusal

"""The endpoint `/mcp`: its tools, and who may call them."""

import pytest

from tests.support.accounts import App
from tests.support.agents import Connect, call, over_http, over_stdio
from tests.support.agents import refused as refused_call
from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    "connect", [over_stdio, over_http(), over_http("legacy")], ids=["stdio", "http", "http-legacy"]
)
async def test_the_tools(connect: Connect, app: App) -> None:
    async with connect(app.gateway.address, app.account.key) as client:
        tools = (await client.list_tools()).tools
        assert client.server_info is not None
        assert client.server_info.title == "Capsule"
        assert "Deploy hooks are secret URLs" in (client.instructions or "")
        assert await call(client, "service_hook", action="list") == {"hooks": []}
        assert "needs id" in await refused_call(client, "service_hook", action="revoke")
    assert [tool.name for tool in tools] == [
        *("service_hook", "service_deploy", "service_app", "service_delivery", "service_publish"),
        *("service_logs", "service_env", "service_limits", "service_usage", "service_members"),
    ]
    described = (await app.gateway.http.get("/docs/openapi.json")).json()["paths"]["/mcp"]["post"]["description"]
    assert [tool.name for tool in tools if f"`{tool.name}`" not in described] == []
    assert tools[0].input_schema["required"] == ["action"]
    assert tools[0].input_schema["properties"]["action"]["enum"] == ["create", "list", "revoke"]
    assert tools[0].annotations is not None
    assert tools[0].annotations.destructive_hint is True
    [logs] = [tool for tool in tools if tool.name == "service_logs"]  # which has one action
    assert logs.input_schema["required"] == ["app"]
    assert "action" not in logs.input_schema["properties"]
    assert logs.annotations is not None
    assert logs.annotations.read_only_hint is True


async def test_any_process_answers(app: App, twin: Gateway) -> None:
    """No process keeps a session that another one would miss."""
    for address in (app.gateway.address, twin.address):
        async with over_http("legacy")(address, app.account.key) as client:
            assert await call(client, "service_hook", action="list") == {"hooks": []}


PING = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


async def test_an_account_key_is_required(gw: Gateway) -> None:
    for credential in ({}, {"Authorization": f"Bearer {OPERATOR}"}):
        answer = await gw.http.post("/mcp", json=PING, headers=credential)
        refused(answer, 401, "UNAUTHORIZED")
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_requests_for_other_hosts_and_from_other_sites_are_refused(app: App) -> None:
    async def status(**more: str) -> int:
        headers = {"Accept": "application/json, text/event-stream", **more}
        return (await app.account.call("POST", "/mcp", PING, headers=headers)).status_code

    assert await status() == 200
    assert await status(Host="127.0.0.1") == 200  # nginx's `$host` leaves the port out
    assert await status(Host="127.0.0.1.rebound.example.com") == 421
    assert await status(Host="rebound.example.com") == 421
    assert await status(Host="api.localhost") == 421
    for name in ("localhost", "[::1]"):  # of the same machine, as the gateway's own address
        assert await status(Host=f"{name}:{app.gateway.port}") == 200
    assert await status(Origin="https://elsewhere.example.com") == 403
    assert await status(Origin=app.gateway.address) == 200


async def test_other_methods_and_bodies_are_refused(app: App) -> None:
    answer = await app.account.call("GET", "/mcp")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    for body, status in ((b" " * 4_194_305, 413), (b"{" * 1000, 400)):
        answer = await app.account.call("POST", "/mcp", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == status

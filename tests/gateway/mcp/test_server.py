"""The agent tool over both transports, with the SDK's own client."""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from tests.fakes import FakeAppBackend
from tests.support.accounts import App
from tests.support.command_line import Tool
from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

Connect = Callable[[str, str], AbstractAsyncContextManager[Client]]


@asynccontextmanager
async def over_stdio(address: str, key: str) -> AsyncIterator[Client]:
    environment = {"PATH": os.environ["PATH"], "CAPSULE_URL": address, "CAPSULE_API_KEY": key}
    server = StdioServerParameters(command=sys.executable, args=["-m", "gateway.cli", "mcp"], env=environment)
    async with Client(server) as client:
        yield client


def over_http(mode: str) -> Connect:
    @asynccontextmanager
    async def connect(address: str, key: str) -> AsyncIterator[Client]:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            httpx2.AsyncClient(headers=headers, trust_env=False) as http,
            Client(streamable_http_client(f"{address}/mcp", http_client=http), mode=mode) as client,
        ):
            yield client

    return connect


@pytest.fixture(params=[over_stdio, over_http("auto"), over_http("legacy")], ids=["stdio", "http", "http-legacy"])
def connect(request: pytest.FixtureRequest) -> Connect:
    return request.param


async def call(client: Client, tool: str = "service_hook", /, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert result.structured_content is not None
    return result.structured_content


async def refused(client: Client, tool: str = "service_hook", /, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    (content,) = result.content
    return content.text  # type: ignore[union-attr]


async def test_a_hooks_life(connect: Connect, app: App) -> None:
    gw = app.gateway
    async with connect(gw.address, app.account.key) as client:
        made = await call(client, action="create", app=app.name, name=" CI ")
        url = made["hook"]["url"]
        gw.confidential.add(url.rpartition("/")[2])
        assert made["hook"]["name"] == "CI"
        assert "only this once" in made["note"]
        assert (await gw.http.post(url)).status_code == 409

        (hook,) = (await call(client, action="list"))["hooks"]
        assert hook.keys() == {"id", "name", "app", "createdAt", "lastUsedAt"}
        assert hook["lastUsedAt"] is not None

        # Agents fill in what they need not.
        assert (await call(client, action="revoke", id=hook["id"], app="", name=None))["revoked"] == hook["id"]
        assert (await gw.http.post(url)).status_code == 404
        assert (await call(client, action="list", id=None)) == {"hooks": []}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "action must be 'create' (with app and name), 'list', or 'revoke' (with id)."),
        ({"action": "delete"}, "action must be"),
        ({"action": ["list"]}, "action must be"),
        ({"action": "create", "name": "CI"}, "action 'create' needs app: the app's name."),
        ({"action": "create", "app": "shop", "name": "  "}, "action 'create' needs name: what the hook is for"),
        ({"action": "create", "app": 7, "name": "CI"}, "action 'create' needs app"),
        (
            {"action": "create", "app": "shop", "name": "CI", "id": "hook_1"},
            "action 'create' takes no id; leave it out.",
        ),
        ({"action": "list", "app": "shop", "name": "CI"}, "action 'list' takes no app and no name; leave it out."),
        ({"action": "revoke", "hook_id": "hook_1"}, "action 'revoke' needs id: the hook's id, as 'list' shows it."),
        ({"action": "create", "app": "nobodys", "name": "CI"}, "no such app in this account"),
        ({"action": "revoke", "id": "hook_1"}, "no such hook in this account"),
        ({"action": "revoke", "id": "../webhook"}, "no such hook in this account"),
    ],
)
async def test_what_is_wrong_is_said(app: App, arguments: dict[str, Any], told: str) -> None:
    async with over_http("auto")(app.gateway.address, app.account.key) as client:
        assert told in await refused(client, **arguments)


async def test_refusals_over_stdio(app: App) -> None:
    async with over_stdio(app.gateway.address, app.account.key) as client:
        assert "NOT_FOUND" in await refused(client, action="create", app="nobodys", name="CI")
    async with over_stdio(app.gateway.address, "csk_wrong") as client:
        assert "UNAUTHORIZED" in await refused(client, action="list")
    async with over_stdio(f"http://127.0.0.1:{free_port()}", app.account.key) as client:
        assert "cannot reach" in await refused(client, action="list")


async def test_what_an_agent_reads(connect: Connect, app: App) -> None:
    async with connect(app.gateway.address, app.account.key) as client:
        tools = (await client.list_tools()).tools
    assert [tool.name for tool in tools] == ["service_hook", "service_deploy", "service_app", "service_delivery"]
    tool = tools[0]
    assert tool.input_schema["required"] == ["action"]
    properties = tool.input_schema["properties"]
    assert properties["action"]["enum"] == ["create", "list", "revoke"]
    assert properties.keys() == {"action", "app", "name", "id"}
    assert all(argument["type"] == "string" and argument["description"] for argument in properties.values())
    assert tool.annotations is not None
    assert tool.annotations.destructive_hint is True


async def test_accounts_do_not_see_each_other(app: App, backend: FakeAppBackend) -> None:
    gw = app.gateway
    other = await gw.app(backend)
    async with (
        over_http("auto")(gw.address, app.account.key) as ours,
        over_http("auto")(gw.address, other.account.key) as theirs,
    ):
        made = await call(ours, action="create", app=app.name, name="CI")
        gw.confidential.add(made["hook"]["url"].rpartition("/")[2])
        assert await call(theirs, action="list") == {"hooks": []}
        assert "no such hook" in await refused(theirs, action="revoke", id=made["hook"]["id"])
        assert "no such app" in await refused(theirs, action="create", app=app.name, name="CI")
        await call(ours, action="revoke", id=made["hook"]["id"])


async def test_any_process_answers(app: App, twin: Gateway) -> None:
    """A session that one process began goes on at another: there is none."""
    async with over_http("legacy")(app.gateway.address, app.account.key) as client:
        assert await call(client, action="list") == {"hooks": []}
    async with over_http("legacy")(twin.address, app.account.key) as client:
        assert await call(client, action="list") == {"hooks": []}


PING = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


@pytest.mark.parametrize(
    "credential",
    [None, "Bearer", "Bearer csk_wrong", f"Bearer {OPERATOR}", "Basic x"],
    ids=["none", "half", "unknown", "operator", "basic"],
)
async def test_the_account_key_is_asked_for(gw: Gateway, credential: str | None) -> None:
    headers = {"Authorization": credential} if credential else {}
    answer = await gw.http.post("/mcp", json=PING, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "UNAUTHORIZED"
    assert answer.json()["error"]["requestId"] == answer.headers["x-request-id"]


async def test_only_this_service_is_meant(app: App) -> None:
    headers = {"Authorization": f"Bearer {app.account.key}", "Accept": "application/json, text/event-stream"}

    async def status(**more: str) -> int:
        return (await app.gateway.http.post("/mcp", json=PING, headers={**headers, **more})).status_code

    assert await status() == 200
    assert await status(Host="127.0.0.1") == 200  # nginx's `$host` leaves the port out
    assert await status(Host="127.0.0.1.rebound.example.com") == 421
    assert await status(Host="rebound.example.com") == 421
    assert await status(Host=f"localhost:{app.gateway.port}") == 421
    assert await status(Origin="https://elsewhere.example.com") == 403
    assert await status(Origin=app.gateway.address) == 200


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_there_is_nothing_to_listen_to(app: App, method: str) -> None:
    answer = await app.gateway.http.request(method, "/mcp", headers={"Authorization": f"Bearer {app.account.key}"})
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


async def test_bodies_are_bounded(app: App) -> None:
    headers = {"Authorization": f"Bearer {app.account.key}", "Content-Type": "application/json"}
    assert (await app.gateway.http.post("/mcp", content=b" " * 65_537, headers=headers)).status_code == 413
    assert (await app.gateway.http.post("/mcp", content=b"{" * 1000, headers=headers)).status_code == 400


async def test_stdio_needs_a_key(tmp_path: Path) -> None:
    assert "no API key" in await Tool("", "", tmp_path).refused("mcp", code=2)

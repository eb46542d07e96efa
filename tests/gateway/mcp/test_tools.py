"""The agent tools: the schema and the messages that a class makes, and calls with the SDK's own client.

The test plays the deploy engine and the worker.
"""

import asyncio
import base64
import io
import secrets
import tarfile
from collections import defaultdict
from typing import Annotated, Any, cast

import msgspec
import pytest
from mcp.server.mcpserver.exceptions import ToolError
from msgspec import UNSET, Meta, UnsetType

from gateway.accounts.access import Access, Call
from gateway.accounts.records import Account
from gateway.mcp import tools
from gateway.mcp.tools import ACCESS, AgentTool, AppName, Arg, Result
from gateway.services import Services
from tests.support.accounts import App
from tests.support.agents import call, over_http, refused
from tests.support.deploys import publish, report_phases
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.visitor import Visitor
from tests.support.webhook_holder import read_queue, write_deliveries

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVICES = cast(Services, None)  # these tools use none
ACCOUNT = Account(id="acc_1", name="One", plan="free", createdAt="")


@pytest.fixture(autouse=True)
def permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools of this process have no rows in the table of calls."""
    monkeypatch.setattr(tools, "TOOL_CALLS", defaultdict[str, list[Call]](list))


class Paint(msgspec.Struct, forbid_unknown_fields=True):
    """Null removes it."""

    color: Annotated[str | UnsetType | None, Meta(description="the color")] = UNSET
    size: Annotated[int | UnsetType | None, Meta(description="the size")] = UNSET


class PaintTool(AgentTool):
    """Paints."""

    name, title = "paint", "Paint"

    async def show(self, app: AppName, tail: Annotated[int, Arg("lines", "integer", maximum=20)] = 5) -> Result:
        """Show the paint."""
        return {"app": app, "tail": tail}

    async def set(self, app: AppName, change: Paint) -> Result:
        """Change the paint."""
        return {"app": app, "paint": change}


async def answer(**given: Any) -> Result:
    names = {name for action in PaintTool.actions.values() for name in action.args}
    tool = PaintTool(SERVICES, {ACCESS: Access(ACCOUNT)})
    return await tool.answer({**dict.fromkeys({"action", *names}, ""), **given})


async def test_the_schema_names_the_actions_that_take_an_argument() -> None:
    schema = PaintTool.make(SERVICES).parameters
    described = {name: each["description"] for name, each in schema["properties"].items()}
    assert described == {
        "action": "show: show the paint. set: change the paint.",
        "app": "The app's name.",
        "tail": "For show: lines.",
        "color": "For set: the color. Null removes it.",
        "size": "For set: the size. Null removes it.",
    }
    assert schema["properties"]["size"]["type"] == ["integer", "null"]
    assert schema["required"] == ["action"]


async def test_empty_values_are_not_given_and_null_is_a_value_of_some() -> None:
    assert await answer(action="show", app=" shop ", tail=None) == {"app": "shop", "tail": 5}
    assert await answer(action="show", app="shop", tail="07") == {"app": "shop", "tail": 7}
    painted = await answer(action="set", app="shop", color=None, size=0)
    assert painted == {"app": "shop", "paint": {"color": None, "size": 0}}
    assert await answer(action="set", app="shop", size=0) == {"app": "shop", "paint": {"size": 0}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "action must be 'show' (with app) or 'set' (with app and any of color, size)."),
        ({"action": "set", "app": "shop"}, "action 'set' needs at least one of color, size."),
        ({"action": "set", "app": "shop", "size": "1"}, "size: must be a whole number or null, not text."),
        ({"action": "show", "app": "shop", "size": 0}, "action 'show' does not take size; leave it out."),
        ({"action": "show", "app": "shop", "tail": "0" * 5000}, "tail must be a number from 1 to 20."),
    ],
)
async def test_messages_say_how_to_correct_the_call(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError) as raised:
        await answer(**given)
    assert str(raised.value).startswith(message)


# -- calls over HTTP ------------------------------------------------------------------------------------------

APP, DELIVERY, DEPLOY, ENV, HOOK = (f"service_{name}" for name in ("app", "delivery", "deploy", "env", "hook"))
LIMITS, LOGS, MEMBERS, PUBLISH, USAGE = (
    f"service_{name}" for name in ("limits", "logs", "members", "publish", "usage")
)


async def test_apps(hosted: App) -> None:
    name = f"mine-{secrets.token_hex(4)}"
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        created = (await call(client, APP, action="create", app=name))["app"]
        assert created["name"] == name
        build = {"command": "npm run build", "output": "out"}
        settings = (await call(client, APP, action="set", app=name, build=build))["settings"]
        assert settings["build"] == build
        secret = {"kind": "secret", "secret": secrets.token_hex(20)}
        answered = await call(client, APP, action="set", app=name, auth=secret, repository=None)
        assert (answered["settings"]["auth"]["kind"], answered["settings"]["build"]) == ("secret", build)
        assert secret["secret"] not in str(answered)
        shown = (await call(client, APP, action="show", app=name))["app"]
        assert (shown["settings"]["build"], shown["findings"], shown["crashes"]) == (build, [], [])
        assert (await call(client, APP, action="set", app=name, build=None))["settings"]["build"] is None
        assert {each["name"] for each in (await call(client, APP, action="list"))["apps"]} == {name, hosted.name}
        assert await call(client, APP, action="delete", app=name) == {"deleted": name}
        assert "NOT_FOUND" in await refused(client, APP, action="show", app=name)


async def test_limits(app: App) -> None:
    async with over_http()(app.gateway.address, app.account.key) as client:
        none = (await call(client, LIMITS, action="show", app=app.name))["limits"]
        assert set(none.values()) == {None}
        change = {"dailyEuro": "0.02", "requestsPerMinute": 0}
        assert (await call(client, LIMITS, action="set", app=app.name, **change))["limits"] == none | change
        shown = await call(client, LIMITS, action="show", app=app.name)
        assert (shown["limits"], shown["spend"]["cap"]) == (none | change, 20_000_000)
        cleared = await call(client, LIMITS, action="set", app=app.name, dailyEuro=None)
        assert cleared["limits"] == {**none, "requestsPerMinute": 0}


async def test_usage(app: App) -> None:
    assert (await app.ask("Hello")).status_code == 200
    async with over_http()(app.gateway.address, app.account.key) as client:

        async def rows(**arguments: Any) -> Any:
            return (await call(client, USAGE, **arguments))["rows"]

        [row] = await wait_until(rows)
        assert row["requests"] == 1
        assert row["nanoEuro"] > 0
        for by, value in (("app", app.name), ("model", "gpt-oss-120b"), ("provider", "default")):
            assert [each[by] for each in await rows(by=by, days="30")] == [value]


async def test_deliveries(gw: Gateway) -> None:
    account = await gw.account()
    write_deliveries(account, ("evt_0", "failed"), ("evt_1", "delivered"), ("evt_2", "failed"))
    async with over_http()(gw.address, account.key) as client:
        listed = (await call(client, DELIVERY, action="list", app="", outcome="failed"))["deliveries"]
        assert [row["id"] for row in listed] == ["evt_2", "evt_0"]
        shown = (await call(client, DELIVERY, action="show", id="evt_1"))["delivery"]
        assert (shown["outcome"], shown["response"]) == ("delivered", None)
        assert (await call(client, DELIVERY, action="redeliver", id="evt_2"))["id"] == "evt_2"
        assert await call(client, DELIVERY, action="redeliver_failed", since="1970-01-01") == {"count": 1}
        assert "RATE_LIMITED" in await refused(client, DELIVERY, action="redeliver_failed", since="1970-01-01")
    assert [event["id"] for event in read_queue(account)] == ["evt_2", "evt_0"]


EMAIL, OWN = "ada@example.com", "<the app>"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (APP, {"action": "set", "app": OWN}, "needs at least one of auth, repository, build"),
    (APP, {"action": "set", "app": OWN, "build": {"command": 1}}, "build.command"),
    (LIMITS, {"action": "set", "app": OWN, "dailyEuro": "1000"}, "allows at most"),
    (DELIVERY, {"action": "redeliver_failed", "since": 5}, "needs since"),
    (DELIVERY, {"action": "redeliver_failed", "since": "lately"}, "since: "),
    (DELIVERY, {"action": "show", "id": "evt_none"}, "NOT_FOUND"),
    (DEPLOY, {"action": "cancel", "app": "x", "id": "dep_1"}, "does not take app"),
    (ENV, {"action": "set", "app": OWN, "variables": ["A"]}, "action 'set' needs variables, such as"),
    (ENV, {"action": "unset", "app": OWN}, '["NAME"]'),
    (ENV, {"action": "set", "app": OWN, "variables": {"PORT": "1"}}, "REQUEST_MALFORMED"),
    (HOOK, {}, "action must be 'create' (with app and name), 'list', or 'revoke' (with id)."),
    (HOOK, {"action": "create", "app": "nobodys", "name": "CI"}, "no such app in this account"),
    (HOOK, {"action": "revoke", "id": "../webhook"}, "no such hook in this account"),
    (LOGS, {"app": OWN, "tail": 0}, "tail must be a number from 1 to 2000"),
    (MEMBERS, {"action": "invite", "email": EMAIL, "role": "admin"}, "role must be one of owner, developer, viewer"),
    (MEMBERS, {"action": "remove", "email": EMAIL}, "NOT_FOUND"),
    (USAGE, {"days": 401}, "days must be a number from 1 to 400"),
]


async def test_errors_say_how_to_correct_the_call(hosted: App) -> None:
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        for tool, arguments, words in REFUSED:
            given = {name: hosted.name if value == OWN else value for name, value in arguments.items()}
            assert words in await refused(client, tool, **given), (tool, arguments)
    assert {each["by"] for each in (await hosted.account.get("/account/audit")).json()} == {"operator"}


async def test_members(gw: Gateway) -> None:
    account, visitor = await gw.account(), Visitor(gw)
    async with over_http()(gw.address, account.key) as client, visitor.http:
        invited = await call(client, MEMBERS, action="invite", email="Ada@example.com", role="developer")
        assert (invited["member"]["email"], invited["member"]["state"]) == (EMAIL, "invited")
        assert "accept" in invited["note"]
        await visitor.join(account, EMAIL, "viewer")
        changed = await call(client, MEMBERS, action="invite", email=EMAIL, role="owner")
        assert (changed["member"]["role"], changed["member"]["state"]) == ("owner", "member")
        assert (await call(client, MEMBERS, action="list"))["members"] == [changed["member"]]
        assert "LAST_OWNER" in await refused(client, MEMBERS, action="remove", email=EMAIL)
        await call(client, MEMBERS, action="invite", email="bob@example.com", role="viewer")
        assert await call(client, MEMBERS, action="remove", email="Bob@example.com") == {"removed": "bob@example.com"}
    trail = [(each["action"], each["target"]) for each in (await account.get("/account/audit")).json()]
    assert trail[:2] == [("remove_member", "Bob@example.com"), ("set_member", "bob@example.com")]


async def go_live(app: App) -> str:
    deploy: str = (await publish(app.account, app.name)).json()["deployId"]
    await report_phases(app.gateway, deploy, "build", "health", "canary")
    return deploy


async def test_deploys(hosted: App) -> None:
    first, second = await go_live(hosted), await go_live(hosted)
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        listed = (await call(client, DEPLOY, action="list", app="", id=""))["deploys"]
        assert [deploy["id"] for deploy in listed][:2] == [second, first]
        shown = (await call(client, DEPLOY, action="show", id=second))["deploy"]
        assert (shown["state"], shown["log"]) == ("live", "")
        back = (await call(client, DEPLOY, action="rollback", app=hosted.name))["deployId"]
        assert (await call(client, DEPLOY, action="show", id=back))["deploy"]["release"] == first
        assert (await call(client, DEPLOY, action="cancel", id=back))["deploy"]["state"] == "canceled"
        again = (await call(client, DEPLOY, action="rollback", app=hosted.name, id=first))["deployId"]
        assert again != back


async def test_variables(hosted: App) -> None:
    value = secrets.token_hex(8)
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:

        async def names(action: str, **more: object) -> list[str]:
            answered = await call(client, ENV, action=action, app=hosted.name, **more)
            assert value not in str(answered)
            return [variable["name"] for variable in answered["variables"]]

        assert await names("set", variables={"A": value, "B": value, "C": value}) == ["A", "B", "C"]
        assert await names("unset", variables=["A"]) == ["B", "C"]
        assert await names("unset", variables={"B": None}) == ["C"]
        assert await names("list") == ["C"]
        assert await names("unset", variables="C") == []
        await names("set", variables={"A": "1", "B": "2", "C": "3"}, kind="")
        previews = {"action": "set", "kind": "preview", "variables": {"A": "4", "B": False}}
        changed = (await call(client, ENV, app=hosted.name, **previews))["variables"]
        assert [each["inPreviews"] for each in changed] == ["other", "none", "same"]
        assert await names("unset", variables=["A"], kind="preview") == ["A", "B", "C"]


async def test_hooks(app: App) -> None:
    gw = app.gateway
    async with over_http()(gw.address, app.account.key) as client:
        made = await call(client, HOOK, action="create", app=app.name, name=" CI ")
        url = made["hook"]["url"]
        gw.confidential.add(url.rpartition("/")[2])
        assert made["hook"]["name"] == "CI"
        assert "shown only once" in made["note"]
        assert (await gw.http.post(url)).status_code == 409

        (hook,) = (await call(client, HOOK, action="list"))["hooks"]
        assert hook.keys() == {"id", "name", "app", "createdAt", "lastUsedAt"}
        assert hook["lastUsedAt"] is not None
        # Agents fill in arguments that they do not need with empty values.
        revoked = await call(client, HOOK, action="revoke", id=hook["id"], app="", name=None)
        assert revoked["revoked"] == hook["id"]
        assert (await gw.http.post(url)).status_code == 404


async def test_accounts_do_not_see_each_other(hosted: App) -> None:
    gw, other = hosted.gateway, await hosted.gateway.app(hosted.backend)
    deploy = (await publish(hosted.account, hosted.name)).json()["deployId"]
    async with (
        over_http()(gw.address, hosted.account.key) as ours,
        over_http()(gw.address, other.account.key) as theirs,
    ):
        made = await call(ours, HOOK, action="create", app=hosted.name, name="CI")
        gw.confidential.add(made["hook"]["url"].rpartition("/")[2])
        assert await call(theirs, HOOK, action="list") == {"hooks": []}
        for tool, given, words in (
            (HOOK, {"action": "revoke", "id": made["hook"]["id"]}, "no such hook"),
            (HOOK, {"action": "create", "app": hosted.name, "name": "CI"}, "no such app"),
            (LOGS, {"app": hosted.name}, "no such app"),
            (ENV, {"action": "list", "app": hosted.name}, "no such app"),
            (DEPLOY, {"action": "show", "id": deploy}, "no such deploy in this account"),
            (DEPLOY, {"action": "cancel", "id": deploy}, "no such deploy in this account"),
            (LOGS, {"app": other.name, "deploy": deploy}, "no such deploy in this account"),
        ):
            assert words in await refused(theirs, tool, **given), (tool, given)
        assert (await call(ours, DEPLOY, action="show", id=deploy))["deploy"]["state"] == "queued"


async def test_the_log_of_a_deploy_and_of_the_start_command(hosted: App) -> None:
    other = await hosted.account.app(hosted.backend)
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        assert "no log yet" in await refused(client, LOGS, app=hosted.name)
        failed = (await publish(hosted.account, hosted.name)).json()["deployId"]
        await report_phases(hosted.gateway, failed, "build", ok=False, reason="no such file")
        for which in ({}, {"deploy": failed, "tail": "5"}):
            assert await call(client, LOGS, app=hosted.name, **which) == {"of": failed, "state": "failed", "log": ""}
        assert "NOT_FOUND" in await refused(client, LOGS, app=other.name, deploy=failed)
        change = {"build": {"start": "node server.js"}}
        assert (await hosted.account.call("PATCH", f"/account/apps/{hosted.name}", change)).is_success
        assert await call(client, LOGS, app=hosted.name) == {"of": "start command", "log": ""}
        live = (await publish(hosted.account, hosted.name)).json()["deployId"]
        await report_phases(hosted.gateway, live, "build", "health", "canary")
        folder = hosted.gateway.data_folder / "running"
        folder.mkdir(exist_ok=True)
        (folder / f"{live}.output").write_text("one\ntwo\nthree\n")
        assert (await call(client, LOGS, app=hosted.name, tail=2))["log"] == "two\nthree\n"


PAGE = "<!doctype html><title>Früh</title>"
FILES = [
    {"path": "index.html", "text": PAGE},
    {"path": "assets/logo.png", "base64": base64.b64encode(b"\x89PNG\0").decode()},
    {"path": "./empty.txt", "text": "", "base64": ""},
]


async def test_the_files_become_the_source_of_a_deploy(hosted: App) -> None:
    """A call may wait for its end, and the account may go on meanwhile."""
    large = [{"path": f"{number}.js", "text": "x" * 100_000} for number in range(30)]
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        published = await call(client, PUBLISH, app=hosted.name, files=FILES)
        assert published["deploy"]["state"] == "queued"
        assert DEPLOY in published["note"]
        stored = await hosted.gateway.platform("GET", f"deploys/{published['deployId']}/source")
        with tarfile.open(fileobj=io.BytesIO(stored.content)) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        assert files == {"index.html": PAGE.encode(), "assets/logo.png": b"\x89PNG\0", "empty.txt": b""}
        publishing = asyncio.create_task(call(client, PUBLISH, app=hosted.name, files=FILES, wait=True))

        async def count() -> int:
            return len((await hosted.account.get(f"/account/deploys?app={hosted.name}")).json())

        await wait_until(count, holds=lambda seen: seen == 2)
        assert (await call(client, PUBLISH, app=hosted.name, files=large))["deployId"]
        assert (await publishing)["deploy"]["state"] == "canceled"
        failing = asyncio.create_task(call(client, PUBLISH, app=hosted.name, files=FILES, wait=True))
        await wait_until(count, holds=lambda seen: seen == 4)
        newest = (await hosted.account.get(f"/account/deploys?app={hosted.name}")).json()[0]["id"]
        await report_phases(hosted.gateway, newest, "build", ok=False, reason="KeyError: 'API_TOKEN'")
        ended = await failing
    assert (ended["deployId"], ended["deploy"]["state"], ended["log"]) == (newest, "failed", "")
    assert ended["deploy"]["error"] == "build: KeyError: 'API_TOKEN'"
    assert ended["deploy"]["nextStep"]["command"] == f"capsule env set {hosted.name} API_TOKEN"


async def test_a_preview_and_its_end(hosted: App) -> None:
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        described = {"preview": "Fix/Login", "message": " Try a\nnew form " + "x" * 300}
        published = await call(client, PUBLISH, app=hosted.name, files=FILES, **described)
        assert published["url"] == f"https://{hosted.name}--p-fix-login.apps.localhost"
        row = published["deploy"]
        assert (row["kind"], row["branch"], row["by"]) == ("preview", "Fix/Login", "first")
        assert row["message"] == ("Try a new form " + "x" * 300)[:200]
        ending = {"action": "end_preview", "app": hosted.name, "slug": "fix-login"}
        assert await call(client, DEPLOY, **ending) == {"ended": "fix-login"}
        assert "NOT_FOUND" in await refused(client, DEPLOY, **ending)


async def test_files_that_are_refused(hosted: App) -> None:
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:

        async def fault(files: object, app: str = hosted.name) -> str:
            return await refused(client, PUBLISH, app=app, files=files)

        assert "NOT_FOUND" in await fault(FILES, "none-of-mine")
        assert "files is needed" in await fault([])
        assert 'files[1]: each file is {"path"' in await fault([FILES[0], {"text": "x"}])
        for path in ("/etc/x", "../x", "a\\b", "a\0b"):
            assert "files[0]: a path is relative" in await fault([{"path": path, "text": "x"}])
        assert "files[1]: 'index.html' is there twice" in await fault([FILES[0], FILES[0]])
        both = [FILES[0], {"path": "a", "text": "x"}, {"path": "a/b", "text": "x"}]
        assert "both a file and a folder" in await fault(both)
        for more in ({}, {"text": "x", "base64": "eA=="}, {"base64": "nö"}, {"base64": "x"}, {"text": 1}):
            assert "'x' needs either text or base64" in await fault([{"path": "x", **more}])

"""Keys with a scope try every route and agent tool, on their app, on another app, and on another account's app.

What a key may do is written here once more, apart from the table that the gateway obeys.
"""

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.accounts.access import CALLS, TOOL_CALLS
from gateway.accounts.sessions import ACCOUNT
from gateway.data.records import DataRecords, Snapshot, snapshot_key
from gateway.ids import now_iso
from gateway.storage import FolderStorage
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import Account, App
from tests.support.agents import over_http
from tests.support.deployment import packed
from tests.support.deploys import publish
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.responses import refused
from tests.support.stores import opened
from tests.support.visitor import Visitor
from tests.support.webhook_holder import write_deliveries

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROLES = ("developer", "viewer")
OWNERS = {"POST /account/keys", "DELETE /account/keys/{key_id}", "PUT /account/members/{email}"}
OWNERS |= {"DELETE /account/members/{email}", "PUT /account/apps/{app}/limits", "DELETE /account/apps/{app}"}
OWNERS |= {"POST /account/deletion", "DELETE /account/deletion"}
KINDS = ("full", "deploy", "read", "deploy one", "read one")
DEPLOYS = {
    "PUT /account/apps/{app}/source",
    "POST /account/apps/{app}/deploys",
    "DELETE /account/apps/{app}/previews/{slug}",
    "POST /account/apps/{app}/rollback",
    "POST /account/apps/{app}/build-cache/clear",
    "GET /account/apps/{app}/logs",
    "GET /account/deploys",
    "GET /account/deploys/{deploy_id}",
    "POST /account/deploys/{deploy_id}/promote",
    "POST /account/deploys/{deploy_id}/redeploy",
    "POST /account/deploys/{deploy_id}/cancel",
}
# Those that a key for one app may not make, although they only read.
WHOLE_ACCOUNT = {
    f"GET /account{rest}"
    for rest in ("", "/audit", "/changes", "/keys", "/members", "/notices", "/data/deleted", "/webhook")
}
DEPLOY_TOOLS = {
    "service_publish",
    "service_logs",
    *(f"service_deploy {each}" for each in ("list", "show", "rollback", "cancel", "end_preview")),
}
READ_TOOLS = {"service_usage", "service_logs", "service_deploy list", "service_deploy show", "service_limits show"}
READ_TOOLS |= {"service_app list", "service_app show", "service_hook list", "service_env list"}
READ_TOOLS |= {"service_delivery list", "service_delivery show", "service_members list"}
BODIES: dict[str, Any] = {
    "POST /account/keys": {"name": "more"},
    "POST /account/apps": {"name": "an-app"},
    "PUT /account/members/{email}": {"role": "owner"},
    "PATCH /account": {"name": "Another name"},
    "PATCH /account/apps/{app}": {"build": None},
    "PUT /account/apps/{app}/env": {"NAME": "value"},
    "PUT /account/apps/{app}/limits": {"requestsPerMinute": 1},
    "PUT /account/apps/{app}/domain": {"domain": "example.org"},
    "PUT /account/apps/{app}/domains/{domain}": {"primary": True},
    "POST /account/apps/{app}/deploys": {"kind": "preview", "branch": "branch"},
    "POST /account/apps/{app}/hooks": {"name": "hook"},
    "POST /account/apps/{app}/token-check": {"token": "a.b.c"},
    "PUT /account/webhook": {"url": "http://127.0.0.1:9/"},
    "POST /account/webhook/test": {"type": "deploy.succeeded"},
    "POST /account/deliveries/redeliver": {"since": "2026-01-01", "outcome": "failed"},
}
# Values that a request changes by being made: uses, limits of rates, and figures of operation.
VOLATILE = re.compile(
    rb"\{ops\}|\{provider\}|worker:|logins:|session|.*:(window|keys-used|write-check|settled|app-changes)|.*:audit:.*:last:"
)


def may(kind: str, address: str) -> bool:
    """Returns whether a key or member of this kind may make the call, if it concerns the key's app."""
    if kind == "developer":
        return address not in OWNERS
    if kind == "viewer":
        return address.startswith("GET ")
    scope, _, one = kind.partition(" ")
    if scope == "full":
        return True
    if one and address in WHOLE_ACCOUNT:
        return False
    return address in DEPLOYS if scope == "deploy" else address.startswith("GET ")


class Target(NamedTuple):
    """An app, and the ids of its records."""

    app: str
    deploy_id: str
    request_id: str
    delivery_id: str
    key_id: str
    hook_id: str
    domain: str
    slug: str
    snapshot_id: str
    email: str = "nobody@example.com"  # of no caller, because members may leave

    def fill(self, address: str) -> tuple[str, str]:
        method, _, path = address.format_map(self._asdict()).partition(" ")
        return method, path


class Scene:
    """An account with two apps and a key of each kind, of which two are for the first app, and another account."""

    def __init__(self, gw: Gateway, account: Account, keys: dict[str, str], targets: dict[str, Target]) -> None:
        self.gw, self.account, self.keys, self.targets = gw, account, keys, targets
        self.members: dict[str, Visitor] = {}  # by role

    def headers(self, kind: str) -> dict[str, str]:
        if kind not in self.members:
            return {"Authorization": f"Bearer {self.keys[kind]}"}
        visitor = self.members[kind]
        return {**visitor.headers, "Cookie": f"{ACCOUNT}={visitor.token}"}

    async def call(self, kind: str, address: str, target: str, query: str = "") -> tuple[int, str]:
        """Returns the status and the code. The response may be an endless stream."""
        method, path = self.targets[target].fill(address)
        options: dict[str, Any] = {"headers": self.headers(kind)}
        if address in BODIES:
            options["json"] = BODIES[address]
        if address.endswith("/restore"):
            options["json"] = {"snapshotId": self.targets[target].snapshot_id}
        if address.endswith("/source"):
            options["content"] = SOURCE
        async with self.gw.http.stream(method, path + query, **options) as response:
            if response.status_code < 400:
                return response.status_code, ""
            await response.aread()
            return response.status_code, response.json()["error"]["code"]

    async def get(self, kind: str, path: str) -> httpx.Response:
        return await self.gw.http.get(path, headers={"Authorization": f"Bearer {self.keys[kind]}"})

    def dump(self) -> dict[bytes, Any]:
        """Returns everything in Redis that a call may not change."""
        with self.gw.redis.client() as client:
            keys = sorted(key for key in client.scan_iter(count=1000) if not VOLATILE.match(key))
            # A refused change has left its entry in the trail until it was refused.
            return {key: client.xrange(key) if client.type(key) == b"stream" else client.dump(key) for key in keys}


SOURCE = packed({"index.html": "<h1>Here</h1>"})


@module_fixture
async def scene(
    provider: FakeProvider, backend: FakeAppBackend, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("access")
    async with gateway_with_redis(provider, folder, GATEWAY_DEPLOY_QUOTAS="max=1000") as gw:
        account, stranger = await gw.account(), await gw.account()
        apps = {"own": await account.app(backend), "other": await account.app(backend)}
        apps["stranger's"] = await stranger.app(backend)
        targets = {name: await make_target(app) for name, app in apps.items()}
        keys = {}
        for kind in KINDS:
            scope, _, one = kind.partition(" ")
            body = {"name": kind, "scope": scope} | ({"app": apps["own"].name} if one else {})
            made = await account.call("POST", "/account/keys", body)
            assert made.status_code == 201, made.text
            keys[kind] = made.json()["key"]
            gw.confidential.add(keys[kind])
        scene = Scene(gw, account, keys, targets)
        for role in ROLES:
            email = f"{role}@example.com"
            scene.members[role] = Visitor(gw)
            await scene.members[role].join(account, email, role)
        yield scene
        for visitor in scene.members.values():
            await visitor.http.aclose()


async def make_target(app: App) -> Target:
    account, gw = app.account, app.gateway
    domain, slug = f"{app.name}.example.org", "branch"
    published = await publish(account, app.name, SOURCE)
    for made in (
        published,
        await account.call("PUT", f"/account/apps/{app.name}/source?preview={slug}", content=SOURCE),
        await account.call("PUT", f"/account/apps/{app.name}/domains/{domain}", {}),
        hook := await account.call("POST", f"/account/apps/{app.name}/hooks", {"name": app.name}),
    ):
        assert made.is_success, made.text
    gw.confidential.add(hook.json()["url"].rpartition("/")[2])
    await app.ask("Hello?")

    async def logged() -> list[dict[str, Any]]:
        return (await account.get(f"/account/requests?app={app.name}")).json()

    [request] = await wait_until(logged)
    event = f"evt_{app.name}"
    write_deliveries(account, (event, "failed"), app=app.name)
    app_id = next(each["id"] for each in (await account.get("/account/apps")).json() if each["name"] == app.name)
    snapshot = Snapshot(f"snap_{app.name}", now_iso(), len(SOURCE), "manual")
    await FolderStorage(gw.data_folder).put(snapshot_key(app_id, snapshot.id), SOURCE)
    async with opened(gw.redis.url) as store:
        await DataRecords(store).add_snapshot(account.id, app_id, snapshot)
    return Target(
        app=app.name,
        deploy_id=published.json()["deployId"],
        request_id=request["id"],
        delivery_id=event,
        key_id=(await account.add_key(app.name)).key_id,
        hook_id=hook.json()["id"],
        domain=domain,
        slug=slug,
        snapshot_id=snapshot.id,
    )


# -- the matrix ----------------------------------------------------------------------------------------------


async def test_nobody_changes_what_they_may_not(scene: Scene) -> None:
    """Every route with every limited key and role, for an app of the key, of the account and of another: refusals."""
    before, tried = scene.dump(), 0
    for kind in (*KINDS[1:], *ROLES):
        for address in CALLS:
            if "{" in address and not re.search(r"{(app|deploy_id|request_id|delivery_id)}", address):
                targets = ["own"]
            else:
                targets = [*scene.targets]
            for target in targets:
                if may(kind, address) and (target == "own" or "one" not in kind):
                    continue
                if may(kind, address) and not re.search(r"{(app|deploy_id|request_id|delivery_id)}", address):
                    continue  # a list: see below
                status, code = await scene.call(kind, address, target)
                allowed = {(403, "NOT_PERMITTED")} | ({(404, "NOT_FOUND")} if target == "stranger's" else set())
                assert (status, code) in allowed, (kind, address, target, status, code)
                tried += 1
    assert tried > 400
    assert scene.dump() == before


async def test_reading_changes_nothing(scene: Scene) -> None:
    before = scene.dump()
    for kind in ("read", "read one", "viewer"):
        for address in (each for each in CALLS if may(kind, each) and each.startswith("GET ")):
            status, code = await scene.call(kind, address, "own")
            assert (status, code) not in ((401, "UNAUTHORIZED"), (403, "NOT_PERMITTED")), (kind, address)
            assert status < 500
    assert scene.dump() == before


async def test_keys_and_members_reach_no_other_account(scene: Scene) -> None:
    for kind in (*KINDS, *ROLES):
        for address in (each for each in CALLS if may(kind, each) and "{" in each and "{email}" not in each):
            status, code = await scene.call(kind, address, "stranger's")
            assert (status, code) in ((403, "NOT_PERMITTED"), (404, "NOT_FOUND")), (kind, address, status, code)


async def test_a_snapshot_belongs_to_its_app(scene: Scene) -> None:
    own = scene.targets["own"]
    download = "/account/apps/{app}/data/snapshots/{snapshot_id}"
    assert (await scene.get("full", download.format_map(own._asdict()))).content == SOURCE
    for other in ("other", "stranger's"):
        path = download.format(app=own.app, snapshot_id=scene.targets[other].snapshot_id)
        refused(await scene.get("full", path), 404, "NOT_FOUND")
        headers, body = scene.headers("full"), {"snapshotId": scene.targets[other].snapshot_id}
        response = await scene.gw.http.post(f"/account/apps/{own.app}/data/restore", headers=headers, json=body)
        refused(response, 404, "NOT_FOUND")


async def test_keys_for_deploys_deploy(scene: Scene) -> None:
    for kind in ("deploy", "deploy one"):
        for address in DEPLOYS:
            assert (await scene.call(kind, address, "own"))[1] != "NOT_PERMITTED", (kind, address)
        assert (await scene.call(kind, "PUT /account/apps/{app}/source", "own"))[0] == 202
        deploys = (await scene.get(kind, "/account/deploys")).json()
        assert (await scene.get(kind, f"/account/deploys/{deploys[0]['id']}")).status_code == 200


# -- lists ---------------------------------------------------------------------------------------------------


def variants(own: str, other: str) -> Iterator[tuple[str, bool]]:
    """Yields queries, and whether they name another app."""
    yield from ((query, False) for query in ("", "?app=", f"?app={own}", "?limit=50&app=", f"?app={own}&app={own}"))
    spellings = (f"?app={other}", f"?app={own}&app={other}", f"?app={other}&app={own}", f"?%61pp={other}", "?app=*")
    yield from ((query, True) for query in (*spellings, f"?app=&app={other}", "?app=%00", f"?app={own}%20"))


LISTS = ("deploys", "requests", "requests/figures", "deliveries", "usage")


@pytest.mark.parametrize("path", [f"/account/{each}" for each in LISTS])
async def test_lists_have_only_the_keys_app(scene: Scene, path: str) -> None:
    own, other = scene.targets["own"].app, scene.targets["other"].app
    kinds = ("deploy one", "read one") if path == "/account/deploys" else ("read one",)
    for kind in kinds:
        for query, names_another in variants(own, other):
            query += "&group=app" if path == "/account/usage" and query else ""
            response = await scene.get(kind, path + query)
            if names_another:
                refused(response, 403, "NOT_PERMITTED")
                continue
            assert response.status_code == 200, (query, response.text)
            assert other not in response.text, (query, response.text)
            assert own in response.text or not query, (query, response.text)


async def test_the_lists_of_apps_and_hooks_have_only_the_keys_app(scene: Scene) -> None:
    own, other = scene.targets["own"].app, scene.targets["other"].app
    for path in ("/account/apps", "/account/hooks"):
        text = (await scene.get("read one", path)).text
        assert own in text
        assert other not in text
        assert other in (await scene.get("read", path)).text


# -- agent tools ---------------------------------------------------------------------------------------------


ARGUMENTS: dict[str, dict[str, Any]] = {
    "service_publish": {"files": [{"path": "index.html", "text": "x"}]},
    "service_hook create": {"name": "x"},
    "service_app set": {"build": None},
    "service_limits set": {"requestsPerMinute": 1},
    "service_env set": {"variables": {"NAME": "x"}},
    "service_env unset": {"variables": ["NAME"]},
    "service_members invite": {"email": "nobody@example.com", "role": "owner"},
    "service_members remove": {"email": "nobody@example.com"},
    "service_delivery redeliver_failed": {"since": "2026-01-01"},
}
WITHOUT_APP = {
    *(f"service_members {each}" for each in ("list", "invite", "remove")),
    "service_hook list",
    "service_hook revoke",
    "service_app list",
    "service_deploy show",
    "service_deploy cancel",
}
WITHOUT_APP |= {"service_delivery show", "service_delivery redeliver", "service_delivery redeliver_failed"}


def find_arguments(tool: str, target: Target) -> dict[str, Any]:
    name, _, action = tool.partition(" ")
    arguments: dict[str, Any] = {**ARGUMENTS.get(tool, {}), **({"action": action} if action else {})}
    if tool not in WITHOUT_APP:
        arguments["app"] = target.app
    if name == "service_deploy" and action in ("show", "cancel"):
        arguments["id"] = target.deploy_id
    if name == "service_delivery" and action in ("show", "redeliver"):
        arguments["id"] = target.delivery_id
    if tool == "service_deploy end_preview":
        arguments["slug"] = target.slug
    if tool == "service_hook revoke":
        arguments["id"] = target.hook_id
    return arguments


async def test_agent_tools_obey_the_same_table(scene: Scene) -> None:
    before, tried = scene.dump(), 0
    for kind in KINDS[1:]:
        scope, _, one = kind.partition(" ")
        permitted = DEPLOY_TOOLS if scope == "deploy" else READ_TOOLS
        async with over_http()(scene.gw.address, scene.keys[kind]) as client:
            for tool in TOOL_CALLS:
                for target in ("own", "other") if one else ("own",):
                    lists_all = tool in ("service_app list", "service_hook list")
                    is_account_s = tool == "service_members list"  # a key for one app may not
                    allowed = tool in permitted and (target == "own" or lists_all) and not (one and is_account_s)
                    if allowed and tool in DEPLOY_TOOLS - READ_TOOLS:
                        continue  # it would change something
                    answer = await client.call_tool(tool.split()[0], find_arguments(tool, scene.targets[target]))
                    text = str(answer.content)
                    assert ("NOT_PERMITTED" in text) == (not allowed), (kind, tool, target, text)
                    assert not one or scene.targets["other"].app not in text or "NOT_PERMITTED" in text
                    tried += 1
    assert tried > 80
    assert scene.dump() == before


# -- more ways around the scope ------------------------------------------------------------------------------


async def test_only_full_keys_make_keys(scene: Scene) -> None:
    full_for_one = {"name": "x", "scope": "full", "app": scene.targets["own"].app}
    refused(await scene.account.call("POST", "/account/keys", full_for_one), 400, "REQUEST_MALFORMED")
    for scope in ("FULL", "admin", "", None, ["full"]):
        refused(
            await scene.account.call("POST", "/account/keys", {"name": "x", "scope": scope}), 400, "REQUEST_MALFORMED"
        )
    for app in (scene.targets["stranger's"].app, "nothing"):
        body = {"name": "x", "scope": "read", "app": app}
        refused(await scene.account.call("POST", "/account/keys", body), 404, "NOT_FOUND")


async def test_a_session_may_do_no_more_than_its_key(scene: Scene) -> None:
    own = {"Origin": scene.gw.address}
    async with httpx.AsyncClient(base_url=scene.gw.address, trust_env=False) as browser:
        for kind in ("deploy", "deploy one", "read one"):
            answer = await browser.post("/dashboard/session", json={"apiKey": scene.keys[kind]}, headers=own)
            refused(answer, 403, "NOT_PERMITTED")
        opened = await browser.post("/dashboard/session", json={"apiKey": scene.keys["read"]}, headers=own)
        assert opened.status_code == 204
        scene.gw.confidential.add(browser.cookies[ACCOUNT])
        assert (await browser.get("/account/apps")).status_code == 200
        refused(await browser.post("/account/keys", json={"name": "x"}, headers=own), 403, "NOT_PERMITTED")
        refused(await browser.delete(f"/account/apps/{scene.targets['own'].app}", headers=own), 403, "NOT_PERMITTED")


async def test_a_key_in_a_path_leaks_nowhere(scene: Scene) -> None:
    """The log and Redis are searched for it when the gateway ends."""
    secret = scene.keys["read"]
    for response in (
        await scene.account.call("DELETE", f"/account/keys/{secret}"),
        await scene.account.call("GET", f"/account/apps/{secret}"),
        await scene.account.call("DELETE", f"/account/hooks/{secret}"),
        await scene.gw.http.get(f"/account/keys/{secret}"),
        await scene.gw.platform("DELETE", f"accounts/{scene.account.id}/keys/{secret}"),
    ):
        assert response.status_code in (404, 405, 401)
        assert secret not in response.text
        assert secret not in str(response.headers)

"""The agent tools about deploys, with the SDK's own client. The test plays the deploy engine and the worker."""

import asyncio
import base64
import io
import secrets
import tarfile

import pytest

from tests.support.accounts import App
from tests.support.agents import call, over_http, refused
from tests.support.deploys import publish, report_phases
from tests.support.polling import wait_until

DEPLOY, ENV, HOOK, LOGS, PUBLISH = (f"service_{name}" for name in ("deploy", "env", "hook", "logs", "publish"))

pytestmark = pytest.mark.asyncio(loop_scope="session")


# -- service_deploy ------------------------------------------------------------------------------------------


async def go_live(app: App) -> str:
    deploy: str = (await publish(app.account, app.name)).json()["deployId"]
    await report_phases(app.gateway, deploy, "build", "health", "canary")
    return deploy


async def test_list_show_rollback_and_cancel(hosted: App) -> None:
    first, second = await go_live(hosted), await go_live(hosted)
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        listed = (await call(client, DEPLOY, action="list", app="", id=""))["deploys"]
        assert [deploy["id"] for deploy in listed][:2] == [second, first]
        assert (await call(client, DEPLOY, action="list", app=hosted.name))["deploys"] == listed
        shown = (await call(client, DEPLOY, action="show", id=second))["deploy"]
        assert (shown["state"], shown["log"]) == ("live", "")
        back = (await call(client, DEPLOY, action="rollback", app=hosted.name))["deployId"]
        assert (await call(client, DEPLOY, action="show", id=back))["deploy"]["release"] == first
        assert (await call(client, DEPLOY, action="cancel", id=back))["deploy"]["state"] == "canceled"
        again = (await call(client, DEPLOY, action="rollback", app=hosted.name, id=first))["deployId"]
        assert again != back


# -- service_env ---------------------------------------------------------------------------------------------


async def test_set_list_and_unset_without_values(hosted: App) -> None:
    value = secrets.token_hex(8)
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:

        async def names(action: str, **more: object) -> list[str]:
            answered = await call(client, ENV, action=action, app=hosted.name, **more)
            assert value not in str(answered)
            return [variable["name"] for variable in answered["variables"]]

        assert await names("set", variables={"A": value, "B": value, "C": value}) == ["A", "B", "C"]
        assert await names("set", variables={"B": "other"}) == ["A", "B", "C"]
        assert await names("unset", variables=["A"]) == ["B", "C"]
        assert await names("unset", variables={"B": None}) == ["C"]
        assert await names("list") == ["C"]
        assert await names("unset", variables="C") == []
        await names("set", variables={"A": "1", "B": "2", "C": "3"}, kind="")
        previews = {"action": "set", "kind": "preview", "variables": {"A": "4", "B": False}}
        changed = (await call(client, ENV, app=hosted.name, **previews))["variables"]
        assert [each["inPreviews"] for each in changed] == ["other", "none", "same"]
        assert await names("unset", variables=["A"], kind="preview") == ["A", "B", "C"]
        listed = (await call(client, ENV, action="list", app=hosted.name, kind="preview"))["variables"]
        assert [each["inPreviews"] for each in listed] == ["same", "none", "same"]


# -- service_hook --------------------------------------------------------------------------------------------


async def test_create_list_and_revoke(app: App) -> None:
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
        assert (await call(client, HOOK, action="list", id=None)) == {"hooks": []}


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


# -- service_logs --------------------------------------------------------------------------------------------


async def test_the_log_of_a_deploy_and_of_the_start_command(hosted: App) -> None:
    other = await hosted.account.app(hosted.backend)
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        assert "no log yet" in await refused(client, LOGS, app=hosted.name)
        failed = (await publish(hosted.account, hosted.name)).json()["deployId"]
        await report_phases(hosted.gateway, failed, "build", ok=False, reason="no such file")
        expected = {"of": failed, "state": "failed", "log": ""}
        assert await call(client, LOGS, app=hosted.name) == expected
        assert await call(client, LOGS, app=hosted.name, deploy=failed, tail="5") == expected
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


# -- service_publish -----------------------------------------------------------------------------------------

PAGE = "<!doctype html><title>Früh</title>"
FILES = [
    {"path": "index.html", "text": PAGE},
    {"path": "assets/logo.png", "base64": base64.b64encode(b"\x89PNG\0").decode()},
    {"path": "./empty.txt", "text": "", "base64": ""},
]


async def test_the_files_become_the_source_of_a_deploy(hosted: App) -> None:
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        published = await call(client, PUBLISH, app=hosted.name, files=FILES)
        assert published["deploy"]["state"] == "queued"
        assert DEPLOY in published["note"]
    stored = await hosted.gateway.platform("GET", f"deploys/{published['deployId']}/source")
    with tarfile.open(fileobj=io.BytesIO(stored.content)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert files == {"index.html": PAGE.encode(), "assets/logo.png": b"\x89PNG\0", "empty.txt": b""}


async def test_a_preview_and_its_end(hosted: App) -> None:
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        described = {"preview": "Fix/Login", "message": " Try a\nnew form " + "x" * 300}
        published = await call(client, PUBLISH, app=hosted.name, files=FILES, **described)
        assert published["url"] == f"https://{hosted.name}--p-fix-login.apps.localhost"
        row = published["deploy"]
        assert (row["kind"], row["branch"], row["by"]) == ("preview", "Fix/Login", "first")
        assert row["message"] == ("Try a new form " + "x" * 300)[:200]
        assert "preview is the name of a branch" in await refused(
            client, PUBLISH, app=hosted.name, files=FILES, preview="-x"
        )
        ending = {"action": "end_preview", "app": hosted.name, "slug": "fix-login"}
        assert await call(client, DEPLOY, **ending) == {"ended": "fix-login"}
        assert "NOT_FOUND" in await refused(client, DEPLOY, **ending)
        failed = (await call(client, PUBLISH, app=hosted.name, files=FILES))["deployId"]
        await report_phases(hosted.gateway, failed, "build", ok=False, reason="KeyError: 'API_TOKEN'")
        shown = (await call(client, DEPLOY, action="show", id=failed))["deploy"]
        assert shown["nextStep"]["command"] == f"capsule env set {hosted.name} API_TOKEN"


async def test_it_waits_for_the_end_and_the_account_may_go_on(hosted: App) -> None:
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        publishing = [
            asyncio.create_task(call(client, PUBLISH, app=hosted.name, files=FILES, wait=True)) for _ in range(2)
        ]

        async def queued() -> str | None:
            rows = (await hosted.account.get(f"/account/deploys?app={hosted.name}")).json()
            states = {row["state"]: row["id"] for row in rows}
            return states["queued"] if states.keys() == {"queued", "canceled"} else None

        newest = await wait_until(queued)
        await report_phases(hosted.gateway, newest, "build", ok=False, reason="no such file")
        ended = [await task for task in publishing]
    assert sorted(each["deploy"]["state"] for each in ended) == ["canceled", "failed"]
    failed = next(each for each in ended if each["deployId"] == newest)
    assert failed["deploy"]["error"] == "build: no such file"
    assert failed["log"] == ""


async def test_a_large_source(hosted: App) -> None:
    files = [{"path": f"{number}.js", "text": "x" * 100_000} for number in range(30)]
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        assert (await call(client, PUBLISH, app=hosted.name, files=files))["deployId"]


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

"""`capsule deploys rollback`, `promote` and `cancel`, against a running gateway; the test plays the deploy engine."""

import json
from pathlib import Path

import pytest

from tests.support.accounts import App
from tests.support.command_line import Tool
from tests.support.deploys import report_phases

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def capsule(hosted: App, tmp_path: Path) -> Tool:
    return Tool(hosted.gateway.address, hosted.account.key, tmp_path)


async def publish(capsule: Tool, app: App, tmp_path: Path) -> str:
    folder = tmp_path / "shop"
    folder.mkdir(exist_ok=True)
    (folder / "index.html").write_text("<h1>Shop</h1>")
    run = await capsule("deploys", "publish", app.name, str(folder), "--json")
    deploy: str = json.loads(run.out)["deployId"]
    return deploy


async def test_rollback_promote_and_cancel(capsule: Tool, hosted: App, tmp_path: Path) -> None:
    first, second = "", ""
    for _ in range(2):
        first, second = second, await publish(capsule, hosted, tmp_path)
        await report_phases(hosted.gateway, second, "build", "health", "canary")
    run = await capsule("deploys", "rollback", hosted.name)
    back = run.out.split()[2].rstrip(".")
    details = f"Details: {hosted.gateway.address}/dashboard#/deploys/{back}\n"
    assert run.out == f"Queued as {back}.\n{details}Follow it with: capsule deploys show {back} --follow\n"
    run = await capsule("deploys", "show", back)
    assert first in run.out
    assert "the deploy engine" in run.out
    run = await capsule("deploys", "cancel", back)
    assert run.out == f"{back} is canceled.\n"
    run = await capsule("deploys", "show", back, "--follow")
    assert run.code == 1
    assert f"{back} was canceled: canceled on request" in run.err
    assert "canceled" in (await capsule("deploys", "list")).out
    run = await capsule("deploys", "rollback", hosted.name, first, "--json")
    assert json.loads(run.out).keys() == {"deployId"}
    answer = await hosted.gateway.platform("POST", f"apps/{hosted.name}/deploys", {"kind": "preview"})
    preview = answer.json()["deployId"]
    await report_phases(hosted.gateway, preview, "build", "health")
    assert (await capsule("deploys", "promote", preview)).out.startswith("Queued as dep_")


async def test_refused_actions_print_one_line(capsule: Tool, hosted: App) -> None:
    for arguments, code in (
        (("rollback", hosted.name), "NO_DEPLOY_YET"),
        (("rollback", "no-such-app"), "NOT_FOUND"),
        (("promote", "dep_none"), "NOT_FOUND"),
        (("cancel", "dep_none"), "NOT_FOUND"),
    ):
        run = await capsule("deploys", *arguments)
        assert run.code == 1
        assert code in run.err
        assert run.err.count("\n") == 1


async def test_pages_of_deploys_and_a_redeploy(capsule: Tool, hosted: App, tmp_path: Path) -> None:
    first = await publish(capsule, hosted, tmp_path)
    await report_phases(hosted.gateway, first, "build", "health", "canary")
    queued = (await capsule("deploys", "redeploy", first)).out.split()[2].rstrip(".")
    page = await capsule("deploys", "list", "--limit", "1", "--app", hosted.name)
    assert queued in page.out
    assert page.err == f"More: capsule deploys list --app {hosted.name} --limit 1 --before {queued}\n"
    assert not (await capsule("deploys", "list", "--limit", "1", "--json")).err
    older = (await capsule("deploys", "list", "--before", queued)).out
    assert first in older
    assert "current" in older
    assert (await capsule("deploys", "list", "--before", first)).out == "No older deploys.\n"
    assert "there is no deploy of this id" in await capsule.refused("deploys", "list", "--before", "dep_none")
    shown = (await capsule("deploys", "show", first)).out
    assert "yes, its address serves it" in shown
    assert "canary " in shown

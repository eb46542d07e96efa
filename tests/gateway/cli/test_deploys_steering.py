"""`capsule deploys rollback`, `promote` and `cancel`, against a running gateway whose deploy engine is the test."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend
from tests.gateway.cli.test_deploys import report
from tests.gateway.conftest import Launch
from tests.support.accounts import App
from tests.support.command_line import Tool

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def hosted(launch: Launch, backend: FakeAppBackend) -> AsyncIterator[App]:
    async with launch(GATEWAY_DEPLOY_ENGINE="external") as gw:
        yield await gw.app(backend)


@pytest.fixture
def capsule(hosted: App, tmp_path: Path) -> Tool:
    return Tool(hosted.gateway.address, hosted.account.key, tmp_path)


async def published(capsule: Tool, app: App, tmp_path: Path) -> str:
    folder = tmp_path / "shop"
    folder.mkdir(exist_ok=True)
    (folder / "index.html").write_text("<h1>Shop</h1>")
    run = await capsule("deploys", "publish", app.name, str(folder), "--json")
    deploy: str = json.loads(run.out)["deployId"]
    return deploy


async def test_rollback_promote_and_cancel(capsule: Tool, hosted: App, tmp_path: Path) -> None:
    first, second = "", ""
    for _ in range(2):
        first, second = second, await published(capsule, hosted, tmp_path)
        await report(hosted, second, "build", "health", "canary")
    run = await capsule("deploys", "rollback", hosted.name)
    back = run.out.split()[2].rstrip(".")
    assert run.out == f"Queued as {back}.\nFollow it with: capsule deploys show {back} --follow\n"
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
    await report(hosted, preview, "build", "health")
    assert (await capsule("deploys", "promote", preview)).out.startswith("Queued as dep_")


async def test_what_is_refused_is_one_line(capsule: Tool, hosted: App) -> None:
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

"""The agent tool `service_publish`, with the SDK's own client. The test plays the deploy engine."""

import asyncio
import base64
import io
import tarfile

import pytest

from tests.support.accounts import App
from tests.support.agents import Connect, call, over_http, refused
from tests.support.deploys import report_phases
from tests.support.polling import wait_until

TOOL = "service_publish"
PAGE = "<!doctype html><title>Früh</title>"
FILES = [
    {"path": "index.html", "text": PAGE},
    {"path": "assets/logo.png", "base64": base64.b64encode(b"\x89PNG\0").decode()},
    {"path": "./empty.txt", "text": "", "base64": ""},
]

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_files_become_the_source_of_a_deploy(connect: Connect, hosted: App) -> None:
    async with connect(hosted.gateway.address, hosted.account.key) as client:
        published = await call(client, TOOL, app=hosted.name, files=FILES)
        assert published["deploy"]["state"] == "queued"
        assert "service_deploy" in published["note"]
    stored = await hosted.gateway.platform("GET", f"deploys/{published['deployId']}/source")
    with tarfile.open(fileobj=io.BytesIO(stored.content)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert files == {"index.html": PAGE.encode(), "assets/logo.png": b"\x89PNG\0", "empty.txt": b""}


async def test_a_preview_and_its_end(connect: Connect, hosted: App) -> None:
    async with connect(hosted.gateway.address, hosted.account.key) as client:
        described = {"preview": "Fix/Login", "message": " Try a\nnew form " + "x" * 300}
        published = await call(client, TOOL, app=hosted.name, files=FILES, **described)
        assert published["url"] == f"https://{hosted.name}--p-fix-login.apps.localhost"
        row = published["deploy"]
        assert (row["kind"], row["branch"], row["by"]) == ("preview", "Fix/Login", "first")
        assert row["message"] == ("Try a new form " + "x" * 300)[:200]
        assert "preview is the name of a branch" in await refused(
            client, TOOL, app=hosted.name, files=FILES, preview="-x"
        )
        ending = {"action": "end_preview", "app": hosted.name, "slug": "fix-login"}
        assert await call(client, "service_deploy", **ending) == {"ended": "fix-login"}
        assert "NOT_FOUND" in await refused(client, "service_deploy", **ending)
        failed = (await call(client, TOOL, app=hosted.name, files=FILES))["deployId"]
        await report_phases(hosted.gateway, failed, "build", ok=False, reason="KeyError: 'API_TOKEN'")
        shown = (await call(client, "service_deploy", action="show", id=failed))["deploy"]
        assert shown["nextStep"]["command"] == f"capsule env set {hosted.name} API_TOKEN"


async def test_it_waits_for_the_end_and_the_account_may_go_on(hosted: App) -> None:
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        publishing = [
            asyncio.create_task(call(client, TOOL, app=hosted.name, files=FILES, wait=True)) for _ in range(2)
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
        assert (await call(client, TOOL, app=hosted.name, files=files))["deployId"]


async def test_errors_say_how_to_correct_the_call(connect: Connect, hosted: App) -> None:
    async with connect(hosted.gateway.address, hosted.account.key) as client:

        async def fault(files: object, app: str = hosted.name) -> str:
            return await refused(client, TOOL, app=app, files=files)

        assert "app is needed" in await fault(FILES, "")
        assert "NOT_FOUND" in await fault(FILES, "none-of-mine")
        assert "files is needed" in await fault([])
        assert "files is needed" in await fault("index.html")
        assert 'files[0]: each file is {"path"' in await fault(["index.html"])
        assert 'files[1]: each file is {"path"' in await fault([FILES[0], {"text": "x"}])
        for path in ("/etc/x", "../x", "a\\b", "a\0b", "."):
            assert "files[0]: a path is relative" in await fault([{"path": path, "text": "x"}])
        assert "files[1]: 'index.html' is there twice" in await fault([FILES[0], FILES[0]])
        both = [FILES[0], {"path": "a", "text": "x"}, {"path": "a/b", "text": "x"}]
        assert "both a file and a folder" in await fault(both)
        for more in ({}, {"text": "x", "base64": "eA=="}, {"base64": "nö"}, {"base64": "x"}, {"text": 1}):
            assert "'x' needs either text or base64" in await fault([{"path": "x", **more}])

"""`capsule new` and `capsule deploy`, while the test plays the engine."""

import asyncio
import json
import secrets
import tarfile
from pathlib import Path
from typing import Any, Literal

import pytest

from capsule_gateway.cli.folders import write_template
from gateway.deploys.templates import TEMPLATES
from gateway.keys import partition_tag
from tests.capsule_gateway.cli.conftest import Service
from tests.fakes.server import answer
from tests.support.accounts import App
from tests.support.command_line import Run, Tool
from tests.support.deploys import report_phases
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(("options", "named"), [((), "node server.ts"), (("--template", "static"), "")])
async def test_new(offline: Tool, tmp_path: Path, options: tuple[str, ...], named: str) -> None:
    folder = tmp_path / "my notes"
    run = await offline("new", "notes", str(folder), *options)
    assert run.code == 0, run.err
    manifest = (folder / "capsule.toml").read_text()
    assert 'name = "notes"' in manifest
    assert named in manifest
    assert run.out.startswith(f"Wrote the app notes into the folder {folder}.\n")
    assert f"cd '{folder}'" in run.out
    assert "capsule deploy " in run.out
    before = sorted(folder.rglob("*"))
    assert "is not empty" in await offline.refused("new", "other", str(folder))
    assert sorted(folder.rglob("*")) == before


async def test_new_without_a_folder(offline: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Notes", "a--b", "-a", "a.b", "a-preview", "../a", "a" * 64):
        await offline.refused("new", "--", name, code=2)
    assert not [*tmp_path.iterdir()]
    (tmp_path / "notes").mkdir()  # an empty folder is fine
    assert (await offline("new", "notes")).code == 0
    assert (tmp_path / "notes" / "README.md").is_file()


@pytest.mark.parametrize("kind", ["full", "static"])
async def test_the_files_of_a_template(tmp_path: Path, kind: Literal["full", "static"]) -> None:
    """tests/browser/test_template.py builds and uses them."""
    folder = tmp_path / "app"
    write_template("my-notes", kind, folder)
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert not [name for name, text in files.items() if "__NAME__" in text]
    named = {name for name, text in files.items() if "my-notes" in text}
    page = {"full": "index.html", "static": "site/index.html"}[kind]
    packages = {"package.json", "package-lock.json"} if kind == "full" else set()
    assert named == {"capsule.toml", "README.md", page, *packages}
    assert "<title>my-notes</title>" in files[page]
    [module] = folder.rglob("ai.js")
    assert {path.name for path in module.parent.iterdir()} == {path.name for path in (TEMPLATES / "lib").iterdir()}
    assert module.read_bytes() == (TEMPLATES / "lib" / "ai.js").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like that of the template `full`, with a name that no other test uses."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "capsule.toml").write_text(f'name = "app-{secrets.token_hex(4)}"\n[build]\nstart = "node server.ts"\n')
    (folder / "package.json").write_text(json.dumps({"dependencies": {"better-auth": "1"}}))
    (folder / ".gitignore").write_text("dist\n")
    for ignored in ("node_modules", "dist", ".git", ".capsule"):
        (folder / ignored).mkdir()
        (folder / ignored / "file").write_text("large")
    return folder


@pytest.mark.usefixtures("quick_follow")
async def test_the_first_deploy_creates_the_app_and_the_second_only_publishes(hosted: App, folder: Path) -> None:
    """At a real gateway, whose engine the test plays."""
    gw, name = hosted.gateway, (folder / "capsule.toml").read_text().split('"')[1]
    account = await gw.account()
    capsule = Tool(gw.address, account.key, folder.parent)

    async def is_queued() -> list[dict[str, Any]]:
        response = await gw.platform("GET", "deploys?state=queued")
        return [deploy for deploy in response.json() if deploy["app"] == name]

    async def deploy(*options: str, ok: bool = True) -> Run:
        running = asyncio.create_task(capsule("deploy", str(folder), *options))
        (queued,) = await wait_until(is_queued)
        phases = ("build", "health", "canary") if ok else ("build",)
        await report_phases(gw, queued["id"], *phases, ok=ok, reason="why")
        return await asyncio.wait_for(running, 20)

    run = await deploy()
    assert run.code == 0, run
    assert f"Live at https://{name}.apps.localhost after " in run.out
    assert f"Created the app {name}." in run.err
    variables = (await account.get(f"/account/apps/{name}/env")).json()
    assert [each["name"] for each in variables] == ["BETTER_AUTH_SECRET"]
    sources = Path(gw.environment["GATEWAY_DATA_DIR"]).glob("sources/*/*.tar.gz")
    with tarfile.open(max(sources, key=lambda path: path.stat().st_mtime)) as tar:
        assert sorted(tar.getnames()) == [".gitignore", "capsule.toml", "package.json"]

    run = await deploy("--json")
    assert (run.json["state"], run.json["by"], run.err) == ("live", "first", "")
    assert (await account.get(f"/account/apps/{name}/env")).json() == variables
    run = await deploy(ok=False)
    assert run.code == 1
    assert "failed: build: why" in run.err
    sites = f"{partition_tag(account.id)}:site:*"
    with gw.redis.client() as client:
        assert not [site for site in client.scan_iter(sites) if client.hexists(site, "cache")]
        assert (await deploy("--no-cache")).code == 0
        assert [site for site in client.scan_iter(sites) if client.hexists(site, "cache")]


async def test_without_a_usable_manifest_nothing_is_sent(stubbed: Tool, service: Service, tmp_path: Path) -> None:
    for manifest, says in (
        (None, "no framework was recognized. There is no index.html"),
        ("", "has no name"),
        ('[build]\noutput = "dist"\n', "has no name"),
        ('name = "notes"\nnam = 1\n', "capsule.toml, line 2: "),
        ('name = "no name"\n', "capsule.toml, line 1: "),
    ):
        if manifest is not None:
            (tmp_path / "capsule.toml").write_text(manifest)
        assert says in await stubbed.refused("deploy", str(tmp_path), code=2)
    assert not service.exchanges


async def test_a_name_of_another_account(stubbed: Tool, service: Service, folder: Path) -> None:
    (folder / "capsule.toml").write_text('name = "shop"\n')
    service.answers["GET /account/apps"] = []
    service.replies = [answer(409, {"error": {"code": "NAME_TAKEN", "message": "Taken.", "requestId": "r1"}})]
    assert "the name shop is taken" in await stubbed.refused("deploy", str(folder))


async def test_open(stubbed: Tool, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) is None)
    monkeypatch.chdir(tmp_path)
    origin, dashboard = "https://shop.apps.example", f"{service.address}/dashboard"
    service.answers["GET /account/apps/shop"] = {"url": origin}
    assert (await stubbed("open")).line == dashboard
    assert (await stubbed("open", "shop")).line == origin
    (tmp_path / "capsule.toml").write_text('name = "shop"\n')
    assert (await stubbed("open")).line == origin
    assert (await stubbed("open", "--dashboard")).line == f"{dashboard}#/apps/shop"
    assert opened == [dashboard, origin, origin, f"{dashboard}#/apps/shop"]
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    assert (await stubbed("open")).err == "No browser opened. Open the address yourself.\n"

"""`capsule new` and `capsule deploy`, while the test plays the engine."""

import asyncio
import json
import secrets
import tarfile
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.keys import partition_tag
from tests.support.accounts import Account, App
from tests.support.command_line import Run, Tool
from tests.support.deploys import report_phases
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def account(hosted: App) -> Account:
    """A new account at the gateway whose engine the test plays."""
    return await hosted.gateway.account()


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


async def deploy_to_the_end(capsule: Tool, gw: Gateway, folder: Path, *options: str, ok: bool = True) -> Run:
    running = asyncio.create_task(capsule("deploy", str(folder), *options))
    manifest = folder / "capsule.toml"
    app = manifest.read_text().split('"')[1] if manifest.exists() else folder.name

    async def is_queued() -> list[dict[str, Any]]:
        response = await gw.platform("GET", "deploys?state=queued")
        return [deploy for deploy in response.json() if deploy["app"] == app]

    (deploy,) = await wait_until(is_queued)
    await report_phases(gw, deploy["id"], *(("build", "health", "canary") if ok else ("build",)), ok=ok, reason="why")
    return await asyncio.wait_for(running, 20)


@pytest.mark.usefixtures("quick_follow")
async def test_the_first_deploy_creates_the_app_and_the_second_only_publishes(
    capsule: Tool, account: Account, folder: Path
) -> None:
    gw = account.gateway
    name = (folder / "capsule.toml").read_text().split('"')[1]
    run = await deploy_to_the_end(capsule, gw, folder)
    assert run.code == 0, run
    assert f"Live at https://{name}.apps.localhost after " in run.out
    assert f"Created the app {name}." in run.err
    variables = (await account.get(f"/account/apps/{name}/env")).json()
    assert [each["name"] for each in variables] == ["BETTER_AUTH_SECRET"]
    stored = max(
        Path(gw.environment["GATEWAY_DATA_DIR"]).glob("sources/*/*.tar.gz"), key=lambda path: path.stat().st_mtime
    )
    with tarfile.open(stored) as tar:
        assert sorted(tar.getnames()) == [".gitignore", "capsule.toml", "package.json"]

    run = await deploy_to_the_end(capsule, gw, folder, "--json")
    assert run.json["state"] == "live"
    assert not run.err
    assert (await account.get(f"/account/apps/{name}/env")).json() == variables
    run = await deploy_to_the_end(capsule, gw, folder, ok=False)
    assert run.code == 1
    assert "failed: build: why" in run.err
    sites = f"{partition_tag(account.id)}:site:*"
    with gw.redis.client() as client:
        assert not [site for site in client.scan_iter(sites) if client.hexists(site, "cache")]
        assert (await deploy_to_the_end(capsule, gw, folder, "--no-cache")).code == 0
        assert [site for site in client.scan_iter(sites) if client.hexists(site, "cache")]


@pytest.mark.usefixtures("quick_follow")
async def test_the_first_deploy_of_a_folder_writes_its_manifest(
    capsule: Tool, account: Account, tmp_path: Path
) -> None:
    folder = tmp_path / f"app-{secrets.token_hex(4)}"
    folder.mkdir()
    (folder / "package.json").write_text(
        json.dumps({"dependencies": {"vite": "8"}, "scripts": {"build": "vite build"}})
    )
    run = await deploy_to_the_end(capsule, account.gateway, folder, "--yes")
    assert run.code == 0, run
    said = ["Found Vite. Wrote capsule.toml: npm install && npm run build → dist.", f"Created the app {folder.name}."]
    assert run.err.splitlines() == said
    assert f"Live at https://{folder.name}.apps.localhost after " in run.out


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (None, "no framework was recognized. There is no index.html"),
        ("", "has no name"),
        ('[build]\noutput = "dist"\n', "has no name"),
        ('name = "notes"\nnam = 1\n', "capsule.toml, line 2: "),
        ('name = "no name"\n', "capsule.toml, line 1: "),
    ],
)
async def test_without_a_usable_manifest_nothing_is_sent(
    capsule: Tool, account: Account, tmp_path: Path, manifest: str | None, says: str
) -> None:
    if manifest is not None:
        (tmp_path / "capsule.toml").write_text(manifest)
    assert says in await capsule.refused("deploy", str(tmp_path), code=2)
    assert (await account.get("/account/apps")).json() == []


async def test_a_name_of_another_account(capsule: Tool, hosted: App, folder: Path) -> None:
    (folder / "capsule.toml").write_text(f'name = "{hosted.name}"\n')
    assert f"the name {hosted.name} is taken" in await capsule.refused("deploy", str(folder))


async def test_open(capsule: Tool, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) is None)
    monkeypatch.chdir(tmp_path)
    service = app.gateway.address
    assert (await capsule("open")).line == f"{service}/dashboard"
    assert (await capsule("open", app.name)).line == app.origin
    (tmp_path / "capsule.toml").write_text(f'name = "{app.name}"\n')
    assert (await capsule("open")).line == app.origin
    assert (await capsule("open", "--dashboard")).line == f"{service}/dashboard#/apps/{app.name}"
    assert opened == [f"{service}/dashboard", app.origin, app.origin, f"{service}/dashboard#/apps/{app.name}"]
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    assert (await capsule("open")).err == "No browser opened. Open the address yourself.\n"
    assert "no app not-mine" in await capsule.refused("open", "not-mine")

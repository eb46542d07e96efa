"""Deploys whose app was deleted or moved."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from gateway.accounts.records import App
from gateway.deploys.addresses import host
from gateway.deploys.states import DeployError
from gateway.events.catalog import Kind
from gateway.settings import Settings
from tests.support.hosted_apps import Hosting
from workers.engine.steps import ReleaseSteps
from workers.hosting.driver import HostDriver

APP = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")


@dataclass
class Apps:
    """The app's record at the time of the swap."""

    found: App | None

    async def find(self, app: str) -> App | None:
        return self.found if app == APP.id else None


@pytest.mark.parametrize("found", [None, msgspec.structs.replace(APP, account="acc_2")], ids=["deleted", "moved"])
async def test_the_deploy_of_a_deleted_app_gets_no_address(tmp_path: Path, found: App | None) -> None:
    """The name may belong to another account's app by now."""
    hosting = Hosting(tmp_path)
    apps = Apps(APP)
    steps = ReleaseSteps(HostDriver(Settings(data_dir=str(hosting.folder))), apps.find, "apps.test")
    deploy = hosting.deploy("dep_1")
    site = hosting.build(deploy, {"index.html": "x"})
    target = hosting.target(deploy, APP, "canary")
    apps.found = found
    with pytest.raises(DeployError, match="deleted"):
        await steps.serve(target)
    assert site.current is None
    assert not list((hosting.folder / "addresses").iterdir())
    apps.found = APP
    await steps.serve(target)
    assert site.current == "dep_1"


@pytest.mark.parametrize("kind", ["live", "preview"])
async def test_no_app_takes_the_address_of_another_app_s_preview(tmp_path: Path, kind: Kind) -> None:
    """The attacker's app has the name to which the victim's was shortened before."""
    name = "a" * 60
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    victim = msgspec.structs.replace(APP, id="victim", name=name)
    attacker = msgspec.structs.replace(APP, id="attacker", account="acc_2", name=f"{name[:46]}-{digest}")
    await deploy_both(tmp_path, victim, attacker, kind)


@pytest.mark.parametrize("kind", ["live", "preview"])
async def test_a_served_host_name_stays_with_its_app(tmp_path: Path, kind: Kind) -> None:
    """Two records with one name, such as after a failover that lost a renaming."""
    victim = msgspec.structs.replace(APP, id="victim", name="notes")
    attacker = msgspec.structs.replace(APP, id="attacker", account="acc_2", name="notes")
    with pytest.raises(DeployError, match="belongs to another app"):
        await deploy_both(tmp_path, victim, attacker, kind)


async def deploy_both(folder: Path, victim: App, attacker: App, kind: Kind) -> None:
    """Deploys the victim's app, then the attacker's. The victim's address shows the victim's release all the time."""
    hosting, apps = Hosting(folder), {app.id: app for app in (victim, attacker)}

    async def find_app(app: str) -> App | None:
        return apps.get(app) or next((each for each in apps.values() if each.name == app), None)

    steps = ReleaseSteps(HostDriver(Settings(data_dir=str(hosting.folder))), find_app, "apps.test")
    try:
        for number, app in enumerate((victim, attacker)):
            deploy = hosting.deploy(f"dep_{number}", app.id, kind)
            deploy = msgspec.structs.replace(deploy, app=app.name, account=app.account)
            hosting.build(deploy, {"index.html": app.id})
            await steps.serve(hosting.target(deploy, app, "live"))
    finally:
        served = hosting.folder / "addresses" / host(victim.name, kind, None, "apps.test")
        assert (served / "current" / "files" / "index.html").read_text() == victim.id

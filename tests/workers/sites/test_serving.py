"""What a deploy may still do when its app is no longer there."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from gateway.accounts.records import App
from gateway.settings import Settings
from tests.support.hosted_apps import Hosting
from workers.sites.serving import DeployError, Job, Serving

APP = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")


@dataclass
class Apps:
    """The records as they are when the deploy swaps."""

    found: App | None

    async def find(self, app: str) -> App | None:
        return self.found if app == APP.id else None


async def nothing(_: object) -> None: ...


@pytest.mark.parametrize("found", [None, msgspec.structs.replace(APP, account="acc_2")], ids=["deleted", "moved"])
async def test_a_deleted_app_s_deploy_takes_no_address(tmp_path: Path, found: App | None) -> None:
    """Its name may belong to another account's app by now."""
    hosting = Hosting(tmp_path)
    apps = Apps(APP)
    serving = Serving(Settings(data_dir=str(hosting.folder), apps_domain="apps.test"), apps.find)
    job = Job(hosting.deploy("dep_1"), APP, print, nothing, nothing)
    site = hosting.build(job.deploy, {"index.html": "x"})
    apps.found = found
    with pytest.raises(DeployError, match="deleted"):
        await serving.swap(job)
    assert site.current is None
    assert not list((hosting.folder / "addresses").iterdir())
    apps.found = APP
    await serving.swap(job)
    assert site.current == "dep_1"

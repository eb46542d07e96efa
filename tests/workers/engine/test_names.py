"""Which host names lead where on a host, as the apps' records change. The other cases are in the drivers' contract."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from gateway.accounts.records import App
from gateway.settings import Settings
from workers.engine.names import Names
from workers.hosting.driver import HostPlaces
from workers.hosting.releases import Releases

APP = App(id="app-1", name="shop", account="acc_1", createdAt="2026-01-01T00:00:00.000Z")


class Host:
    def __init__(self, folder: Path) -> None:
        self.apps, self.releases = [APP], Releases(folder)
        self.releases.create_folders()
        places = HostPlaces(Settings(data_dir=str(folder)), self.releases)
        self.names = Names(places, self.find_app, self.find_apps, "apps.test")

    async def find_app(self, name: str) -> App | None:
        return next((app for app in self.apps if name in (app.id, app.name)), None)

    async def find_apps(self, app_ids: Sequence[str]) -> dict[str, App]:
        return {app.id: app for app in self.apps if app.id in app_ids}

    async def follow(self) -> set[str]:
        """Returns the host names that lead to a site, after each way in which the records are followed."""
        await self.names.follow_app("app-1")
        for _ in range(8):
            await self.names.follow_some()
        return {name for names in self.releases.list_names().values() for name in names}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_an_app_that_was_never_live_has_a_site_without_a_release(host: Host) -> None:
    assert await host.follow() == {"shop.apps.test"}
    site = host.releases.site_at("shop.apps.test")
    assert site is not None
    assert (site.app_id, site.account, site.current) == ("app-1", "acc_1", None)
    assert (site.folder / "unpublished").exists()
    host.apps = [msgspec.structs.replace(APP, name="store")]
    assert await host.follow() == {"store.apps.test"}
    host.apps = [msgspec.structs.replace(APP, account="acc_2")]
    assert await host.follow() == set(), "the site is the former account's"
    host.apps = []
    assert await host.follow() == set()


async def test_a_name_that_is_served_is_not_taken(host: Host) -> None:
    host.apps = [msgspec.structs.replace(APP, id="app-2", name="shop-preview"), APP]
    site = host.releases.site("acc_1", "app-1", "preview")
    (site.release("dep_1")).mkdir()
    site.swap("dep_1")
    host.releases.serve_as("shop-preview.apps.test", site)
    await host.names.follow_app("shop-preview")
    found = host.releases.site_at("shop-preview.apps.test")
    assert found is not None
    assert found.app_id == "app-1"

"""Which host names lead to an app on a host that was never live. All other cases are in the drivers' contract."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gateway.accounts.records import App
from gateway.settings import Settings
from workers.engine.names import Names
from workers.hosting.driver import HostPlaces
from workers.hosting.releases import Releases

APP = App(id="app-1", name="shop", account="acc_1", createdAt="2026-01-01T00:00:00.000Z")


async def test_an_app_that_was_never_live_has_a_site_without_a_release(tmp_path: Path) -> None:
    apps, releases = [APP], Releases(tmp_path)
    releases.create_folders()

    async def find_app(name: str) -> App | None:
        return next((app for app in apps if name in (app.id, app.name)), None)

    async def find_apps(app_ids: Sequence[str]) -> dict[str, App]:
        return {app.id: app for app in apps if app.id in app_ids}

    async def follow(*present: App) -> list[str]:
        """Returns the host names that lead to a site, after each way in which the records are followed."""
        apps[:] = present
        await names.follow_app("app-1")
        for _ in range(8):
            await names.follow_some()
        return sorted(name for found in releases.list_names().values() for name in found)

    places = HostPlaces(Settings(data_dir=str(tmp_path)), releases)
    names = Names(places, find_app, find_apps, "apps.test")
    assert await follow(APP) == ["shop.apps.test"]
    site = releases.site_at("shop.apps.test")
    assert site is not None
    assert (site.app_id, site.account, site.current) == ("app-1", "acc_1", None)
    assert (site.folder / "unpublished").exists()
    assert await follow(msgspec.structs.replace(APP, name="store")) == ["store.apps.test"]
    assert await follow(msgspec.structs.replace(APP, account="acc_2")) == [], "the site is the former account's"
    assert await follow() == []

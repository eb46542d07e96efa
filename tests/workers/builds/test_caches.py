"""What package managers download stays until an app's next build: real builds, with a real gateway and workers."""

import os
from pathlib import Path

import pytest

from tests.support.deployment import Host
from workers.builds.caches import BuildCaches

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 1 << 20
# Shows how many builds before this one have left something, and leaves something itself.
COUNT = "mkdir -p ~/.cache/n dist; ls ~/.cache/n | wc -l > dist/index.html; touch ~/.cache/n/$(date +%N)"


async def deploy(host: Host, app: str, command: str = COUNT, kind: str = "live") -> dict[str, object]:
    await host.gateway.platform("PUT", f"apps/{app}", {"account": host.account.id, "build": {"command": command}})
    if kind == "live":
        return await host.over(await host.publish(app, {"a": "1"}))
    queued = await host.gateway.platform("POST", f"apps/{app}/deploys", {"kind": kind})
    return await host.over(queued.json()["deployId"])


async def test_each_live_build_finds_what_the_last_one_left(host: Host) -> None:
    app = await host.app()
    for number in range(2):
        ended = await deploy(host, app)
        assert (ended["state"], await host.page(app)) == ("live", f"{number}\n")
    assert "Using the packages that the last deploy downloaded" in str(ended["log"])
    # Neither a failed build, nor one that fails its check, nor a preview changes the cache.
    assert (await deploy(host, app, "rm -r ~/.cache/n; exit 3"))["state"] == "failed"
    assert (await deploy(host, app, "rm -r ~/.cache/n; mkdir dist"))["state"] == "failed"
    assert (await deploy(host, app, kind="preview"))["state"] == "live"
    assert await host.page(f"{app}-preview") == "2\n"
    assert (await deploy(host, app))["state"] == "live"
    assert await host.page(app) == "2\n"
    # Other apps have their own, and it can be cleared.
    other = await host.app()
    assert (await deploy(host, other))["state"] == "live"
    assert await host.page(other) == "0\n"
    answer = await host.account.call("POST", f"/account/apps/{app}/build-cache/clear")
    assert answer.status_code == 204
    assert (await deploy(host, app))["state"] == "live"
    assert await host.page(app) == "0\n"
    stranger = await host.gateway.account()
    assert (await stranger.call("POST", f"/account/apps/{app}/build-cache/clear")).status_code == 404


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


async def test_a_cache_follows_no_link_and_belongs_to_one_account(tmp_path: Path) -> None:
    caches, secret = BuildCaches(tmp_path, MIB), tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    made = fill(tmp_path / "made", a="1")
    (made / "link").symlink_to(secret)
    (made / "up").symlink_to("/")
    await caches.set_aside("dep_1", "acc_1 ", made)
    assert not await caches.copy("shop", "acc_1 ", tmp_path / "none", None), "the deploy is not live yet"
    await caches.adopt("dep_1", "shop")
    owner = 60_600 if os.geteuid() == 0 else None
    assert await caches.copy("shop", "acc_1 ", tmp_path / "copy", owner)
    assert sorted(os.listdir(tmp_path / "copy")) == ["a", "link", "up"]
    assert os.readlink(tmp_path / "copy" / "link") == str(secret)
    assert secret.stat().st_uid == os.geteuid()
    assert (tmp_path / "copy" / "a").stat().st_uid == (owner or os.geteuid())
    for other in ("acc_2 ", "acc_1 clr_1"):
        assert not await caches.copy("shop", other, tmp_path / "none", owner)
    assert (tmp_path / "caches").stat().st_mode & 0o777 == 0o700
    link = tmp_path / "itself"
    link.symlink_to(tmp_path / "copy")
    await caches.set_aside("dep_2", "acc_1 ", link)
    assert not (tmp_path / "caches" / ".dep_2").exists()


async def test_a_cache_has_a_limit_and_an_end(tmp_path: Path) -> None:
    caches = BuildCaches(tmp_path, MIB)
    await caches.set_aside("dep_1", "acc_1 ", fill(tmp_path / "large", a="x" * (MIB + 1)))
    await caches.adopt("dep_1", "shop")
    assert not (tmp_path / "caches" / "shop").exists()
    for deploy_id in ("dep_2", "dep_3", "dep_4"):
        await caches.set_aside(deploy_id, "acc_1 ", fill(tmp_path / deploy_id, a="1"))
    await caches.adopt("dep_2", "shop")
    caches.tidy({"dep_3"})
    assert sorted(os.listdir(tmp_path / "caches")) == [".dep_3", "shop"]
    os.utime(tmp_path / "caches" / "shop" / "origin", (0, 0))
    caches.tidy(set())
    assert os.listdir(tmp_path / "caches") == []
    off = BuildCaches(tmp_path, 0)
    await off.set_aside("dep_5", "acc_1 ", fill(tmp_path / "off", a="1"))
    await off.adopt("dep_5", "shop")
    assert os.listdir(tmp_path / "caches") == []

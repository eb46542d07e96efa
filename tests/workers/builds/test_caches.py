"""What package managers download stays until an app's next build: real builds, with a real gateway and workers."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.deployment import Host
from workers.builds.build import RUN
from workers.builds.caches import PARTS, BuildCaches

MIB = 1 << 20
# Shows how many builds before this one have left something, and leaves something itself.
COUNT = (
    "mkdir -p dist; for n in ~/.cache/n .next/cache/n .astro/n node_modules/.cache/n; do"
    " mkdir -p $n; ls $n | wc -l >> counts; touch $n/$(date +%N); done; xargs < counts > dist/index.html"
)


async def deploy(host: Host, app: str, command: str = COUNT, kind: str = "live") -> dict[str, object]:
    await host.gateway.platform("PUT", f"apps/{app}", {"account": host.account.id, "build": {"command": command}})
    if kind == "live":
        return await host.over(await host.publish(app, {"a": "1"}))
    queued = await host.gateway.platform("POST", f"apps/{app}/deploys", {"kind": kind})
    return await host.over(queued.json()["deployId"])


@pytest.mark.asyncio(loop_scope="session")
async def test_each_live_build_finds_what_the_last_one_left(host: Host) -> None:
    app = await host.app()
    for number in range(2):
        ended = await deploy(host, app)
        assert (ended["state"], await host.page(app)) == ("live", " ".join(4 * [str(number)]) + "\n")
    assert "Using the packages that the last deploy downloaded" in str(ended["log"])
    # Neither a failed build, nor one that fails its check, nor a preview changes the cache.
    assert (await deploy(host, app, "rm -r ~/.cache/n; exit 3"))["state"] == "failed"
    assert (await deploy(host, app, "rm -r ~/.cache/n; mkdir dist"))["state"] == "failed"
    assert (await deploy(host, app, kind="preview"))["state"] == "live"
    assert await host.page(f"{app}-preview") == "2 2 2 2\n"
    assert (await deploy(host, app))["state"] == "live"
    assert await host.page(app) == "2 2 2 2\n"
    # Other apps have their own, and it can be cleared.
    other = await host.app()
    assert (await deploy(host, other))["state"] == "live"
    assert await host.page(other) == "0 0 0 0\n"
    answer = await host.account.call("POST", f"/account/apps/{app}/build-cache/clear")
    assert answer.status_code == 204
    assert (await deploy(host, app))["state"] == "live"
    assert await host.page(app) == "0 0 0 0\n"


SAVED = Path("home/.cache")


def fill(build: Path, *, at: str | Path = SAVED, **files: str) -> Path:
    """Makes a folder of a build with these files at a place in it."""
    folder = build / at
    folder.mkdir(parents=True)
    (build / "source").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return build


async def keep(caches: BuildCaches, build: Path, app: str = "shop") -> None:
    await caches.set_aside("dep_1", "acc_1 ", build)
    await caches.adopt("dep_1", app)


async def test_a_cache_follows_no_link_and_belongs_to_one_account(tmp_path: Path) -> None:
    caches, secret = BuildCaches(tmp_path, MIB), tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    made = fill(tmp_path / "made", a="1")
    (made / SAVED / "link").symlink_to(secret)
    (made / SAVED / "up").symlink_to("/")
    await caches.set_aside("dep_1", "acc_1 ", made)
    assert not await caches.copy("shop", "acc_1 ", tmp_path / "none", None), "the deploy is not live yet"
    await caches.adopt("dep_1", "shop")
    owner = 60_600 if os.geteuid() == 0 else None
    build = tmp_path / "build"
    build.mkdir()
    assert await caches.copy("shop", "acc_1 ", build, owner)
    assert sorted(os.listdir(build / SAVED)) == ["a", "link", "up"]
    assert os.readlink(build / SAVED / "link") == str(secret)
    assert secret.stat().st_uid == os.geteuid()
    assert (build / SAVED / "a").stat().st_uid == (owner or os.geteuid())
    (tmp_path / "none").mkdir()
    for other in ("acc_2 ", "acc_1 clr_1"):
        assert not await caches.copy("shop", other, tmp_path / "none", owner)
    assert (tmp_path / "caches").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("part", PARTS)
async def test_a_part_of_the_cache_that_is_a_link_is_not_kept(tmp_path: Path, part: str) -> None:
    caches, elsewhere = BuildCaches(tmp_path, MIB), fill(tmp_path / "elsewhere", at="cache", secret="1")
    for depth in range(2, part.count("/") + 2):
        build, linked = tmp_path / f"build-{depth}", Path(*part.split("/")[:depth])
        (build / linked).parent.mkdir(parents=True)
        (build / linked).symlink_to(elsewhere if linked != Path(part) else elsewhere / "cache")
        await keep(caches, build)
        assert not (tmp_path / "caches" / "shop").exists()


async def test_a_source_can_not_send_the_cache_elsewhere(tmp_path: Path) -> None:
    caches, outside = BuildCaches(tmp_path, MIB), tmp_path / "outside"
    outside.mkdir()
    made = fill(tmp_path / "made", at="source/.next/cache", a="1")
    for part in ("source/.astro", "source/node_modules"):
        fill(made, at=part, a="1")
    await keep(caches, made)
    source = fill(tmp_path / "build") / "source"
    for name in (".next", ".astro"):
        (source / name).symlink_to(outside)
    (source / "node_modules").mkdir()
    assert await caches.copy("shop", "acc_1 ", source.parent, None)
    assert os.listdir(outside) == os.listdir(source / "node_modules") == []
    assert sorted(os.listdir(source.parent)) == ["home", "source"]


@pytest.mark.parametrize("part", PARTS)
async def test_folders_of_the_source_stay(tmp_path: Path, part: str) -> None:
    caches, owner = BuildCaches(tmp_path, MIB), 60_600 if os.geteuid() == 0 else None
    await keep(caches, fill(tmp_path / "made", at=part, a="1"))
    build = fill(tmp_path / "build", at="other")
    assert await caches.copy("shop", "acc_1 ", build, owner)
    assert (build / part / "a").read_text() == "1"
    assert (build / part).parent.stat().st_uid == (owner or os.geteuid()) or (build / part).parent == build / "source"
    (build / part / "a").write_text("2")
    again = fill(tmp_path / "again", at="other")
    assert await caches.copy("shop", "acc_1 ", again, None)
    assert (again / part / "a").read_text() == "1", "a build has changed the cache itself"


async def test_a_cache_has_a_limit_and_an_end(tmp_path: Path) -> None:
    caches = BuildCaches(tmp_path, MIB)
    await keep(caches, fill(tmp_path / "large", a="x" * (MIB + 1)))
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


NPM = """\
set -eu
case "$1" in
    ci) rm -rf node_modules; mkdir node_modules; echo ci >>log ;;
    *) echo "$*" >>log ;;
esac
"""


def run_build(source: Path, command: str) -> tuple[int, str]:
    tools = source.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name, program in {"npm": NPM, "node": "echo v24"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{program}")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", RUN, "sh", command], cwd=source, env=environment, capture_output=True, text=True)
    log = source / "log"
    calls = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    return done.returncode, calls


def test_node_modules_stays_while_the_lock_file_is_the_same(tmp_path: Path) -> None:
    source = fill(tmp_path, at="source", **{"package.json": "{}", "package-lock.json": "1"}) / "source"
    fill(source, at="web")
    build = "npm ci --omit=dev && npm run build && mkdir -p node_modules/.cache && touch node_modules/.cache/a"
    assert run_build(source, build) == (0, "ci\nrun build\n")
    assert run_build(source, build) == (0, "install --no-audit --no-fund --omit=dev\nrun build\n")
    (source / "package-lock.json").write_text("2")
    (source / "node_modules" / "left-pad").mkdir()
    assert run_build(source, "ls node_modules -A >log; npm ci; ls -A node_modules >>log") == (0, ".cache\nci\n.cache\n")
    assert run_build(source, "cd web && npm ci") == (0, "")
    assert (source / "web" / "log").read_text() == "ci\n"


def test_the_status_of_a_build_is_its_commands(tmp_path: Path) -> None:
    source = fill(tmp_path, at="source") / "source"
    for command, status in {"exit 3": 3, "set -e; false; true": 1, 'test "$#" = 0': 0, "if": 2, "exec true": 0}.items():
        assert run_build(source, command)[0] == status, command

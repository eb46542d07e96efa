"""Deploys from end to end, as account holders see them, with a real gateway, workers, git, builds and receiver."""

import asyncio
import errno
import hashlib
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from gateway.deploys.logs import FIRST_BYTES, LAST_BYTES, DeployLogs, Line, count_lines, read_lines
from gateway.deploys.records import Deploy
from gateway.errors import BackboneUnavailable
from gateway.keys import deploy_key, deploy_log_key, partition_tag
from gateway.settings import Settings
from tests.fakes.collector import HEADER_SECRET, FakeCollector, Span
from tests.support.accounts import DOMAIN
from tests.support.deployment import BUILD, START, Host, live, page, server
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.repositories import Repository
from workers.builds import builder
from workers.builds.builder import DeployLog

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_no_start_command_starts_without_free_memory(own: Host) -> None:
    await own.worker("deploys", constants={"workers.hosting.driver.MIN_FREE_BYTES": 1 << 60})
    app = await own.app(build=START)
    deploy = await own.over(await own.publish(app, server("one")))
    assert deploy["state"] == "failed"
    assert "no memory left for another app" in deploy["log"]


@pytest.fixture
def folder() -> Iterator[Path]:
    with passable_folder() as folder:
        yield folder


def commit(repository: Repository, text: str) -> str:
    return repository.commit("build.sh", f'mkdir dist && echo "{text} $VITE_SERVICE_AI_URL" > dist/index.html')


async def test_a_hook_rebuilds_the_latest_commit_and_its_preview(host: Host, folder: Path) -> None:
    repository = Repository(folder / "repository", "trunk")
    repository.commit("photo.png", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    first = commit(repository, "one")
    app = await host.app(repository={"url": repository.url}, build=BUILD)
    deploy = await host.over(await host.trigger(await host.hook(app)))
    assert deploy["state"] == "live", (deploy.get("error"), deploy.get("log"))
    assert (deploy["commit"], deploy["trigger"], deploy["by"]) == (first, "hook", "ci")
    assert (deploy["message"], deploy["branch"], deploy["kind"]) == ("build.sh", "trunk", "live")
    assert deploy["warning"] == "In Git LFS, and not fetched (1): photo.png. Commit these files without LFS."
    ai_url = f"{host.gateway.address}/capsule/{app}/ai"
    assert await host.page(app) == f"one {ai_url}\n"
    [(event, data)] = await host.events(deploy["id"])
    assert event == "deploy.succeeded"
    assert (data["kind"], data["url"], data["appName"]) == ("live", f"https://{app}.{DOMAIN}", app)
    assert f"Commit {first}" in deploy["log"]

    repository.git("checkout", "-b", "Feature/New_Thing!")
    commit(repository, "three")
    queued = await host.gateway.platform(
        "POST", f"apps/{app}/deploys", {"kind": "preview", "branch": "Feature/New_Thing!"}
    )
    deploy = await host.over(queued.json()["deployId"])
    assert deploy["url"] == f"https://{app}--p-feature-new-thing.{DOMAIN}", deploy
    assert await host.page(f"{app}--p-feature-new-thing") == f"three {ai_url}\n"
    assert await host.page(app) == f"one {ai_url}\n"


async def test_an_old_git_is_reported_at_the_start_and_hinders_no_uploads(own: Host) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # builds have a /tmp of their own
        os.chmod(folder, 0o755)
        git = Path(folder, "git")
        git.write_text("#!/bin/sh\necho git version 2.30.2\n")
        git.chmod(0o755)
        worker = await own.worker("deploys", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
        assert "deploys.no_repositories" in worker.log
        await live(own, await own.app(build=BUILD), page("published"))


async def test_pages_are_checked_and_served_by_the_rules_of_their_release(host: Host) -> None:
    app = await host.app()
    first = {
        "en/index.html": "english",
        "_redirects": "/ /en/ 302\n/a /b Country=de\n",
        "_headers": "/*\n  X-Own: yes\n",
    }
    deploy = await host.deploy(await live(host, app, first))
    assert deploy["warning"] == "_redirects:2 is skipped: conditions are not supported; write: from to [status]."
    assert "_redirects:2 is skipped: conditions are not supported" in deploy["log"]
    found = await host.web.get("/", headers={"Host": f"{app}.{DOMAIN}"}, follow_redirects=False)
    assert (found.status_code, found.headers["location"], found.headers["x-own"]) == (302, "/en/", "yes")
    for files in ({"200.html": "app"}, {"index.html": "home", "404.html": "lost", "_redirects": "/* /404.html 404"}):
        await live(host, app, files)
        assert await host.page(app) in ("app", "home")


async def test_each_failed_phase_is_reported_once_and_keeps_the_served_release(host: Host) -> None:
    """Pages are checked as visitors get them, by the rules of their release."""
    app = await host.app(build={"command": "[ ! -e build.sh ] || sh build.sh", "output": "."})
    await live(host, app, {"index.html": "home"})
    for files, phase, reason in [
        ({"build.sh": "exit 3"}, "build", "the build command ended with status 3"),
        ({"other.html": "no page"}, "health", "GET / returned 404"),
        ({"index.html": "home", "_redirects": "/ /gone.html 410!"}, "health", "GET / returned 410"),
    ]:
        deploy = await host.over(await host.publish(app, files))
        assert (deploy["state"], deploy["error"]) == ("failed", f"{phase}: {reason}")
        [(event, data)] = await host.events(deploy["id"])
        assert (event, data["phase"], data["reason"]) == ("deploy.failed", phase, reason)
        assert await host.page(app) == "home"


@pytest.mark.parametrize("state", ["building", "canary"])
async def test_the_next_worker_makes_a_stopped_workers_deploy(own: Host, state: str) -> None:
    app = await own.app(build={"command": "sleep 1", **START})
    worker = await own.worker("deploys", GATEWAY_CANARY="60")
    deploy = await own.publish(app, server("good"))
    await own.in_state(deploy, state)
    assert await worker.stop() == 0
    assert (await own.deploy(deploy))["state"] == "queued"
    await own.worker("deploys")
    assert (await own.over(deploy))["state"] == "live"
    assert await own.page(app) == "good"


async def test_an_apps_name_that_now_belongs_to_another_account(host: Host) -> None:
    app = await host.app(build=BUILD)
    await live(host, app, page("mine"))
    slow = await host.publish(app, page("mine", "sleep 2;"))
    await host.in_state(slow, "building")
    waiting = await host.publish(app, page("mine"))
    other = await host.gateway.account("maker")
    assert (await host.gateway.platform("DELETE", f"apps/{app}")).status_code == 204
    taken = {"account": other.id, "build": {"command": "echo secret", "output": "."}}
    assert (await host.gateway.platform("PUT", f"apps/{app}", taken)).is_success
    deploy = await host.over(waiting)
    assert deploy["state"] == "canceled"
    assert "secret" not in deploy["log"]
    # Visitors of the second account's app do not see the first account's release.
    await wait_until(lambda: host.page(app), 20, holds=lambda text: text == "404")
    host.account = other
    await live(host, app, {"index.html": "theirs"})
    assert await host.page(app) == "theirs"


async def test_a_domain_is_served_as_soon_as_it_is_verified_and_no_longer(own: Host) -> None:
    """The builder tidies the addresses only every 15 seconds; it hears of changes."""
    await own.worker("deploys")
    app, domain = await own.app(build={"output": "."}), f"{secrets.token_hex(6)}.example.org"
    await own.over(await own.publish(app, {"index.html": "shop"}))

    async def shown() -> str:
        return (await own.web.get("/", headers={"Host": domain})).text

    async def put(**fields: Any) -> None:
        record = {"account": own.account.id, "build": {"output": "."}, **fields}
        assert (await own.gateway.platform("PUT", f"apps/{app}", record)).is_success

    assert await shown() != "shop"
    for _ in range(2):
        await put(customDomain=domain, customDomainVerified=True)
        await wait_until(shown, 2, holds=lambda text: text == "shop")
        await put()
        await wait_until(shown, 2, holds=lambda text: text != "shop")
    assert await own.page(app) == "shop"
    assert (await own.account.call("DELETE", f"/account/apps/{app}")).status_code == 204
    await wait_until(lambda: own.page(app), 2, holds=lambda text: text == "404")


async def roll_back(host: Host, app: str, deploy: str | None = None) -> str:
    body = {} if deploy is None else {"json": {"deployId": deploy}}
    return (await host.call("POST", f"/account/apps/{app}/rollback", **body))["deployId"]


async def test_a_rollback_serves_an_earlier_release_without_a_build(host: Host) -> None:
    app = await host.app(build=BUILD)
    one, two = await live(host, app, page("one")), await live(host, app, page("two"))
    # From now on, every build would fail.
    await host.gateway.platform("PUT", f"apps/{app}", {"account": host.account.id, "build": {"command": "exit 1"}})
    back = await host.over(await roll_back(host, app))
    assert (back["state"], back["trigger"], back["release"], back["kind"]) == ("live", "rollback", one, "live"), back
    assert await host.page(app) == "one\n"
    [(event, data)] = await host.events(back["id"])
    assert (event, data["kind"]) == ("deploy.succeeded", "live")
    again = await host.over(await roll_back(host, app, two))
    assert (again["state"], again["release"]) == ("live", two)
    assert await host.page(app) == "two\n"
    # The release of a rollback can be the target of another rollback.
    assert (await host.over(await roll_back(host, app, back["id"])))["state"] == "live"
    assert await host.page(app) == "one\n"


async def test_a_rollback_waits_for_no_build_and_ends_that_of_its_app(host: Host) -> None:
    app = await host.app(build=BUILD)
    others = [await host.app(build=BUILD) for _ in range(3)]
    first = await live(host, app, page("one"))
    await live(host, app, page("two"))
    coming = await host.publish(app, page("three", "sleep 120;"))
    await host.in_state(coming, "building")
    slow = [await host.publish(other, page("x", "sleep 120;")) for other in others]

    async def some_build() -> bool:
        return "building" in [(await host.deploy(deploy))["state"] for deploy in slow]

    await wait_until(some_build, 20)
    back = await host.over(await roll_back(host, app))
    assert (back["state"], back["release"]) == ("live", first), "the build that it ends does not count as the live one"
    assert await host.page(app) == "one\n"
    replaced = await host.deploy(coming)
    assert (replaced["state"], replaced["error"]) == (
        "canceled",
        f"replaced by {back['id']}, a rollback to an existing release",
    )
    assert await some_build()


async def test_canceling_a_build_ends_all_its_processes(host: Host) -> None:
    app = await host.app(build=BUILD)
    await live(host, app, page("one"))
    deploy = await host.publish(app, page("two", "(sleep 64.321 &) ; echo begun; sleep 64.321;"))
    await wait_until(lambda: host.deploy(deploy), 20, holds=lambda found: "begun" in found["log"])
    canceled = await host.call("POST", f"/account/deploys/{deploy}/cancel")
    assert canceled["state"] == "canceled"
    await wait_until(lambda: not subprocess.run(["pgrep", "-f", "sleep 64.321"], capture_output=True).stdout, 10)
    builds, release = host.gateway.data_folder / "builds", f"releases/{app}/live/{deploy}"
    await wait_until(lambda: not [*builds.iterdir()], 10)
    assert not (host.gateway.data_folder / release).exists()
    # The next deploy succeeds, only it causes an event, and the queue is empty.
    after = await live(host, app, page("three"))
    await host.events(after)
    received = [exchange.json["data"].get("deployId") for exchange in host.receiver.exchanges]
    assert deploy not in received
    shown = await host.deploy(deploy)
    assert (shown["state"], shown["error"]) == ("canceled", "canceled on request")
    assert "The deploy was canceled" in shown["log"]
    assert await host.page(app) == "three\n"
    with host.gateway.redis.client() as client:
        key = f"{partition_tag(host.account.id)}:builds"
        await wait_until(lambda: client.xlen(key) == 0)
        assert client.xpending(key, "deploys")["pending"] == 0


async def test_a_build_canceled_while_its_worker_is_dead_stays_canceled(own: Host) -> None:
    app = await own.app(build=BUILD)
    worker = await own.worker("deploys")
    deploy = await own.publish(app, page("one", "sleep 120;"))
    await own.in_state(deploy, "building")
    worker.kill()
    await own.call("POST", f"/account/deploys/{deploy}/cancel")
    await own.worker("deploys")
    assert (await own.over(await own.publish(app, page("two"))))["state"] == "live"
    assert (await own.deploy(deploy))["state"] == "canceled"


async def test_queued_deploys_show_what_they_wait_for(own: Host) -> None:
    app, other, third = [await own.app(build=BUILD) for _ in range(3)]
    first = await own.publish(app, page("one", "sleep 120;"))
    assert (await own.deploy(first))["waitsFor"] == "a worker that builds deploys; none is running"
    await own.worker("deploys")
    await own.in_state(first, "building")
    second = await own.publish(app, page("two"))
    await own.in_state(await own.publish(other, page("x", "sleep 120;")), "building")
    waits = await own.publish(third, page("three"))

    async def positions() -> bool:
        found = {deploy["id"]: deploy for deploy in await own.call("GET", "/account/deploys")}
        return [found[deploy].get("position") for deploy in (waits, second)] == [1, 2]

    await wait_until(positions, 10)
    assert (await own.deploy(waits))["waitsFor"] == "a free slot for builds"
    assert (await own.deploy(second))["waitsFor"] == f"{first}, an earlier deploy of this app"
    assert "position" not in await own.deploy(first)


LOGGED = {"command": "echo to the log; mkdir dist; echo good > dist/index.html", "output": "dist"}


@pytest.mark.parametrize(("state", "command"), [("live", LOGGED["command"]), ("failed", "echo to the log; exit 3")])
async def test_a_log_leaves_redis_when_its_deploy_ends(host: Host, state: str, command: str) -> None:
    app = await host.app(build={**LOGGED, "command": command})
    deploy_id = await host.publish(app, {"a": "b"})
    assert (await host.over(deploy_id))["state"] == state
    with host.gateway.redis.client() as client:
        await wait_until(lambda: not client.exists(deploy_log_key(host.account.id, deploy_id)))
    shown = await host.deploy(deploy_id)
    lines = shown["log"].splitlines()
    assert "to the log" in lines
    assert len(shown["logTimes"]) == len(lines)
    assert shown["logTimes"] == sorted(shown["logTimes"])
    assert shown["current"] == (state == "live")
    phases = [(phase["phase"], phase["state"], "durationMs" in phase) for phase in shown["phases"]]
    if state == "live":
        assert phases == [("build", "done", True), ("health", "done", True), ("canary", "done", True)]
    else:
        assert phases == [("build", "failed", True), ("health", "waiting", False), ("canary", "waiting", False)]


async def test_unreadable_entries_do_not_stop_workers_or_delay_apps(own: Host) -> None:
    """An entry with a broken deploy gets three attempts. Other unreadable entries become dead letters at once."""
    app = await own.app(build=LOGGED)
    tag, account = partition_tag(own.account.id), own.account.id
    stream = f"{tag}:builds"
    stranger = next(name for name in map("acc_{}".format, range(300)) if partition_tag(name) != tag)
    with own.gateway.redis.client() as client:
        app_id = (await own.gateway.platform("GET", f"apps/{app}")).json()["id"]
        broken = deploy_key(account, "dep_broken")
        client.hset(broken, mapping={"id": "dep_broken", "state": "no such state"})
        client.expire(broken, 600)
        poison: list[dict[Any, Any]] = [
            {b"\xff": b"\xfe"},
            {"account": account, "app": app_id},
            {"id": "dep_x", "account": stranger, "app": app_id},
            {"id": "dep_broken", "account": account, "app": app_id},
        ]
        for fields in poison:
            client.xadd(stream, fields)
        worker = await own.worker("deploys", GATEWAY_WEBHOOK_CLAIM_IDLE="2")
        worker.tracebacks_allowed = True
        assert (await own.over(await own.publish(app, {"a": "b"})))["state"] == "live"
        await wait_until(lambda: client.xlen(f"{tag}:dead") == len(poison), 30)
        await wait_until(lambda: client.xlen(stream) == 0)
    assert worker.code is None
    assert worker.log.count("deploy.postponed") == 3


async def test_each_release_has_an_archive_until_it_is_removed(own: Host) -> None:
    await own.worker("deploys", constants={"workers.hosting.releases.KEPT_RELEASES": 2})
    app = await own.app(build=LOGGED)
    folder = own.gateway.data_folder / "archives"
    deploys = [await live(own, app, {"a": str(number)}) for number in range(3)]
    back = (await own.call("POST", f"/account/apps/{app}/rollback", json={}))["deployId"]
    assert (await own.over(back))["state"] == "live"

    def archives() -> list[str]:
        return sorted(path.name.partition(".")[0] for path in folder.rglob("*.tar.gz"))

    await wait_until(lambda: archives() == [deploys[-1], back], 5)
    with own.gateway.redis.client() as client:
        for deploy in (deploys[-1], back):
            digest, size = client.hmget(deploy_key(own.account.id, deploy), "digest", "size")
            [archive] = folder.rglob(f"{deploy}.tar.gz")
            assert hashlib.sha256(archive.read_bytes()).hexdigest() == digest.decode()
            assert archive.stat().st_size == int(size)


FILES = {
    "building": page("two", "sleep 120;"),
    "checking": {"capsule.toml": '[build]\nstart = "sleep 600"\n'},
    "canary": page("two"),
}


@pytest.mark.parametrize("state", FILES)
async def test_a_deploy_in_progress_is_undone(own: Host, state: str) -> None:
    """The page is back afterwards, and the next deploy of the app does not wait for the end of this one."""
    in_canary = state == "canary"  # of the first deploy: nothing is served before
    await own.worker("deploys", "webhooks", **({"GATEWAY_CANARY": "5"} if in_canary else {}))
    app, before = await own.app(build=BUILD), "404" if in_canary else "one\n"
    if not in_canary:
        await live(own, app, page("one"))
    deploy = await own.publish(app, FILES[state])
    await own.in_state(deploy, state)
    assert (await own.gateway.platform("PUT", f"apps/{app}/suspension", {"reason": "test"})).status_code == 200
    ended = await own.deploy(deploy)
    assert (ended["state"], ended["error"]) == ("canceled", "the app was suspended")
    await wait_until(lambda: own.page(app), 10, holds=lambda text: text == ("404" if in_canary else "503"))
    await wait_until(lambda: not (own.gateway.data_folder / "builds" / deploy).exists(), 10)
    assert (await own.gateway.platform("DELETE", f"apps/{app}/suspension")).status_code == 204
    await wait_until(lambda: own.page(app), 10, holds=lambda text: text == before)
    began = time.monotonic()
    last = await live(own, app, page("three"))
    assert time.monotonic() - began < 30
    await own.events(last)
    assert {exchange.json["type"] for exchange in own.receiver.exchanges} == {"deploy.succeeded"}


INTERNAL, CONSUMER = 1, 5
PAGE = "echo output-of-the-build; mkdir dist; echo text-of-the-page > dist/index.html"


async def test_each_deploy_has_one_trace(own: Host) -> None:
    async with FakeCollector() as collector:
        own.gateway.confidential.add(HEADER_SECRET)
        app = await own.app(build={"command": "sh build.sh", "output": "dist"})
        await own.worker("deploys", **collector.settings())

        async def deploy(script: str, state: str) -> list[Span]:
            deploy_id = await own.publish(app, {"build.sh": script})
            assert (await own.over(deploy_id))["state"] == state
            return await collector.wait_for_trace("capsule.deploy", deploy_id)

        root, *stages = await deploy(PAGE, "live")
        assert (root.name, root.kind, root.failed, root.error) == ("deploy", CONSUMER, False, None)
        assert root.attributes.pop("capsule.deploy").startswith("dep_")
        assert root.attributes == {
            "capsule.account": own.account.id,
            "capsule.app": app,
            "capsule.deploy.kind": "live",
            "capsule.deploy.trigger": "upload",
            "capsule.outcome": "live",
        }
        assert [span.name for span in stages] == ["wait", "build", "health", "canary", "finish"]
        assert {(span.kind, span.failed, span.error) for span in stages} == {(INTERNAL, False, None)}
        ends = [moment for span in stages for moment in (span.began, span.ended)]
        assert sorted(ends) == ends

        root, *stages = await deploy("echo output-of-the-build; exit 3", "failed")
        assert [(span.name, span.error, span.failed) for span in (root, *stages)] == [
            ("deploy", "DeployError", True),
            ("wait", None, False),
            ("build", "DeployError", True),
        ]
        assert root.attributes["capsule.outcome"] == "failed"

        hidden = {"output-of-the-build", "text-of-the-page", "build.sh", *own.gateway.confidential}
        assert not [text for text in hidden if text.encode() in collector.raw]


DEPLOY = Deploy(
    id="dep_1",
    account="acc_1",
    app="shop",
    appId="app_1",
    kind="live",
    state="building",
    trigger="upload",
    createdAt="",
)


class Stored:
    """Stands for `DeployLogs`."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.lines: list[Line] = []
        self.failures = 0

    async def append(self, deploy: Deploy, text: str) -> None:
        if self.failures:
            self.failures -= 1
            raise BackboneUnavailable
        self.texts.append("".join(f"{line.text}\n" for line in read_lines(text)))
        self.lines += read_lines(text)


@pytest.fixture
def stored() -> Stored:
    return Stored()


def flushed(stored: Stored) -> DeployLog:
    return DeployLog(cast("DeployLogs", stored), DEPLOY, flush_seconds=0.01)


async def test_lines_are_flushed_regularly_and_at_the_end_and_wait_for_redis_in_order(stored: Stored) -> None:
    stored.failures = 1
    async with flushed(stored) as lines:
        lines.write_line("one")
        await wait_until(lambda: stored.failures == 0)
        lines.write_line("two")
        await wait_until(lambda: "".join(stored.texts) == "one\ntwo\n")
        lines.write_line("three")
    assert "".join(stored.texts) == "one\ntwo\nthree\n"


async def test_a_canceled_deploy_keeps_its_last_lines(stored: Stored) -> None:
    async def deploy() -> None:
        async with flushed(stored) as lines:
            await asyncio.sleep(0.05)
            lines.write_line("last")
            await asyncio.sleep(0)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await deploy()
    assert stored.texts == ["last\n"]


async def test_control_characters_are_dropped(stored: Stored) -> None:
    """Among them are those that mark the times of lines, and missing lines."""
    async with flushed(stored) as lines:
        for line in ("\x1b[31mred\x1b[0m\x07", "\x1b]0;title\x07abcdefg", "\x1e500"):
            lines.write_line(line)
    assert "".join(stored.texts) == "red\nabcdefg\n500\n"


async def test_lines_that_wait_are_bounded(stored: Stored) -> None:
    """While Redis is away, a build may print much more than a log keeps."""
    stored.failures = 1_000_000
    async with flushed(stored) as lines:
        for number in range(60_000):
            lines.write_line(f"line {number}")
            assert number % 1_000 or sum(map(len, lines._lines)) < 3 * (FIRST_BYTES + LAST_BYTES)
        lines.write_line("Failed: status 7")
        stored.failures = 0
    assert count_lines(stored.lines) == 60_001
    assert (stored.lines[0].text, stored.lines[-1].text) == ("line 0", "Failed: status 7")
    assert len("".join(stored.texts)) < FIRST_BYTES + LAST_BYTES


async def test_a_flood_is_flushed_at_a_pace(stored: Stored) -> None:
    async with flushed(stored) as lines:
        for _ in range(5_000):
            lines.write_line("y" * 100)
        await wait_until(lambda: len(stored.texts) == 1)
        lines.write_line("waits")
        await asyncio.sleep(0.1)
        assert len(stored.texts) == 1
    assert stored.texts[-1] == "waits\n"


async def test_a_full_disk_is_said_to_be_full(stored: Stored, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = builder.Builder(Settings(data_dir=str(tmp_path)))
    for change in ("_undo", "_finish_phase"):
        monkeypatch.setattr(worker, change, AsyncMock())
    async with flushed(stored) as log:
        await worker._fail_phase(DEPLOY, "build", OSError(errno.EDQUOT, "Disk quota exceeded"), log)
    assert "".join(stored.texts) == "Failed: the disk of the service is full; deploy again later\n"

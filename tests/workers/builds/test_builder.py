"""Deploys from end to end, as account holders see them, with a real gateway, workers, git, builds and receiver."""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.accounts import DOMAIN
from tests.support.deployment import BUILD, START, Host, live, server
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.repositories import Repository

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
    repository = Repository(folder / "repository")
    first = commit(repository, "one")
    app = await host.app(repository={"url": repository.url}, build=BUILD)
    hook = await host.hook(app)

    deploy = await host.over(await host.trigger(hook))
    assert deploy["state"] == "live", (deploy.get("error"), deploy.get("log"))
    assert (deploy["commit"], deploy["trigger"], deploy["by"]) == (first, "hook", "ci")
    assert (deploy["message"], deploy["branch"], deploy["kind"]) == ("build.sh", "main", "live")
    ai_url = f"{host.gateway.address}/capsule/{app}/ai"
    assert await host.page(app) == f"one {ai_url}\n"
    [(event, data)] = await host.events(deploy["id"])
    assert event == "deploy.succeeded"
    assert (data["kind"], data["url"], data["appName"]) == ("live", f"https://{app}.{DOMAIN}", app)
    assert f"Commit {first}" in deploy["log"]

    second = commit(repository, "two")
    await host.gateway.switch(enabled=False)
    try:
        deploy = await host.over(await host.trigger(hook))
    finally:
        await host.gateway.switch(enabled=True)
    assert (deploy["state"], deploy["commit"]) == ("live", second)
    assert await host.page(app) == "two \n"  # inference was off: no address

    repository.git("checkout", "-b", "Feature/New_Thing!")
    commit(repository, "three")
    queued = await host.gateway.platform(
        "POST", f"apps/{app}/deploys", {"kind": "preview", "branch": "Feature/New_Thing!"}
    )
    deploy = await host.over(queued.json()["deployId"])
    assert deploy["url"] == f"https://{app}--p-feature-new-thing.{DOMAIN}", deploy
    assert await host.page(f"{app}--p-feature-new-thing") == f"three {ai_url}\n"
    assert await host.page(app) == "two \n"

    (listed,) = await host.call("GET", "/account/hooks")
    assert (await host.account.call("DELETE", f"/account/hooks/{listed['id']}")).status_code == 204
    assert (await host.gateway.http.post(hook)).status_code == 404


async def test_files_in_lfs_are_named_on_the_row_and_the_default_branch_is_followed(host: Host, folder: Path) -> None:
    repository = Repository(folder / "repository", "trunk")
    repository.commit("index.html", "of main")
    repository.git("branch", "main")
    repository.commit("index.html", "a page")
    repository.commit("photo.png", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    app = await host.app(repository={"url": repository.url})
    deploy = await host.over(await host.trigger(await host.hook(app)))
    assert (deploy["state"], await host.page(app)) == ("live", "a page"), deploy
    assert deploy["warning"] == "In Git LFS, and not fetched (1): photo.png. Commit these files without LFS."
    assert deploy["warning"] in deploy["log"]


@pytest.fixture
def old_git() -> Iterator[str]:
    """A folder with a git of an old version, where builds see it: they have a /tmp of their own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        git = Path(folder, "git")
        git.write_text("#!/bin/sh\necho git version 2.30.2\n")
        git.chmod(0o755)
        yield folder


async def test_an_old_git_is_reported_at_the_start_and_clones_nothing(own: Host, tmp_path: Path, old_git: str) -> None:
    worker = await own.worker("deploys", PATH=f"{old_git}{os.pathsep}{os.environ['PATH']}")
    assert "deploys.no_repositories" in worker.log
    cloned = await own.app(repository={"url": f"file://{tmp_path}"}, build=BUILD)
    deploy = await own.over(await own.trigger(await own.hook(cloned)))
    assert deploy["error"] == "build: repositories can't be cloned: the worker needs git 2.37 or newer"
    published = await own.app(build=BUILD)
    files = {"build.sh": "mkdir dist; echo page > dist/index.html"}
    assert (await own.over(await own.publish(published, files)))["state"] == "live"


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
        ({"index.html": "home", "404.html": "lost", "_redirects": "/* /404.html 404!"}, "health", "GET / returned 404"),
        ({"index.html": "home", "_redirects": "/ /gone.html 410!"}, "health", "GET / returned 410"),
        ({"en/a.html": "a", "_redirects": "/ /none.html 200"}, "health", "GET / returned 404"),
    ]:
        deploy = await host.over(await host.publish(app, files))
        assert (deploy["state"], deploy["error"]) == ("failed", f"{phase}: {reason}")
        [(event, data)] = await host.events(deploy["id"])
        assert (event, data["phase"], data["reason"]) == ("deploy.failed", phase, reason)
        assert await host.page(app) == "home"


async def _is(host: Host, app: str, text: str) -> bool:
    return await host.page(app) == text


async def test_a_damaged_record_does_not_affect_served_apps(host: Host, busy: Host) -> None:
    damaged, other = await host.app(build=BUILD), await host.app(build=BUILD)
    [worker] = busy.workers
    page = {"build.sh": "mkdir dist; echo page > dist/index.html"}
    assert (await host.over(await host.publish(damaged, page)))["state"] == "live"
    await asyncio.sleep(1)  # the host still applies the last step of the deploy, and reads the app for it
    with host.gateway.redis.client() as client:
        record = client.get(f"app:{damaged}")
        client.set(f"app:{damaged}", "{")
        try:
            await wait_until(lambda: worker.log.count("app.unreadable") > 2, 10)
            assert (await host.over(await host.publish(other, page)))["state"] == "live"
            assert [await host.page(app) for app in (damaged, other)] == ["page\n", "page\n"]
        finally:
            client.set(f"app:{damaged}", record)


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
    page = {"build.sh": "mkdir dist; echo mine > dist/index.html"}
    assert (await host.over(await host.publish(app, page)))["state"] == "live"
    slow = await host.publish(app, {"build.sh": "sleep 2; " + page["build.sh"]})
    await host.in_state(slow, "building")
    waiting = await host.publish(app, page)
    other = await host.gateway.account("maker")
    assert (await host.gateway.platform("DELETE", f"apps/{app}")).status_code == 204
    taken = {"account": other.id, "build": {"command": "echo secret", "output": "."}}
    assert (await host.gateway.platform("PUT", f"apps/{app}", taken)).is_success
    deploy = await host.over(waiting)
    assert deploy["state"] == "canceled"
    assert "secret" not in deploy["log"]
    # Visitors of the second account's app do not see the first account's release.
    await wait_until(lambda: _is(host, app, "404"), 20)
    host.account = other
    deploy = await host.over(await host.publish(app, {"index.html": "theirs"}))
    assert deploy["state"] == "live", f"{deploy}"
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

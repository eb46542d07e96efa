"""Deploys from end to end, as account holders see them: gateway, workers, git, builds and a receiver are real."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeProvider
from tests.support.accounts import DOMAIN
from tests.support.deployment import Host, hosting
from tests.support.folders import passable_folder
from tests.support.polling import wait_until

BUILD = {"command": "sh build.sh", "output": "dist"}
START = {"start": "exec node server.js"}
TIDY = "workers.deploys.builder.TIDY_INTERVAL"


def server(text: str, more: str = "") -> dict[str, str]:
    serve = f"require('http').createServer((_, answer) => answer.end('{text}')).listen(process.env.PORT)"
    return {"server.js": f"{serve}\n{more}\n"}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with FakeProvider() as provider, hosting(provider, tmp_path) as host:
        yield host


def git(folder: Path, *arguments: str) -> str:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    command = ["git", "-C", str(folder), "-c", "init.defaultBranch=main", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **identity})
    return done.stdout.strip()


def commit(folder: Path, text: str) -> str:
    (folder / "build.sh").write_text(f'mkdir dist && echo "{text} $VITE_SERVICE_AI_URL" > dist/index.html')
    git(folder, "add", "-A")
    git(folder, "commit", "-m", text)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository() -> Iterator[Path]:
    with passable_folder() as folder:
        (folder / "repository").mkdir()
        yield folder / "repository"


async def test_a_hook_rebuilds_the_latest_commit_and_its_preview(host: Host, repository: Path) -> None:
    git(repository, "init")
    first = commit(repository, "one")
    app = await host.app(repository={"url": f"file://{repository}"}, build=BUILD)
    hook = await host.hook(app)
    await host.worker("deploys", "webhooks")

    deploy = await host.over(await host.trigger(hook))
    assert deploy["state"] == "live", (deploy.get("error"), deploy.get("log"))
    assert (deploy["commit"], deploy["trigger"]) == (first, "hook")
    ai_url = f"{host.gateway.address}/capsule/{app}/ai"
    assert await host.page(app) == f"one {ai_url}\n"
    [(event, data)] = await host.events(deploy["id"])
    assert event == "deploy.succeeded"
    assert (data["kind"], data["url"], data["appName"]) == ("live", f"https://{app}.{DOMAIN}", app)
    assert f"Commit {first}" in deploy["log"]

    second = commit(repository, "two")
    await host.gateway.switch(enabled=False)
    deploy = await host.over(await host.trigger(hook))
    assert (deploy["state"], deploy["commit"]) == ("live", second)
    assert await host.page(app) == "two \n"  # inference is off: no address

    git(repository, "checkout", "-b", "Feature/New_Thing!")
    commit(repository, "three")
    queued = await host.gateway.platform(
        "POST", f"apps/{app}/deploys", {"kind": "preview", "branch": "Feature/New_Thing!"}
    )
    deploy = await host.over(queued.json()["deployId"])
    assert deploy["url"] == f"https://{app}--p-feature-new-thing.{DOMAIN}", deploy
    assert await host.page(f"{app}--p-feature-new-thing") == "three \n"
    assert await host.page(app) == "two \n"

    assert (
        await host.gateway.http.delete(
            f"/account/hooks/{(await host.call('GET', '/account/hooks'))[0]['id']}",
            headers={"Authorization": f"Bearer {host.account.key}"},
        )
    ).status_code == 204
    assert (await host.gateway.http.post(hook)).status_code == 404


async def test_an_old_git_is_told_at_the_start_and_clones_nothing(host: Host, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "git").write_text("#!/bin/sh\necho git version 2.30.2\n")
    (tools / "git").chmod(0o755)
    for folder in (tools, *tools.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)  # the worker leaves out folders that builds can't enter
    host.gateway.environment["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
    worker = await host.worker("deploys")
    assert "deploys.no_repositories" in worker.log
    cloned = await host.app(repository={"url": f"file://{tmp_path}"}, build=BUILD)
    deploy = await host.over(await host.trigger(await host.hook(cloned)))
    assert deploy["error"] == "build: repositories can't be cloned: the worker needs git 2.37 or newer"
    published = await host.app(build=BUILD)
    files = {"build.sh": "mkdir dist; echo page > dist/index.html"}
    assert (await host.over(await host.publish(published, files)))["state"] == "live"


async def test_each_failed_phase_is_told_once_and_leaves_what_was_served(host: Host) -> None:
    app = await host.app(build=BUILD)
    await host.worker("deploys", "webhooks")
    good = "mkdir dist; echo good > dist/index.html"
    assert (await host.over(await host.publish(app, {"build.sh": good})))["state"] == "live"

    cases = {
        "build": ({"build.sh": "echo to the log; exit 3"}, "the build command ended with status 3"),
        "health": ({"build.sh": "mkdir dist; echo bad > dist/other.html"}, "GET / was answered with 404"),
    }
    for phase, (files, reason) in cases.items():
        deploy = await host.over(await host.publish(app, files))
        assert (deploy["state"], deploy["error"]) == ("failed", f"{phase}: {reason}")
        [(event, data)] = await host.events(deploy["id"])
        assert (event, data["phase"], data["reason"]) == ("deploy.failed", phase, reason)
        assert await host.page(app) == "good\n"


async def test_an_account_has_so_much_disk(host: Host) -> None:
    host.gateway.environment["GATEWAY_ACCOUNT_DISK"] = "7"
    app, second = await host.app(build=BUILD), await host.app(build=BUILD)
    await host.worker("deploys")
    page = "mkdir dist; echo {} > dist/index.html; head -c {}000000 /dev/zero > dist/more"
    for number in range(3):
        deploy = await host.over(await host.publish(app, {"build.sh": page.format(number, 2)}))
        assert deploy["state"] == "live", deploy["log"]
    deploy = await host.over(await host.publish(second, {"build.sh": page.format("second", 4)}))
    assert deploy["error"] == "build: the account's apps take more than 7 MiB of disk; make them smaller"
    assert await host.page(app) == "2\n"
    assert await host.page(second) == "404"
    small = await host.over(await host.publish(second, {"build.sh": "mkdir dist; echo small > dist/index.html"}))
    assert small["state"] == "live"


async def test_a_canary_that_fails_rolls_back(host: Host) -> None:
    app = await host.app(build=START)
    await host.worker("deploys", "webhooks")
    deploy = await host.over(await host.publish(app, server("good")))
    assert deploy["state"] == "live", f"{deploy}"
    assert await host.page(app) == "good"
    # It answers the check, and dies of what comes after.
    dies = server("bad", "setTimeout(() => process.exit(7), 1500)")
    host.gateway.environment["GATEWAY_CANARY"] = "4"
    await host.workers[0].stop()
    await host.worker("deploys", "webhooks")
    await wait_until(lambda: _is(host, app, "good"), 10)
    deploy = await host.over(await host.publish(app, dies))
    assert deploy["state"] == "failed"
    assert deploy["error"].startswith("canary: "), deploy
    [(event, data)] = await host.events(deploy["id"])
    assert (event, data["phase"]) == ("deploy.failed", "canary")
    await wait_until(lambda: _is(host, app, "good"), 10)


async def test_deep_folders_stop_neither_the_worker_nor_the_next_one(host: Host) -> None:
    app, deep = await host.app(build=BUILD), await host.app(build=BUILD)
    worker = await host.worker("deploys", constants={TIDY: 0.2})
    assert (await host.over(await host.publish(app, {"build.sh": "mkdir dist; echo good > dist/index.html"})))["state"]
    nested = "for i in $(seq 1200); do mkdir d; cd -P d; done; "
    failed = await host.over(await host.publish(deep, {"build.sh": nested + "exit 3"}))
    assert failed["error"] == "build: the build command ended with status 3"
    killed = await host.publish(deep, {"build.sh": nested + "echo nested; sleep 60"})

    async def is_nested() -> bool:
        return "nested" in (await host.deploy(killed))["log"]

    await wait_until(is_nested, 20)
    worker.kill()
    await host.worker("deploys", constants={TIDY: 0.2})
    assert (await host.over(killed))["state"] == "failed"
    await wait_until(lambda: not list((host.gateway.data_folder / "builds").iterdir()), 10)
    assert await host.page(app) == "good\n"


async def _is(host: Host, app: str, text: str) -> bool:
    return await host.page(app) == text


@pytest.mark.parametrize("former", ["still-runs", "was-stopped"])
async def test_a_worker_that_is_killed_in_a_canary_leaves_no_unverified_release(host: Host, former: str) -> None:
    """Visitors get an answer all the while, although the replaced app may have to start again first."""
    app = await host.app(build=START)
    await host.worker("sites", joined=False)
    await host.worker("deploys")
    good = await host.over(await host.publish(app, server("good")))
    assert good["state"] == "live", good
    await host.workers[-1].stop()
    host.gateway.environment["GATEWAY_CANARY"] = "60"
    worker = await host.worker("deploys", constants={TIDY: 0.2})
    deploy = await host.publish(app, server("unverified"))
    await host.in_state(deploy, "canary")
    assert await host.page(app) == "unverified"
    answers: list[str] = []

    async def visitor() -> None:
        while True:
            answers.append(await host.page(app))
            await asyncio.sleep(0.02)

    visiting = asyncio.create_task(visitor())
    worker.kill()
    link = host.gateway.data_folder / "running" / good["id"]
    if former == "was-stopped":
        link.unlink()
        await wait_until(lambda: not link.with_suffix(".state").exists(), 15)
    await host.worker("deploys", constants={TIDY: 0.2})
    await wait_until(lambda: answers[-1] == "good", 15)
    failed = await host.over(deploy)
    assert failed["error"] == "canary: the worker stopped during the deploy; deploy again"
    await asyncio.sleep(1)  # for more rounds of tidying
    visiting.cancel()
    assert set(answers) == {"unverified", "good"}
    assert answers.index("good") + answers[::-1].index("unverified") == len(answers), "once, and for good"


async def test_a_damaged_record_stops_neither_its_app_nor_others(host: Host) -> None:
    damaged, other = await host.app(build=BUILD), await host.app(build=BUILD)
    worker = await host.worker("deploys", constants={TIDY: 0.2})
    page = {"build.sh": "mkdir dist; echo page > dist/index.html"}
    assert (await host.over(await host.publish(damaged, page)))["state"] == "live"
    with host.gateway.redis.client() as client:
        record = client.get(f"app:{damaged}")
        client.set(f"app:{damaged}", "{")
        await wait_until(lambda: worker.log.count("app.unreadable") > 2, 10)
        assert (await host.over(await host.publish(other, page)))["state"] == "live"
        assert [await host.page(app) for app in (damaged, other)] == ["page\n", "page\n"]
        client.set(f"app:{damaged}", record)


async def test_a_killed_worker_s_deploy_fails_once_and_the_next_one_is_made(host: Host, tmp_path: Path) -> None:
    app = await host.app(build=BUILD)
    worker = await host.worker("deploys", "webhooks")
    begun = "echo begun; mkdir dist; echo done > dist/index.html; "
    killed = await host.publish(app, {"build.sh": begun + "sleep 61.234"})

    async def builds() -> bool:
        return "begun" in (await host.deploy(killed))["log"]

    await wait_until(builds, 10)
    waits = await host.publish(app, {"build.sh": begun})
    assert (await host.deploy(waits))["state"] == "queued"
    worker.kill()
    await wait_until(lambda: not subprocess.run(["pgrep", "-f", "sleep 61.234"], capture_output=True).stdout, 5)
    await host.worker("deploys", "webhooks")
    deploy = await host.over(killed)
    assert (deploy["state"], deploy["error"]) == (
        "failed",
        "build: the worker stopped during the deploy; deploy again",
    )
    assert (await host.over(waits))["state"] == "live"
    assert [event for event, _ in await host.events(waits)] == ["deploy.succeeded"]
    assert [event for event, _ in await host.events(killed)] == ["deploy.failed"]


async def test_a_stopped_worker_s_deploy_is_made_by_the_next(host: Host) -> None:
    app = await host.app(build=BUILD)
    worker = await host.worker("deploys")
    deploy = await host.publish(app, {"build.sh": "sleep 2; mkdir dist; echo done > dist/index.html"})
    await host.in_state(deploy, "building")
    assert await worker.stop() == 0
    assert (await host.deploy(deploy))["state"] == "queued"
    await host.worker("deploys")
    assert (await host.over(deploy))["state"] == "live"
    assert await host.page(app) == "done\n"


async def test_apps_side_by_side_and_one_app_in_order(host: Host) -> None:
    diary = host.gateway.data_folder / "diary"
    one, other = await host.app(build=BUILD), await host.app(build=BUILD)
    await host.worker("deploys")
    first = await host.publish(one, {"build.sh": "sleep 3; mkdir dist; echo first > dist/index.html"})
    await host.in_state(first, "building")
    second = await host.publish(one, {"build.sh": "mkdir dist; echo second > dist/index.html"})
    third = await host.publish(other, {"build.sh": "mkdir dist; echo third > dist/index.html"})
    assert (await host.over(third))["state"] == "live"
    assert (await host.deploy(second))["state"] == "queued"
    assert (await host.over(second))["state"] == "live"
    ended = [(await host.deploy(d))["finishedAt"] for d in (third, first, second)]
    assert ended == sorted(ended)
    assert await host.page(one) == "second\n"
    assert not diary.exists()


async def test_redis_away_in_the_middle_of_a_build(host: Host) -> None:
    app = await host.app(build=BUILD)
    await host.worker("deploys", "webhooks")
    deploy = await host.publish(app, {"build.sh": "sleep 2; mkdir dist; echo done > dist/index.html"})
    await host.in_state(deploy, "building")
    await asyncio.to_thread(host.gateway.redis.freeze)
    await asyncio.sleep(4)
    await asyncio.to_thread(host.gateway.redis.thaw)
    assert (await host.over(deploy))["state"] == "live"
    assert [event for event, _ in await host.events(deploy)] == ["deploy.succeeded"]


async def test_an_app_that_ends_is_told_and_started_again(host: Host) -> None:
    app = await host.app(build=START)
    await host.worker("deploys", "webhooks")
    stops = server("up", "console.log('about to end'); setTimeout(() => process.exit(7), 4000)")
    assert (await host.over(await host.publish(app, stops)))["state"] == "live"

    def crashes() -> list[dict[str, Any]]:
        return [e.json["data"] for e in host.receiver.exchanges if e.json["type"] == "app.crashed"]

    await wait_until(crashes, 15)
    assert (crashes()[0]["reason"], crashes()[0]["exitCode"], crashes()[0]["appName"]) == ("exit", 7, app)
    kept = (await host.call("GET", f"/account/apps/{app}/crashes"))[-1]
    assert (kept["at"], kept["exitCode"], kept["lines"]) == (crashes()[0]["at"], 7, ["about to end"])
    await wait_until(lambda: _is(host, app, "up"), 10)


async def test_a_deploy_whose_worker_stops_in_its_canary_starts_again(host: Host) -> None:
    host.gateway.environment["GATEWAY_CANARY"] = "60"
    app = await host.app(build=START)
    worker = await host.worker("deploys", "webhooks")
    deploy = await host.publish(app, server("good"))
    await host.in_state(deploy, "canary")
    assert await worker.stop() == 0
    host.gateway.environment["GATEWAY_CANARY"] = "0.5"
    await host.worker("deploys", "webhooks")
    assert (await host.over(deploy))["state"] == "live"
    await wait_until(lambda: _is(host, app, "good"), 10)


async def test_what_a_failed_canary_replaced_goes_on_however_long_it_took(host: Host) -> None:
    """The canary outlives at least one round of tidying, which must spare the release that comes back."""
    often = {TIDY: 2.5}
    app = await host.app(build=START)
    await host.worker("deploys", "webhooks", constants=often)
    deploy = await host.publish(app, server("good of process ' + process.pid + '"))
    assert (await host.over(deploy))["state"] == "live"
    host.gateway.environment["GATEWAY_CANARY"] = "25"
    await host.workers[0].stop()
    await host.worker("deploys", "webhooks", constants=often)

    async def good() -> str | None:
        page = await host.page(app)
        return page if page.startswith("good") else None

    before = await wait_until(good, 10)
    dies = await host.publish(app, server("bad", "setTimeout(() => process.exit(7), 6000)"))
    await host.in_state(dies, "canary")
    began = time.monotonic()
    assert (await host.in_state(dies, "failed", timeout=40))["error"].startswith("canary: ")
    assert time.monotonic() - began > 1.5 * often[TIDY]
    assert await host.page(app) == before, "the process that was replaced was never stopped"


async def test_an_app_s_name_that_became_another_account_s(host: Host) -> None:
    app = await host.app(build=BUILD)
    await host.worker("deploys")
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
    # What the first account had built is not what the second one's visitors see.
    await wait_until(lambda: _is(host, app, "404"), 20)
    host.account = other
    deploy = await host.over(await host.publish(app, {"index.html": "theirs"}))
    assert deploy["state"] == "live", f"{deploy}"
    assert await host.page(app) == "theirs"


async def test_a_builder_of_another_folder_stands_by(host: Host, tmp_path: Path) -> None:
    app = await host.app(build=BUILD)
    await host.worker("deploys")
    host.gateway.environment["GATEWAY_DATA_DIR"] = str(tmp_path / "elsewhere")
    other = await host.worker("deploys", joined=False)
    await wait_until(lambda: "deploys.elsewhere" in other.log, 10)
    for _ in range(3):
        deploy = await host.publish(app, {"build.sh": "mkdir dist; echo here > dist/index.html"})
        assert (await host.over(deploy))["state"] == "live"
    assert await host.page(app) == "here\n"
    assert "stream.joined" not in other.log

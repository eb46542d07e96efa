"""What the stream of builds and the logs of deploys leave behind in Redis."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.store import keys
from tests.fakes import FakeProvider
from tests.support.deployment import Host, hosting
from tests.support.polling import wait_until

BUILD = {"command": "echo to the log; mkdir dist; echo good > dist/index.html", "output": "dist"}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with FakeProvider() as provider, hosting(provider, tmp_path) as host:
        yield host


@pytest.mark.parametrize(("state", "command"), [("live", BUILD["command"]), ("failed", "echo to the log; exit 3")])
async def test_a_log_leaves_redis_when_its_deploy_ends(host: Host, state: str, command: str) -> None:
    await host.worker("deploys")
    app = await host.app(build={**BUILD, "command": command})
    deploy_id = await host.publish(app, {"a": "b"})
    assert (await host.over(deploy_id))["state"] == state
    with host.gateway.redis.client() as client:
        await wait_until(lambda: not client.exists(keys.deploy_log_key(host.account.id, deploy_id)))
    shown = await host.deploy(deploy_id)
    lines = shown["log"].splitlines()
    assert "to the log" in lines
    assert len(shown["logTimes"]) == len(lines)
    assert shown["logTimes"] == sorted(shown["logTimes"])
    assert shown["current"] == (state == "live")
    phases = [(phase["phase"], phase["state"], "durationMs" in phase) for phase in shown["phases"]]
    if state == "live":
        assert phases == [("build", "done", True), ("health", "done", True), ("canary", "done", True)]
        rounded = len(phases)
        assert sum(phase["durationMs"] for phase in shown["phases"]) <= shown["durationMs"] + rounded
    else:
        assert phases == [("build", "failed", True), ("health", "waiting", False), ("canary", "waiting", False)]
    (file,) = (host.gateway.data_folder / "logs").glob(f"*/{deploy_id}.gz")
    assert file.parent.name == shown["createdAt"][:10]


async def test_a_log_whose_worker_died_before_it_was_stored(host: Host) -> None:
    """The entry stays pending until the log is a file; until then Redis has it."""
    worker = await host.worker("deploys")
    app = await host.app(build=BUILD)
    deploy_id = await host.publish(app, {"a": "b"})
    await host.over(deploy_id)
    key = keys.deploy_log_key(host.account.id, deploy_id)
    with host.gateway.redis.client() as client:
        await wait_until(lambda: not client.exists(key))
        await worker.stop()
        for file in (host.gateway.data_folder / "logs").glob("*/*.gz"):
            file.unlink()
        client.set(key, "as it was\n", ex=600)
        fields = {
            "id": deploy_id,
            "account": host.account.id,
            "app": client.hget(keys.deploy_key(host.account.id, deploy_id), "appId"),
        }
        client.xadd(f"{keys.tag(host.account.id)}:builds", fields)
        assert (await host.deploy(deploy_id))["log"] == "as it was\n"
        await host.worker("deploys")
        await wait_until(lambda: not client.exists(key))
    assert (await host.deploy(deploy_id))["log"] == "as it was\n"


async def test_poison_ends_no_worker_and_holds_up_no_app(host: Host) -> None:
    app = await host.app(build=BUILD)
    tag, account = keys.tag(host.account.id), host.account.id
    stream = f"{tag}:builds"
    stranger = next(name for name in map("acc_{}".format, range(300)) if keys.tag(name) != tag)
    with host.gateway.redis.client() as client:
        app_id = (await host.gateway.platform("GET", f"apps/{app}")).json()["id"]
        poison: list[dict[Any, Any]] = [
            {"garbage": "1"},
            {b"\xff": b"\xfe"},
            {"id": "dep_x", "app": app_id},
            {"account": account, "app": app_id},
            {"id": "dep_x", "account": stranger, "app": app_id},
        ]
        for fields in poison:
            client.xadd(stream, fields)
        worker = await host.worker("deploys")
        assert (await host.over(await host.publish(app, {"a": "b"})))["state"] == "live"
        assert client.xlen(f"{tag}:dead") == len(poison)
        await wait_until(lambda: client.xlen(stream) == 0)
    assert worker.process.poll() is None


async def test_a_broken_record_becomes_a_dead_letter(host: Host) -> None:
    """The entry's deploy can't be read. It is tried three times; the app's next deploys go on."""
    app = await host.app(build=BUILD)
    tag, account = keys.tag(host.account.id), host.account.id
    app_id = (await host.gateway.platform("GET", f"apps/{app}")).json()["id"]
    with host.gateway.redis.client() as client:
        client.hset(keys.deploy_key(account, "dep_broken"), mapping={"id": "dep_broken", "state": "no such state"})
        client.expire(keys.deploy_key(account, "dep_broken"), 600)
        client.xadd(f"{tag}:builds", {"id": "dep_broken", "account": account, "app": app_id})
        worker = await host.worker("deploys")
        worker.tracebacks_allowed = True
        assert (await host.over(await host.publish(app, {"a": "b"})))["state"] == "live"
        await wait_until(lambda: client.xlen(f"{tag}:dead") == 1, 60)
        assert client.xlen(f"{tag}:builds") == 0
    assert worker.log.count("deploy.postponed") == 3


async def test_each_release_has_an_archive_until_it_is_removed(host: Host) -> None:
    await host.worker("deploys", constants={"workers.sites.releases.KEPT_RELEASES": 2})
    app = await host.app(build=BUILD)
    folder = host.gateway.data_folder / "archives"
    deploys = []
    for number in range(3):
        deploys.append(await host.publish(app, {"a": str(number)}))
        assert (await host.over(deploys[-1]))["state"] == "live"
    failed = await host.publish(await host.app(build={**BUILD, "output": "."}), {"a": "no page"})
    assert (await host.over(failed))["state"] == "failed"
    back = (await host.call("POST", f"/account/apps/{app}/rollback", json={}))["deployId"]
    assert (await host.over(back))["state"] == "live"

    def archives() -> list[str]:
        return sorted(path.name.partition(".")[0] for path in folder.rglob("*.tar.gz"))

    await wait_until(lambda: archives() == [deploys[-1], back], 5)
    with host.gateway.redis.client() as client:
        for deploy in (deploys[-1], back):
            digest, size = client.hmget(keys.deploy_key(host.account.id, deploy), "digest", "size")
            [archive] = folder.rglob(f"{deploy}.tar.gz")
            assert hashlib.sha256(archive.read_bytes()).hexdigest() == digest.decode()
            assert archive.stat().st_size == int(size)

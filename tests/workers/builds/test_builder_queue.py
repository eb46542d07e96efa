"""The data that builds leave in Redis and in the storage."""

import hashlib
from typing import Any

import pytest

from gateway.keys import deploy_key, deploy_log_key, partition_tag
from tests.support.deployment import Host
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

BUILD = {"command": "echo to the log; mkdir dist; echo good > dist/index.html", "output": "dist"}


@pytest.mark.parametrize(("state", "command"), [("live", BUILD["command"]), ("failed", "echo to the log; exit 3")])
async def test_a_log_leaves_redis_when_its_deploy_ends(host: Host, state: str, command: str) -> None:
    app = await host.app(build={**BUILD, "command": command})
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
        rounded = len(phases)
        assert sum(phase["durationMs"] for phase in shown["phases"]) <= shown["durationMs"] + rounded
    else:
        assert phases == [("build", "failed", True), ("health", "waiting", False), ("canary", "waiting", False)]
    (file,) = (host.gateway.data_folder / "logs").glob(f"*/{deploy_id}.gz")
    assert file.parent.name == shown["createdAt"][:10]


async def test_a_log_whose_worker_died_before_it_was_stored(own: Host) -> None:
    """The entry stays pending, and the log stays in Redis, until the log is stored as a file."""
    worker = await own.worker("deploys")
    app = await own.app(build=BUILD)
    deploy_id = await own.publish(app, {"a": "b"})
    await own.over(deploy_id)
    key = deploy_log_key(own.account.id, deploy_id)
    with own.gateway.redis.client() as client:
        await wait_until(lambda: not client.exists(key))
        await worker.stop()
        for file in (own.gateway.data_folder / "logs").glob("*/*.gz"):
            file.unlink()
        client.set(key, "as it was\n", ex=600)
        fields = {
            "id": deploy_id,
            "account": own.account.id,
            "app": client.hget(deploy_key(own.account.id, deploy_id), "appId"),
        }
        client.xadd(f"{partition_tag(own.account.id)}:builds", fields)
        assert (await own.deploy(deploy_id))["log"] == "as it was\n"
        await own.worker("deploys")
        await wait_until(lambda: not client.exists(key))
    assert (await own.deploy(deploy_id))["log"] == "as it was\n"


async def test_unreadable_entries_do_not_stop_workers_or_delay_apps(own: Host) -> None:
    """An entry with a broken deploy gets three attempts. Other unreadable entries become dead letters at once."""
    app = await own.app(build=BUILD)
    tag, account = partition_tag(own.account.id), own.account.id
    stream = f"{tag}:builds"
    stranger = next(name for name in map("acc_{}".format, range(300)) if partition_tag(name) != tag)
    with own.gateway.redis.client() as client:
        app_id = (await own.gateway.platform("GET", f"apps/{app}")).json()["id"]
        broken = deploy_key(account, "dep_broken")
        client.hset(broken, mapping={"id": "dep_broken", "state": "no such state"})
        client.expire(broken, 600)
        poison: list[dict[Any, Any]] = [
            {"garbage": "1"},
            {b"\xff": b"\xfe"},
            {"id": "dep_x", "app": app_id},
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
    app = await own.app(build=BUILD)
    folder = own.gateway.data_folder / "archives"
    deploys = []
    for number in range(3):
        deploys.append(await own.publish(app, {"a": str(number)}))
        assert (await own.over(deploys[-1]))["state"] == "live"
    failed = await own.publish(await own.app(build={**BUILD, "output": "."}), {"a": "no page"})
    assert (await own.over(failed))["state"] == "failed"
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

"""The API of apps' data, where no host has any."""

import asyncio

import pytest

from gateway.data.commands import DataCommands
from gateway.data.records import DataRecords, DataStatus, Snapshot
from tests.support.deploys import an_app
from tests.support.gateway_process import Gateway
from tests.support.responses import refused
from tests.support.stores import opened

pytestmark = pytest.mark.asyncio(loop_scope="session")

SNAPSHOT = Snapshot("snp_1", "2026-07-02T10:00:00.000Z", 100, "deploy", "dep_1")


async def test_an_app_without_data(gw: Gateway) -> None:
    account = await gw.account("starter")
    app = await an_app(account)
    at = f"/account/apps/{app}/data"
    shown = (await account.get(at)).json()
    assert shown == {"usedBytes": 0, "limitBytes": 1024 << 20, "state": "none", "snapshots": []}
    for _ in range(2):  # only snapshots that were made count
        tried = await asyncio.gather(*(account.call("POST", f"{at}/snapshots") for _ in range(7)))
        assert sorted(each.status_code for each in tried) == [404] * 6 + [429]
    assert (await account.get(f"{at}/snapshots/snp_1")).status_code == 404
    assert (await account.call("POST", f"{at}/restore", {"snapshotId": "snp_1"})).status_code == 404
    assert (await account.call("DELETE", at)).status_code == 204
    assert (await account.get("/account/data/deleted")).json() == []


async def test_a_deleted_app_leaves_a_command_for_its_host(gw: Gateway) -> None:
    account = await gw.account()
    app = await an_app(account)
    async with opened(gw.redis.url) as store:
        records, commands = DataRecords(store), DataCommands(store)
        await records.write_statuses([(account.id, app, DataStatus(10, "running", "A problem."))])
        await records.add_snapshot(account.id, app, SNAPSHOT)
        await gw.platform("PUT", f"apps/{app}/suspension", {"reason": "test"})
        assert (await account.get(f"/account/apps/{app}/data")).json()["state"] == "suspended"
        await gw.platform("DELETE", f"apps/{app}/suspension")
        shown = (await account.get(f"/account/apps/{app}/data")).json()
        assert (shown["usedBytes"], shown["state"], shown["problem"]) == (10, "running", "A problem.")
        snapshot = {"id": "snp_1", "at": SNAPSHOT.at, "bytes": 100, "reason": "deploy", "deployId": "dep_1"}
        assert shown["snapshots"] == [snapshot]
        answer = await account.call("POST", f"/account/apps/{app}/data/restore", {"snapshotId": "snp_1"})
        refused(answer, 409, "NO_DEPLOY_YET")
        gone = await account.get(f"/account/apps/{app}/data/snapshots/snp_1")
        assert gone.status_code == 404, "its object is gone"
        assert (await account.call("DELETE", f"/account/apps/{app}")).status_code == 204
        [command] = [each for each in await commands.list_commands() if each.app == app]
        assert (command.action, command.account) == ("forget", account.id)
        assert await records.list_snapshots(account.id, app) == []
        [deleted] = (await account.get("/account/data/deleted")).json()
        assert (deleted["app"], [each["id"] for each in deleted["snapshots"]]) == (app, ["snp_1"])
        assert (await (await gw.account()).get("/account/data/deleted")).json() == []

"""The data of apps from end to end, as account holders see them, with a real gateway, workers, builds and apps."""

import io
import tarfile
from typing import Any

import pytest

from tests.support.accounts import DOMAIN
from tests.support.deployment import Host
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Each POST adds its body to a file in DATA_DIR, and a GET returns the file.
NOTES = """\
const fs = require('fs'), http = require('http')
const file = process.env.DATA_DIR + '/notes'
const read = () => (fs.existsSync(file) ? fs.readFileSync(file, 'utf8') : '')
http.createServer((request, answer) => {
  if (request.url === '/fill') fs.writeFileSync(file + '.big', Buffer.alloc(3e6))
  if (request.method !== 'POST') return answer.end(read())
  request.on('data', (chunk) => fs.appendFileSync(file, chunk)).on('end', () => answer.end('kept'))
}).listen(process.env.PORT)
"""
ONLY_EMPTY = "if (read()) process.exit(3);"  # does not start while there are notes


def notes(before: str = "") -> dict[str, str]:
    return {"server.js": NOTES.replace("http.createServer", f"{before}http.createServer")}


class Capsule:
    """An app with data."""

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name, self.at = host, name, f"/account/apps/{name}/data"

    @classmethod
    async def create(cls, host: Host) -> "Capsule":
        capsule = cls(host, await host.app(build={"start": "exec node server.js"}))
        await capsule.publish(notes())
        return capsule

    async def publish(self, files: dict[str, str], state: str = "live") -> dict[str, Any]:
        deploy = await self.host.over(await self.host.publish(self.name, files))
        assert deploy["state"] == state, deploy
        return deploy

    async def write(self, text: str) -> None:
        headers = {"Host": f"{self.name}.{DOMAIN}"}
        assert (await self.host.web.post("/", content=text, headers=headers)).text == "kept"

    async def read(self) -> str:
        return await self.host.page(self.name)

    async def data(self) -> dict[str, Any]:
        return await self.host.call("GET", self.at)

    async def snapshots(self) -> list[tuple[str, str | None]]:
        return [(each["reason"], each.get("deployId")) for each in (await self.data())["snapshots"]]

    async def restore(self, snapshot: str) -> dict[str, Any]:
        queued = await self.host.call("POST", f"{self.at}/restore", json={"snapshotId": snapshot})
        return await self.host.over(queued["deployId"])


async def test_data_stay_and_each_live_deploy_keeps_a_snapshot_from_before_it(host: Host) -> None:
    capsule = await Capsule.create(host)
    await capsule.write("one ")
    second = await capsule.publish(notes())
    assert await capsule.read() == "one "
    assert await capsule.snapshots() == [("deploy", second["id"])]
    preview = await host.gateway.platform("POST", f"apps/{capsule.name}/deploys", {"kind": "preview"})
    assert (await host.over(preview.json()["deployId"]))["state"] == "live"
    assert await host.page(f"{capsule.name}-preview") == "", "a preview has its own folder"
    assert len(await capsule.snapshots()) == 1, "and keeps no snapshot"
    back = await host.over((await host.call("POST", f"/account/apps/{capsule.name}/rollback"))["deployId"])
    assert await capsule.read() == "one "
    assert (await capsule.snapshots())[0] == ("deploy", back["id"])
    failed = await capsule.publish({"server.js": "process.exit(3)"}, "failed")
    kept = (await capsule.data())["snapshots"][0]
    assert (kept["reason"], kept["deployId"]) == ("deploy", failed["id"])
    assert kept["id"] in failed["error"]
    assert kept["id"] in failed["log"]
    assert await capsule.read() == "one "


async def test_a_snapshot_is_made_downloaded_and_restored(host: Host) -> None:
    capsule = await Capsule.create(host)
    assert (await host.account.call("POST", f"{capsule.at}/snapshots")).status_code == 404
    await capsule.write("one ")
    answer = await host.account.call("POST", f"{capsule.at}/snapshots")
    assert answer.status_code == 201
    made = answer.json()
    assert made["reason"] == "manual"
    packed = await host.account.call("GET", f"{capsule.at}/snapshots/{made['id']}")
    assert (packed.headers["content-type"], len(packed.content)) == ("application/gzip", made["bytes"])
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as tar:
        assert tar.extractfile("notes").read() == b"one "  # type: ignore[union-attr]
    await capsule.write("two ")
    restored = await capsule.restore(made["id"])
    assert (restored["state"], restored["trigger"]) == ("live", "restore"), restored
    assert await capsule.read() == "one "
    assert await capsule.snapshots() == [("restore", restored["id"]), ("manual", None)]
    await capsule.write("three ")
    await capsule.restore((await capsule.data())["snapshots"][0]["id"])
    assert await capsule.read() == "one two "


async def test_a_failed_restore_brings_the_former_data_back(host: Host) -> None:
    capsule = await Capsule.create(host)
    await capsule.write("one ")
    made = await host.call("POST", f"{capsule.at}/snapshots")
    await host.account.call("DELETE", capsule.at)
    await capsule.publish(notes(ONLY_EMPTY))
    failed = await capsule.restore(made["id"])
    assert failed["error"].startswith("health: the start command ended with status 3"), failed
    await wait_until(capsule.read, 20, holds=lambda text: text == "")


async def test_snapshots_of_an_account_are_limited_per_hour(host: Host) -> None:
    capsule = await Capsule.create(host)
    await capsule.write("one ")
    for _ in range(6):
        assert (await host.account.call("POST", f"{capsule.at}/snapshots")).status_code == 201
    answer = await host.account.call("POST", f"{capsule.at}/snapshots")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "RATE_LIMITED")
    assert int(answer.headers["retry-after"]) > 3_000
    assert len(await capsule.snapshots()) == 5


async def test_an_app_whose_data_are_full_is_stopped_until_they_are_cleared(own: Host) -> None:
    await own.worker("deploys", GATEWAY_APP_DATA="maker=2")
    capsule = await Capsule.create(own)
    await capsule.write("one ")
    await own.web.get("/fill", headers={"Host": f"{capsule.name}.{DOMAIN}"})
    full = await wait_until(capsule.data, 15, holds=lambda data: data["state"] == "full")
    assert full["usedBytes"] > 3_000_000
    assert "plan allows 2 MiB" in full["problem"]
    await wait_until(capsule.read, holds=lambda text: text == "503")
    [crash] = await own.call("GET", f"/account/apps/{capsule.name}/crashes")
    assert (crash["reason"], crash["exitCode"]) == ("exit", 137)
    failed = await capsule.publish(notes(), "failed")
    assert "larger than its plan allows" in failed["error"]
    kept = full["snapshots"]
    assert (await own.account.call("DELETE", capsule.at)).status_code == 204
    await wait_until(capsule.read, 20, holds=lambda text: text == "")
    data = await wait_until(capsule.data, holds=lambda data: data["state"] == "running")
    assert "problem" not in data
    assert data["snapshots"][0]["reason"] == "clear"
    assert kept == []


async def test_the_host_is_asked_for_data_that_nothing_tells_of(own: Host) -> None:
    """Neither the app's record nor a report does so yet."""
    await own.worker("deploys", constants={"workers.hosting.data.REPORT_SECONDS": 600.0})
    capsule = await Capsule.create(own)
    assert (await own.gateway.platform("PUT", f"apps/{capsule.name}", {"account": own.account.id})).is_success
    assert (await own.account.call("POST", f"{capsule.at}/snapshots")).status_code == 404
    await capsule.write("one ")
    assert (await own.account.call("POST", f"{capsule.at}/snapshots")).status_code == 201

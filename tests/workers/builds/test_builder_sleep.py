"""Sleep, and releases that must not overlap, from end to end: with a real gateway, workers, builds and apps."""

import pytest

from tests.support.deployment import Host
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

# It does not start while another process of it runs.
SERVER = """\
const fs = require('fs'), lock = process.env.DATA_DIR + '/lock', { name } = require('./name.json')
fs.mkdirSync(lock)
process.on('SIGTERM', () => { fs.rmdirSync(lock); process.exit(0) })
require('http').createServer((_, answer) => answer.end(name)).listen(process.env.PORT)
"""
MANIFEST = """\
[build]
start = "exec node server.js"
overlap = false
"""


async def test_releases_that_must_not_overlap_are_swapped_and_sleep(own: Host) -> None:
    await own.worker("deploys", "sites", "webhooks", GATEWAY_APP_SLEEP="maker=4")
    app = await own.app()

    async def publish(name: str) -> None:
        files = {"capsule.toml": MANIFEST, "server.js": SERVER, "name.json": f'{{"name": "{name}"}}'}
        deploy = await own.over(await own.publish(app, files))
        assert deploy["state"] == "live", deploy

    async def state() -> str:
        return (await own.call("GET", f"/account/apps/{app}/data"))["state"]

    await publish("one")
    await publish("two")
    await wait_until(state, 30, holds=lambda state: state == "asleep")
    assert await own.page(app) == "two"
    await wait_until(state, holds=lambda state: state == "running")
    await wait_until(state, 30, holds=lambda state: state == "asleep")
    back = await own.over((await own.call("POST", f"/account/apps/{app}/rollback"))["deployId"])
    assert back["state"] == "live"
    assert await own.page(app) == "one"
    await own.events(back["id"])
    events = [exchange.json for exchange in own.receiver.exchanges]
    types = {event["type"] for event in events if event["data"].get("appName") == app}
    assert types == {"deploy.succeeded"}, "sleep fires no event"

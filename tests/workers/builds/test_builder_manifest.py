"""Manifests from end to end: what they change, when, and for whom, with a real gateway, workers, builds and apps."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes import FakeProvider
from tests.fakes.receiver import FakeReceiver
from tests.support.accounts import DOMAIN
from tests.support.deployment import Host, host_on, live
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

PORT = free_port()  # of the hosted apps, where the gateway reaches them

# A backend that signs in its users itself. Each visit of `/` counts, so that one can fail after the health check.
SERVER = """\
const { generateKeyPairSync, randomUUID, sign } = require('crypto')
const kid = randomUUID()
const { privateKey, publicKey } = generateKeyPairSync('ec', { namedCurve: 'P-256' })
const part = (value) => Buffer.from(JSON.stringify(value)).toString('base64url')
let visits = 0
require('http').createServer((request, answer) => {
  if (request.url === '/keys') {
    answer.end(JSON.stringify({ keys: [{ kid, ...publicKey.export({ format: 'jwk' }) }] }))
  } else if (request.url === '/me') {
    answer.end(JSON.stringify({ id: 'ana' }))
  } else if (request.url === '/token') {
    const text = part({ alg: 'ES256', kid }) + '.' + part({ sub: 'ana', exp: (Date.now() / 1000 + 600) | 0 })
    answer.end(text + '.' + sign('sha256', text, { key: privateKey, dsaEncoding: 'ieee-p1363' }).toString('base64url'))
  } else {
    answer.statusCode = ++visits > VISITS ? 500 : 200
    answer.end(process.env.APP_URL)
  }
}).listen(process.env.PORT)
"""


def server(manifest: str, visits: str = "Infinity") -> dict[str, str]:
    return {"server.js": SERVER.replace("VISITS", visits), "capsule.toml": manifest}


def backend(url: str, kind: str = "jwks") -> dict[str, str]:
    return server(f'[build]\nstart = "exec node server.js"\n[auth]\nkind = "{kind}"\nurl = "{url}"\n')


@module_fixture
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    settings = {"GATEWAY_CANARY": "0.2", "GATEWAY_APPS_URL": f"http://{{host}}:{PORT}"}
    folder = tmp_path_factory.mktemp("manifests")
    constants = {"gateway.inference.auth.key_sets.FETCH_INTERVAL_SECONDS": 0.1}  # each start of the app makes a key
    async with FakeProvider() as provider, gateway_with_redis(provider, folder, constants, **settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def host(deployment: Gateway) -> AsyncIterator[Host]:
    """An empty deployment, whose workers the test starts."""
    try:
        async with FakeReceiver() as receiver, host_on(deployment, receiver, PORT) as host:
            yield host
    finally:
        deployment.empty()


async def settings_of(host: Host, app: str) -> dict[str, Any]:
    return await host.call("GET", f"/account/apps/{app}/settings")


async def ask(host: Host, app: str) -> int:
    """Asks the model as a user who has signed in at the app itself."""
    token = (await host.web.get("/token", headers={"Host": f"{app}.{DOMAIN}"})).text
    host.gateway.confidential.add(token.rpartition(".")[2])
    answer = await host.gateway.http.post(
        f"/capsule/{app}/ai", json={"prompt": "hello"}, headers={"Authorization": f"Bearer {token}"}
    )
    return answer.status_code


async def test_an_app_verifies_its_users_and_a_rollback_brings_its_manifest_back(host: Host) -> None:
    await host.worker("deploys")
    app = await host.app()
    before = await settings_of(host, app)
    plain = await live(host, app, {"index.html": "no manifest", "build.sh": ""})
    assert await settings_of(host, app) == before

    first = await live(host, app, backend("/keys"))
    settings = await settings_of(host, app)
    assert settings["auth"] == {"kind": "jwks", "url": "/keys"}
    assert settings["build"]["start"] == "exec node server.js"
    assert await host.page(app) == f"http://{app}.{DOMAIN}:{PORT}"
    assert await ask(host, app) == 200

    await live(host, app, backend("/me", kind="backend"))
    assert (await settings_of(host, app))["auth"] == {"kind": "backend", "url": "/me"}
    assert await ask(host, app) == 200

    back = await host.call("POST", f"/account/apps/{app}/rollback", json={"deployId": first})
    assert (await host.over(back["deployId"]))["state"] == "live"
    assert await settings_of(host, app) == settings
    assert await ask(host, app) == 200

    back = await host.call("POST", f"/account/apps/{app}/rollback", json={"deployId": plain})
    assert (await host.over(back["deployId"]))["state"] == "live"
    assert await host.page(app) == "no manifest"
    assert await settings_of(host, app) == settings, "a release without a manifest changes nothing"


async def test_a_preview_is_built_by_its_manifest_and_changes_nothing_until_it_is_promoted(host: Host) -> None:
    await host.worker("deploys")
    app = await host.app()
    await live(host, app, backend("/keys"))
    await host.call("PATCH", f"/account/apps/{app}", json={"auth": None, "build": None})
    preview = (await host.gateway.platform("POST", f"apps/{app}/deploys", {"kind": "preview"})).json()["deployId"]
    deploy = await host.over(preview)
    assert deploy["state"] == "live", deploy
    assert await host.page(f"{app}-preview") == f"http://{app}-preview.{DOMAIN}:{PORT}"
    settings = await settings_of(host, app)
    assert (settings["auth"], settings["build"]) == ({"kind": "jwks"}, None)
    promoted = await host.call("POST", f"/account/deploys/{preview}/promote")
    assert (await host.over(promoted["deployId"]))["state"] == "live"
    assert (await settings_of(host, app))["auth"]["url"] == "/keys"
    assert await host.page(app) == f"http://{app}.{DOMAIN}:{PORT}"


async def test_a_fault_fails_the_build_and_a_failed_canary_gives_the_settings_back(host: Host) -> None:
    await host.worker("deploys")
    app = await host.app()
    await live(host, app, backend("/keys"))
    before = await settings_of(host, app)

    deploy = await host.over(await host.publish(app, {"index.html": "", "capsule.toml": '[build]\noutptu = "dist"\n'}))
    assert (deploy["state"], deploy["phases"][0]["state"]) == ("failed", "failed")
    assert deploy["error"].startswith("capsule.toml, line 2: build: there is no key called outptu")

    manifest = '[build]\nstart = "node server.js"\n[auth]\nkind = "jwks"\nurl = "/other"\n'
    deploy = await host.over(await host.publish(app, server(manifest, visits="1")))
    assert deploy["error"] == "canary: GET / returned 500", deploy
    assert await settings_of(host, app) == before
    assert await ask(host, app) == 200


async def test_the_health_check_of_a_start_command(host: Host) -> None:
    await host.worker("deploys")
    app = await host.app()
    manifest = '[build]\nstart = "exec node server.js"\nhealth = "/me"\n'
    await live(host, app, server(manifest, visits="0"))
    deploy = await host.over(await host.publish(app, server(manifest.replace("/me", "/"), visits="Infinity")))
    assert deploy["state"] == "live", deploy
    elsewhere = manifest.replace("exec node", "PORT=9999 exec node")
    began = time.monotonic()
    deploy = await host.over(await host.publish(app, server(elsewhere)))
    assert deploy["error"] == "health: It listens at 9999; listen at $PORT (8080).", deploy
    assert time.monotonic() - began < 50, "it does not wait until the end"
    assert (await settings_of(host, app))["build"]["health"] == "/"


async def test_settings_change_with_the_swap_and_back_when_the_worker_is_killed(host: Host) -> None:
    await host.worker("sites", joined=False)
    worker = await host.worker("deploys")
    app = await host.app()
    await live(host, app, backend("/keys"))
    await worker.stop()
    worker = await host.worker("deploys", GATEWAY_CANARY="60")
    deploy = await host.publish(app, backend("/me", kind="backend"))
    await host.in_state(deploy, "canary")
    assert (await settings_of(host, app))["auth"] == {"kind": "backend", "url": "/me"}
    worker.kill()
    await host.worker("deploys", GATEWAY_WEBHOOK_CLAIM_IDLE="3")
    assert (await host.over(deploy))["state"] == "failed"
    assert (await settings_of(host, app))["auth"] == {"kind": "jwks", "url": "/keys"}

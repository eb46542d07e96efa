"""Apps with a start command from end to end, with a real gateway, workers and builds: their variables and output, data
and manifests.
"""

import asyncio
import io
import secrets
import tarfile
from typing import Any

import pytest

from tests.support.accounts import DOMAIN
from tests.support.deployment import Host, live, packed
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


TALKATIVE = """\
const value = process.env.TOKEN ?? 'none'
console.log('starting with ' + value)
require('http').createServer((request, answer) => {
  console.log('GET ' + request.url)
  answer.end([value.length, process.env.NODE_ENV, process.env.PORT === undefined].join(' '))
}).listen(process.env.PORT)
"""


async def test_builds_see_the_variables_and_logs_do_not(host: Host) -> None:
    app = await host.app(build={"command": "sh build.sh", "output": "dist"})
    secret = secrets.token_hex(16)
    host.gateway.confidential.add(secret)
    await host.call("PUT", f"/account/apps/{app}/env", json={"TOKEN": secret, "CI": "mine"})
    script = 'echo "the token is $TOKEN"; mkdir dist; printf %s "$TOKEN" | sha256sum > dist/index.html; echo $CI'
    # No command line on this machine contains the value. The shell alone looks: while a process begins, its command
    # line may be read with its variables.
    script += "; found=0; for file in /proc/[0-9]*/cmdline; do line=; read -r line < $file; "
    script += 'case "$line" in *"$TOKEN"*) found=1;; esac; done 2> /dev/null; echo $found >> dist/index.html'
    deploy = await host.over(await host.publish(app, {"build.sh": script}))
    assert deploy["state"] == "live", deploy
    assert "the token is ***" in deploy["log"]
    assert secret not in deploy["log"]
    assert "mine" in deploy["log"]
    lines = (await host.page(app)).splitlines()
    assert len(lines[0].split()[0]) == 64
    assert lines[1] == "0"


async def test_a_preview_has_the_values_of_previews(host: Host) -> None:
    """In its build and in its start command. Once promoted, the start command has those of the live release."""
    show = "console.log([process.env.SAME, process.env.TOKEN, process.env.PAYMENTS].join(' '))"
    serve = "require('http').createServer((_, answer) => answer.end(text)).listen(process.env.PORT)"
    start = "const { TOKEN, PAYMENTS } = process.env; const text = require('fs').readFileSync('built', 'utf8')"
    files = {"build.js": show, "server.js": f"{start}.trim() + `, ${{TOKEN}} ${{PAYMENTS}}`; {serve}"}
    app = await host.app(build={"command": "node build.js > built", "start": "exec node server.js"})
    path = f"/account/apps/{app}/env"
    await host.call("PUT", path, json={"SAME": "1", "TOKEN": "live", "PAYMENTS": "on"})
    await host.call("PUT", f"{path}?kind=preview", json={"TOKEN": "test", "PAYMENTS": False})
    assert (await host.over(await host.publish(app, files)))["state"] == "live"
    preview = await host.call("PUT", f"/account/apps/{app}/source?preview=a", content=packed(files))
    deploy = await host.over(preview["deployId"])
    assert deploy["state"] == "live", deploy
    assert await host.page(f"{app}--p-a") == "1 test, test undefined"
    assert await host.page(app) == "1 live on, live on"
    promoted = await host.call("POST", f"/account/deploys/{deploy['id']}/promote")
    assert (await host.over(promoted["deployId"]))["state"] == "live"
    assert await host.page(app) == "1 test, live on"


async def test_a_start_command_runs_with_the_variables_of_its_deploy(host: Host) -> None:
    app = await host.app(build={"start": "exec node server.js"})
    path, secret = f"/account/apps/{app}/env", "a secret of " + secrets.token_hex(8)
    host.gateway.confidential.add(secret)
    first = await host.over(await host.publish(app, {"server.js": TALKATIVE}))
    assert (first["state"], await host.page(app)) == ("live", "4 production false")
    await host.call("PUT", path, json={"TOKEN": secret, "NODE_ENV": "staging"})
    assert await host.page(app) == "4 production false", "only from the next deploy on"
    deploy = await host.over(await host.publish(app, {"server.js": TALKATIVE}))
    assert deploy["state"] == "live"
    assert await host.page(app) == f"{len(secret)} staging false"
    assert secret not in deploy["log"]
    # A rollback is a new deploy, which runs the former files with the present variables.
    await host.call("PUT", path, json={"NODE_ENV": None})
    back = await host.over((await host.call("POST", f"/account/apps/{app}/rollback", json={}))["deployId"])
    assert back["release"] == first["id"]
    assert await host.page(app) == f"{len(secret)} production false"
    # The value on disk is encrypted, and the release that shares the files has no value.
    release = host.gateway.data_folder / "releases" / app / "live"
    assert not (release / first["id"] / "environment").exists()
    assert secret not in (release / back["id"] / "environment").read_text()
    assert "starting with ***" in (await host.account.get(f"/account/apps/{app}/logs")).text


async def test_the_output_of_a_start_command_can_be_read_and_followed(host: Host) -> None:
    app = await host.app(build={"start": "exec node server.js"})
    assert (await host.over(await host.publish(app, {"server.js": TALKATIVE})))["state"] == "live"
    path = f"/account/apps/{app}/logs"

    async def text(query: str = "") -> str:
        answer = await host.account.get(path + query)
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        return answer.text

    assert (await text()).startswith("starting with none\nGET /\n")
    assert (await text("?tail=1")) == "GET /\n"
    assert (await text("?since=1h&until=30m")) == ""
    assert (await (await host.gateway.account("maker")).get(path)).status_code == 404
    events = {"Authorization": f"Bearer {host.account.key}", "Accept": "text/event-stream"}
    async with asyncio.timeout(60), host.gateway.http.stream("GET", path + "?tail=1", headers=events) as stream:
        assert stream.headers["content-type"] == "text/event-stream"  # no EventSource takes another
        lines = stream.aiter_lines()
        assert await anext(lines) == "data: GET /"
        await host.web.get("/new", headers={"Host": f"{app}.apps.localhost"})
        while (line := await anext(lines)) != "data: GET /new":
            assert line in ("", "data: GET /")
        # The next release's output follows in the same stream.
        await host.over(await host.publish(app, {"server.js": TALKATIVE.replace("starting", "beginning")}))
        while await anext(lines) != "data: beginning with none":
            pass


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
        await live(host, capsule.name, notes())
        return capsule

    async def publish(self, files: dict[str, str]) -> dict[str, Any]:
        return await self.host.over(await self.host.publish(self.name, files))

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
    second = await live(host, capsule.name, notes())
    assert await capsule.read() == "one "
    assert await capsule.snapshots() == [("deploy", second)]
    preview = await host.gateway.platform("POST", f"apps/{capsule.name}/deploys", {"kind": "preview"})
    assert (await host.over(preview.json()["deployId"]))["state"] == "live"
    assert await host.page(f"{capsule.name}-preview") == "", "a preview has its own folder"
    assert len(await capsule.snapshots()) == 1, "and keeps no snapshot"
    failed = await capsule.publish({"server.js": "process.exit(3)"})
    kept = (await capsule.data())["snapshots"][0]
    assert (kept["reason"], kept["deployId"]) == ("deploy", failed["id"])
    assert kept["id"] in failed["error"]
    assert kept["id"] in failed["log"]
    assert await capsule.read() == "one "


async def test_a_snapshot_is_made_downloaded_and_restored(host: Host) -> None:
    """An account may make six per hour, and the newest five are kept."""
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
    for _ in range(5):
        assert (await host.account.call("POST", f"{capsule.at}/snapshots")).status_code == 201
    answer = await host.account.call("POST", f"{capsule.at}/snapshots")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "RATE_LIMITED")
    assert int(answer.headers["retry-after"]) > 3_000
    assert (await capsule.snapshots()).count(("manual", None)) == 5


async def test_a_failed_restore_brings_the_former_data_back(host: Host) -> None:
    capsule = await Capsule.create(host)
    await capsule.write("one ")
    made = await host.call("POST", f"{capsule.at}/snapshots")
    await host.account.call("DELETE", capsule.at)
    await live(host, capsule.name, notes(ONLY_EMPTY))
    failed = await capsule.restore(made["id"])
    assert failed["error"].startswith("health: the start command ended with status 3"), failed
    await wait_until(capsule.read, 20, holds=lambda text: text == "")


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
    failed = await capsule.publish(notes())
    assert "larger than its plan allows" in failed["error"]
    assert (await own.account.call("DELETE", capsule.at)).status_code == 204
    await wait_until(capsule.read, 20, holds=lambda text: text == "")
    data = await wait_until(capsule.data, holds=lambda data: data["state"] == "running")
    assert "problem" not in data
    assert data["snapshots"][0]["reason"] == "clear"


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


async def test_an_app_verifies_its_users_and_a_rollback_brings_its_manifest_back(own: Host) -> None:
    await own.worker("deploys")
    app = await own.app()
    before = await settings_of(own, app)
    plain = await live(own, app, {"index.html": "no manifest", "build.sh": ""})
    assert await settings_of(own, app) == before

    first = await live(own, app, backend("/keys"))
    settings = await settings_of(own, app)
    assert settings["auth"] == {"kind": "jwks", "url": "/keys"}
    assert settings["build"]["start"] == "exec node server.js"
    assert await own.page(app) == f"http://{app}.{DOMAIN}:{own.apps_port}"
    assert await ask(own, app) == 200

    await live(own, app, backend("/me", kind="backend"))
    assert (await settings_of(own, app))["auth"] == {"kind": "backend", "url": "/me"}
    assert await ask(own, app) == 200

    back = await own.call("POST", f"/account/apps/{app}/rollback", json={"deployId": first})
    assert (await own.over(back["deployId"]))["state"] == "live"
    assert await settings_of(own, app) == settings
    assert await ask(own, app) == 200

    back = await own.call("POST", f"/account/apps/{app}/rollback", json={"deployId": plain})
    assert (await own.over(back["deployId"]))["state"] == "live"
    assert await own.page(app) == "no manifest"
    assert await settings_of(own, app) == settings, "a release without a manifest changes nothing"


async def test_a_preview_is_built_by_its_manifest_and_changes_nothing_until_it_is_promoted(own: Host) -> None:
    await own.worker("deploys")
    app = await own.app()
    await live(own, app, backend("/keys"))
    await own.call("PATCH", f"/account/apps/{app}", json={"auth": None, "build": None})
    preview = (await own.gateway.platform("POST", f"apps/{app}/deploys", {"kind": "preview"})).json()["deployId"]
    deploy = await own.over(preview)
    assert deploy["state"] == "live", deploy
    assert await own.page(f"{app}-preview") == f"http://{app}-preview.{DOMAIN}:{own.apps_port}"
    settings = await settings_of(own, app)
    assert (settings["auth"], settings["build"]) == ({"kind": "jwks"}, None)
    promoted = await own.call("POST", f"/account/deploys/{preview}/promote")
    assert (await own.over(promoted["deployId"]))["state"] == "live"
    assert (await settings_of(own, app))["auth"]["url"] == "/keys"
    assert await own.page(app) == f"http://{app}.{DOMAIN}:{own.apps_port}"


async def test_a_fault_fails_the_build_and_a_failed_canary_gives_the_settings_back(own: Host) -> None:
    await own.worker("deploys")
    app = await own.app()
    await live(own, app, backend("/keys"))
    before = await settings_of(own, app)

    deploy = await own.over(await own.publish(app, {"index.html": "", "capsule.toml": '[build]\noutptu = "dist"\n'}))
    assert (deploy["state"], deploy["phases"][0]["state"]) == ("failed", "failed")
    assert deploy["error"].startswith("capsule.toml, line 2: build: there is no key called outptu")

    manifest = '[build]\nstart = "node server.js"\n[auth]\nkind = "jwks"\nurl = "/other"\n'
    deploy = await own.over(await own.publish(app, server(manifest, visits="1")))
    assert deploy["error"] == "canary: GET / returned 500", deploy
    assert await settings_of(own, app) == before
    assert await ask(own, app) == 200


async def test_the_health_check_of_a_start_command(own: Host) -> None:
    await own.worker("deploys")
    app = await own.app()
    manifest = '[build]\nstart = "exec node server.js"\nhealth = "/me"\n'
    await live(own, app, server(manifest, visits="0"))
    deploy = await own.over(await own.publish(app, server(manifest.replace("/me", "/"), visits="Infinity")))
    assert deploy["state"] == "live", deploy
    assert (await settings_of(own, app))["build"]["health"] == "/"

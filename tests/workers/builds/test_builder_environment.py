"""Environment variables and the output of start commands from end to end, with a real gateway, workers and apps."""

import asyncio
import secrets

import pytest

from tests.support.deployment import Host, packed

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVER = """\
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
    first = await host.over(await host.publish(app, {"server.js": SERVER}))
    assert (first["state"], await host.page(app)) == ("live", "4 production false")
    await host.call("PUT", path, json={"TOKEN": secret, "NODE_ENV": "staging"})
    assert await host.page(app) == "4 production false", "only from the next deploy on"
    deploy = await host.over(await host.publish(app, {"server.js": SERVER}))
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
    assert (await host.over(await host.publish(app, {"server.js": SERVER})))["state"] == "live"
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
        await host.over(await host.publish(app, {"server.js": SERVER.replace("starting", "beginning")}))
        while await anext(lines) != "data: beginning with none":
            pass

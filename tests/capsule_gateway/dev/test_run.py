"""`capsule dev` on machines that can and cannot build apps, and with a folder."""

import io
import ssl
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from capsule_gateway.dev.identity import OWNER
from capsule_gateway.dev.layout import Layout
from tests.support.dev_process import Run, start
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.redis_servers import five_free_ports
from tests.support.user_namespace import FAULT
from workers.hosting.releases import Site

# A backend of its own, without packages: it signs tokens, and counts its starts in DATA_DIR.
SERVER = r"""
const { createServer } = require("node:http");
const { createHmac } = require("node:crypto");
const { appendFileSync, readFileSync } = require("node:fs");
const count = process.env.DATA_DIR + "/starts";
appendFileSync(count, "x");
const encode = (value) => Buffer.from(JSON.stringify(value)).toString("base64url");
const sign = () => {
  const text = encode({ alg: "HS256" }) + "." + encode({ sub: "ana", exp: Math.floor(Date.now() / 1000) + 60 });
  return text + "." + createHmac("sha256", "s".repeat(32)).update(text).digest("base64url");
};
createServer((request, response) => {
  const { APP_URL, VITE_SERVICE_AI_URL, GATEWAY_PROVIDER_KEY, BETTER_AUTH_SECRET, HELLO } = process.env;
  const starts = readFileSync(count, "utf8").length;
  const secret = BETTER_AUTH_SECRET?.length;
  const seen = { APP_URL, VITE_SERVICE_AI_URL, GATEWAY_PROVIDER_KEY, HELLO, secret, starts };
  response.end(JSON.stringify({ ...seen, token: sign() }));
}).listen(process.env.PORT, process.env.HOST, () => console.log("the server listens"));
"""
MANIFEST = """
name = "notes"
[auth]
kind = "secret"
secret = "ssssssssssssssssssssssssssssssss"
[dev]
command = "HELLO=world node server.cjs"
"""


def pack_page(text: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        file = tarfile.TarInfo("index.html")
        file.size = len(text)
        tar.addfile(file, io.BytesIO(text.encode()))
    return packed.getvalue()


@pytest.fixture
def folder() -> Iterator[Path]:
    with passable_folder() as folder:
        yield folder


async def read_page(run: Run, app: str) -> str:
    async with httpx.AsyncClient(
        base_url=run.hosted, headers={"Host": f"{app}.apps.localhost"}, trust_env=False, timeout=30
    ) as http:
        return (await http.get("/")).text


async def test_without_a_sandbox_the_screen_names_the_remedy(folder: Path) -> None:
    port = five_free_ports()
    run = await start(port, folder, confined=True)
    await run.read(until="Press Ctrl-C to stop.")
    try:
        assert f"  Demo page   unavailable: {FAULT[0]}\n" in run.said
        assert f" To fix it: {FAULT[1]}, then start again.\n" in run.said
        assert "docker compose up" in run.said
        assert "make run ARGS=--trust-builds" in run.said
        assert f"demo.apps.localhost:{port + 1}" not in run.said
        deploy = await publish(run, "demo", pack_page("mine"))
        assert deploy["state"] == "failed"
        assert deploy["error"].startswith("build: this machine can't build apps safely: ")
        assert deploy["error"].endswith(": ".join(FAULT))
    finally:
        assert await run.stop() == 0


async def publish(run: Run, app: str, source: bytes) -> dict[str, Any]:
    """Publishes a source, as a new app unless it exists, and returns the deploy once it has ended."""
    headers = {"Authorization": f"Bearer {run.api_key}"}
    async with httpx.AsyncClient(
        base_url=f"http://localhost:{run.port}", headers=headers, trust_env=False, timeout=30
    ) as http:
        await http.post("/account/apps", json={"name": app})
        queued = await http.put(f"/account/apps/{app}/source", content=source)
        assert queued.status_code == 202, queued.text
        deploy: dict[str, Any] = {}

        async def has_ended() -> bool:
            deploy.update((await http.get(f"/account/deploys/{queued.json()['deployId']}")).json())
            return deploy["state"] in ("live", "failed")

        await wait_until(has_ended, 30)
        return deploy


async def sign_in(run: Run, email: str) -> dict[str, Any]:
    """Returns the dashboard's session of somebody who has signed in at the provider of `capsule dev`."""
    base = f"http://localhost:{run.port}"
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as browser:
        provider = (await browser.get("/dashboard/sign-in")).headers["location"]
        answer = (await browser.get(f"{provider}&login={email}")).headers["location"]
        assert (await browser.get(answer)).headers["location"] == "/dashboard"
        session: dict[str, Any] = (await browser.get("/dashboard/session")).json()
        return session


@pytest.fixture
def source(folder: Path) -> Path:
    source = folder / "notes"
    source.mkdir()
    (source / "capsule.toml").write_text(MANIFEST)
    (source / "server.cjs").write_text(SERVER)
    return source


async def test_a_folder_runs_in_the_place_of_the_demo_app(folder: Path, source: Path) -> None:
    port, data = five_free_ports(), folder / "data"
    for starts in (1, 2):
        run = await start(port, data, str(source), GATEWAY_PROVIDER_KEY="hidden")
        await run.read(until="notes answers at")
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
                page = await http.get(f"{run.hosted}/", headers={"Host": f"notes.apps.localhost:{port + 1}"})
                seen = page.json()
                ask = {"json": {"prompt": "Who?"}, "headers": {"Authorization": f"Bearer {seen.pop('token')}"}}
                answer = await http.post(f"http://127.0.0.1:{port}/capsule/notes/ai", **ask)
            address = f"http://notes.apps.localhost:{port + 1}"
            ai = f"http://localhost:{port}/capsule/notes/ai"
            assert seen == {
                "APP_URL": address,
                "VITE_SERVICE_AI_URL": ai,
                "HELLO": "world",
                "secret": 43,
                "starts": starts,
            }
            assert answer.json()["finishReason"] == "stop"
            assert address in run.said
            assert "the server listens" in run.said
            assert "the server listens" in (data / "logs" / "app.log").read_text()
        finally:
            assert await run.stop() == 0


async def test_one_setting_serves_everything_with_https(folder: Path, source: Path) -> None:
    port, data = five_free_ports(), folder / "data"
    run = await start(port, data, str(source), GATEWAY_ACME="internal")
    await run.read(until="notes answers at")
    try:
        authority = ssl.create_default_context(cafile=Layout(port, data, https=True).root_certificate)
        app, service = f"https://notes.apps.localhost:{port + 1}", f"https://localhost:{port + 1}"
        assert app in run.said
        assert f"{service}/dashboard" in run.said
        assert f"  Certificate {Layout(port, data, https=True).root_certificate} (" in run.said
        named = {"headers": {"Host": app[8:]}, "extensions": {"sni_hostname": "notes.apps.localhost"}}
        async with httpx.AsyncClient(trust_env=False, timeout=30, verify=authority) as http:
            seen = (await http.get(f"https://127.0.0.1:{port + 1}/", **named)).json()
            assert (seen["APP_URL"], seen["VITE_SERVICE_AI_URL"]) == (app, f"{service}/capsule/notes/ai")
            headers = {"Authorization": f"Bearer {seen['token']}", "Origin": app}
            answer = await http.post(seen["VITE_SERVICE_AI_URL"], json={"prompt": "Who?"}, headers=headers)
            assert answer.headers["Access-Control-Allow-Origin"] == app
            assert (await http.get(f"{service}/dashboard")).is_success
            assert [(await http.get(f"{service}/{path}")).status_code for path in ("metrics", "ready")] == [404, 404]
    finally:
        assert await run.stop() == 0


async def test_a_published_release_takes_the_place_of_the_folder(folder: Path, source: Path) -> None:
    (source / "capsule.toml").write_text('[dev]\ncommand = "node server.cjs"\n')
    port, data = five_free_ports(), folder / "data"
    run = await start(port, data, str(source))
    await run.read(until="demo answers at")
    assert "starts" in await read_page(run, "demo")
    published = await publish(run, "demo", pack_page("<p>published"))
    assert published["state"] == "live"
    assert await read_page(run, "demo") == "<p>published"
    assert await run.stop() == 0
    [live] = Layout(port, data).data_dir.glob("releases/*/live")
    assert Site(live).current == published["id"]


async def test_trust_builds_runs_apps_without_a_sandbox(folder: Path) -> None:
    run = await start(five_free_ports(), folder, "--trust-builds")
    await run.read(until="Press Ctrl-C to stop.")
    try:
        assert "WITHOUT A SANDBOX" in run.said
        session = await sign_in(run, OWNER)
        assert [(each["name"], each["role"]) for each in session["accounts"]] == [("Demo", "owner")]
        assert session["account"] == session["accounts"][0]["id"], "its person is in the demo account at once"
        assert (await publish(run, "mine", pack_page("mine")))["state"] == "live"
        assert await read_page(run, "mine") == "mine"
    finally:
        assert await run.stop() == 0

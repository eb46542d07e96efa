"""Apps on a real cluster, as their owners and visitors see them: deployed, replaced, broken, suspended and deleted.

`make test-kubernetes` runs these tests. It needs root and Debian 12, and builds Kubernetes the first time.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import pytest

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import NAMESPACE
from tests.support.accounts import DOMAIN
from tests.support.deployment import START, Host
from tests.support.polling import wait_until
from tests.support.worker_process import Worker

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]

SWAPS = int(os.environ.get("KUBERNETES_SWAPS", "10"))  # the workflow makes 100
HEAL_SECONDS = 10
KINDS = ("deployments", "secrets", "services", "endpoints", "ingresses", "pods", "persistentvolumeclaims")
SERVER = """
console.log('starting', process.env.TOKEN ?? 'without a token')
const memory = []
require('http').createServer((request, answer) => {
  if (request.url === '/exit') process.exit(3)
  if (request.url === '/memory') setInterval(() => memory.push(Buffer.alloc(64 << 20, 1)), 20)
  if (request.url === '/token') return answer.end(process.env.TOKEN ?? 'none')
  if (request.url === '/slow') return setTimeout(() => answer.end('TEXT'), 3000)
  answer.end('TEXT')
}).listen(process.env.PORT)
"""
CONNECTS = """
require('http').createServer((request, answer) => {
  const [, host, port] = request.url.split('/')
  if (!port) return answer.end('here')
  const socket = require('net').connect({host, port, timeout: 2000})
  socket.on('connect', () => answer.end('connected')).on('timeout', () => answer.end('refused'))
  socket.on('error', () => answer.end('refused'))
}).listen(process.env.PORT)
"""


def server(text: str) -> dict[str, str]:
    return {"server.js": SERVER.replace("TEXT", text)}


async def until_live(host: Host, deploy_id: str, timeout: float = 120) -> dict[str, Any]:
    deploy = await host.in_state(deploy_id, "live", "failed", "canceled", timeout=timeout)
    assert deploy["state"] == "live", (deploy["error"], deploy["log"])
    return deploy


async def publish(host: Host, app: str, files: dict[str, str]) -> dict[str, Any]:
    return await until_live(host, await host.publish(app, files))


async def queue_preview(host: Host, app: str) -> str:
    """Returns the id of the deploy."""
    deploy: str = (await host.gateway.platform("POST", f"apps/{app}/deploys", {"kind": "preview"})).json()["deployId"]
    return deploy


async def delete(host: Host, cluster: Cluster, app: str, timeout: float = 90) -> None:
    """Deletes an app, and waits until no object of it is left."""
    own = await app_id(host, app)
    assert (await host.account.call("DELETE", f"/account/apps/{app}")).status_code == 204
    await wait_until(lambda: count(cluster, own), timeout, holds=lambda found: not found)


async def get(host: Host, app: str, path: str = "/") -> Any:
    return await host.web.get(path, headers={"Host": f"{app}.{DOMAIN}"})


async def serves(host: Host, app: str, text: str, timeout: float = HEAL_SECONDS) -> None:
    await wait_until(lambda: host.page(app), timeout, holds=lambda page: page == text)


async def app_id(host: Host, app: str) -> str:
    return next(each["id"] for each in await host.call("GET", "/account/apps") if each["name"] == app)


def find(cluster: Cluster, kind: str, app: str) -> list[Any]:
    """Returns the app's objects of a kind that are not being deleted."""
    found = cluster.find(kind, NAMESPACE, f"capsule/app={app}")
    return [each for each in found if "deletionTimestamp" not in each["metadata"]]


def count(cluster: Cluster, app: str) -> dict[str, int]:
    return {kind: found for kind in KINDS if (found := len(find(cluster, kind, app)))}


@contextlib.asynccontextmanager
async def visitors(host: Host, app: str, texts: set[str], *, may_miss: bool = False) -> AsyncIterator[dict[str, int]]:
    """Sends requests all the time. Each must be answered with one of the texts. Yields how often each one was.

    `may_miss`: there may be no pod for a moment.
    """
    seen, over = dict.fromkeys(texts, 0), asyncio.Event()
    url, headers = f"http://127.0.0.1:{host.apps_port}/", {"Host": f"{app}.{DOMAIN}"}

    async def visit(session: aiohttp.ClientSession) -> None:
        while not over.is_set():
            async with session.get(url, headers=headers) as answer:
                text = await answer.text()
            if may_miss and answer.status == 502:
                continue
            assert (answer.status, text in texts) == (200, True), (answer.status, text)
            seen[text] += 1
            await asyncio.sleep(0.01)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(visit(session))
        try:
            yield seen
        finally:
            over.set()


async def test_pages_are_served_promoted_and_rolled_back(host: Host, cluster: Cluster) -> None:
    app = await host.app()
    page = {"index.html": "first", "first.js": "1", "_headers": "/*\n  X-Mine: yes\n", "docs/index.html": "docs"}
    first = await publish(host, app, page)
    answer = await get(host, app)
    assert (answer.status_code, answer.text, answer.headers["x-mine"]) == (200, "first", "yes")
    assert "x-robots-tag" not in answer.headers
    assert (await get(host, app, "/docs/")).text == "docs"
    await publish(host, app, {"index.html": "second"})
    await serves(host, app, "second")
    assert (await get(host, app, "/first.js")).text == "1"  # for pages that were opened before
    assert (await get(host, app, "/docs/")).text != "docs"
    back = await host.call("POST", f"/account/apps/{app}/rollback", json={"deployId": first["id"]})
    await until_live(host, back["deployId"])
    await serves(host, app, "first")
    own = await app_id(host, app)
    expected = {"deployments": 1, "secrets": 1, "services": 1, "endpoints": 1, "ingresses": 1, "pods": 1}
    await wait_until(lambda: count(cluster, own), 60, holds=lambda found: found == expected)


async def test_a_start_command_has_its_variables_and_nobody_else(host: Host, cluster: Cluster) -> None:
    app, secret = await host.app(build=START), secrets.token_hex(16)
    host.gateway.confidential.add(secret)
    await host.call("PUT", f"/account/apps/{app}/env", json={"TOKEN": secret})
    await publish(host, app, server("one"))
    assert (await get(host, app, "/token")).text == secret

    async def log() -> str:
        return (await host.account.get(f"/account/apps/{app}/logs?tail=20")).text

    assert "starting ***" in await wait_until(log, 10, holds=lambda text: "starting" in text)
    own = await app_id(host, app)
    for kind in ("deployments", "pods", "ingresses", "services"):
        assert secret not in str(find(cluster, kind, own))
    [pod] = find(cluster, "pods", own)
    output = cluster.kubectl("logs", "-n", NAMESPACE, pod["metadata"]["name"], "--all-containers")
    assert "starting ***" in output
    assert secret not in output


async def test_the_log_is_followed_over_a_deploy(host: Host) -> None:
    app = await host.app(build=START)
    await publish(host, app, server("one"))
    headers = {"Authorization": f"Bearer {host.account.key}", "Accept": "text/event-stream"}
    async with host.gateway.http.stream("GET", f"/account/apps/{app}/logs", headers=headers) as answer:
        lines = answer.aiter_lines()
        async with asyncio.timeout(60):
            while "starting" not in await anext(lines):
                pass
            await publish(host, app, {"server.js": SERVER.replace("starting", "again").replace("TEXT", "two")})
            while "again" not in await anext(lines):
                pass


async def test_a_start_command_that_ends_fails_the_check_with_its_output(host: Host) -> None:
    app = await host.app(build=START)
    deploy = await host.over(await host.publish(app, {"server.js": "console.log('no luck'); process.exit(7)"}))
    assert deploy["error"] == "health: the start command ended with status 7"
    assert "no luck" in deploy["log"]


async def test_swaps_under_load_fail_no_request(host: Host) -> None:
    app = await host.app(build=START)
    deploys = [(await publish(host, app, server(text)))["id"] for text in ("one", "two")]
    async with visitors(host, app, {"one", "two"}) as seen:
        for number in range(SWAPS):
            path, body = f"/account/apps/{app}/rollback", {"deployId": deploys[number % 2]}
            deploy = await until_live(host, (await host.call("POST", path, json=body))["deployId"])
            deploys[number % 2] = deploy["id"]
    assert min(seen.values()) > 10 * SWAPS, seen


async def test_a_request_that_runs_during_a_swap_is_finished(host: Host) -> None:
    app = await host.app(build=START)
    await publish(host, app, server("one"))
    coming = await host.publish(app, server("two"))
    await host.in_state(coming, "checking")
    slow = [asyncio.create_task(get(host, app, "/slow"))]
    while (await host.deploy(coming))["state"] == "checking":
        slow.append(asyncio.create_task(get(host, app, "/slow")))
        await asyncio.sleep(0.2)
    await until_live(host, coming)
    assert {answer.status_code for answer in await asyncio.gather(*slow)} == {200}


@pytest.mark.parametrize(("path", "reason", "code"), [("/exit", "exit", 3), ("/memory", "oom", 137)])
async def test_each_crash_is_reported_once(host: Host, running: Host, path: str, reason: str, code: int) -> None:
    app = await host.app(build=START)
    await publish(host, app, server("one"))

    def crashes() -> list[tuple[str, int]]:
        received = [exchange.json for exchange in host.receiver.exchanges if exchange.json["type"] == "app.crashed"]
        mine = [each["data"] for each in received if each["data"]["appName"] == app]
        return [(each["reason"], each["exitCode"]) for each in mine]

    await ask_until_it_ends(host, app, path)
    assert await wait_until(crashes, 30) == [(reason, code)]
    await serves(host, app, "one", 60)
    for worker in find_sites(running):
        worker.kill()
        await worker.start()
    await ask_until_it_ends(host, app, "/exit")
    await wait_until(lambda: len(crashes()) > 1, 60)
    await serves(host, app, "one", 120)
    assert crashes() == [(reason, code), ("exit", 3)]
    [first, _] = await host.call("GET", f"/account/apps/{app}/crashes")
    assert first["lines"][-1].startswith("starting")


async def ask_until_it_ends(host: Host, app: str, path: str) -> None:
    with contextlib.suppress(httpx.TransportError):
        await get(host, app, path)


def find_sites(running: Host) -> list[Worker]:
    return [worker for worker in running.workers if "sites" in worker.names]


# By kind: what somebody changes, and what somebody adds.
CHANGES: dict[str, tuple[Any, Any]] = {
    "deployments": ({"spec": {"replicas": 0}}, {"spec": {"template": {"spec": {"hostNetwork": True}}}}),
    "secrets": ({"data": {"token": "AAAA"}}, {"data": {"other.example.org": "AAAA"}}),
    "services": ({"spec": {"selector": {"capsule/deploy": "none"}}}, {"spec": {"externalIPs": ["203.0.113.9"]}}),
    "ingresses": (
        {"spec": {"rules": [{"host": "stolen.example"}]}},
        {"spec": {"tls": [{"hosts": ["other.example.org"], "secretName": "other"}]}},
    ),
    "networkpolicies": (
        {"spec": {"ingress": [{}]}},
        {"spec": {"podSelector": {"matchLabels": {"other.example.org": "x"}}}},
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
async def test_what_somebody_changes_adds_or_deletes_is_healed(host: Host, cluster: Cluster, kind: str) -> None:
    app = await host.app(build=START)
    await publish(host, app, server("one"))
    own = "" if kind == "networkpolicies" else f",capsule/app={await app_id(host, app)}"
    own += ",!capsule/data" if kind == "secrets" else ""  # that of the release, not of the data

    def read() -> dict[str, Any]:
        """Returns the contents of each object, without what the API server sets."""
        found = cluster.find(kind, NAMESPACE, f"app.kubernetes.io/managed-by=capsule{own}")
        kept = {each["metadata"]["name"]: each for each in found if "deletionTimestamp" not in each["metadata"]}
        contents = {name: each["spec"] if "spec" in each else each["data"] for name, each in kept.items()}
        volatile = ("clusterIP", "clusterIPs")
        return {name: {key: each[key] for key in each if key not in volatile} for name, each in contents.items()}

    before = read()
    [name] = before
    changed, added = CHANGES[kind]
    for how, change in (("merge", changed), ("strategic", added)):
        cluster.kubectl("patch", kind, name, "-n", NAMESPACE, f"--type={how}", "-p", json.dumps(change))
        cluster.kubectl("label", kind, name, "-n", NAMESPACE, "capsule/deploy-", "--overwrite")
        await wait_until(read, HEAL_SECONDS, holds=lambda found: found == before)
    cluster.kubectl("delete", kind, name, "-n", NAMESPACE, "--wait=false")
    await wait_until(read, HEAL_SECONDS, holds=lambda found: found == before)
    await serves(host, app, "one", 60)
    await publish(host, app, server("two"))  # it can still be changed
    await serves(host, app, "two", 60)


async def test_a_suspended_app_says_so_and_comes_back(host: Host, cluster: Cluster) -> None:
    app = await host.app(build=START)
    await publish(host, app, server("one"))
    own = await app_id(host, app)
    assert (await host.gateway.platform("PUT", f"apps/{app}/suspension", {"reason": "test"})).is_success

    async def answer() -> tuple[int, str]:
        answer = await get(host, app)
        return answer.status_code, answer.text

    await wait_until(lambda: find(cluster, "pods", own), 5, holds=lambda pods: not pods)
    _, text = await wait_until(answer, 5, holds=lambda answer: answer[0] == 503)
    assert "suspended" in text
    assert (await host.gateway.platform("DELETE", f"apps/{app}/suspension")).is_success
    await serves(host, app, "one", 60)


async def test_a_deleted_app_leaves_nothing(host: Host, cluster: Cluster) -> None:
    app = await host.app(build=START)
    await publish(host, app, server("one"))
    left = f"dep-{secrets.token_hex(10)}"  # by a worker that ended between the deletions of a release's objects
    cluster.kubectl("create", "secret", "generic", left, "-n", NAMESPACE)
    labels = {"app.kubernetes.io/managed-by": "capsule", "capsule/deploy": left.replace("-", "_")}
    cluster.kubectl("label", "secret", left, "-n", NAMESPACE, *(f"{name}={value}" for name, value in labels.items()))
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    await wait_until(lambda: cluster.find("secrets", NAMESPACE, selector), 30, holds=lambda found: not found)
    await host.over(await queue_preview(host, app))
    own = await app_id(host, app)
    await delete(host, cluster, app, 30)
    await wait_until(lambda: cluster.find("pods", NAMESPACE, f"capsule/app={own}"), 90, holds=lambda found: not found)


async def test_a_full_quota_fails_the_deploy_with_the_reason(host: Host, cluster: Cluster) -> None:
    app = await host.app(build=START)
    await publish(host, app, server("one"))
    pods = len(cluster.find("pods", NAMESPACE))
    full = {"spec": {"hard": {"pods": str(pods)}}}
    cluster.kubectl("patch", "resourcequota", "apps", "-n", NAMESPACE, "-p", json.dumps(full))
    try:
        deploy = await host.in_state(await host.publish(app, server("two")), "failed", "live", timeout=180)
    finally:
        full["spec"]["hard"]["pods"] = "1000"
        cluster.kubectl("patch", "resourcequota", "apps", "-n", NAMESPACE, "-p", json.dumps(full))
    assert deploy["state"] == "failed"
    assert "quota" in deploy["error"]
    assert await host.page(app) == "one"


async def test_an_app_reaches_nothing_inside(host: Host, cluster: Cluster) -> None:
    """Neither the API server, nor another app, nor what else listens on the nodes, such as Redis or the gateway."""
    neighbor = await host.app()
    await publish(host, neighbor, {"index.html": "neighbor"})
    [pod] = find(cluster, "pods", await app_id(host, neighbor))
    app = await host.app(build=START)
    await publish(host, app, {"server.js": CONNECTS})
    with socket.create_server(("0.0.0.0", 0)) as listener:
        own = find(cluster, "pods", await app_id(host, app))[0]["status"]["hostIP"]
        targets = [(pod["status"]["podIP"], 61080), (own, listener.getsockname()[1]), ("10.96.0.1", 443)]
        for address, port in targets:
            assert (await get(host, app, f"/{address}/{port}")).text == "refused", address
    assert await host.page(neighbor) == "neighbor"

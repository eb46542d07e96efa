"""A running service has every metric, label and key that a dashboard or an alert names."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis

from gateway.accounts.records import App as Record
from gateway.keys import PARTITION_TAGS, partition_tag
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.server import answer
from tests.support.accounts import App
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.programs import require, running
from tests.support.redis_servers import free_port
from tests.support.responses import refused
from tests.support.worker_process import CRASH, Queue

OPS = Path(__file__).parents[2] / "ops"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in (OPS / "grafana/dashboards").glob("*.json")}

session = pytest.mark.asyncio(loop_scope="session")
pytestmark = session


def list_panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def list_targets(source: str) -> list[dict[str, Any]]:
    every = [target for each in DASHBOARDS.values() for panel in list_panels(each) for target in panel["targets"]]
    return [target for target in every if target["datasource"]["uid"] == source]


def list_expressions() -> list[str]:
    notes = [note["expr"] for dashboard in DASHBOARDS.values() for note in dashboard["annotations"]["list"]]
    alerts = (OPS / "alerts.yml").read_text()
    found = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.+))", alerts)
    return [*notes, *(target["expr"] for target in list_targets("prometheus")), *("".join(parts) for parts in found)]


# -- a service that has all kinds of data --------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gw(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with FakeProvider() as provider, gateway_with_redis(provider, tmp_path_factory.mktemp("ops")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def app(gw: Gateway) -> AsyncIterator[App]:
    """Creates an app with successful and refused requests, its events, and events in every partition."""
    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
        for _ in range(20):
            await app.events("x")
        refused(await app.ask("x"), 429, "USER_RATE_LIMITED")
        refused(await app.ask(gw.provider.plays(answer(500)), token=app.token("eve")), 502, "PROVIDER_ERROR")
        queue = Queue(gw.redis.url, gw.folder)
        await queue.worker()
        await queue.webhooks.emit(Record(id=app.name, name=app.name, account=app.account.id, createdAt=""), CRASH)
        missing = set(PARTITION_TAGS)
        while missing:
            account = queue.unset_account()
            await account.emit()
            missing.discard(partition_tag(account.id))

        await queue.drained(15)
        with gw.redis.client() as client:
            await wait_until(lambda: client.keys("spend-by-account:*") and client.keys("{ops}:processes"))
        yield app
        await queue.close()


@pytest.fixture(scope="module")
def exporter(gw: Gateway) -> Iterator[str]:
    """Runs the exporter from which Prometheus scrapes Redis, and yields its address."""
    path = require("prometheus-redis-exporter", "redis_exporter")
    port = free_port()
    address = [f"--redis.addr=redis://127.0.0.1:{gw.redis.port}", f"--web.listen-address=127.0.0.1:{port}"]
    with running(path, *address):
        yield f"http://127.0.0.1:{port}/metrics"


# -- the dashboards ------------------------------------------------------------------------------------------


async def test_every_metric_and_its_labels_exist(gw: Gateway, app: App, exporter: str) -> None:
    async def read_exporter() -> str | None:
        try:
            return (await gw.http.get(exporter)).text
        except httpx.TransportError:
            return None

    metrics = (await gw.http.get("/metrics")).text + await wait_until(read_exporter)
    names = {"up", *re.findall(r"^(?:# TYPE )?(\w+)(?:{.*})? ", metrics, re.MULTILINE)}  # a type also without a value
    named = {
        name
        for expression in list_expressions()
        for name in re.findall(r"\b((?:gateway|gen_ai|redis)_\w+|up)\b(?=[{\[) ]|$)", expression)
    }
    labels = {"gen_ai_request_model", "gen_ai_token_type"}
    assert len(named) > 20
    assert sorted(named - labels - names) == []
    for expression in list_expressions():
        for name, matchers in re.findall(r"\b((?:gateway|gen_ai)_\w+)\{([^}]*)\}", expression):
            for label in re.findall(r"(\w+)\s*[!=]=?", matchers):
                assert re.search(rf'^{name}\{{.*\b{label}="', metrics, re.MULTILINE), (name, label)


def read_variables(client: redis.Redis, app: App) -> dict[str, str]:
    """Returns the variables of the dashboards: query results from Redis, and the app's values for the text boxes."""
    typed = {"partition": partition_tag(app.account.id), "account": app.account.id}
    found = {}
    for variable in (v for dashboard in DASHBOARDS.values() for v in dashboard["templating"]["list"]):
        name = variable["name"]
        if variable["type"] == "query":
            assert variable["datasource"] == {"type": "redis-datasource", "uid": "redis"}
            assert variable["refresh"] == 2  # whenever the time range changes, which each refresh of the dashboard does
            found[name] = client.execute_command(*variable["query"].split()).decode()
        else:
            found[name] = typed[name]
    return found


def fill_variables(text: str, values: dict[str, str]) -> str:
    filled = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)
    assert "$" not in filled
    return filled


async def test_every_key_exists_and_redis_answers_every_query(gw: Gateway, app: App) -> None:
    commands = {"hgetall": "HGETALL", "smembers": "SMEMBERS", "xlen": "XLEN"}
    with gw.redis.client() as client:
        # The gateway writes counters every ten seconds, so the current minute's key may not exist yet.
        def find_missing_keys() -> list[str]:
            values = read_variables(client, app)
            named = [
                t.get("keyName") or t["query"].split()[1] for t in list_targets("redis") if {"keyName", "query"} & {*t}
            ]
            return [key for key in (fill_variables(each, values) for each in named) if not client.exists(key)]

        await wait_until(lambda: not find_missing_keys(), 15)
        values = read_variables(client, app)
        for target in list_targets("redis"):
            if target["type"] == "cli":
                assert client.execute_command(*fill_variables(target["query"], values).split())
            elif "keyName" in target:
                assert target["command"] in commands
            else:
                assert (
                    client.info(target["section"]) if target["command"] == "info" else target["command"] == "slowlogGet"
                )

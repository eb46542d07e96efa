"""The OpenAPI document and the running service: schemathesis sends valid and invalid requests."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.deploys.manifest import manifest_schema
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.gateway_process import OPERATOR, Gateway, gateway_with_redis

pytestmark = pytest.mark.asyncio(loop_scope="session")

# A schema cannot express that an account or address exists, so valid requests may still be refused.
CHECKS = ["--exclude-checks", "positive_data_acceptance"]
SCHEMA = "/docs/openapi.json"


def schemathesis(gw: Gateway, app: str, paths: str, credential: str) -> str:
    config = gw.folder / "schemathesis.toml"
    config.write_text(f'[parameters]\n"path.app" = "{app}"\n')
    command = [Path(sys.executable).parent / "st", "--config-file", config, "run", f"{gw.address}{SCHEMA}"]
    options = ["--include-path-regex", paths, "--max-examples", "4", "--phases", "examples,coverage,fuzzing"]
    header = ["--header", f"Authorization: Bearer {credential}", "--no-color", *CHECKS]
    environment = {"PATH": os.environ["PATH"], "HOME": str(gw.folder), "COLUMNS": "200"}
    done = subprocess.run(
        [*command, *options, *header], cwd=gw.folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = re.search(r"Tested: (\d+)", done.stdout)
    assert tested, done.stdout
    return tested[1]


# Paths by caller. Three are left out: two stream for minutes, the other is JSON-RPC.
GROUPS = {
    "user": "^/capsule",
    "account": "^/(account(?!/changes)|capabilities|register|hooks)",
    "operator": "^/(platform|health|ready|metrics|dashboard|ops/session|pages|unsubscribe|ops$|$)",
}
LEFT_OUT = {"/account/changes", "/ops/events", "/mcp"}


@pytest_asyncio.fixture(loop_scope="session")
async def generous(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway without effective rate limits and spending caps.

    Each group has its own, because what one group sends as a prompt another one sends as a name, which Redis keeps.
    """
    many = {"GATEWAY_RATE_LIMITS": "app=1000000,user=1000000", "GATEWAY_DAILY_CAPS": "max=1000"}
    async with FakeProvider() as provider, gateway_with_redis(provider, tmp_path, **many) as running:
        yield running


async def operations(gw: Gateway, paths: str) -> list[str]:
    documented = (await gw.http.get(SCHEMA)).json()["paths"]
    return [f"{method} {path}" for path, item in documented.items() if re.search(paths, path) for method in item]


@pytest.mark.parametrize("group", GROUPS)
async def test_no_undocumented_status_and_no_server_error(
    generous: Gateway, backend: FakeAppBackend, group: str
) -> None:
    app = await generous.app(backend)
    credential = {"user": app.token(), "account": app.account.key, "operator": OPERATOR}[group]
    tested = await asyncio.to_thread(schemathesis, generous, app.name, GROUPS[group], credential)
    assert int(tested) == len(await operations(generous, GROUPS[group]))


async def test_every_route_is_in_one_group(gw: Gateway) -> None:
    grouped = [operation for paths in GROUPS.values() for operation in await operations(gw, paths)]
    others = [operation for operation in await operations(gw, "") if operation.partition(" ")[2] in LEFT_OUT]
    assert sorted(grouped + others) == sorted(await operations(gw, ""))
    assert len(others) == len(LEFT_OUT)


OWN = "^/(account|platform|capabilities|dashboard/session)"
PARAMETERS = {"{app}": "app", "{account}": "account", "{account_id}": "account"}


async def test_no_answer_of_an_account_is_stored(gw: Gateway, backend: FakeAppBackend) -> None:
    """Neither by a browser nor by a proxy, whatever it is: every GET of the document, with and without a right."""
    app = await gw.app(backend)
    names, statuses = {"app": app.name, "account": app.account.id}, set[int]()
    for operation in await operations(gw, OWN):
        method, _, path = operation.partition(" ")
        if method != "get" or path in LEFT_OUT:
            continue
        path = re.sub(r"\{\w+\}", lambda name: names.get(PARAMETERS.get(name[0], ""), "none"), path)
        for credential in (app.account.key, OPERATOR, "none"):
            headers = {"Authorization": f"Bearer {credential}"}
            async with gw.http.stream("GET", path, headers=headers) as answer:
                assert answer.headers.get_list("cache-control") == ["no-store"], (path, answer.status_code)
                statuses.add(answer.status_code)
    assert statuses >= {200, 401, 404}


async def test_the_schema_of_manifests_is_public(gw: Gateway) -> None:
    answer = await gw.http.get("/docs/capsule.schema.json")
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/schema+json")
    assert answer.json() == manifest_schema()

"""The application's factory, the methods that it reports for each address, and what it may do at Redis."""

import re
from pathlib import Path

import pytest
import redis

from gateway.app import create_app
from gateway.settings import Settings
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.receiver import FakeReceiver
from tests.support.deployment import all_processes
from tests.support.polling import wait_until
from tests.support.prices import cost
from tests.support.redis_servers import RedisServer
from tests.support.responses import answered


def test_each_route_has_its_methods() -> None:
    app = create_app(Settings()).litestar
    find = app.state.allowed_methods.find
    for route in app.routes:
        assert find(route.path_format), route.path_format
    for path, methods in {
        "/": ["GET", "HEAD", "OPTIONS"],
        "/account/deliveries/evt_1": ["GET", "OPTIONS"],
        "/account/deliveries/evt_1/": ["GET", "OPTIONS"],
        "/account/deliveries/redeliver": ["OPTIONS", "POST"],  # not those of an id
        "/account/deliveries/evt_1/redeliver": ["OPTIONS", "POST"],
        "/account/deliveries/evt_1/redeliver/more": [],
        "/account/deliveries/evt_1/none": [],
        "/account/members/ada": ["DELETE", "OPTIONS", "PUT"],  # of several routes
        "/other": [],
    }.items():
        assert find(path) == methods, path


def test_invalid_settings_end_the_start_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As uvicorn makes the application without `capsule serve`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_REDIS_URL", "nonsense")
    monkeypatch.setenv("GATEWAY_DRAIN", "never")
    with pytest.raises(SystemExit) as ended:
        create_app()
    first, *faults = str(ended.value.code).splitlines()
    assert first == "The settings are invalid:"
    assert [line.partition(":")[0] for line in faults] == ["GATEWAY_REDIS_URL", "GATEWAY_DRAIN"]


PAGE = Path(__file__).parents[2] / "docs" / "redis.md"


# Further commands, for a cluster and for GATEWAY_REDIS_WAIT.
OTHERS = ("CLUSTER SLOTS", "ASKING", "WAIT 1 1")


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="session")
async def test_the_documented_acl(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    rule = re.search(r"ACL SETUSER gateway on '>…' (.*)$", PAGE.read_text(), re.MULTILINE)
    assert rule
    with RedisServer("valkey") as server, redis.Redis(port=server.port, decode_responses=True) as node:
        node.execute_command("ACL SETUSER", "gateway", "on", ">password", *rule[1].replace("'", "").split())
        for command in OTHERS:
            assert node.execute_command("ACL DRYRUN", "gateway", *command.split()) == "OK"
        url = f"redis://gateway:password@127.0.0.1:{server.port}"
        async with FakeReceiver() as site, all_processes(url, provider, site, tmp_path) as host:
            app, hosted = await host.gateway.app(backend), await host.app()
            answered(await app.ask(provider.plays(tokens("x", usage=(7, 3)))))
            assert await app.account.settled() == cost(7, 3)
            deploy = await host.over(await host.publish(hosted, {"index.html": "one"}))
            assert deploy["state"] == "live", deploy
            assert [kind for kind, _ in await host.events(deploy["id"])] == ["deploy.succeeded"]
            await wait_until(site.got)
            assert (await host.gateway.http.get("/ready")).json() == {"status": "ready"}
        assert node.acl_log() == []

"""The ACL in docs/redis.md is sufficient for all processes of the service."""

import re
from pathlib import Path

import pytest
import redis

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.receiver import FakeReceiver
from tests.support.deployment import all_processes
from tests.support.polling import wait_until
from tests.support.prices import cost
from tests.support.redis_servers import RedisServer
from tests.support.responses import answered

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

PAGE = Path(__file__).parents[2] / "docs" / "redis.md"


# Further commands, for a cluster and for GATEWAY_REDIS_WAIT.
OTHERS = ("CLUSTER SLOTS", "ASKING", "WAIT 1 1")


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

"""The gateway on Redis Cluster, with accounts on all three primaries."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.receiver import FakeReceiver, verified
from tests.fakes.server import CLOSE, answer
from tests.support.accounts import DOMAIN, Account
from tests.support.deploys import publish, report_phases
from tests.support.dns_server import DnsServer
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import cost, max_cost
from tests.support.redis_servers import cluster
from tests.support.responses import answered, counted, refused, text_of
from tests.support.webhook_holder import DELIVERIES, WEBHOOK, Holder
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")


@module_fixture
async def clustered(
    provider: FakeProvider, resolver: DnsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("cluster")
    settings = {"GATEWAY_DEPLOY_ENGINE": "external", "GATEWAY_DNS": resolver.address}
    with cluster("redis") as url:
        async with gateway(url, provider, folder, **settings) as gw:
            yield gw


async def test_smoke(clustered: Gateway, provider: FakeProvider, backend: FakeAppBackend) -> None:
    gw = clustered
    apps = [await gw.app(backend) for _ in range(20)]
    prompt = provider.plays(tokens("Bon", "jour", usage=(7, 3)))
    answers = await asyncio.gather(*(app.ask(prompt) for app in apps))
    assert {answered(a)["text"] for a in answers} == {"Bonjour"}
    for app in apps:
        assert await app.account.settled() == cost(7, 3)
    app = apps[0]
    assert text_of(await app.events(prompt)) == "Bonjour"
    cut = provider.plays(ROLE, chunk("a"), CLOSE)
    refused(await app.ask(cut), 502, "PROVIDER_ERROR")
    assert await app.account.settled() == 2 * cost(7, 3) + max_cost(cut)
    assert counted(await app.ask("x"))[1] == 16
    for _ in range(16):
        await app.ask("x")
    refused(await app.ask("x"), 429, "USER_RATE_LIMITED")
    for capped in apps[1:4]:
        at = f"/account/apps/{capped.name}"
        for field, code in (("userDailyEuro", "USER_CAP_REACHED"), ("dailyEuro", "APP_CAP_REACHED")):
            limits = {"userDailyEuro": None, field: "0.002"}
            assert (await capped.account.call("PUT", f"{at}/limits", limits)).is_success
            assert (await capped.ask(prompt, token=capped.token("ben"))).status_code == 200
            assert (await capped.account.call("PUT", f"{at}/limits", {field: "0"})).is_success
            refused(await capped.ask(prompt, token=capped.token("ben")), 402, code)
        assert await capped.account.settled() == 3 * cost(7, 3)
        assert (await capped.account.get(f"{at}/spend")).json()["settled"] == 3 * cost(7, 3)
    assert [a["name"] for a in (await app.account.get("/account/apps")).json()] == [app.name]

    path = "/account/requests"
    logged = await wait_until(lambda: app.account.get(path), 10, holds=lambda answer: len(answer.json()) == 21)
    assert sum(row["nanoEuro"] for row in logged.json()) == await app.account.settled()
    for each in apps:
        settled = await each.account.settled()

        async def is_counted(account: Account = each.account, settled: int = settled) -> bool:
            (day, *_) = (await account.get("/account/usage?by=day")).json()["rows"]
            return bool(day["nanoEuro"] == settled)

        await wait_until(is_counted, 10)
    await gw.switch(enabled=False)
    await wait_until(lambda: apps[1].ask("x"), PATIENCE_SECONDS, 0.1, holds=lambda answer: answer.status_code == 503)
    assert (await gw.http.get("/ready")).status_code == 200
    assert (await gw.platform("DELETE", f"apps/{app.name}")).status_code == 204
    await gw.switch(enabled=True)


async def test_deploys(clustered: Gateway, backend: FakeAppBackend) -> None:
    gw = clustered
    for app in [await gw.app(backend) for _ in range(6)]:
        account, deploys = app.account, []
        for _ in range(3):
            deploys.append((await publish(account, app.name)).json()["deployId"])
            if len(deploys) < 3:
                await report_phases(gw, deploys[-1], "build", "health", "canary")
        back = await account.call("POST", f"/account/apps/{app.name}/rollback")
        assert back.status_code == 202, back.text
        deploys.append(back.json()["deployId"])
        canceled = await account.call("POST", f"/account/deploys/{deploys[-1]}/cancel")
        assert canceled.json()["state"] == "canceled", canceled.text
        listed = (await account.get("/account/deploys?limit=1000")).json()
        assert [deploy["id"] for deploy in listed] == deploys[::-1]
        assert [deploy["state"] for deploy in listed] == ["canceled", "canceled", "live", "live"]
        changed = await account.call("PUT", f"/account/apps/{app.name}/env", {"A": "b"})
        assert [each["name"] for each in changed.json()] == ["A"]
        own = await account.call("POST", "/account/apps", {"name": f"{app.name}-own"})
        assert own.status_code == 201, own.text
        body = {"build": {"command": "make"}}
        assert (await account.call("PATCH", f"/account/apps/{app.name}-own", body)).is_success
        for each in (app.name, f"{app.name}-own"):
            assert (await account.call("DELETE", f"/account/apps/{each}")).status_code == 204
    assert (await gw.platform("GET", "deploys?state=queued")).json() == []


async def test_events(clustered: Gateway, receiver: FakeReceiver, tmp_path: Path) -> None:
    """A worker reads all partitions. Secrets are rotated, and failed events are sent again."""
    gw = clustered
    async with Worker(gw.environment["GATEWAY_REDIS_URL"], tmp_path, confidential=gw.confidential):
        for holder in [Holder(await gw.account(), receiver) for _ in range(2)]:
            await holder.set()
            rotated = (await holder.call("POST", f"{WEBHOOK}/rotate")).json()["secret"]
            gw.confidential.add(rotated)
            receiver.plays(holder.path, answer(500))
            event = await holder.test()
            await holder.logged(1)
            receiver.plays(holder.path)
            failed = {"since": "2020-01-01", "outcome": "failed"}
            again = await holder.call("POST", f"{DELIVERIES}/redeliver", failed)
            assert (again.status_code, again.json()) == (202, {"count": 1})
            rows = [(row["id"], row["outcome"]) for row in await holder.logged(2)]
            assert rows == [(event, "delivered"), (event, "failed")]
            for exchange in receiver.got(holder.path):
                verified(exchange, rotated)
            assert "previousSecretUntil" in (await holder.call("GET")).json()
            assert (await holder.call("DELETE")).status_code == 204


async def test_custom_domains(clustered: Gateway, backend: FakeAppBackend, resolver: DnsServer) -> None:
    for number in range(10):
        app, domain = await clustered.app(backend), f"cluster-{number}.example.com"
        path = f"/account/apps/{app.name}/domain"
        record = (await app.account.call("PUT", path, {"domain": domain})).json()["records"][0]
        resolver.sets(record["name"], record["value"])
        assert (await app.account.call("POST", f"{path}/verify")).json()["verified"]
        assert (await app.account.get(path)).json()["verified"]
        for name, status in ((domain, 200), (f"{app.name}.{DOMAIN}", 200), (f"{app.name}-preview.{DOMAIN}", 404)):
            allowed = await clustered.http.get("/platform/tls/allow", params={"domain": name})
            assert allowed.status_code == status, allowed.text
        assert (await app.account.call("DELETE", path)).status_code == 204
        assert (await clustered.http.get("/platform/tls/allow", params={"domain": domain})).status_code == 404

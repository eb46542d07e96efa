"""Rollbacks, promotions and cancellations from end to end, with a real gateway, workers and builds."""

import subprocess

import pytest

from gateway.keys import partition_tag
from tests.support.deployment import BUILD, Host, live, page
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def roll_back(host: Host, app: str, deploy: str | None = None) -> str:
    body = {} if deploy is None else {"json": {"deployId": deploy}}
    return (await host.call("POST", f"/account/apps/{app}/rollback", **body))["deployId"]


async def test_a_rollback_serves_an_earlier_release_without_a_build(host: Host) -> None:
    app = await host.app(build=BUILD)
    one, two = await live(host, app, page("one")), await live(host, app, page("two"))
    # From now on, every build would fail.
    await host.gateway.platform("PUT", f"apps/{app}", {"account": host.account.id, "build": {"command": "exit 1"}})
    back = await host.over(await roll_back(host, app))
    assert (back["state"], back["trigger"], back["release"], back["kind"]) == ("live", "rollback", one, "live"), back
    assert await host.page(app) == "one\n"
    [(event, data)] = await host.events(back["id"])
    assert (event, data["kind"]) == ("deploy.succeeded", "live")
    again = await host.over(await roll_back(host, app, two))
    assert (again["state"], again["release"]) == ("live", two)
    assert await host.page(app) == "two\n"
    # The release of a rollback can be the target of another rollback.
    assert (await host.over(await roll_back(host, app, back["id"])))["state"] == "live"
    assert await host.page(app) == "one\n"


async def test_a_rollback_waits_for_no_build_and_ends_that_of_its_app(host: Host) -> None:
    app = await host.app(build=BUILD)
    others = [await host.app(build=BUILD) for _ in range(3)]
    first = await live(host, app, page("one"))
    await live(host, app, page("two"))
    coming = await host.publish(app, page("three", "sleep 120;"))
    await host.in_state(coming, "building")
    slow = [await host.publish(other, page("x", "sleep 120;")) for other in others]

    async def some_build() -> bool:
        return "building" in [(await host.deploy(deploy))["state"] for deploy in slow]

    await wait_until(some_build, 20)
    back = await host.over(await roll_back(host, app))
    assert (back["state"], back["release"]) == ("live", first), "the build that it ends does not count as the live one"
    assert await host.page(app) == "one\n"
    replaced = await host.deploy(coming)
    assert (replaced["state"], replaced["error"]) == (
        "canceled",
        f"replaced by {back['id']}, a rollback to an existing release",
    )
    assert await some_build()


async def test_canceling_a_build_ends_all_its_processes(host: Host) -> None:
    app = await host.app(build=BUILD)
    await live(host, app, page("one"))
    deploy = await host.publish(app, page("two", "(sleep 64.321 &) ; echo begun; sleep 64.321;"))
    await wait_until(lambda: host.deploy(deploy), 20, holds=lambda found: "begun" in found["log"])
    canceled = await host.call("POST", f"/account/deploys/{deploy}/cancel")
    assert canceled["state"] == "canceled"
    await wait_until(lambda: not subprocess.run(["pgrep", "-f", "sleep 64.321"], capture_output=True).stdout, 10)
    builds, release = host.gateway.data_folder / "builds", f"releases/{app}/live/{deploy}"
    await wait_until(lambda: not [*builds.iterdir()], 10)
    assert not (host.gateway.data_folder / release).exists()
    # The next deploy succeeds, only it causes an event, and the queue is empty.
    after = await live(host, app, page("three"))
    await host.events(after)
    received = [exchange.json["data"].get("deployId") for exchange in host.receiver.exchanges]
    assert deploy not in received
    shown = await host.deploy(deploy)
    assert (shown["state"], shown["error"]) == ("canceled", "canceled on request")
    assert "The deploy was canceled" in shown["log"]
    assert await host.page(app) == "three\n"
    with host.gateway.redis.client() as client:
        key = f"{partition_tag(host.account.id)}:builds"
        await wait_until(lambda: client.xlen(key) == 0)
        assert client.xpending(key, "deploys")["pending"] == 0


async def test_a_build_canceled_while_its_worker_is_dead_stays_canceled(own: Host) -> None:
    app = await own.app(build=BUILD)
    worker = await own.worker("deploys")
    deploy = await own.publish(app, page("one", "sleep 120;"))
    await own.in_state(deploy, "building")
    worker.kill()
    await own.call("POST", f"/account/deploys/{deploy}/cancel")
    await own.worker("deploys")
    assert (await own.over(await own.publish(app, page("two"))))["state"] == "live"
    assert (await own.deploy(deploy))["state"] == "canceled"


async def test_queued_deploys_show_what_they_wait_for(own: Host) -> None:
    app, other, third = [await own.app(build=BUILD) for _ in range(3)]
    first = await own.publish(app, page("one", "sleep 120;"))
    assert (await own.deploy(first))["waitsFor"] == "a worker that builds deploys; none is running"
    await own.worker("deploys")
    await own.in_state(first, "building")
    second = await own.publish(app, page("two"))
    await own.in_state(await own.publish(other, page("x", "sleep 120;")), "building")
    waits = await own.publish(third, page("three"))

    async def positions() -> bool:
        found = {deploy["id"]: deploy for deploy in await own.call("GET", "/account/deploys")}
        return [found[deploy].get("position") for deploy in (waits, second)] == [1, 2]

    await wait_until(positions, 10)
    assert (await own.deploy(waits))["waitsFor"] == "a free slot for builds"
    assert (await own.deploy(second))["waitsFor"] == f"{first}, an earlier deploy of this app"
    assert "position" not in await own.deploy(first)

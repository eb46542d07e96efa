"""Deploys of an app that is suspended meanwhile end as canceled, from any state, with a real gateway and worker."""

import time

import pytest

from tests.support.deployment import BUILD, Host, packed, page
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def suspend(host: Host, app: str) -> None:
    answer = await host.gateway.platform("PUT", f"apps/{app}/suspension", {"reason": "test"})
    assert answer.status_code == 200, answer.text


async def resume(host: Host, app: str) -> None:
    assert (await host.gateway.platform("DELETE", f"apps/{app}/suspension")).status_code == 204


async def served(host: Host, app: str, text: str) -> None:
    async def answered() -> bool:
        return await host.page(app) == text

    await wait_until(answered, 10)


def events(host: Host, app: str) -> list[str]:
    received = [exchange.json for exchange in host.receiver.exchanges]
    return [event["type"] for event in received if event["data"].get("appName") == app]


async def test_a_build_ends_and_the_page_is_back_afterwards(host: Host) -> None:
    app = await host.app(build=BUILD)
    assert (await host.over(await host.publish(app, page("one"))))["state"] == "live"
    building = await host.publish(app, page("two", "sleep 120;"))
    await host.in_state(building, "building")
    await suspend(host, app)
    deploy = await host.deploy(building)
    assert (deploy["state"], deploy["error"]) == ("canceled", "the app was suspended")
    await served(host, app, "503")
    # The build has ended: its folder is gone.
    folder = host.gateway.folder / "data" / "builds" / building
    await wait_until(lambda: not folder.exists(), 10)
    answer = await host.account.call("PUT", f"/account/apps/{app}/source", content=packed(page("two")))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "APP_SUSPENDED")
    await resume(host, app)
    await served(host, app, "one\n")
    assert (await host.over(await host.publish(app, page("two"))))["state"] == "live"
    await wait_until(lambda: len(events(host, app)) == 2, 30)
    assert events(host, app) == ["deploy.succeeded"] * 2


async def test_a_deploy_in_its_check_ends(host: Host) -> None:
    app = await host.app(build={"start": "sleep 600"})
    deploy = await host.publish(app, {"x": ""})
    await host.in_state(deploy, "checking")
    await suspend(host, app)
    assert (await host.deploy(deploy))["state"] == "canceled"
    await resume(host, app)
    # Deploys of an app are made in order: the next one does not wait for the check's end.
    began = time.monotonic()
    await host.gateway.platform("PUT", f"apps/{app}", {"account": host.account.id, "build": BUILD})
    assert (await host.over(await host.publish(app, page("next"))))["state"] == "live"
    assert time.monotonic() - began < 30
    assert "deploy.failed" not in events(host, app)


async def test_a_deploy_in_its_canary_is_undone(own: Host) -> None:
    await own.worker("deploys", "webhooks", GATEWAY_CANARY="20")
    app = await own.app(build=BUILD)
    first = await own.publish(
        app, {**page("one"), "capsule.toml": '[build]\ncommand = "sh build.sh"\noutput = "dist"\n'}
    )
    await own.in_state(first, "canary")
    await suspend(own, app)
    assert (await own.over(first))["state"] == "canceled"
    await served(own, app, "404")  # nothing was live before
    await resume(own, app)
    assert await own.page(app) == "404"
    assert "deploy.failed" not in events(own, app)
    await own.remove_apps()

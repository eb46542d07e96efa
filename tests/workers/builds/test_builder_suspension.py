"""Deploys of an app that is suspended meanwhile end as canceled, from any state, with a real gateway and worker."""

import time

import pytest

from tests.support.deployment import BUILD, Host, live, page
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")

FILES = {
    "building": page("two", "sleep 120;"),
    "checking": {"capsule.toml": '[build]\nstart = "sleep 600"\n'},
    "canary": page("two"),
}


@pytest.mark.parametrize("state", FILES)
async def test_a_deploy_in_progress_is_undone(own: Host, state: str) -> None:
    """The page is back afterwards, and the next deploy of the app does not wait for the end of this one."""
    in_canary = state == "canary"  # of the first deploy: nothing is served before
    await own.worker("deploys", "webhooks", **({"GATEWAY_CANARY": "5"} if in_canary else {}))
    app, before = await own.app(build=BUILD), "404" if in_canary else "one\n"
    if not in_canary:
        await live(own, app, page("one"))
    deploy = await own.publish(app, FILES[state])
    await own.in_state(deploy, state)
    assert (await own.gateway.platform("PUT", f"apps/{app}/suspension", {"reason": "test"})).status_code == 200
    ended = await own.deploy(deploy)
    assert (ended["state"], ended["error"]) == ("canceled", "the app was suspended")
    await wait_until(lambda: own.page(app), 10, holds=lambda text: text == ("404" if in_canary else "503"))
    await wait_until(lambda: not (own.gateway.data_folder / "builds" / deploy).exists(), 10)
    assert (await own.gateway.platform("DELETE", f"apps/{app}/suspension")).status_code == 204
    await wait_until(lambda: own.page(app), 10, holds=lambda text: text == before)
    began = time.monotonic()
    last = await live(own, app, page("three"))
    assert time.monotonic() - began < 30
    await own.events(last)
    assert {exchange.json["type"] for exchange in own.receiver.exchanges} == {"deploy.succeeded"}

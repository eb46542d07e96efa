"""Previews sleep soon. How they make room for live addresses, `test_driver_contract.py` says."""

import pytest

from tests.kubernetes.check_apps import START, app_id, find, publish, server, serves
from tests.kubernetes.cluster import Cluster
from tests.support.deployment import Host
from tests.support.polling import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


async def test_a_preview_sleeps_as_apps_of_the_free_plan_do(host: Host, cluster: Cluster) -> None:
    app = await host.app(build=START)  # of the plan `max`, whose apps never sleep
    own = await app_id(host, app)
    await publish(host, app, server("one"))
    queued = await host.gateway.platform("POST", f"apps/{app}/deploys", {"kind": "preview"})
    deploy = await host.in_state(queued.json()["deployId"], "live", "failed", "canceled", timeout=120)
    assert deploy["state"] == "live", (deploy["error"], deploy["log"])

    def addresses() -> list[str]:
        """Returns the addresses of the app's pods."""
        return sorted(each["metadata"]["labels"]["capsule/address"] for each in find(cluster, "pods", own))

    await wait_until(addresses, 90, holds=lambda found: found == ["live"])
    await serves(host, f"{app}-preview", "one", 90)
    assert addresses() == ["live", "preview"]
    await wait_until(addresses, 90, holds=lambda found: found == ["live"])

"""Previews sleep soon, and to make room for live addresses, within the quota of pods of the account's plan."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.kubernetes.check_apps import START, app_id, find, publish, server
from tests.kubernetes.cluster import Cluster
from tests.support.accounts import DOMAIN
from tests.support.deployment import Host
from tests.support.polling import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

Answer = tuple[int, str]


async def publish_preview(host: Host, app: str) -> str:
    """Makes a preview of what the app has published. Returns its name below the domain."""
    queued = await host.gateway.platform("POST", f"apps/{app}/deploys", {"kind": "preview"})
    deploy = await host.in_state(queued.json()["deployId"], "live", "failed", "canceled", timeout=120)
    assert deploy["state"] == "live", (deploy["error"], deploy["log"])
    return f"{app}-preview"


def count_pods(cluster: Cluster, app: str) -> dict[str, int]:
    """Returns the number of pods at each address of an app."""
    addresses = [each["metadata"]["labels"]["capsule/address"] for each in find(cluster, "pods", app)]
    return {address: addresses.count(address) for address in sorted(set(addresses))}


@contextlib.asynccontextmanager
async def visited(host: Host, *names: str) -> AsyncIterator[dict[str, list[Answer]]]:
    """Visits these addresses all the time, so that none sleeps for want of visitors. Yields the answers of each."""
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    over = asyncio.Event()

    async def visit(http: httpx.AsyncClient, name: str) -> None:
        while not over.is_set():
            answer = await http.get("/", headers={"Host": f"{name}.{DOMAIN}"})
            answers[name].append((answer.status_code, answer.text.strip()))
            await asyncio.sleep(0.3)

    client = httpx.AsyncClient(base_url=host.web.base_url, trust_env=False, timeout=70)
    async with client as http, asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(visit(http, name))
        try:
            yield answers
        finally:
            over.set()


async def gets(answers: list[Answer], expected: Answer, timeout: float = 90) -> None:
    await wait_until(lambda: answers[-1:], timeout, holds=lambda newest: newest == [expected])


async def test_a_preview_sleeps_as_apps_of_the_free_plan_do(host: Host, cluster: Cluster) -> None:
    app = await host.app(build=START)  # of the plan `max`, whose apps never sleep
    own = await app_id(host, app)
    await publish(host, app, server("one"))
    preview = await publish_preview(host, app)
    await wait_until(lambda: count_pods(cluster, own), 90, holds=lambda pods: pods == {"live": 1})
    async with visited(host, preview) as answers:
        await gets(answers[preview], (200, "one"))
        assert count_pods(cluster, own) == {"live": 1, "preview": 1}
    await wait_until(lambda: count_pods(cluster, own), 90, holds=lambda pods: pods == {"live": 1})


async def test_previews_make_room_for_live_addresses(host: Host, cluster: Cluster) -> None:
    """The plan allows two addresses to have a pod."""
    plan = {"plan": "starter"}
    assert (await host.gateway.platform("PATCH", f"accounts/{host.account.id}", plan)).is_success
    first, second, third = [await host.app(build=START) for _ in range(3)]
    ids = {app: await app_id(host, app) for app in (first, second)}
    refused = 503, "As many apps of this account run as its plan allows; try again later."

    def pods() -> dict[str, dict[str, int]]:
        return {app: count_pods(cluster, own) for app, own in ids.items()}

    await publish(host, first, server("first"))
    preview = await publish_preview(host, first)
    async with visited(host, first, second, preview) as answers:
        await gets(answers[preview], (200, "first"))
        await publish(host, second, server("second"))
        await gets(answers[second], (200, "second"))
        await gets(answers[preview], refused)
        await wait_until(pods, 60, holds=lambda found: found == {first: {"live": 1}, second: {"live": 1}})
        deploy = await host.over(await host.publish(third, server("third")))
        assert (deploy["state"], "as many as its plan allows" in deploy["error"]) == ("failed", True), deploy
        await publish(host, second, server("again"))  # a swap needs no further pod
        await gets(answers[second], (200, "again"))
        assert answers[preview][-1] == refused
        assert set(answers[first]) == {(200, "first")}
    async with visited(host, second, preview) as answers:  # the live address of the first app sleeps now
        await gets(answers[preview], (200, "first"))
        async with visited(host, first) as woken:
            await gets(woken[first], (200, "first"))
            await gets(answers[preview], refused)
            assert set(woken[first]) == {(200, "first")}
        assert set(answers[second]) == {(200, "again")}

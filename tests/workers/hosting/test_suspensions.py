"""Suspended apps on a host: their pages, their start commands, and what a host knows without Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store
from tests.support.background import in_background
from tests.support.hosted_apps import HOST, Hosting
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.redis_servers import RedisServer, free_port
from tests.support.sandbox import require_control_groups
from tests.support.stores import opened
from tests.support.watched_apps import Watch
from workers.hosting.suspensions import Suspensions
from workers.hosting.watchdog import is_running

ACCOUNT = "acc_1"  # of all apps of `Hosting`
# A server that ignores SIGTERM, as one may that should not run.
STUBBORN = """
process.on('SIGTERM', () => {})
require('http').createServer((request, response) => response.end('stubborn')).listen(process.env.PORT)
"""


@contextlib.asynccontextmanager
async def following(store: Store, hosting: Hosting) -> AsyncIterator[None]:
    async with in_background(Suspensions(store, hosting.releases).run()):
        yield


async def test_the_pages_of_a_suspended_app_answer_503(hosting: Hosting, store: Store) -> None:
    site = hosting.publish("dep_1", {"index.html": "shop"})
    hosting.publish("dep_2", {"index.html": "preview"}, "shop-preview.apps.test", kind="preview")
    hosting.publish("dep_3", {"index.html": "other"}, "other.apps.test", app_id="other")
    names = (HOST, "shop-preview.apps.test")
    async with hosting.served(), following(store, hosting):

        async def statuses() -> list[int]:
            return [(await hosting.ask("/", host=name)).status for name in names]

        for subject in ("shop", ""):  # the app, and then its account
            await list_suspended(store, ACCOUNT, subject)
            await wait_until(statuses, holds=lambda found: found == [503, 503])
            said = await hosting.ask("/any/page")
            assert (said.status, said.body) == (503, b"This app is suspended.\n")
            assert said.headers["cache-control"] == "no-store"
            assert (await hosting.ask("/", host="other.apps.test")).status == (200 if subject else 503)
            # A swap changes nothing, and a new site is marked too.
            hosting.publish(f"dep_4{subject}", {"index.html": "new"})
            assert await statuses() == [503, 503]
            fresh = hosting.site(hosting.deploy(f"dep_5{subject}", kind="preview", branch=f"of-{subject or 'all'}"))
            await wait_until(lambda: fresh.is_suspended)  # noqa: B023
            await unlist_suspended(store, ACCOUNT, subject)
            await wait_until(statuses, holds=lambda found: found == [200, 200])
    assert not site.is_suspended


async def test_without_redis_what_is_suspended_stays_so(hosting: Hosting, valkey: RedisServer, redis_url: str) -> None:
    suspended = hosting.publish("dep_1", {"index.html": "shop"})
    served = hosting.publish("dep_2", {"index.html": "other"}, "other.apps.test", app_id="other")
    store = Store(redis_url)
    await list_suspended(store, ACCOUNT, "shop")
    await Suspensions(store, hosting.releases).catch_up()
    async with opened(f"redis://127.0.0.1:{free_port()}/0") as away:
        fresh = Suspensions(away, hosting.releases)
        await fresh.catch_up()
        fresh.mark(suspended)
        assert (suspended.is_suspended, served.is_suspended) == (True, False)
        with pytest.raises(BackboneUnavailable):
            await list_suspended(away, ACCOUNT, "other")
        await store.close()


async def test_start_commands_stop_and_start_again(watch: Watch, hosting: Hosting) -> None:
    require_control_groups()
    watch.publish("dep_1")
    watch.publish("dep_2", server=STUBBORN, kind="preview")
    watch.start()
    born = await watch.ask("dep_1", "/born")
    assert await watch.ask("dep_2") == "stubborn"
    states = [watch.state(each) for each in ("dep_1", "dep_2")]
    sites = [*hosting.releases.sites()]
    for site in sites:
        site.set_suspended(suspended=True)
    # The grace that other apps get is twice as long.
    await wait_until(lambda: not any(is_running(state.keeper, state.began) for state in states), PATIENCE_SECONDS)
    await asyncio.sleep(0.5)  # and they do not come back
    assert [watch.state(each).socket for each in ("dep_1", "dep_2")] == ["", ""]
    await watch.stop()
    watch.start()
    await asyncio.sleep(0.5)
    assert watch.state("dep_1").socket == ""
    for site in sites:
        site.set_suspended(suspended=False)
    assert await watch.ask("dep_1", "/born") != born
    assert await watch.ask("dep_2") == "stubborn"
    assert watch.crashes == []
    assert [watch.state(each).exits for each in ("dep_1", "dep_2")] == [0, 0]


async def test_an_app_that_sleeps_is_not_woken(watch: Watch, hosting: Hosting) -> None:
    require_control_groups()
    watch.sleeps_after = 0.2
    watch.publish("dep_1")
    watch.start()
    await watch.ask("dep_1")
    await wait_until(lambda: watch.state("dep_1").asleep, 10)
    [site] = hosting.releases.sites()
    site.set_suspended(suspended=True)
    asking = asyncio.create_task(watch.ask("dep_1"))  # as a request that Caddy has just let through
    await asyncio.sleep(0.7)
    assert not asking.done()
    site.set_suspended(suspended=False)
    assert await asking == "release dep_1"

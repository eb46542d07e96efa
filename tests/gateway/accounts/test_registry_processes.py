"""A request whose records are known makes two round trips to Redis."""

import asyncio
import re
from functools import partial

import pytest

from gateway.redis.client import Script
from tests.support.accounts import App
from tests.support.polling import wait_until
from tests.support.responses import answered

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_hot_path_takes_two_round_trips(app: App) -> None:
    """One script admits and one settles. The app's record is cached."""
    tap = app.gateway.wiretap
    await app.ask("x")
    await app.account.settled()
    await asyncio.sleep(0.1)
    # Background work: heartbeats, counters, pub/sub, and checks of the queues, the caps and the server.
    keys = r"{ops}|{p\d\d}:(events|builds|outcomes|write-check|accounts)|worker:|CONSUMERS"
    counts = "|".join(
        Script(name).sha for name in ("increment_counters", "telemetry/record_usage", "accounts/record_key_uses")
    )
    scripts = rf"EVALSHA ({counts})|EVAL -- record_key_uses"
    beside = re.compile(rf"{scripts}|INFO server|TIME|PING|MULTI|EXEC|HMGET {{p\d\d}}:spend:|\w+ ({keys})")
    for _ in range(5):  # a check every ten seconds sends commands that look like those of a request
        before = tap.position
        for user in range(5):  # the app can have 30 requests per minute
            answered(await app.ask("x", token=app.token(f"user-{user}")))
        # Redis shows a command some time after its answer.
        await wait_until(partial(tap.has_seen, f"EVALSHA {Script('inference/settle').sha}", 5, since=before))
        await asyncio.sleep(0.2)
        commands = tap.commands(before)
        for name in ("inference/admit", "inference/settle"):
            assert commands.count(f"EVALSHA {Script(name).sha}") == 5, name
        lease = f"EVALSHA {Script('inference/lease').sha}"  # renewed every two seconds
        others = [command for command in commands if command != lease and not beside.match(command)]
        if len(others) == 10 and commands.count(lease) < 5:
            return
    raise AssertionError(others)

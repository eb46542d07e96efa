"""Only the builder that has the deploy can set what the hosts serve."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.lua.scripts import SECOND, TAG, on_test_clock, set_clock

DEPLOY, SERVING, APPS = f"{TAG}:deploy:dep_1", f"{TAG}:serving:app_1", f"{TAG}:serving"


@pytest.fixture
def set_serving(client: Any) -> Callable[..., int]:
    set_clock(client, 1_000 * SECOND)
    client.hset(DEPLOY, "state", "checking")
    client.expire(DEPLOY, 60)
    script = client.register_script(on_test_clock("deploys/set_serving"))
    return lambda state, before, after, app="app_1": script(
        [DEPLOY, f"{TAG}:serving:{app}", APPS], [state, app, "live", before, after, "changes"]
    )


def test_only_in_the_state_of_the_step(client: Any, set_serving: Callable[..., int]) -> None:
    assert set_serving("canary", "", "one") == 0
    assert not client.exists(SERVING, APPS)
    assert set_serving("checking", "", "one") == 1
    client.hset(DEPLOY, "state", "failed")
    assert set_serving("checking", "one", "two") == 0
    assert set_serving("", "one", "two") == 1
    assert client.hgetall(SERVING) == {b"live": b"two"}


def test_only_over_the_record_that_was_read_and_announced(client: Any, set_serving: Callable[..., int]) -> None:
    with client.pubsub(ignore_subscribe_messages=True) as changes:
        changes.subscribe("changes")
        while changes.get_message(timeout=1.0) is not None:
            pass
        assert set_serving("", "something", "one") == 0
        assert set_serving("", "", "one") == 1
        [announced] = [message for _ in range(3) if (message := changes.get_message(timeout=0.2)) is not None]
        assert announced["data"] == APPS.encode()
    for before, after in (("", "two"), ("another", "")):
        assert set_serving("", before, after) == 0
    assert client.hget(SERVING, "live") == b"one"
    assert set_serving("", "one", "") == 1
    assert not client.exists(SERVING)


def test_each_change_has_a_later_version(client: Any, set_serving: Callable[..., int]) -> None:
    def versions() -> dict[bytes, float]:
        return dict(client.zrange(APPS, 0, -1, withscores=True))

    assert set_serving("", "", "one") == 1
    assert versions() == {b"app_1": 1_000_000}
    set_clock(client, 900 * SECOND)  # a clock that went back
    assert set_serving("", "", "one", "app_2") == 1
    assert set_serving("", "one", "two") == 1
    assert versions() == {b"app_2": 1_000_001, b"app_1": 1_000_002}
    client.zrem(APPS, "app_1")  # a removed app does not lower the version
    set_clock(client, 2_000 * SECOND)
    assert set_serving("", "one", "two", "app_2") == 1
    assert versions() == {b"app_2": 2_000_000}

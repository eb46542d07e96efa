"""What hosts serve is said by the builder that has the deploy, and by no other."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.lua.scripts import SECOND, TAG, on_test_clock, set_clock

DEPLOY, SERVING, APPS = f"{TAG}:deploy:dep_1", f"{TAG}:serving:app_1", f"{TAG}:serving"


@pytest.fixture
def direct(client: Any) -> Callable[..., int]:
    set_clock(client, 1_000 * SECOND)
    client.hset(DEPLOY, "state", "checking")
    client.expire(DEPLOY, 60)
    script = client.register_script(on_test_clock("deploys/set_serving"))
    return lambda state, before, after, app="app_1": script(
        [DEPLOY, f"{TAG}:serving:{app}", APPS], [state, app, "live", before, after]
    )


def test_only_in_the_state_of_the_step(client: Any, direct: Callable[..., int]) -> None:
    assert direct("canary", "", "one") == 0
    assert not client.exists(SERVING, APPS)
    assert direct("checking", "", "one") == 1
    client.hset(DEPLOY, "state", "failed")
    assert direct("checking", "one", "two") == 0
    assert direct("", "one", "two") == 1
    assert client.hgetall(SERVING) == {b"live": b"two"}


def test_only_over_the_record_that_was_read(client: Any, direct: Callable[..., int]) -> None:
    assert direct("", "something", "one") == 0
    assert direct("", "", "one") == 1
    assert direct("", "", "two") == 0
    assert client.hget(SERVING, "live") == b"one"


def test_each_change_has_a_later_version(client: Any, direct: Callable[..., int]) -> None:
    def versions() -> dict[bytes, float]:
        return dict(client.zrange(APPS, 0, -1, withscores=True))

    assert direct("", "", "one") == 1
    assert versions() == {b"app_1": 1_000_000}
    set_clock(client, 900 * SECOND)  # a clock that went back
    assert direct("", "", "one", "app_2") == 1
    assert direct("", "one", "two") == 1
    assert versions() == {b"app_2": 1_000_001, b"app_1": 1_000_002}
    client.zrem(APPS, "app_1")  # an app that is forgotten takes no version back
    set_clock(client, 2_000 * SECOND)
    assert direct("", "one", "two", "app_2") == 1
    assert versions() == {b"app_2": 2_000_000}

"""Accounts share all builders fairly."""

import json
from typing import Any

import pytest

from tests.lua.scripts import SECOND, on_test_clock, set_clock

KEYS = ["{builds}:waiting", "{builds}:running", "{builds}:order"]
HELD_SECONDS = 15


def owner(deploy: str) -> dict[str, str]:
    return {"account": deploy[0], "app": deploy.partition("/")[2] or deploy}


class Queue:
    """Tests deploys. The first letter of an id is the account; the app follows a slash, or is the id itself."""

    def __init__(self, client: Any) -> None:
        self.client, self.clock = client, 1_000
        self.script = client.register_script(on_test_clock("deploys/schedule_builds"))
        self.waiting: dict[str, list[str]] = {}  # by builder
        self.running: dict[str, dict[str, bool]] = {}
        self.started: list[str] = []

    def wait(self, builder: str, *deploys: str) -> None:
        self.waiting.setdefault(builder, []).extend(deploys)

    def call(self, builder: str, *, slots: int = 2, spare: int = 1) -> list[str]:
        """Returns the deploys that are granted."""
        set_clock(self.client, self.clock * SECOND)
        waiting, running = self.waiting.setdefault(builder, []), self.running.setdefault(builder, {})
        args: list[Any] = [builder, HELD_SECONDS * 1000, slots, spare, len(waiting)]
        for deploy in waiting:
            reuse = deploy[1] == "r"
            record = {**owner(deploy), "reuse": reuse, "tag": "{p13}", "entry": f"1-{deploy}"}
            args += [deploy, json.dumps(record)]
        for deploy, builds in running.items():
            args += [deploy, json.dumps({**owner(deploy), "building": builds})]
        granted, elsewhere = self.script(KEYS, args)
        assert [part.decode() for part in granted[1::3]] == ["{p13}"] * (len(granted) // 3)
        turns = [deploy.decode() for deploy in granted[::3]]
        assert [entry.decode() for entry in granted[2::3]] == [f"1-{deploy}" for deploy in turns]
        for deploy in turns:
            running[deploy] = True
            if deploy in waiting:
                waiting.remove(deploy)
        for deploy in elsewhere:
            waiting.remove(deploy.decode())
        self.started += turns
        return turns

    def end(self, deploy: str) -> None:
        for running in self.running.values():
            running.pop(deploy, None)


@pytest.fixture
def queue(client: Any) -> Queue:
    return Queue(client)


def test_an_account_with_many_builds_delays_no_others_first(queue: Queue) -> None:
    queue.wait("one", *(f"a{n:02}" for n in range(20)))
    assert queue.call("one") == ["a00", "a01"]
    queue.wait("one", "b00")
    assert queue.call("one") == ["b00"]
    assert queue.call("one") == []


def test_one_build_of_an_account_at_a_time_while_others_wait(queue: Queue) -> None:
    queue.wait("one", "a0", "a1", "a2")
    queue.wait("two", "b0", "b1", "c0")
    for builder in ("one", "two"):
        queue.call(builder, slots=1, spare=0)
    assert queue.started == ["a0", "b0"]
    assert queue.call("one", slots=3, spare=0) == ["c0"], "including deploys that wait at the other builder"
    assert queue.waiting == {"one": ["a1", "a2"], "two": ["b1", "c0"]}
    assert queue.call("two", slots=3, spare=0) == []
    assert queue.waiting["two"] == ["b1"]
    queue.end("a0")
    assert queue.call("one", slots=3, spare=0) == ["a1"]


def test_accounts_alternate_and_an_accounts_own_deploys_keep_their_order(queue: Queue) -> None:
    queue.wait("one", "a0", "a1", "a2", "b0", "b1", "c0")
    for _ in range(6):
        [deploy] = queue.call("one", slots=1, spare=0)
        queue.end(deploy)
    assert queue.started == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_the_deploys_of_an_app_one_after_the_other_over_all_builders(queue: Queue) -> None:
    queue.wait("two", "a2/shop")
    queue.wait("one", "a1/shop", "ar3/shop")
    assert queue.call("one") == ["a1/shop"]
    assert queue.call("two") == []
    queue.running["one"]["a1/shop"] = False  # its build is over, its canary is not
    assert queue.call("one") == []
    assert queue.call("two") == []
    queue.end("a1/shop")
    assert queue.call("one") == ["a2/shop"], "whichever builder has a slot"


def test_a_release_that_is_served_again_waits_for_no_slot(queue: Queue) -> None:
    queue.wait("one", "a0", "a1", "a2", "ar5")
    assert queue.call("one") == ["ar5", "a0", "a1"]


def test_the_deploys_of_a_dead_builder_go_to_others(queue: Queue) -> None:
    queue.wait("one", "a0/shop", "a1/shop", "a2")
    assert queue.call("one") == ["a0/shop", "a2"]
    assert queue.call("two") == []
    queue.clock += HELD_SECONDS + 1
    queue.wait("two", "a1/shop")  # claimed
    assert queue.call("two") == ["a1/shop"]


def test_a_builder_that_was_considered_dead_frees_no_deploy_of_another(queue: Queue) -> None:
    """It comes back while another builder runs its deploy, and ends that deploy first."""
    queue.wait("one", "a0/shop")
    assert queue.call("one") == ["a0/shop"]
    queue.clock += HELD_SECONDS + 1
    queue.wait("two", "a0/shop", "a1/shop")  # claimed
    assert queue.call("two") == ["a0/shop"]
    assert queue.call("one") == []
    del queue.running["one"]["a0/shop"]
    assert queue.call("one") == queue.call("two") == [], "the app's deploy still runs at the other builder"
    queue.end("a0/shop")
    assert queue.call("two") == ["a1/shop"]


def test_a_builder_that_leaves_is_granted_nothing(queue: Queue) -> None:
    queue.wait("one", "a0", "ar5")
    queue.wait("two", "b0", "br5")
    assert queue.call("two", slots=-1, spare=1) == []
    assert queue.call("one") == ["ar5", "br5", "a0", "b0"]


def test_a_builder_that_lives_keeps_its_deploys(queue: Queue) -> None:
    queue.wait("one", "a0/shop", "a1/shop")
    assert queue.call("one") == ["a0/shop"]
    for _ in range(5):
        queue.clock += HELD_SECONDS - 1
        assert queue.call("one") == queue.call("two") == []
    assert 0 < queue.client.pttl(KEYS[1]) <= 10 * HELD_SECONDS * 1000

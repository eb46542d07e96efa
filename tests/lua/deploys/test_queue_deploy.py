"""A deploy is queued, or refused for the first reason that applies."""

from typing import Any

import pytest

from tests.lua.scripts import MINUTE, SECOND, TAG, at, on_test_clock, set_clock, source

NOON = at("2026-11-21T12:00:00")
DAY = "2026-11-21"
ISO = "2026-11-21T12:00:00.000Z"
WINDOW, USED, SITE = f"{TAG}:window:hook:hook_1", f"{TAG}:hooks-used:acc", f"{TAG}:site:shop"
COUNTERS, DEPLOYS, BUILDS = f"{TAG}:deploys-on:acc", f"{TAG}:deploys:acc", f"{TAG}:builds"


class Triggers:
    def __init__(self, client: Any) -> None:
        self.client = client
        set_clock(client, NOON)

    def trigger(
        self,
        deploy: str = "dep_1",
        *,
        hook: str = "hook_1",
        source: str = "",
        repository: str = "",
        per_minute: int = 3,
        suspended: str = "",
        per_day: int = 9,
        address: str = "",
        **bounds: int,
    ) -> tuple[str, int, str]:
        """Returns the verdict, the microseconds until the hook can be called again, and the day."""
        script = self.client.register_script(on_test_clock("deploys/queue_deploy", **bounds))
        record = ["id", deploy, "account", "acc", "app", "shop"]
        keys = [WINDOW, USED, SITE, COUNTERS, self.key(deploy), DEPLOYS, BUILDS, f"{TAG}:deploy"]
        args = [hook, per_minute, suspended, per_day, source, repository]
        args += [deploy, "acc", "shop", address or deploy, ISO, *record]
        verdict, wait, day = script(keys, args)
        return verdict.decode(), int(wait), day.decode()

    @staticmethod
    def key(deploy: str) -> str:
        return f"{TAG}:deploy:{deploy}"

    def set_site(self, **fields: str) -> None:
        self.client.hset(SITE, mapping=fields)

    def record(self, deploy: str = "dep_1") -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.client.hgetall(self.key(deploy)).items()}

    def builds(self) -> list[tuple[str, dict[str, str]]]:
        entries = self.client.xrange(BUILDS)
        return [(i.decode(), {k.decode(): v.decode() for k, v in fields.items()}) for i, fields in entries]

    def queued(self) -> dict[str, int]:
        """Returns the times at which the account's deploys were queued, ms."""
        return {deploy.decode(): int(at) for deploy, at in self.client.zrange(DEPLOYS, 0, -1, withscores=True)}

    def today(self) -> int:
        return int(self.client.get(f"{COUNTERS}:{DAY}") or 0)


@pytest.fixture
def triggers(client: Any) -> Triggers:
    return Triggers(client)


def test_queued(triggers: Triggers) -> None:
    triggers.set_site(live="dep_0", source="src_0")
    assert triggers.trigger() == ("queued", 0, DAY)
    [(entry, fields)] = triggers.builds()
    assert fields == {"id": "dep_1", "account": "acc", "app": "shop"}
    queued = {"state": "queued", "queuedMs": str(NOON // 1000), "source": "src_0", "entry": entry, "address": "dep_1"}
    assert triggers.record() == fields | queued
    assert triggers.queued() == {"dep_1": NOON // 1000}
    assert triggers.today() == 1
    assert triggers.client.hgetall(USED) == {b"hook_1": str(NOON // 1000).encode()}
    for key, days in ((triggers.key("dep_1"), 90), (DEPLOYS, 90), (f"{COUNTERS}:{DAY}", 2)):
        assert (days - 1) * 86_400 < triggers.client.ttl(key) <= days * 86_400


def test_a_newer_deploy_replaces_the_queued_one_of_its_address(triggers: Triggers) -> None:
    triggers.set_site(live="dep_0", source="src_0")
    for deploy, address in (("dep_1", "live"), ("dep_2", "preview"), ("dep_3", "live")):
        assert triggers.trigger(deploy, address=address, hook="")[0] == "queued"
    replaced = triggers.record("dep_1")
    assert (replaced["state"], replaced["finishedAt"]) == ("canceled", ISO)
    assert replaced["error"] == "replaced by dep_3, a newer deploy of the same address"
    assert triggers.client.hget(f"{TAG}:builds:ended", "canceled") == b"1"
    assert [fields["id"] for _, fields in triggers.builds()] == ["dep_2", "dep_3"]
    assert triggers.record("dep_2")["state"] == "queued"


def test_a_deploy_that_has_started_is_not_replaced(triggers: Triggers) -> None:
    triggers.set_site(live="dep_0", source="src_0")
    triggers.trigger("dep_1", hook="", address="live")
    triggers.client.hset(triggers.key("dep_1"), "state", "building")
    triggers.trigger("dep_2", hook="", address="live")
    assert triggers.record("dep_1")["state"] == "building"
    assert [fields["id"] for _, fields in triggers.builds()] == ["dep_1", "dep_2"]


@pytest.mark.parametrize(
    ("site", "asked", "built"),
    [
        ({}, {"source": "src_1"}, "src_1"),
        ({"live": "dep_0", "source": "src_0"}, {"source": "src_1"}, "src_1"),
        ({}, {"repository": "1"}, ""),
        ({"live": "dep_0", "source": "src_0"}, {"repository": "1"}, ""),
        ({"live": "dep_0", "source": "src_0"}, {}, "src_0"),
    ],
)
def test_the_source_to_build(triggers: Triggers, site: dict[str, str], asked: dict[str, str], built: str) -> None:
    """The source that was sent, the repository, or the live source."""
    if site:
        triggers.set_site(**site)
    assert triggers.trigger(**asked)[0] == "queued"
    assert triggers.record()["source"] == built


def test_an_app_without_anything_to_build(triggers: Triggers) -> None:
    assert triggers.trigger() == ("never-live", 0, DAY)
    triggers.set_site(live="dep_0")
    assert triggers.trigger() == ("source-gone", 0, DAY)
    assert triggers.client.llen(WINDOW) == 2, "a refused call counts as a trigger of its hook"
    used = triggers.client.hgetall(USED)
    set_clock(triggers.client, NOON + SECOND)
    assert triggers.trigger(per_minute=2, per_day=0)[0] == "rate", "it is checked first, and changes nothing"
    assert (triggers.client.hgetall(USED), triggers.client.llen(WINDOW)) == (used, 2)
    _nothing_is_queued(triggers)


def test_a_hook_of_a_suspended_app_queues_nothing_and_counts(triggers: Triggers) -> None:
    for _ in range(3):
        assert triggers.trigger(suspended="1", source="src") == ("suspended", 0, DAY)
    assert triggers.trigger(suspended="1", source="src")[0] == "rate"
    _nothing_is_queued(triggers)
    assert triggers.client.hgetall(USED) == {b"hook_1": str(NOON // 1000).encode()}


def test_a_hooks_triggers_per_minute(triggers: Triggers) -> None:
    for number in range(3):
        set_clock(triggers.client, NOON + number * SECOND)
        assert triggers.trigger(f"dep_{number}", source="src")[0] == "queued"
    assert triggers.trigger("dep_3", source="src") == ("rate", 58 * SECOND, DAY)
    assert triggers.trigger("dep_4", source="src", hook="")[0] == "queued", "only hooks have a rate"
    set_clock(triggers.client, NOON + MINUTE - 1)
    assert triggers.trigger("dep_3", source="src") == ("rate", 1, DAY)
    set_clock(triggers.client, NOON + MINUTE)
    assert triggers.trigger("dep_3", source="src")[0] == "queued"


def test_an_accounts_deploys_per_day(triggers: Triggers) -> None:
    for deploy, address, verdict in (("dep_0", "live", "queued"), ("dep_1", "", "queued"), ("dep_2", "live", "quota")):
        assert triggers.trigger(deploy, source="src", hook="", per_day=2, address=address)[0] == verdict
    assert (triggers.today(), triggers.record("dep_0")["state"]) == (2, "queued"), "a refused deploy replaces nothing"
    set_clock(triggers.client, at("2026-11-22T00:00:00"))
    assert triggers.trigger("dep_3", source="src", hook="", per_day=2) == ("queued", 0, "2026-11-22")
    assert set(triggers.queued()) == {"dep_0", "dep_1", "dep_3"}


def test_a_full_stream_refuses_and_trims_nothing(triggers: Triggers) -> None:
    verdicts = [triggers.trigger(f"dep_{n}", source="src", hook="", MAX_WAITING=2)[0] for n in range(3)]
    assert verdicts == ["queued", "queued", "full"]
    assert [fields["id"] for _, fields in triggers.builds()] == ["dep_0", "dep_1"]
    assert triggers.today() == 2
    assert "local MAX_WAITING = 10000 " in source("deploys/queue_deploy")


def test_the_list_of_an_accounts_deploys_is_limited(triggers: Triggers) -> None:
    for number in range(5):
        set_clock(triggers.client, NOON + number * SECOND)
        triggers.trigger(f"dep_{number}", source="src", hook="", MAX_LISTED=3)
    assert set(triggers.queued()) == {"dep_2", "dep_3", "dep_4"}
    assert "local MAX_LISTED = 1000 " in source("deploys/queue_deploy")


def _nothing_is_queued(triggers: Triggers) -> None:
    assert triggers.builds() == []
    assert triggers.record() == {}
    assert triggers.queued() == {}
    assert triggers.today() == 0

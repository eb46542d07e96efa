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
    triggers.client.hset(SITE, mapping={"live": "dep_0", "source": "src_0"})
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


def test_a_newer_deploy_replaces_the_queued_one_of_its_address_until_it_has_started(triggers: Triggers) -> None:
    for deploy, address in (("dep_1", "live"), ("dep_2", "preview"), ("dep_3", "live")):
        assert triggers.trigger(deploy, address=address, source="src", hook="")[0] == "queued"
    replaced = triggers.record("dep_1")
    assert (replaced["state"], replaced["finishedAt"]) == ("canceled", ISO)
    assert replaced["error"] == "replaced by dep_3, a newer deploy of the same address"
    assert triggers.client.hget(f"{TAG}:builds:ended", "canceled") == b"1"
    triggers.client.hset(triggers.key("dep_3"), "state", "building")
    triggers.trigger("dep_4", address="live", source="src", hook="")
    assert [triggers.record(deploy)["state"] for deploy in ("dep_2", "dep_3")] == ["queued", "building"]
    assert [fields["id"] for _, fields in triggers.builds()] == ["dep_2", "dep_3", "dep_4"]


def test_a_refused_call_of_a_hook_counts_and_queues_nothing(triggers: Triggers) -> None:
    assert triggers.trigger() == ("never-live", 0, DAY)
    triggers.client.hset(SITE, "live", "dep_0")
    assert triggers.trigger() == ("source-gone", 0, DAY)
    assert triggers.trigger(suspended="1", source="src") == ("suspended", 0, DAY)
    used = triggers.client.hgetall(USED)
    set_clock(triggers.client, NOON + SECOND)
    assert triggers.trigger(suspended="1", per_day=0)[0] == "rate", "it is checked first, and changes nothing"
    assert (triggers.client.hgetall(USED), triggers.client.llen(WINDOW)) == (used, 3)
    assert (triggers.builds(), triggers.record(), triggers.queued(), triggers.today()) == ([], {}, {}, 0)


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


def test_a_full_stream_refuses_and_the_list_of_an_account_forgets_the_oldest(triggers: Triggers) -> None:
    bounds = {"MAX_WAITING": 5, "MAX_LISTED": 3}
    verdicts = []
    for number in range(6):
        set_clock(triggers.client, NOON + number * SECOND)
        verdicts.append(triggers.trigger(f"dep_{number}", source="src", hook="", **bounds)[0])
    assert verdicts == ["queued"] * 5 + ["full"]
    assert [fields["id"] for _, fields in triggers.builds()] == [f"dep_{number}" for number in range(5)]
    assert triggers.today() == 5
    assert set(triggers.queued()) == {"dep_2", "dep_3", "dep_4"}
    script = source("deploys/queue_deploy")
    assert "local MAX_WAITING = 10000 " in script
    assert "local MAX_LISTED = 1000 " in script

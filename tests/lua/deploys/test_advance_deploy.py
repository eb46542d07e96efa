"""A deploy moves from the expected state, and the consequences are applied in the same step."""

import time
from typing import Any

import pytest

from tests.lua.deliveries import BODIES, DATA, EVENT_KEYS, STREAM, Deliveries
from tests.lua.scripts import TAG

DEPLOY, SITE, BUILDS = f"{TAG}:deploy:dep_1", f"{TAG}:site:shop", f"{TAG}:builds"
PREVIEWS = f"{TAG}:previews:acc"
RECORD = {"id": "dep_1", "account": "acc", "address": "live"}
NO_EVENT = ("", "", "", "", "")
EVENT = ("evt_1", "acc", "shop", "deploy.succeeded", DATA)


class Deploy(Deliveries):
    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.entry = client.xadd(BUILDS, {"id": "dep_1", "account": "acc", "app": "shop"}).decode()
        client.hset(DEPLOY, mapping={**RECORD, "state": "building", "entry": self.entry})
        client.expire(DEPLOY, 1000)

    def advance(
        self,
        expected: str,
        *fields: str,
        take: bool = False,
        live: str = "",
        source: str = "",
        event: tuple[str, ...] = NO_EVENT,
        **bounds: int,
    ) -> int:
        keys = [DEPLOY, SITE, BUILDS, *EVENT_KEYS, f"{BUILDS}:ended", f"{BUILDS}:failed", PREVIEWS]
        args = [expected, "1" if take else "", live, source, *event, *fields]
        return self.script("deploys/advance_deploy", **bounds)(keys, args)

    def fields(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.client.hgetall(DEPLOY).items()}

    def site(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.client.hgetall(SITE).items()}

    def events(self) -> list[str]:
        return [fields[b"id"].decode() for _, fields in self.client.xrange(STREAM)]


@pytest.fixture
def deploy(client: Any) -> Deploy:
    return Deploy(client)


def test_a_move_changes_the_site_and_queues_an_event_once(deploy: Deploy) -> None:
    assert deploy.advance("building", "state", "canary", "commit", "é") == 1
    assert deploy.fields() == {**RECORD, "state": "canary", "entry": deploy.entry, "commit": "é"}
    assert 0 < deploy.client.ttl(DEPLOY) <= 1000, "the record keeps its time to live"
    assert (deploy.site(), deploy.events(), deploy.client.xlen(BUILDS)) == ({}, [], 1)
    assert deploy.advance("canary", "state", "live", live="dep_1", source="src_1", event=EVENT) == 1
    assert deploy.site() == {"live": "dep_1", "source": "src_1"}
    assert deploy.client.hget(BODIES, "evt_1").decode() == DATA
    assert deploy.advance("building", "state", "failed", take=True, event=("evt_2", *EVENT[1:])) == 0
    assert (deploy.fields()["state"], deploy.events(), deploy.client.xlen(BUILDS)) == ("live", ["evt_1"], 1)
    deploy.client.hset(DEPLOY, "state", "building")
    assert deploy.advance("building", "state", "live", live="dep_2", take=True) == 1
    assert deploy.site() == {"live": "dep_2"}, "hooks must not build the source of the deploy before"
    assert deploy.client.xlen(BUILDS) == 0
    deploy.client.delete(DEPLOY)
    assert deploy.advance("building", "state", "live", event=EVENT) == 0
    assert not deploy.client.exists(DEPLOY), "a deploy that does not exist is not created"


def test_a_preview_that_goes_live_is_among_the_accounts_previews(deploy: Deploy) -> None:
    """In the same step: whoever repeats the move after an outage finds that it has happened."""
    deploy.client.hset(DEPLOY, mapping={"appId": "app_1", "address": "p-fix", "state": "checking"})
    deploy.client.hset(SITE, mapping={"live": "dep_0", "preview:p-fix": "dep_0"})
    assert deploy.advance("checking", "state", "live", event=EVENT) == 1
    assert deploy.site() == {"live": "dep_0", "preview:p-fix": "dep_1"}
    [(member, visited)] = deploy.client.zrange(PREVIEWS, 0, -1, withscores=True)
    assert (member, abs(visited - time.time()) < 60) == (b"app_1 p-fix", True)

    deploy.client.delete(PREVIEWS)
    for address, state, live in (("p-fix", "checking", ""), ("p-fix", "failed", ""), ("live", "live", "dep_1")):
        deploy.client.hset(DEPLOY, mapping={"address": address, "state": "building"})
        assert deploy.advance("building", "state", state, live=live) == 1
    assert (deploy.site()["live"], deploy.client.exists(PREVIEWS)) == ("dep_1", 0), "only one that goes live"


def test_it_moves_even_if_its_event_is_dropped(deploy: Deploy) -> None:
    assert deploy.advance("building", "state", "live", live="dep_1", event=EVENT, MAX_WAITING=0) == 1
    assert deploy.fields()["state"] == "live"
    assert deploy.events() == []
    assert deploy.outcomes() == {"dropped": 1, "dropped:overflow": 1}


def test_the_site_names_the_queued_deploy(deploy: Deploy) -> None:
    deploy.client.hset(DEPLOY, "state", "queued")
    deploy.client.hset(SITE, "queued:live", "dep_1")
    assert deploy.advance("queued", "state", "building") == 1
    assert deploy.site() == {}
    assert deploy.advance("building", "state", "queued") == 1  # its worker was stopped
    assert deploy.site() == {"queued:live": "dep_1"}
    deploy.advance("queued", "state", "building")
    deploy.client.hset(SITE, "queued:live", "dep_2")
    deploy.advance("building", "state", "queued")
    deploy.advance("queued", "state", "building")
    assert deploy.site() == {"queued:live": "dep_2"}, "a newer one stays queued"


def test_operators_see_failed_deploys_and_the_number_that_ended(deploy: Deploy) -> None:
    deploy.client.zadd(f"{BUILDS}:failed", {"acc dep_0": 1, **{f"acc old_{n}": 2 + n for n in range(120)}})
    assert deploy.advance("building", "state", "failed") == 1
    assert deploy.advance("building", "state", "failed") == 0
    assert deploy.client.zrange(f"{BUILDS}:failed", 0, -1) == [b"acc dep_1"]
    assert 0 < deploy.client.ttl(f"{BUILDS}:failed") <= 86_400
    assert deploy.client.hgetall(f"{BUILDS}:ended") == {b"failed": b"1"}

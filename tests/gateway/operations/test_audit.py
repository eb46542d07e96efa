"""The audit trail when Redis fails, its bound, and what it takes from a body."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from gateway.accounts.operator_routes import AppFields
from gateway.accounts.operators import Operator
from gateway.errors import BackboneUnavailable
from gateway.operations import audit
from gateway.operations.audit import Audit, describe_answer, describe_body
from gateway.operations.keys import audit_key
from gateway.redis.client import Store
from tests.support.logs import captured
from tests.support.redis_servers import cluster
from tests.support.tcp_proxy import Proxy

ANA = Operator("ana", "0a1b2c3d", "operator:…")
KEY = audit_key("changes")


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store(redis_url)
    yield store
    await store.close()


async def test_a_record_without_a_result_stays(store: Store) -> None:
    """The gateway died, or Redis failed, in between: nobody knows what happened, and it shows."""
    begun = await Audit(store).begin("changes", ANA, "change_account", "acc_1", "request")
    (record,) = await Audit(store).list("changes", 10, None)
    assert (record.status, record.at, record.id) == (None, begun.at, begun.id)


async def test_the_result_replaces_it(store: Store) -> None:
    trail = Audit(store)
    record = await trail.begin("changes", ANA, "change_account", "acc_1", "request")
    record.status, record.details = 200, {"plan": "max"}
    with captured(audit) as lines:
        await trail.finish("changes", record)
    (line,) = lines
    assert (line["event"], line["operator"], line["target"], line["status"]) == ("audit.recorded", "ana", "acc_1", 200)
    assert "max" not in str(line)
    (after,) = await trail.list("changes", 10, None)
    assert (after.status, after.details, after.at) == (200, {"plan": "max"}, record.at)
    assert await store.client.xlen(KEY) == 1


async def test_the_oldest_make_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST", 3)
    for n in range(5):
        await Audit(store).begin("changes", ANA, "change_account", f"acc_{n}", "request")
    assert [record.target for record in await Audit(store).list("changes", 10, None)] == ["acc_4", "acc_3", "acc_2"]


async def test_what_cannot_be_recorded_is_refused(proxy: Proxy) -> None:
    store = Store(proxy.url)
    record = await Audit(store).begin("changes", ANA, "change_account", "acc_1", "request")
    proxy.go_down()
    with pytest.raises(BackboneUnavailable):
        await Audit(store).begin("changes", ANA, "change_account", "acc_2", "request")
    record.status = 200
    with captured(audit) as lines:
        await Audit(store).finish("changes", record)
    (line,) = [line for line in lines if line["event"] == "audit.unfinished"]
    assert line["record"]["target"] == "acc_1"
    await store.close()


async def test_in_a_cluster() -> None:
    with cluster("valkey") as url:
        store = Store(url)
        record = await Audit(store).begin("reports", ANA, "report_crash", "shop", "request")
        record.status = 202
        await Audit(store).finish("reports", record)
        assert [each.status for each in await Audit(store).list("reports", 10, None)] == [202]
        await store.close()


async def test_a_body_shows_what_is_no_secret() -> None:
    body = {"account": "acc_1", "name": "Shop", "auth": {"kind": "secret", "secret": "s" * 40}}
    described = describe_body(msgspec.convert(body, AppFields))
    assert described == {"account": "acc_1", "name": "Shop", "auth": "(not recorded)"}


async def test_an_answer_shows_what_was_made() -> None:
    assert describe_answer(b'{"id":"acc_1","apiKey":"csk_secret"}') == ({"id": "acc_1"}, "")
    assert describe_answer(b'{"error":{"code":"NOT_FOUND","message":"x"}}') == ({}, "NOT_FOUND")
    assert describe_answer(b"") == describe_answer(b"[1]") == ({}, "")

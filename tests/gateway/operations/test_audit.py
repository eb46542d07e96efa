"""The audit trail when Redis fails, and its limit. tests/gateway/api/test_audit.py has what it records."""

import pytest

from gateway.accounts.operators import Operator
from gateway.errors import BackboneUnavailable
from gateway.keys import audit_key
from gateway.operations import audit
from gateway.operations.audit import AuditTrail
from gateway.redis.client import Store
from tests.support.logs import captured
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy

ANA = Operator("ana", "0a1b2c3d", "operator:…")
KEY = audit_key("changes")


async def test_records_are_kept_for_400_days_and_their_number_is_limited(store: Store) -> None:
    seconds, _ = await store.client.time()
    old, kept = ((seconds - 400 * 86_400 + more) * 1000 for more in (-60, 60))
    for ms in (old, kept):
        await store.client.xadd(KEY, {"record": "{}"}, id=f"{ms}-0")
    trail = AuditTrail(store, max_records=4)
    record = await trail.begin_record("changes", ANA, "change_account", "acc_0", "request")
    await trail.finish_record("changes", record)
    assert (await store.client.xrange(KEY))[0][0] == f"{kept}-0"
    for n in range(1, 5):
        await trail.begin_record("changes", ANA, "change_account", f"acc_{n}", "request")
    found = await trail.list_records("changes", 10, None)
    assert [record.target for record in found] == ["acc_4", "acc_3", "acc_2", "acc_1"]


async def test_a_change_that_cannot_be_recorded_is_refused(proxy: Proxy) -> None:
    async with opened(proxy.url) as store:
        record = await AuditTrail(store).begin_record("changes", ANA, "change_account", "acc_1", "request")
        proxy.go_down()
        with pytest.raises(BackboneUnavailable):
            await AuditTrail(store).begin_record("changes", ANA, "change_account", "acc_2", "request")
        record.status = 200
        with captured(audit) as lines:
            await AuditTrail(store).finish_record("changes", record)
        (line,) = [line for line in lines if line["event"] == "audit.unfinished"]
        assert line["record"]["target"] == "acc_1"

"""The process's side of a lease, without the script; tests/lua/inference/test_lease_machine.py tests both together."""

from gateway.inference.concurrency.lease import PermitLease


def test_a_new_epoch_holds_the_permits_in_use() -> None:
    lease = PermitLease(28.0)
    assert lease.renew(lease.call(100.0), 100.1)
    assert lease.accept(1, 0, ["-"] * 4, 100.1) == ["-"] * 4
    assert lease.take(101.0)
    assert lease.take(101.0)
    late = lease.call(120.0)
    call = lease.call(128.0)
    assert (call.epoch, call.granted, call.returned, call.used) == (2, 2, 0, 2)
    assert call.number > late.number
    assert not lease.renew(late, 128.0), "a lease that ended before its answer arrived is not renewed"
    lease.release()
    assert not lease.take(128.1)
    assert lease.renew(call, 128.2)
    assert lease.take(128.3)
    assert lease.accept(1, 4, ["acc"], 128.3) == []

"""The function for the script that shares a provider's permits among processes."""

from collections.abc import Mapping

from gateway.inference.concurrency.lease import BudgetCall, LeaseAnswer, LeaseCall, read_lease_answer
from gateway.keys import lease_keys, permits_channel
from gateway.redis.client import Script, Store

_LEASE = Script("inference/lease")


async def lease(
    store: Store,
    provider: str,
    process: str,
    call: LeaseCall,
    demand: Mapping[str, tuple[float, int, int, int]],
    *,
    want: int,
    cut: bool,
    leave: bool,
    limit: int,
    length: int,
    budget: BudgetCall | None = None,
) -> LeaseAnswer | None:
    """Renews a process's lease for `length` ms, returns permits, and takes grants; None if a later call overtook it.

    `demand` maps each account with a change to its weight, waiting requests, permits in use and the tokens of its next
    request. `want` is the number of spare permits to take. `budget` is needed only if the provider has a quota.
    """
    counts = (call.epoch, call.number, call.granted, call.returned, call.used, call.waiting, want)
    flags = (int(cut), int(leave), limit, length, permits_channel(provider))
    flat_demand: list[str | int] = []
    for account, (weight, waiting, used, tokens) in demand.items():
        flat_demand += (account, f"{weight:g}", waiting, used)
        if budget is not None:
            flat_demand.append(tokens)
    script_keys = lease_keys(provider, rated=budget is not None)
    rate = () if budget is None else budget.flatten()
    reply = await store.run_script(_LEASE, script_keys, process, *counts, *flags, *rate, *flat_demand)
    return read_lease_answer(reply)

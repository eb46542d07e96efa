"""The calls and answers of `lease.lua`, and a summary of its records for operators."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.keys import PERMITS_KEY, WAITING_KEY
from gateway.redis.client import Store


class LeaseCall(msgspec.Struct, frozen=True):
    """A process's report of its lease of permits."""

    epoch: int
    number: int
    granted: int  # grants that the process knows of
    returned: int
    used: int
    waiting: int
    sent: float  # monotonic seconds


class QuotaCall(msgspec.Struct, frozen=True):
    """A process's report of its part of one quota: of requests, or of tokens."""

    quota: int  # of a window, for all processes; 0: none
    granted: int  # as far as the process knows
    returned: int
    spent: int
    want: int  # spare ones


class BudgetCall(msgspec.Struct, frozen=True):
    window: int  # ms
    recent: bool  # the process has started a request within one window
    requests: QuotaCall
    tokens: QuotaCall

    @property
    def wants(self) -> bool:
        return self.requests.want > 0 or self.tokens.want > 0

    def flatten(self) -> list[int]:
        """Returns the arguments of the script, in its order."""
        amounts = [(each.granted, each.returned, each.spent, each.want) for each in (self.requests, self.tokens)]
        return [self.requests.quota, self.tokens.quota, self.window, int(self.recent), *amounts[0], *amounts[1]]


class BudgetAnswer(msgspec.Struct, frozen=True):
    requests: int  # granted to the process since its lease began
    tokens: int
    free_requests: int  # of all processes; -1: no quota
    free_tokens: int
    free_permits: int
    outlook: list[tuple[float, int, int]]  # seconds until so many requests and tokens are free, while any wait here


class LeaseAnswer(msgspec.Struct, frozen=True):
    known: bool  # False: Redis has forgotten which requests wait in this process
    scarce: bool  # requests wait somewhere, or processes hold more permits than the limit allows
    in_force: int  # the limit
    waiting: int  # requests, of all processes
    accounts: int  # that wait, of all processes
    frees_in: float  # seconds until a permit may become free by itself; 0: never
    before: int  # grants before the following
    labels: list[str]  # for each grant its account, or '-' for a spare one
    excess: dict[str, int]  # account → waiting requests beyond its limit, which this process refuses
    budget: BudgetAnswer | None = None  # only with a quota


def read_lease_answer(reply: Sequence[Any]) -> LeaseAnswer | None:
    if reply[0] == "late":
        return None
    known, scarce, in_force, waiting, accounts, frees_in, before, labels, excess, *budget = reply[1:]
    return LeaseAnswer(
        known=known == 1,
        scarce=scarce == 1,
        in_force=int(in_force),
        waiting=int(waiting),
        accounts=int(accounts),
        frees_in=int(frees_in) / 1000,
        before=int(before),
        labels=list(labels),
        excess={account: int(count) for account, count in zip(excess[::2], excess[1::2], strict=True)},
        budget=_read_budget(budget[0]) if budget else None,
    )


def _read_budget(reply: Sequence[Any]) -> BudgetAnswer:
    requests, tokens, free_requests, free_tokens, free_permits, window_start, spent = reply
    outlook = [((ms - int(window_start)) / 1000, r, t) for ms, r, t in (map(int, entry.split()) for entry in spent)]
    return BudgetAnswer(requests, tokens, free_requests, free_tokens, free_permits, outlook)


class Share(msgspec.Struct, frozen=True):
    """The current use of the permits by all processes."""

    held: int  # permits
    used: int  # of them
    waiting: dict[str, int]  # account -> waiting requests


async def read_share(store: Store) -> Share:
    """Reads the share for the operators' page. Raises BackboneUnavailable."""
    permits: dict[str, str] = await store.client.hgetall(PERMITS_KEY)
    waiting: dict[str, str] = await store.client.hgetall(WAITING_KEY)
    counts = [[int(field) for field in text.split()[:7]] for text in permits.values()]
    return Share(
        held=sum(granted - returned for _, _, granted, returned, *_ in counts),
        used=sum(used for _, _, _, _, _, used, _ in counts),
        waiting={
            account: count
            for account, text in waiting.items()
            if (count := sum(int(each.rpartition("=")[2].partition("/")[0]) for each in text.split()[1:]))
        },
    )

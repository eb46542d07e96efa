"""lease.lua on a clock that a test sets. Its messages go to a list instead of being published."""

from typing import Any

from gateway.inference.concurrency.lease import BudgetCall, PermitLease
from gateway.inference.concurrency.lease import LeaseAnswer as Answer
from gateway.inference.concurrency.lease import LeaseCall as Call
from gateway.inference.concurrency.lease import read_lease_answer as read_answer
from gateway.keys import lease_keys, permits_key, waiting_key
from tests.lua.scripts import CLOCK, SECOND, on_test_clock

MESSAGES = "test:messages"
CHANNEL = "permits"
LEASE = 28.0  # seconds
Demand = dict[str, tuple[float, ...]]  # account -> weight, waiting requests, permits in use, tokens of the next


def with_kept_messages(text: str) -> str:
    """Replaces `PUBLISH channel message` by `RPUSH list channel message`."""
    changed = text.replace("redis.call('PUBLISH', ", f"redis.call('RPUSH', '{MESSAGES}', ")
    assert "PUBLISH'" not in changed
    return changed


class Provider:
    """The permits in Redis, and the clock, in seconds, that processes and Redis share here."""

    def __init__(self, client: Any, limit: int) -> None:
        self.client, self.limit = client, limit
        self._script = client.register_script(with_kept_messages(on_test_clock("inference/lease")))
        self.now = 0.0
        self.set_clock(1000.0)

    def set_clock(self, now: float) -> None:
        self.now = now
        micro = round(now * SECOND)
        self.client.pipeline().delete(CLOCK).rpush(CLOCK, micro // SECOND, micro % SECOND).execute()

    def call(
        self,
        name: str,
        call: Call,
        demand: Demand,
        *,
        want: int = 0,
        cut: bool = False,
        leave: bool = False,
        budget: BudgetCall | None = None,
    ) -> tuple[Answer | None, list[tuple[str, str]]]:
        """Returns the answer, and the messages as channel and text."""
        counts = [call.epoch, call.number, call.granted, call.returned, call.used, call.waiting, want]
        flat: list[Any] = []
        for account, (weight, waiting, *used) in demand.items():
            flat += [account, f"{weight:g}", waiting, *(used or [0])]
        rate = budget.flatten() if budget else []
        flags = [int(cut), int(leave), self.limit, int(LEASE * 1000), CHANNEL]
        reply = self._script(lease_keys(rated=bool(budget)), [name, *counts, *flags, *rate, *flat])
        sent = [each.decode() for each in self.client.lrange(MESSAGES, 0, -1)]
        self.client.delete(MESSAGES)
        return read_answer(_decoded(reply)), list(zip(sent[::2], sent[1::2], strict=True))

    def records(self) -> dict[str, list[int]]:
        """Returns by process: epoch, call, granted, returned, lease end, used, waiting."""
        found = self.client.hgetall(permits_key())
        return {name.decode(): [int(field) for field in text.split()[:7]] for name, text in found.items()}

    def held(self) -> int:
        return sum(granted - returned for _, _, granted, returned, *_ in self.records().values())

    def waiting(self) -> dict[str, str]:
        return {key.decode(): text.decode() for key, text in self.client.hgetall(waiting_key()).items()}


def _decoded(reply: Any) -> Any:
    if isinstance(reply, list):
        return [_decoded(part) for part in reply]
    return reply.decode() if isinstance(reply, bytes) else reply


class Process:
    """One process that behaves like `Permits`, on a network without faults."""

    def __init__(self, provider: Provider, name: str) -> None:
        self.provider, self.name = provider, name
        self.lease = PermitLease(LEASE)
        self.granted: list[str] = []
        self.answer: Answer  # of the last call

    def call(
        self,
        demand: Demand | None = None,
        *,
        give_back: int = 0,
        waiting: int = 0,
        want: int = 0,
        cut: bool = False,
        leave: bool = False,
    ) -> list[str]:
        """Calls the script, and returns the labels of the new grants."""
        call = self.lease.call(self.provider.now, give_back, waiting)
        answer, messages = self.provider.call(self.name, call, demand or {}, want=want, cut=cut, leave=leave)
        assert answer is not None
        self.answer, self.messages = answer, messages
        assert self.lease.renew(call, self.provider.now)
        new = self.lease.accept(call.epoch, answer.before, answer.labels, self.provider.now)
        assert new is not None
        self.granted += new
        return new

"""Answers that the provider has sent and slow clients have not taken yet.

An answer is read to its end whether its client keeps up or not, so that a slow reader holds memory here and no permit.
All of it together is at most TOTAL bytes in a process, and an account may hold as much of it as is still free: however
many accounts are at their limit, another one finds room. An answer of more than ANSWER bytes, which no model gives for
the most tokens that a request may ask for, slows its provider down instead.
"""

from __future__ import annotations

from collections import deque

TOTAL = 67_108_864  # bytes in a process
ANSWER = 2_097_152  # bytes of one answer
PIECE = 16_384  # bytes that are sent at once, unless one event is longer


class Backlogs:
    def __init__(self, total: int = TOTAL) -> None:
        self.free = total
        self._accounts: dict[str, int] = {}  # bytes that each holds

    def take(self, account: str, size: int) -> bool:
        held = self._accounts.get(account, 0)
        if held + size > self.free:
            return False
        self._accounts[account] = held + size
        self.free -= size
        return True

    def give_back(self, account: str, size: int) -> None:
        self.free += size
        if held := self._accounts.get(account, 0) - size:
            self._accounts[account] = held
        else:
            self._accounts.pop(account, None)


class Backlog:
    """Of one answer. `clear` it when the request has ended."""

    __slots__ = ("_account", "_all", "_pieces", "_size")

    def __init__(self, backlogs: Backlogs, account: str) -> None:
        self._all, self._account = backlogs, account
        self._pieces: deque[bytearray] = deque()
        self._size = 0  # bytes

    def __len__(self) -> int:
        return self._size

    def add(self, data: bytes) -> bool:
        """False if the account has no room for it."""
        if not self._all.take(self._account, len(data)):
            return False
        self._size += len(data)
        if self._pieces and len(self._pieces[-1]) + len(data) <= PIECE:
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))
        return True

    def next_piece(self) -> bytes:
        """What was added at once stays together."""
        piece = bytes(self._pieces.popleft())
        self._size -= len(piece)
        self._all.give_back(self._account, len(piece))
        return piece

    def clear(self) -> None:
        self._pieces.clear()
        self._all.give_back(self._account, self._size)
        self._size = 0

"""Buffers of answers that the provider has sent and slow clients have not taken yet.

An answer is read to its end whether its client keeps up or not, so a slow reader holds memory here, but no permit. All
backlogs of a process together hold at most TOTAL_BYTES. An account may hold as much as is still free, so that however
many accounts are at their limit, another one finds room. No model's answer is longer than ANSWER_BYTES, even with the
most tokens that a request may ask for. If one is, its provider is slowed down.
"""

TOTAL_BYTES = 67_108_864  # in a process
ANSWER_BYTES = 2_097_152  # of one answer
PIECE_BYTES = 16_384  # that are sent at once, unless one event is longer


class Backlogs:
    """The memory for all backlogs of a process."""

    def __init__(self, total: int = TOTAL_BYTES) -> None:
        self.free = total
        self._accounts: dict[str, int] = {}  # account -> bytes that it holds

    def reserve(self, account: str, size: int) -> bool:
        held = self._accounts.get(account, 0)
        if held + size > self.free:
            return False
        self._accounts[account] = held + size
        self.free -= size
        return True

    def release(self, account: str, size: int) -> None:
        self.free += size
        if held := self._accounts.get(account, 0) - size:
            self._accounts[account] = held
        else:
            self._accounts.pop(account, None)


class Backlog:
    """The backlog of one answer. Call `clear` when the request has ended."""

    __slots__ = ("_account", "_all", "_pieces", "_size")

    def __init__(self, backlogs: Backlogs, account: str) -> None:
        self._all, self._account = backlogs, account
        self._pieces: list[bytearray] = []  # few; an empty deque would be a twentieth of a stream's memory
        self._size = 0  # bytes

    def __len__(self) -> int:
        return self._size

    def add(self, data: bytes) -> bool:
        """Returns False if the account has no room for the data."""
        if not data:
            return True
        if not self._all.reserve(self._account, len(data)):
            return False
        self._size += len(data)
        if self._pieces and len(self._pieces[-1]) + len(data) <= PIECE_BYTES:
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))
        return True

    def next_piece(self) -> bytes:
        """Removes and returns the next piece. It never splits the data of one `add`."""
        piece = bytes(self._pieces.pop(0))
        self._size -= len(piece)
        self._all.release(self._account, len(piece))
        return piece

    def clear(self) -> None:
        if self._size:
            self._pieces.clear()
            self._all.release(self._account, self._size)
            self._size = 0

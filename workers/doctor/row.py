"""The result of a check, as a row of the table."""

from typing import Literal

import msgspec

CORRECT = "correct this, and run the command again"
WARN_FULL, FAIL_FULL = 0.8, 0.95  # of memory or of a disk

State = Literal["ok", "warn", "fail"]


class Row(msgspec.Struct, frozen=True):
    """The result of a check. `action` is empty if it is `ok`."""

    check: str
    state: State
    detail: str
    action: str = ""


def judge_use(used: int, limit: int, action: str) -> tuple[State, str, str]:
    share = used / limit
    state: State = "fail" if share > FAIL_FULL else "warn" if share > WARN_FULL else "ok"
    return state, f"{share:.0%} of {limit / (1 << 30):.1f} GiB are used", "" if state == "ok" else action

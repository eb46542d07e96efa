"""Changes a record that several processes change: reads it, computes the new one, and writes it by compare-and-set.

If another process writes the record in between, the change is computed again from what that process wrote. So of
changes at the same time that concern different fields, each holds.
"""

from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store
from gateway.redis.scripts import Companion, compare_and_set

ATTEMPTS = 50  # each fails only if another write succeeds

T = TypeVar("T")


class Change(NamedTuple, Generic[T]):
    record: str | None  # the new text; '' removes the record, None leaves it as it is
    result: T
    companion: Companion | None = None


async def change_record(
    store: Store,
    key: str,
    compute: Callable[[str], Awaitable[Change[T]]],
    *,
    subject: str = "this record",
    attempts: int = ATTEMPTS,
) -> T:
    """Returns the result of `compute`, which gets the record's text ('' if there is none) and may run several times.

    Raises what `compute` raises, without changing anything, and BackboneUnavailable after so many attempts. Its
    message names the `subject`.
    """
    for _ in range(attempts):
        present = await store.get(key) or ""
        change = await compute(present)
        if change.record is None or await compare_and_set(
            store, key, change.record, expected=present, companion=change.companion
        ):
            return change.result
    raise BackboneUnavailable(f"Several requests are changing {subject} at the same time; try again.")

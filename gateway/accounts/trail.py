"""The account's own trail: every change of an account that a key, a session or an operator made.

The trail has three parts, each a stream with a limit of its own, so that no part is pushed out by another:

- `{pNN}:audit:<account>:operators` has the changes by operators
- `{pNN}:audit:<account>:rights` has those of keys, members, invitations, the webhook and the deletion
- `{pNN}:audit:<account>` has all others

In each part, one actor has at most a fifth of the entries: then its oldest ones make room for its newest. Equal changes
within a minute are counted with one entry, which has the time of the first. So a flood of changes from one key hides
neither what others did nor what the key did a minute before.

Entries have who made which change, of what. They never have a value: only ids and names that addresses contain.

A request of an account writes its entry before the change, and takes it back if the request is refused. So a gateway
that dies in between leaves the entry of a change that may have been made. An operator's change is in the operators'
trail first (`gateway/operations/audit.py`), and here once it has succeeded.

Failure policy: a trail that cannot be written stops no change. The log has the entry, as `trail.unwritten`.
"""

import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import structlog

from gateway.accounts import scripts
from gateway.accounts.access import Access, By
from gateway.accounts.api_keys import digest
from gateway.accounts.scripts import TrailLimits, TrailPlace
from gateway.errors import BackboneUnavailable, ServiceError
from gateway.ids import Time, now_iso
from gateway.keys import trail_counts_key, trail_stream_key
from gateway.redis.client import Store
from gateway.redis.errors import code_of

logger = structlog.get_logger()

OTHERS, RIGHTS, OPERATORS = PARTS = ("", "rights", "operators")
RIGHTS_ACTION = re.compile(r"\w+_(key|member|invitation|webhook|secret)|leave|keep_account")
MAX_ENTRIES = 5_000  # of one part
SHARES = 5  # one actor has at most a fifth
KEPT_SECONDS = 90 * 86_400
COUNTED_SECONDS = 60  # in which equal changes are counted with one entry
READ_ENTRIES = 500  # at once, to find those that a filter chooses
TARGET_LENGTH = 200  # characters
SECRET = re.compile(r"csk_[\w-]|whsec_[\w+/]|/hooks/deploy/[\w-]")  # API keys, signing secrets, URLs of deploy hooks
TOKEN = re.compile(r"(?=.*[A-Z_])[\w-]{43}")  # of a deploy hook; names of apps have neither capitals nor `_`
HIDDEN = "(not recorded)"


class TrailEntry(msgspec.Struct):
    """A change of an account, or several equal ones."""

    id: str
    at: Time  # of the first
    who: str  # the name and the id of an API key, or the name of an operator
    by: By
    action: str  # such as `create_key`
    target: str  # the app, key, hook or deploy; empty for the account itself
    count: int  # of equal changes within a minute


class TrailFilter(msgspec.Struct, frozen=True):
    """Chooses entries. An empty text chooses all."""

    actor: str = ""  # an entry's `who`, or the id of the API key in it
    action: str = ""

    def matches(self, entry: TrailEntry) -> bool:
        is_actor = self.actor in ("", entry.who) or entry.who.endswith(f" ({self.actor})")
        return is_actor and self.action in ("", entry.action)


EVERY_ENTRY = TrailFilter()
LIMITS = TrailLimits(MAX_ENTRIES, MAX_ENTRIES // SHARES, KEPT_SECONDS, COUNTED_SECONDS)


class WrittenEntry(NamedTuple):
    """What `begin` has written, for `forget`."""

    place: TrailPlace
    entry: str


class _Position(NamedTuple):
    """The place of an entry among those of all parts, by which they are listed.

    A stream numbers the entries of a millisecond. The id that callers see has the part in this number, so that it
    names one entry of all parts.
    """

    milliseconds: int
    number: int

    @classmethod
    def parse(cls, text: str) -> "_Position":
        milliseconds, _, number = text.partition("-")
        return cls(int(milliseconds), int(number))

    @classmethod
    def of(cls, part: str, entry: str) -> "_Position":
        milliseconds, number = cls.parse(entry)
        return cls(milliseconds, number * len(PARTS) + PARTS.index(part))

    def __str__(self) -> str:
        return f"{self.milliseconds}-{self.number}"

    @property
    def part(self) -> str:
        return PARTS[self.number % len(PARTS)]

    @property
    def entry(self) -> str:
        """Returns the id in the stream of the part."""
        return f"{self.milliseconds}-{self.number // len(PARTS)}"

    def end_before(self, part: str) -> str:
        """Returns where the older entries of a part begin, as the end of a range."""
        number = self.number - PARTS.index(part) + len(PARTS) - 1  # rounds up: the range excludes its end
        return f"({self.milliseconds}-{number // len(PARTS)}"


def hide_secret(text: str) -> str:
    """Returns the text, unless a caller has put a secret in the place of an id."""
    return HIDDEN if SECRET.search(text) or TOKEN.fullmatch(text) else text


def find_part(by: By, action: str) -> str:
    """Returns the part of the trail that has this change."""
    if by == "operator":
        return OPERATORS
    return RIGHTS if RIGHTS_ACTION.fullmatch(action) else OTHERS


class AccountTrail:
    def __init__(self, store: Store, *, limits: TrailLimits = LIMITS, read_entries: int = READ_ENTRIES) -> None:
        self._store, self._limits, self._read_entries = store, limits, read_entries

    async def begin(self, access: Access, action: str, target: str) -> WrittenEntry | None:
        """Adds a change that is about to be made. Returns None if it could not be written."""
        return await self._add(access.account.id, access.who, access.by, action, target)

    async def add_operators_change(self, account_id: str, operator: str, action: str, target: str) -> None:
        await self._add(account_id, operator, "operator", action, target)

    async def _add(self, account_id: str, who: str, by: By, action: str, target: str) -> WrittenEntry | None:
        fields = {"who": who, "by": by, "action": action, "target": hide_secret(target[:TARGET_LENGTH])}
        place = TrailPlace(account_id, find_part(by, action), digest(who)[:32])
        change = digest("\0".join(fields.values()))[:32]
        try:
            entry = await scripts.add_trail_entry(self._store, place, change, self._limits, fields)
            return WrittenEntry(place, entry)
        except BackboneUnavailable as error:
            logger.warning("trail.unwritten", account=account_id, **fields, error=code_of(error.__cause__))
            return None

    async def forget(self, access: Access, written: WrittenEntry | None) -> None:
        """Takes back a change that was refused. If that fails, the trail has one change too many."""
        if written is not None:
            try:
                await scripts.take_back_trail_entry(self._store, *written)
            except BackboneUnavailable as error:
                logger.warning("trail.superfluous", account=access.account.id, error=code_of(error.__cause__))

    @asynccontextmanager
    async def record(
        self, access: Access, action: str, target: str, *refusals: type[Exception]
    ) -> AsyncGenerator[None]:
        """Wraps a change, which leaves no entry if it is refused: by an error below 500, or one of `refusals`."""
        entry = await self.begin(access, action, target)
        try:
            yield
        except Exception as error:
            # After a failure of the service, the change may have been made.
            if isinstance(error, refusals) or (isinstance(error, ServiceError) and error.status < 500):
                await self.forget(access, entry)
            raise

    # -- reading ---------------------------------------------------------------------------------------------

    async def _read_page(self, account_id: str, count: int, before: str | None) -> list[TrailEntry]:
        """Returns the newest entries of all parts, without their counts."""
        ends = {part: "+" if before is None else _Position.parse(before).end_before(part) for part in PARTS}
        oldest = int((time.time() - self._limits.kept) * 1000)
        parts = await self._store.read_each(
            PARTS,
            lambda pipe, part: pipe.xrevrange(trail_stream_key(account_id, part), ends[part], oldest, count=count),
        )
        found = {
            _Position.of(part, entry): fields
            for part, entries in zip(PARTS, parts, strict=True)
            for entry, fields in entries
        }
        return [_make_entry(position, found[position]) for position in sorted(found, reverse=True)[:count]]

    async def _read_counts(self, account_id: str, entries: list[TrailEntry]) -> list[TrailEntry]:
        positions = [_Position.parse(entry.id) for entry in entries]
        counts = await self._store.read_each(
            positions, lambda pipe, each: pipe.hget(trail_counts_key(account_id, each.part), each.entry)
        )
        for entry, count in zip(entries, counts, strict=True):
            entry.count = int(count or 1)
        return entries

    async def list(
        self, account_id: str, limit: int, before: str | None = None, chosen: TrailFilter = EVERY_ENTRY
    ) -> list[TrailEntry]:
        """Returns the changes, newest first. `before` is the id of an entry. Raises BackboneUnavailable."""
        count = limit if chosen == EVERY_ENTRY else self._read_entries
        found: list[TrailEntry] = []
        has_more = True
        while has_more and len(found) < limit:
            page = await self._read_page(account_id, count, before)
            found += [entry for entry in page if chosen.matches(entry)]
            if has_more := len(page) == count:
                before = page[-1].id
        return await self._read_counts(account_id, found[:limit])


def _make_entry(position: _Position, fields: dict[str, Any]) -> TrailEntry:
    return TrailEntry(id=str(position), at=now_iso(position.milliseconds / 1000), **fields, count=1)

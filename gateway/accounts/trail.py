"""The account's own trail: every change of an account that a key, a session or an operator made.

`{pNN}:audit:<account>` is a stream. Its entries have who made which change, of what. They never have a value: only ids
and names that addresses contain.

A request of an account writes its entry before the change, and removes it if the request is refused. So a gateway that
dies in between leaves the entry of a change that may have been made. An operator's change is in the operators' trail
first (`gateway/operations/audit.py`), and here once it has succeeded.

Failure policy: a trail that cannot be written stops no change. The log has the entry, as `trail.unwritten`.
"""

import re
import time

import msgspec
import structlog

from gateway.accounts.access import Access, By
from gateway.errors import BackboneUnavailable
from gateway.ids import Time, now_iso
from gateway.keys import account_audit_key
from gateway.redis.client import Store
from gateway.redis.errors import code_of

logger = structlog.get_logger()

MAX_ENTRIES = 5_000  # of one account
KEPT_SECONDS = 90 * 86_400
TARGET_LENGTH = 200  # characters
SECRET = re.compile(r"csk_\w|whsec_\w|/hooks/deploy/\w")  # API keys, signing secrets, the URLs of deploy hooks
TOKEN = re.compile(r"(?=.*[A-Z_])[\w-]{43}")  # of a deploy hook; names of apps have neither capitals nor `_`
HIDDEN = "(not recorded)"


class TrailEntry(msgspec.Struct):
    """A change of an account."""

    id: str
    at: Time
    who: str  # the name and the id of an API key, or the name of an operator
    by: By
    action: str  # such as `create_key`
    target: str  # the app, key, hook or deploy; empty for the account itself


def hide_secret(text: str) -> str:
    """Returns the text, unless a caller has put a secret in the place of an id."""
    return HIDDEN if SECRET.search(text) or TOKEN.fullmatch(text) else text


class AccountTrail:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def begin(self, access: Access, action: str, target: str) -> str:
        """Adds a change that is about to be made. Returns the id of its entry, or "" if it could not be written."""
        return await self._add(access.account.id, access.who, access.by, action, target)

    async def add_operators_change(self, account_id: str, operator: str, action: str, target: str) -> None:
        await self._add(account_id, operator, "operator", action, target)

    async def _add(self, account_id: str, who: str, by: By, action: str, target: str) -> str:
        fields = {"who": who, "by": by, "action": action, "target": hide_secret(target[:TARGET_LENGTH])}
        key = account_audit_key(account_id)
        try:
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.xadd(key, fields, maxlen=MAX_ENTRIES)
                pipe.xtrim(key, minid=_oldest())
                pipe.expire(key, KEPT_SECONDS)
                entry, *_ = await pipe.execute()
        except BackboneUnavailable as error:
            logger.warning("trail.unwritten", account=account_id, **fields, error=code_of(error.__cause__))
            return ""
        return str(entry)

    async def forget(self, access: Access, entry: str) -> None:
        """Removes the entry of a change that was refused. If that fails, the trail has one change too many."""
        if entry:
            try:
                await self._store.client.xdel(account_audit_key(access.account.id), entry)
            except BackboneUnavailable as error:
                logger.warning("trail.superfluous", account=access.account.id, error=code_of(error.__cause__))

    async def list(self, account_id: str, limit: int, before: str | None = None) -> list[TrailEntry]:
        """Returns the changes, newest first. `before` is the id of an entry. Raises BackboneUnavailable."""
        newest = "+" if before is None else f"({before}"
        entries = await self._store.client.xrevrange(account_audit_key(account_id), newest, _oldest(), count=limit)
        return [TrailEntry(id=entry, at=_time_of(entry), **fields) for entry, fields in entries]


def _oldest() -> int:
    return int((time.time() - KEPT_SECONDS) * 1000)


def _time_of(entry: str) -> str:
    return now_iso(int(entry.partition("-")[0]) / 1000)

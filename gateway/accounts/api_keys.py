"""An account's API keys: several, each with a name and a scope, shown once and stored as a hash.

- `{pNN}:keys:<account>` and `{pNN}:scoped-keys:<account>` are the lists, which decide which keys are valid: key id →
  the key's record. A key whose scope is not full is in the second one, because versions that know no scopes would take
  it for a full key. They find it nowhere, and refuse it. A later limit on keys needs another list for the same reason
- `key:<sha256>` holds the account and the id of a presented key. It is written before the key is listed, and removed
  after the key has left its list. So each key that works can be found and revoked, whatever is interrupted. Until the
  key is listed, it expires, because nothing else removes it after a creation that is interrupted
- `{pNN}:keys-used:<account>` has the time of each key's last use

Each request with a key or a session reads the key's record from its list. So the request knows the key's scope without
another read, and a revocation applies to the next request in every process. A process notes a key's use in memory, at
most once per minute and key, and writes its notes every two seconds: no request waits for that. While Redis fails, the
notes wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from gateway.accounts import scripts
from gateway.accounts.access import Scope
from gateway.accounts.records import App
from gateway.errors import BackboneUnavailable, LastKey, NotFound, RequestMalformed
from gateway.ids import Time, new_id, now_iso, time_of
from gateway.keys import api_key_key, api_keys_used_key, key_lists
from gateway.loops import batched, every
from gateway.redis.client import Store
from gateway.redis.errors import code_of
from gateway.redis.scripts import compare_and_set
from gateway.validation import read_name


def digest(key: str) -> str:
    """Returns the SHA-256 of a key. A plain hash is enough: nobody can search through 256 random bits.

    For an e-mail address, it only keeps the address itself out of Redis's keys.
    """
    return hashlib.sha256(key.encode()).hexdigest()


logger = structlog.get_logger()

MAX_KEYS = 20  # of one account
# Operators can add a key to a full account, for an account holder who lost all keys.
MAX_KEYS_BY_OPERATORS = 25
NAME_LENGTH = 100  # characters
FIRST_NAME = "first"  # of the key that is created with an account
UNLISTED_SECONDS = 3_600  # for which `key:<sha256>` is kept while the key is in no list
WRITE_SECONDS = 2.0  # between two writes of uses
NOTE_SECONDS = 60.0  # in which a process notes a key's use once
MAX_NOTED = 20_000  # keys, in one process
ACCOUNTS_PER_WRITE = 50  # whose uses are written concurrently


class KeyReference(msgspec.Struct, frozen=True):
    """The account and id of a key. Its text is the value of `key:<sha256>`, and the subject of the key's sessions."""

    account: str
    id: str

    def __str__(self) -> str:
        return f"{self.account} {self.id}"

    @classmethod
    def parse(cls, text: str) -> KeyReference | None:
        account, _, key_id = text.partition(" ")
        return cls(account, key_id) if key_id else None


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key's record."""

    id: str
    name: str
    digest: str
    createdAt: str
    scope: Scope = "full"  # records from before there were scopes have none
    app: str | None = None  # the name that the key's only app had when the key was created
    appId: str | None = None
    by: str | None = None  # who made it; records from before, and those made with an account, have none


class KeyView(msgspec.Struct):
    """An API key as its account sees it."""

    id: str
    name: str
    scope: Scope
    app: str | None  # the only app that the key is for
    createdAt: Time
    by: str | None  # the name and id of a key, an address or an operator; null for one made with the account, or before


class CreatedKey(KeyView):
    key: str  # shown only here


class ListedKey(KeyView):
    lastUsedAt: Time | None


class ApiKeys:
    def __init__(
        self, store: Store, *, max_noted: int = MAX_NOTED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._max_noted, self._clock = store, max_noted, clock
        self._noted: dict[KeyReference, float] = {}  # time at which this process noted the key's use
        self._unwritten: set[KeyReference] = set()

    # -- the account's list ----------------------------------------------------------------------------------

    async def create(
        self,
        account_id: str,
        name: str,
        scope: Scope = "full",
        app: App | None = None,
        *,
        by: str | None = None,
        limit: int = MAX_KEYS,
    ) -> CreatedKey:
        """Creates a key, which cannot be read again later. With `app`, it is for this app only. `by` is who makes it.

        Raises RequestMalformed if the account has `limit` keys, and BackboneUnavailable.
        """
        name = read_name(name, NAME_LENGTH)
        if app is not None and scope == "full":
            raise RequestMalformed("app: only keys with the scope 'deploy' or 'read' can be for one app.")
        secret = f"csk_{secrets.token_urlsafe(32)}"  # 256 random bits
        key = ApiKey(new_id("key"), name, digest(secret), now_iso(), scope, by=by)
        if app is not None:
            key = msgspec.structs.replace(key, app=app.name, appId=app.id)
        finder, reference = api_key_key(key.digest), str(KeyReference(account_id, key.id))
        await self._store.client.set(finder, reference, ex=UNLISTED_SECONDS)
        record, full = msgspec.json.encode(key).decode(), scope == "full"
        if not await scripts.add_key(self._store, account_id, key.id, record, limit, full=full):
            await compare_and_set(self._store, finder, "")
            raise RequestMalformed(f"An account has at most {limit} API keys; revoke one first.")
        # Without expiry from now on. If it is gone, the key was revoked meanwhile, or a failover has lost it.
        if not await compare_and_set(self._store, finder, reference, expected=reference):
            raise BackboneUnavailable
        return CreatedKey(key.id, key.name, key.scope, key.app, key.createdAt, key.by, secret)

    async def list(self, account_id: str, find_name: Callable[[str], Awaitable[str | None]]) -> list[ListedKey]:
        """Returns the keys, newest first, each with its last use. `find_name` returns the present name of an app."""
        found = await self.list_records(account_id)
        used = await self._store.client.hgetall(api_keys_used_key(account_id))
        times = {key_id: now_iso(int(at) / 1000) for key_id, at in used.items()}
        names = {app_id: await find_name(app_id) for app_id in {key.appId for key in found} if app_id is not None}
        return [
            ListedKey(
                key.id,
                key.name,
                key.scope,
                names.get(key.appId or "") or key.app,
                key.createdAt,
                key.by,
                times.get(key.id),
            )
            for key in found
        ]

    async def list_records(self, account_id: str) -> Sequence[ApiKey]:
        """Returns the records of the keys, newest first."""
        lists = await self._store.read_each(key_lists(account_id), lambda pipe, each: pipe.hvals(each))
        found = [msgspec.json.decode(record, type=ApiKey) for records in lists for record in records]
        return sorted({key.id: key for key in found}.values(), key=lambda key: key.id, reverse=True)

    async def revoke(self, account_id: str, key_id: str, *, even_last: bool = False) -> None:
        """Revokes the key and its sessions.

        Raises NotFound, and without `even_last` LastKey for the account's only key with full access.
        """
        unknown = NotFound("There is no such API key in this account.")
        if time_of(key_id) is None:  # perhaps the key itself, which Redis must not see
            raise unknown
        revoked = await scripts.revoke_key(self._store, account_id, key_id, even_last=even_last)
        if revoked.verdict == "unknown":
            raise unknown
        if revoked.verdict == "last":
            raise LastKey
        key = msgspec.json.decode(revoked.record, type=ApiKey)
        await compare_and_set(self._store, api_key_key(key.digest), "")

    # -- credentials -----------------------------------------------------------------------------------------

    async def identify(self, secret: str) -> KeyReference | None:
        """Returns the account and id of the key, which may have been revoked; None if there is no such key."""
        text = await self._store.get(api_key_key(digest(secret)))
        return KeyReference.parse(text) if text else None

    async def find(self, reference: KeyReference) -> ApiKey | None:
        """Returns the record of the key, or None if it is not valid."""
        lists = key_lists(reference.account)
        records = await self._store.read_each(lists, lambda pipe, each: pipe.hget(each, reference.id))
        record = next(filter(None, records), None)
        return None if record is None else msgspec.json.decode(record, type=ApiKey)

    # -- last use --------------------------------------------------------------------------------------------

    def note_use(self, reference: KeyReference) -> None:
        """Notes the use in memory, without waiting: every request with a key or a session calls this."""
        now, is_full = self._clock(), len(self._unwritten) >= self._max_noted
        if now - self._noted.get(reference, -NOTE_SECONDS) < NOTE_SECONDS or is_full:
            return
        if len(self._noted) >= self._max_noted:
            self._noted.clear()
        self._noted[reference] = now
        self._unwritten.add(reference)

    async def keep_writing_uses(self) -> None:
        """Writes the noted uses every two seconds. Runs as long as the process."""
        await every(WRITE_SECONDS, self.write_uses, first=WRITE_SECONDS)

    async def write_uses(self) -> None:
        """Writes the noted uses. Those that cannot be written wait; some may be written twice, with a later time."""
        by_account: dict[str, list[str]] = {}
        for reference in self._unwritten:
            by_account.setdefault(reference.account, []).append(reference.id)
        accounts = list(by_account)
        for batch in batched(accounts, ACCOUNTS_PER_WRITE):
            try:
                await asyncio.gather(*(scripts.record_key_uses(self._store, each, by_account[each]) for each in batch))
            except BackboneUnavailable as error:
                logger.debug("keys.uses_waiting", error=code_of(error.__cause__))
                return
            self._unwritten -= {KeyReference(each, key_id) for each in batch for key_id in by_account[each]}

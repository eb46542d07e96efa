"""The sealed values in Redis, which `Vault` has encrypted: which key opens each, and how all get the first key.

`SEALED` has every kind of record with such values. A broken record has none.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec
import structlog

from gateway.accounts.records import App, Auth, SecretAuth
from gateway.accounts.vault import Vault
from gateway.deploys import scripts
from gateway.deploys.environment import Variables
from gateway.deploys.manifest import Manifest
from gateway.deploys.records import FINAL
from gateway.deploys.release import Release
from gateway.deploys.serving import Wanted, new_token
from gateway.events.webhooks import Receiver
from gateway.keys import deploy_key, kind_of, webhook_key
from gateway.loops import batched
from gateway.redis.client import Store
from gateway.redis.scripts import Companion, compare_and_set

logger = structlog.get_logger()

BATCH_RECORDS = 200
ATTEMPTS = 5  # each writes what others have changed during the one before

ADD_KEY = "add the key of the others to GATEWAY_ENCRYPTION_KEY; capsule secrets check names them"

Change = Callable[[str], str]  # from a sealed value to what replaces it


class Sealed(NamedTuple):
    """A record with sealed values."""

    key: str
    address: str  # in a hash, otherwise ''
    text: str

    def change(self, change: Change) -> str:
        """Returns the text with other values. Raises MsgspecError."""
        return SEALED[kind_of(self.key)](self.text, change)


class SealedCounts(NamedTuple):
    keys: dict[str, int]  # number of values by the fingerprint of their key, for each key in their order
    unopened: dict[str, int]  # number of values that no key opens, by the key in Redis

    @property
    def total(self) -> int:
        return sum(self.keys.values()) + sum(self.unopened.values())

    def describe(self) -> str:
        opened = sum(self.keys.values())
        return f"opens {opened if self.unopened else 'all'} of {self.total} stored secrets"


async def count_sealed(store: Store, vault: Vault) -> SealedCounts:
    """Opens all values. Raises BackboneUnavailable."""
    found, unopened = Counter[str](), Counter[str]()
    async for record in _read_sealed(store):

        def count(sealed: str, key: str = record.key) -> str:
            if fingerprint := vault.find_key(sealed):
                found[fingerprint] += 1
            else:
                unopened[key] += 1
            return sealed

        _try_to_change(record, count)
    return SealedCounts({each: found[each] for each in vault.fingerprints()}, unopened)


async def find_unopened(store: Store, vault: Vault) -> str:
    """Returns a sentence if no key opens some of the values, and logs it; '' otherwise. Raises BackboneUnavailable."""
    counts = await count_sealed(store, vault)
    if not counts.unopened:
        return ""
    reason = f"GATEWAY_ENCRYPTION_KEY {counts.describe()}"
    logger.error("secrets.unopened", reason=reason, action=ADD_KEY)
    return f"{reason}."


async def reseal_all(store: Store, vault: Vault) -> int:
    """Seals with the first key what another one opens, and returns how many values. Raises BackboneUnavailable."""
    first, count, changed = vault.fingerprints()[0], 0, 0

    def change(sealed: str) -> str:
        nonlocal changed
        if vault.find_key(sealed) in ("", first):
            return sealed
        changed += 1
        return vault.reseal(sealed)

    for _ in range(ATTEMPTS):
        missed = False
        async for record in _read_sealed(store):
            changed = 0
            after = _try_to_change(record, change)
            if changed and await _replace(store, record, after):
                count += changed
            elif changed:
                missed = True
        if not missed:
            break
    return count


async def _read_sealed(store: Store) -> AsyncIterator[Sealed]:
    keys = sorted(key for key in await store.list_keys() if kind_of(key) in SEALED)
    hashes = [key for key in keys if kind_of(key) == "serving" and key.count(":") > 1]  # the other one is a zset
    texts = [key for key in keys if kind_of(key) != "serving"]
    for batch in batched(texts, BATCH_RECORDS):
        for key, text in zip(batch, await store.get_all(batch), strict=True):
            if text:
                yield Sealed(key, "", text)
    for batch in batched(hashes, BATCH_RECORDS):
        found = await store.read_each(batch, lambda pipe, key: pipe.hgetall(key))
        for key, addresses in zip(batch, found, strict=True):
            for address, text in addresses.items():
                yield Sealed(key, address, text)


def _try_to_change(record: Sealed, change: Change) -> str:
    try:
        return record.change(change)
    except msgspec.MsgspecError:
        return record.text


async def _replace(store: Store, record: Sealed, after: str) -> bool:
    """Returns False if the record has changed since it was read."""
    match kind_of(record.key):
        case "serving":
            wanted = msgspec.json.decode(after, type=Wanted)
            state = await store.client.hget(deploy_key(wanted.account, wanted.deploy), "state")
            if state is None or state in FINAL:  # nobody waits for the answer to the step, so hosts can take it again
                wanted = msgspec.structs.replace(wanted, token=new_token())
                after = msgspec.json.encode(wanted).decode()
            where = (wanted.account, wanted.app, wanted.deploy, "", record.address)
            return await scripts.set_serving(store, *where, record.text, after)
        case "previous-secret":
            receiver_key = webhook_key(record.key.rpartition(":")[2])
            receiver, seconds = await store.get(receiver_key) or "", await store.client.ttl(record.key)
            companion = Companion(record.key, after, seconds, record.text)
            return seconds > 0 and await compare_and_set(
                store, receiver_key, receiver, expected=receiver, companion=companion
            )
    return await compare_and_set(store, record.key, after, expected=record.text)


# -- the records ---------------------------------------------------------------------------------------------


def _change_app(text: str, change: Change) -> str:
    app = msgspec.json.decode(text, type=App)
    repository, replaced = app.repository, app.replaced
    if repository is not None and repository.credentials:
        repository = msgspec.structs.replace(repository, credentials=change(repository.credentials))
    if replaced is not None and replaced.auth is not msgspec.UNSET:
        replaced = msgspec.structs.replace(replaced, auth=_change_auth(replaced.auth, change))
    auth = _change_auth(app.auth, change)
    return _encode(msgspec.structs.replace(app, auth=auth, repository=repository, replaced=replaced))


def _change_auth(auth: Auth, change: Change) -> Auth:
    return msgspec.structs.replace(auth, secret=change(auth.secret)) if isinstance(auth, SecretAuth) else auth


def _change_receiver(text: str, change: Change) -> str:
    receiver = msgspec.json.decode(text, type=Receiver)
    return _encode(msgspec.structs.replace(receiver, secret=change(receiver.secret)))


def _change_variables(text: str, change: Change) -> str:
    variables = msgspec.json.decode(text, type=Variables)
    return _encode(
        {
            name: msgspec.structs.replace(each, sealed=change(each.sealed)) if each.sealed else each
            for name, each in variables.items()
        }
    )


def _change_serving(text: str, change: Change) -> str:
    """Leaves the variables of releases that are only kept: a rollback to one seals the present variables."""
    wanted = msgspec.json.decode(text, type=Wanted)
    used = {wanted.serves} if wanted.step in ("live", "undo") else {wanted.deploy, wanted.served}
    releases = {name: _change_release(each, change, name in used) for name, each in wanted.releases.items()}
    return _encode(msgspec.structs.replace(wanted, releases=releases))


def _change_release(release: Release, change: Change, is_used: bool) -> Release:
    environment, text = release.environment, release.manifest
    if environment and is_used:
        environment = change(environment)
    if text:
        manifest = msgspec.json.decode(text, type=Manifest)
        if manifest.auth is not None:
            text = _encode(msgspec.structs.replace(manifest, auth=_change_auth(manifest.auth, change)))
    return msgspec.structs.replace(release, environment=environment, manifest=text)


def _encode(record: object) -> str:
    return msgspec.json.encode(record).decode()


# By the kind of their keys. A test compares it with what `gateway/keys.py` says, and with who seals.
SEALED: dict[str, Callable[[str, Change], str]] = {
    "app": _change_app,
    "environment": _change_variables,
    "preview-environment": _change_variables,
    "previous-secret": lambda text, change: change(text),
    "serving": _change_serving,
    "webhook": _change_receiver,
}

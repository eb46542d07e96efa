"""Decides which names a backup may have, because a restore writes files and records under them, as root where apps run.

A backup may be forged: whoever can write to its target can add one. So no name leads out of the folders that a backup
has, and no id in a record is a path.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

from gateway.data.records import FOLDER, DeletedData, Snapshot
from gateway.deploys.serving import Wanted
from gateway.keys import kind_of
from gateway.storage import is_key
from workers.backup.scripts import KeyCopy

FOLDERS = ("sources/", "archives/", "logs/")
DATA = re.compile(r"[^/]+/(snapshots|copies)/[^/]+")  # below `data/`; beside them are the present data of the apps
CADDY = "caddy/"  # in the data folder
CERTIFICATES = "certificates/"  # of Caddy's folder, in the names of a backup
TEMPORARY = (".sock", ".log", ".lock", ".tmp")  # files that Caddy makes again
DEPLOY_NAMES = ("id", "appId", "release", "source")
SCORE = re.compile(r"-?(\d{1,400}(\.\d{1,400})?(e[+-]?\d{1,3})?|inf)")
LATEST_EXPIRY = 1 << 52  # ms since the epoch
SHOWN = 100  # characters of a name in a message

Record = TypeVar("Record")


class Named(msgspec.Struct, frozen=True):
    """What the record of an app says that becomes a path."""

    id: str
    name: str = ""


def is_file(name: str) -> bool:
    """Returns whether a backup has files of this name."""
    if not is_key(name):
        return False
    if name.startswith(FOLDER):
        return DATA.fullmatch(name.removeprefix(FOLDER)) is not None
    return name.startswith((*FOLDERS, CERTIFICATES + CADDY)) and not name.endswith(TEMPORARY)


def find_file_fault(name: str) -> str:
    """Returns what is wrong with the name of a file, or ''."""
    return "" if is_file(name) else f"names a file outside of what backups have: {name[:SHOWN]!r}"


def find_record_fault(copy: KeyCopy) -> str:
    """Returns what is wrong with a record's shape or with the names in it, or ''."""
    if not _is_complete(copy):
        return f"has a record that Redis does not take: {copy.key[:SHOWN]!r}"
    for word in (*copy.key.split(":"), *_find_names(copy)):
        if word and not _is_name(word):
            return f"has a record with a path for a name: {word[:SHOWN]!r}"
    return ""


def _is_complete(copy: KeyCopy) -> bool:
    if not -1 <= copy.expires < LATEST_EXPIRY:
        return False
    match copy.kind:
        case "string":
            return len(copy.values) == 1
        case "set" | "list":
            return bool(copy.values)
        case "hash":
            return bool(copy.values) and len(copy.values) % 2 == 0
        case "zset":
            return bool(copy.values) and len(copy.values) % 2 == 0 and all(map(SCORE.fullmatch, copy.values[1::2]))
    return False


def _is_name(word: str) -> bool:
    return "/" not in word and is_key(word)


def _find_names(copy: KeyCopy) -> Iterator[str]:
    """Yields the ids in the record that become names of files and folders."""
    names, values = copy.values[::2], copy.values[1::2]
    match kind_of(copy.key), copy.kind:
        case "app", "string":
            for app in _decode_whole(copy.values, Named):
                yield from (app.id, app.name)
        case "site", "hash":
            yield from copy.values
        case "deploy", "hash":
            yield from (value for name, value in zip(names, values, strict=False) if name in DEPLOY_NAMES)
        case "serving", "hash":
            yield from names
            for wanted in _decode_whole(values, Wanted):
                yield from (wanted.app, wanted.address, wanted.deploy, wanted.served, *wanted.releases)
        case "data-snapshots", "hash":
            yield from names  # what looks for the newest snapshot reads no more than them
            yield from (snapshot.id for snapshot in _decode_whole(values, Snapshot))
        case "data-deleted", "hash":
            yield from names
            for deleted in _decode_whole(values, DeletedData):
                yield from (deleted.appId, *(each.id for each in deleted.snapshots))


def _decode_whole(texts: Iterable[str], kind: type[Record]) -> Iterator[Record]:
    """Decodes the texts that are not broken. A broken one leads nowhere, and is restored as it is."""
    for text in texts:
        with suppress(ValueError, RecursionError):
            yield msgspec.json.decode(text, type=kind)

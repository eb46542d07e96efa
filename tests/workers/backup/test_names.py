"""The names in a backup that somebody has forged: nothing is written outside, and nothing at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import BACKED_UP, LEFT_OUT, PARTITION_TAGS
from tests.support.redis_servers import RedisServer
from tests.workers.backup.conftest import Forger, Service, files_of
from workers.backup.names import find_record_fault, is_file
from workers.backup.scripts import KeyCopy
from workers.backup.target import BadBackup

GOOD = (
    "sources/app/src_1.tar.gz",
    "archives/app/dep_1.tar.gz",
    "logs/2026-07-02/dep_1.gz",
    "data/app/snapshots/snp_1.tar.gz",
    "certificates/caddy/certificates/acme-v02.api.letsencrypt.org-directory/wildcard_.example.com/a.key",
)
BAD = (
    *("../outside", "sources/../../outside", "sources/..", "/outside", "//outside", "certificates//outside"),
    *("certificates/../outside", "certificates/sources/one", "certificates/caddy/../../outside", "data/../outside"),
    *("data/app/files/database", "data/app/account", "data/app/snapshots/../files/x", "data/app/snapshots/a/b"),
    *("layout", "releases/app/live/dep_1/app/x", "running/dep_1", "uploads/x", ".ssh/authorized_keys", "sources"),
    *("sources/", "sources//x", "sources/.", "sources/a\\..\\b", "sources/a\0", "sources/a\n", "sources/\ud800", ""),
    *("caddy/certificates/x", "certificates/caddy/x.sock", "certificates/caddy/.lock", "logs/" + "x" * 256),
)


def test_which_files_a_backup_has() -> None:
    assert [name for name in GOOD if not is_file(name)] == []
    assert [name for name in BAD if is_file(name)] == []


async def test_a_forged_file(
    empty: Service, servers: list[RedisServer], forger: Forger, target: Path, tmp_path: Path
) -> None:
    """The operator takes a backup that proves nothing."""
    for name in BAD:
        if name.startswith(("/", "certificates//")):
            name = name.replace("/outside", f"{tmp_path}/outside", 1)
        forger.forge(files=[[name, forger.add(b"forged"), "1"]])
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(BadBackup, match=r"names a file outside|is damaged"):
            await empty.restore(target, unauthenticated=True)
        assert sorted(tmp_path.rglob("*")) == before
        forger.remove_newest()
    assert files_of(empty.storage) == {}
    with servers[1].client() as client:
        assert client.keys() == []


def record(key: str, kind: str, *values: Any) -> list[Any]:
    return [key, kind, -1, [value if isinstance(value, str) else json.dumps(value) for value in values]]


TAG = PARTITION_TAGS[0]
SERVED = {"account": "acc_1", "app": "app", "address": "live", "step": "live", "deploy": "dep_1"}
SNAPSHOT = {"id": "../x", "at": "2026-07-02T10:00:00.000Z", "bytes": 1, "reason": "daily"}
DELETED = {"app": "app", "appId": "app", "deletedAt": "2026-07-02T10:00:00.000Z", "snapshots": []}
BAD_RECORDS = [
    record(f"{TAG}:data:acc_1:../../x", "string", "{}"),
    record("app:a\\x", "string", "{}"),
    record("app:x", "string", {"id": "/etc/cron.d", "name": "x"}),
    record(f"{TAG}:site:app", "hash", "live", "../../../x"),
    record(f"{TAG}:deploy:dep_1", "hash", "id", "dep_1", "appId", "../x"),
    record(f"{TAG}:serving:app", "hash", "live", SERVED | {"app": "../x"}),
    record(f"{TAG}:serving:app", "hash", "live", SERVED | {"address": "../x"}),
    record(f"{TAG}:serving:app", "hash", "live", SERVED | {"served": "/x"}),
    record(f"{TAG}:serving:app", "hash", "live", SERVED | {"releases": {"../x": {"digest": "d", "size": 1}}}),
    record(f"{TAG}:data-snapshots:acc_1:app", "hash", "snp_1", SNAPSHOT),
    record(f"{TAG}:data-deleted:acc_1", "hash", "del_1", DELETED | {"appId": ".."}),
    record(f"{TAG}:data-deleted:acc_1", "hash", "del_1", DELETED | {"snapshots": [SNAPSHOT]}),
    # The names of fields are ids too.
    record(f"{TAG}:site:app", "hash", "preview:../x", "dep_1"),
    record(f"{TAG}:serving:app", "hash", "../x", SERVED),
    record(f"{TAG}:data-snapshots:acc_1:app", "hash", "../x", SNAPSHOT | {"id": "snp_1"}),
    record(f"{TAG}:data-snapshots:acc_1:app", "hash", "../x", "broken"),
    record(f"{TAG}:data-deleted:acc_1", "hash", "../x", DELETED),
    # A broken value does not hide the next one.
    record(f"{TAG}:serving:app", "hash", "live", '{"app":' + "[" * 50_000, "preview", SERVED | {"served": "/x"}),
    record(f"{TAG}:data-deleted:acc_1", "hash", "del_0", "broken", "del_1", DELETED | {"appId": ".."}),
]


BROKEN_RECORDS = [
    record("app:x", "string", "{}", "{}"),
    record("app:x", "stream", "{}"),
    record(f"{TAG}:site:app", "hash", "live"),
    record(f"{TAG}:probes", "zset", "app", "nan"),
    record(f"{TAG}:probes", "zset", "app", "1e99999"),
    ["app:x", "string", 2**62, ["{}"]],
    ["app:x", "string", -2, ["{}"]],
]


async def test_a_forged_record(empty: Service, servers: list[RedisServer], forger: Forger, target: Path) -> None:
    """Its ids become the names of folders on the hosts, and what Redis does not take ends a restore in the middle."""
    for bad, words in [
        *((each, "has a record with a path for a name") for each in BAD_RECORDS),
        *((each, "has a record that Redis does not take") for each in BROKEN_RECORDS),
    ]:
        forger.forge(records=[bad])
        with pytest.raises(BadBackup, match=words):
            await empty.restore(target, unauthenticated=True)
        forger.remove_newest()
    with servers[1].client() as client:
        assert client.keys() == []


def test_records_that_a_backup_has() -> None:
    """A branch may contain a slash, and a broken record leads nowhere."""
    good = [
        record(f"{TAG}:deploy:dep_1", "hash", "id", "dep_1", "branch", "feature/../x", "restores", "data/app/copies/s"),
        record(f"{TAG}:serving:app", "hash", "live", "broken", "preview", SERVED),
        record(f"{TAG}:site:app", "hash", "live", "dep_1", "queued:live", "dep_2", "preview:feature-x", "dep_3"),
        record(f"{TAG}:data-snapshots:acc_1:app", "hash", "snp_1", SNAPSHOT | {"id": "snp_1"}),
        record(f"{TAG}:data-deleted:acc_1", "hash", "del_1", DELETED),
        record("app:x", "string", '{"id":' + "[" * 50_000),
        record(f"{TAG}:probes", "zset", "app", "1.7832e+18", "other", "-inf"),
        record(f"{TAG}:members:acc_1", "string", {"a/b@example.com": 1}),
    ]
    assert [find_record_fault(KeyCopy(*each)) for each in good] == [""] * len(good)


async def test_records_of_a_kind_that_no_backup_has(
    service: Service, empty: Service, forger: Forger, target: Path
) -> None:
    """They are left out: a session would open an account, and other keys in the same Redis are not the service's."""
    forged = [record(f"{kind}:x", "string", "forged") for kind in (*sorted(LEFT_OUT), "another", "{tag}")]
    forger.forge(records=forged)
    await empty.store.client.set("another:x", "of another program")
    await empty.restore(forger.target, unauthenticated=True)
    assert await empty.store.get("another:x") == "of another program"
    present = {key.partition(":")[0] for key in await empty.store.list_keys() if key.endswith(":x")}
    assert present == {"another"}
    assert "app" in BACKED_UP

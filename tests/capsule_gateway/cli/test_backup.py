"""`capsule backup` and `capsule restore`, as an operator runs them."""

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from capsule_gateway.cli.backup import backup, parse_until
from tests.support.command_line import invoke
from tests.support.redis_servers import RedisServer, free_port

Capsule = Callable[..., tuple[int, str, str]]


@pytest.fixture
def capsule(redis_url: str, tmp_path: Path) -> Capsule:
    def run(*arguments: str, **settings: str) -> tuple[int, str, str]:
        environment = {"GATEWAY_REDIS_URL": redis_url, "GATEWAY_DATA_DIR": str(tmp_path / "data"), **settings}
        return invoke(arguments, environment)

    return run


def test_a_backup_and_its_restore(capsule: Capsule, valkey: RedisServer, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    with valkey.client() as client:
        client.set(
            "{p09}:account:acc_1", '{"id":"acc_1","name":"A","plan":"free","createdAt":"2026-07-02T10:00:00.000Z"}'
        )
        code, out, _ = capsule("backup", target)
        assert code == 0
        assert out.startswith("Backed up 1 accounts and 0 apps as of 20")
        code, out, _ = capsule("backup", "list", target)
        assert (code, out.lower().splitlines()[0].split()) == (0, ["at", "state", "accounts", "apps", "size", "notes"])
        at, *row = out.splitlines()[1].split()
        assert row[:3] == ["complete", "1", "0"]
        assert capsule("backup", "verify", target, "--at", at)[1].startswith(
            f"The backup of {at} is complete: 1 objects"
        )
        refusal = "capsule: Redis is not empty: it has accounts; --force replaces them\n"
        assert capsule("restore", target) == (1, "", refusal)
        client.delete("{p09}:account:acc_1")
        code, out, error = capsule("restore", target, "--dry-run")
        assert error.startswith(f"Reading the backup of {at}: 1 accounts, 0 apps, ")
        assert (code, out) == (
            0,
            f"Nothing was written. A restore would bring back 1 accounts and 0 apps as of {at}\n",
        )
        assert not client.exists("{p09}:account:acc_1", "layout")
        code, out, error = capsule("restore", target, "--spent-today", "full")
        assert error.startswith(f"Restoring the backup of {at}: 1 accounts, 0 apps, ")
        assert (code, out.partition(" as of")[0]) == (0, "Restored 1 accounts and 0 apps")
        assert client.get("layout") == b"1"
        client.flushall()


def test_backups_of_somebody_else(capsule: Capsule, valkey: RedisServer, tmp_path: Path) -> None:
    """An operator sees which they are, and how to go on."""
    target, key = str(tmp_path / "target"), {"GATEWAY_ENCRYPTION_KEY": "an-encryption-key-of-32-characters"}
    with valkey.client() as client:
        client.flushall()
        assert capsule("backup", target)[0] == 0
        assert capsule("backup", target, **key)[0] == 0
        (Path(target) / "backups" / f"29990101T000000000Z-{'0' * 64}.json").write_text("{")
        (Path(target) / "backups" / "renamed.json").write_text("{")
        for text in NO_TIMES[:2]:
            for command in (["backup", "verify"], ["restore", "--force"]):
                code, out, error = capsule(*command, target, "--at", text, **key)
                assert (code, out, "is not a time" in error) == (2, "", True)
        code, out, _ = capsule("backup", "list", target, "--json", **key)
        older, newer, damaged, renamed = json.loads(out)
        assert (code, older["state"], newer["state"]) == (0, "unauthenticated", "complete")
        assert older["detail"].startswith("has no authenticator: ")
        assert (damaged["at"], damaged["state"]) == ("2999-01-01T00:00:00.000Z", "damaged")
        assert damaged["detail"].startswith("the file backups/")
        assert (renamed["at"], renamed["state"]) == ("", "damaged")
        assert {"accounts": 0, "apps": 0, "notes": 0}.items() <= newer.items()
        at = older["at"]
        listed = json.loads(capsule("backup", "list", target, "--json", "--at", at, **key)[1])
        assert [row["at"] for row in listed] == [at, ""]
        for command in (["backup", "verify", target, "--at", at], ["restore", target, "--at", at]):
            code, _, error = capsule(*command, **key)
            assert (code, error.startswith(f"capsule: the backup of {at} has no authenticator: ")) == (1, True)
            assert error.endswith("add --unauthenticated\n")
            assert capsule(*command, "--unauthenticated", **key)[0] == 0
        at = newer["at"]
        code, out, error = capsule("backup", "verify", target, "--at", at, **key)
        assert (code, out.startswith(f"The backup of {at} is complete: ")) == (0, True)
        assert error == f"Reading the backup of {at}\n"
        code, _, error = capsule("backup", "verify", target, "--at", at)
        assert (code, "\nNote: nothing was compared with GATEWAY_ENCRYPTION_KEY" in error) == (0, True)
        client.flushall()


TIMES = """
2026-11-28 | 2026-11-28T23:59:59.999Z
2026-11-28 23:00 | 2026-11-28T23:00:59.999Z
2026-11-28T23:00 | 2026-11-28T23:00:59.999Z
2026-11-28T23:00:00+01:00 | 2026-11-28T22:00:00.999Z
2026-11-28 00:30-0230 | 2026-11-28T03:00:59.999Z
2026-11-28T23:00:00.123Z | 2026-11-28T23:00:00.123Z
"""
NO_TIMES = (
    *("tomorrow", "", "28.11.2026", "1h", "2026-11", "20261128", "2026-02-30", "2026-11-28T23", "2026-11-28T25:00"),
    *("2026-11-28x23:00", "2026-11-28 23:00 CET", "2026-11-28Z", "2026-11-28\n", "٢٠٢٦-11-28", "0000-01-01"),
)


def test_the_time_of_a_backup() -> None:
    context, option = click.Context(backup), click.Option(["--at"])
    for line in TIMES.strip().splitlines():
        text, _, until = line.partition(" | ")
        assert parse_until(context, option, text) == until
    for text in NO_TIMES:
        with pytest.raises(click.BadParameter, match="is not a time; use one like 2026-07-02"):
            parse_until(context, option, text)


def test_without_a_backup_credentials_or_redis(
    capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, error in (
        ("backup list none", "none is not a folder"),
        ("restore none", "none is not a folder"),
        ("backup verify .", "there is no backup"),
        ("restore . --at 2026-01-01", "there is no backup until 2026-01-01T23:59:59.999Z"),
        ("backup s3://bucket", "s3://bucket: s3:// also needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ):
        assert capsule(*arguments.split()) == (1, "", f"capsule: {error}\n")
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    code, _, error = capsule("backup", "target", GATEWAY_REDIS_URL=url)
    assert (code, error) == (1, "capsule: Redis: Redis is not running\n")

"""`capsule backup` and `capsule restore`, as an operator runs them."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from capsule_gateway.cli.backup import backup, parse_until
from tests.support.command_line import invoke
from tests.support.programs import on_small_disk
from tests.support.redis_servers import RedisServer, free_port

ROOT = Path(__file__).parents[3]
DISK_MIB = 2
Capsule = Callable[..., tuple[int, str, str]]


@pytest.fixture
def capsule(redis_url: str, tmp_path: Path) -> Capsule:
    def run(*arguments: str, full: Path | None = None, **settings: str) -> tuple[int, str, str]:
        """Runs a command; with `full`, in a process of its own while there is a small disk at this folder."""
        environment = {"GATEWAY_REDIS_URL": redis_url, "GATEWAY_DATA_DIR": str(tmp_path / "data"), **settings}
        if full is None:
            return invoke(arguments, environment)
        environment |= {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        command = [*on_small_disk(full, DISK_MIB), sys.executable, "-m", "capsule_gateway", *arguments]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

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
2026-11-28T23:00Z | 2026-11-28T23:00:59.999Z
2026-11-28T23:00:00+01:00 | 2026-11-28T22:00:00.999Z
2026-11-28 00:30-0230 | 2026-11-28T03:00:59.999Z
2026-11-28T23:00:00.123Z | 2026-11-28T23:00:00.123Z
2024-02-29 | 2024-02-29T23:59:59.999Z
"""
NO_TIMES = (
    *("tomorrow", "", " ", "28.11.2026", "2026/11/28", "1h", "2026", "2026-11", "20261128", "2026-W48", "2026-02-30"),
    *("2026-11-28T", "2026-11-28T23", "2026-11-28T25:00", "2026-11-28x23:00", "2026-11-28 23:00 CET", "2026-11-28Z"),
    *("2026-11-28T23:00:00.", "2026-11-28T23:00+99:00", "2026-11-28\n", "٢٠٢٦-11-28", "0000-01-01"),
)


def test_the_time_of_a_backup() -> None:
    context, option = click.Context(backup), click.Option(["--at"])
    for line in TIMES.strip().splitlines():
        text, _, until = line.partition(" | ")
        assert parse_until(context, option, text) == until
    for text in NO_TIMES:
        with pytest.raises(click.BadParameter, match="is not a time; use one like 2026-07-02"):
            parse_until(context, option, text)


def test_a_full_disk(capsule: Capsule, valkey: RedisServer, tmp_path: Path) -> None:
    """It takes one sentence. The file is hardly larger than the disk, or many files are together."""
    target, data, other = tmp_path / "target", tmp_path / "data", tmp_path / "other"
    for folder in (data / "sources" / "one", target, other):
        folder.mkdir(parents=True)
    for number in range(3):
        (data / "sources" / "one" / f"src_{number}.tar.gz").write_bytes(os.urandom((DISK_MIB << 20) - 65_536))
    sentence = re.compile(
        r"capsule: \S+: No space left on device; make room there, .*\n|capsule: the disk of .* is full: .*\n"
    )
    code, out, error = capsule("backup", str(target), full=target)
    assert (code, out) == (1, "")
    assert sentence.fullmatch(error.splitlines(keepends=True)[-1]), error
    assert "Traceback" not in error
    assert capsule("backup", str(target))[0] == 0
    code, out, error = capsule("restore", str(target), full=other, GATEWAY_DATA_DIR=str(other))
    assert (code, out) == (1, "")
    assert sentence.fullmatch(error.splitlines(keepends=True)[-1]), error
    assert "Traceback" not in error
    assert capsule("restore", str(target), GATEWAY_DATA_DIR=str(other))[0] == 0
    assert {path.name for path in other.iterdir()} == {"layout", "sources"}
    with valkey.client() as client:
        client.flushall()


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


WRONG = """
backup a b
backup list
backup verify
backup list a b
backup ''
backup list ''
backup verify ''
restore ''
backup t --at 2026-07-02
backup t --unauthenticated
backup list t --unauthenticated
backup t --json
"""


def test_wrong_usage(capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in WRONG.strip().splitlines():
        assert capsule(*shlex.split(arguments))[0] == 2, arguments
    assert [*tmp_path.iterdir()] == []

"""The page about backups, followed word for word. A program in place of Docker runs the commands of its containers."""

import re
from pathlib import Path

import yaml

from tests.docs.pages import run_shell, sections
from tests.support.redis_servers import RedisServer
from tests.support.s3_server import BUCKET, S3Server

ROOT = Path(__file__).parents[2]
# `docker compose run … SERVICE COMMAND` runs the command here. Others are noted. Each must name services that exist.
DOCKER = """\
#!/bin/bash -eu
echo "$*" >> "$HOME/docker.log"
[ "$1" = compose ] && shift
while [[ $1 == --* ]]; do shift 2; done
verb=$1; shift
while [ $# -gt 0 ]; do
  case $1 in
    -v) shift 2 ;;
    -*) shift ;;
    *) [[ " $SERVICES " == *" $1 "* ]] || { echo "no service $1" >&2; exit 1; }
       if [ "$verb" = run ]; then shift; exec "$@"; fi
       shift ;;
  esac
done
"""
ACCOUNT = '{"id":"acc_1","name":"A","plan":"free","createdAt":"2026-07-02T10:00:00.000Z"}'


async def test_the_page_about_backups(valkey: RedisServer, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(DOCKER)
    (tmp_path / "bin" / "docker").chmod(0o755)
    target = str(tmp_path / "target")
    page = sections(
        "backup.md",
        {
            "/mnt/backups/capsule": target,
            "/var/backups/capsule": target,
            "s3://bucket/capsule": f"s3://{BUCKET}/backups",
            " TARGET\n": f" {target}\n",
        },
    )
    async with S3Server(tmp_path) as s3:
        s3.environment.pop("GATEWAY_STORAGE_URL")
        settings = {
            **s3.environment,
            "GATEWAY_REDIS_URL": redis_url,
            "GATEWAY_DATA_DIR": str(tmp_path / "data"),
            "GATEWAY_ENCRYPTION_KEY": "an-encryption-key-of-32-characters",
            "SERVICES": " ".join(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]),
        }

        async def follow(title: str) -> list[str]:
            """Returns the lines that the next block prints."""
            block = f'PATH="$HOME/bin:$PATH"\n{page[title].take("")}'
            done = await run_shell(block, tmp_path, **settings)
            assert done.code == 0, done.out + done.err
            return done.out.splitlines()

        with valkey.client() as client:
            client.set("{p09}:account:acc_1", ACCOUNT)
            printed = await follow("Back up")
            written = page["Back up"].take("").strip()
            form = re.sub(
                r"\d[\d:.\-TZ]*", lambda _: r"\d\S*", re.escape(written).replace("\\-", "-").replace("\\.", ".")
            )
            assert len(printed) == 2
            assert all(re.fullmatch(form, line) for line in printed), (form, printed)
            assert "complete" in (await follow("Every day"))[-1]
            assert (await follow("Verify"))[-1].startswith("The backup of ")
            for _ in range(2):  # the second way is Compose's
                client.flushall()
                assert (await follow("Restore"))[-1].startswith("Restored 1 accounts and 0 apps as of ")
                assert client.get("{p09}:account:acc_1") == ACCOUNT.encode()
            client.flushall()
    assert not any(page[title].left for title in ("Back up", "Every day", "Verify", "Restore"))
    assert (tmp_path / "docker.log").read_text().splitlines()[-3:] == [
        "compose --profile backup stop gateway workers deploys backup",
        f"compose run --rm -v ./backups:{target} deploys capsule restore {target}",
        "compose up -d",
    ]

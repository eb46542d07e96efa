"""Each check of `capsule doctor`, on a machine that passes it and one that does not."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gateway.accounts.records import App
from gateway.accounts.vault import Vault
from gateway.deploys.environment import Environments
from gateway.keys import LAYOUT_KEY
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.fakes import FakeProvider
from tests.support.redis_servers import RedisServer, free_port
from workers import doctor
from workers.doctor import Row, examine

ROOT = Path(__file__).parents[2]


async def rows_of(settings: Settings) -> dict[str, Row]:
    found = await examine(settings)
    assert all(bool(row.action) == (row.state != "ok") for row in found), found
    return {row.check: row for row in found}


def states(found: dict[str, Row], *names: str) -> list[str]:
    return [found[name].state for name in names]


REDIS = ("redis version", "redis persistence", "redis eviction", "redis memory", "clock", "layout")


@pytest.mark.parametrize("name", ["valkey", "redis"])
async def test_a_good_machine(name: str, tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    with RedisServer(name, "--maxmemory", "500mb", folder=tmp_path / "redis") as server:
        async with FakeProvider() as provider:
            settings = Settings(
                redis_url=server.url,
                data_dir=str(tmp_path / "data"),
                provider_url=provider.url,
                provider_key=provider.key,
                encryption_key="key",
                apps_listen=f"127.0.0.1:{free_port()}",
            )
            found = await rows_of(settings)
            assert states(found, *REDIS) == ["ok"] * 6, found
            assert states(found, "storage", "disk", "port", "encryption key", "provider") == ["ok"] * 5, found
            provider.models_status = 401
            refused = await rows_of(settings)
            assert refused["provider"].state == "fail"
        assert not [path.name for path in (tmp_path / "data").iterdir() if path.name.startswith("doctor")]


async def test_secrets_that_no_key_opens(redis_url: str, store: Store) -> None:
    app = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")
    await Environments(store, Vault("old")).change_variables(app, {"A": "1", "B": "2"})
    await Environments(store, Vault("new")).change_variables(app, {"B": "3"})
    for key, state, detail in (
        ("new,old", "ok", "opens all of 2 stored secrets"),
        ("new", "fail", "opens 1 of 2 stored secrets"),
        ("", "fail", "opens 0 of 2 stored secrets"),
    ):
        rows = [row async for row in doctor.check_encryption_key(Settings(redis_url=redis_url, encryption_key=key))]
        assert [(row.state, row.detail) for row in rows] == [(state, detail)]


async def test_a_redis_with_other_settings(redis_url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECK_SECONDS", 10.0)
    await store.client.config_set("maxmemory-policy", "allkeys-lru")
    await store.client.set(LAYOUT_KEY, "1000")

    async def behind(_: Store) -> float:
        return -3_600.0

    monkeypatch.setattr(Store, "read_skew", behind)
    try:
        found = await rows_of(Settings(redis_url=redis_url, data_dir="."))
    finally:
        await store.client.config_set("maxmemory-policy", "noeviction")
        await store.client.delete(LAYOUT_KEY)
    assert states(found, *REDIS) == ["ok", "fail", "fail", "warn", "fail", "fail"]
    assert found["clock"].detail == "3600.0 seconds behind Redis's"


async def test_a_machine_that_lacks_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(
            redis_url=f"redis://:secret@127.0.0.1:{free_port()}",
            data_dir=str(tmp_path / "file" / "data"),
            apps_listen=f"127.0.0.1:{taken.getsockname()[1]}",
            base_url="http://api.example.com",
            apps_domain="apps.invalid",
            provider_url=f"http://127.0.0.1:{free_port()}",
            provider_key="secret",
        )
        found = await rows_of(settings)
    assert states(found, "redis", "storage", "caddy", "port", "tls", "dns", "provider") == ["fail"] * 7
    assert found["encryption key"].state == "warn"
    assert "secret" not in repr(found)


async def test_a_pod_that_the_cluster_confines_needs_no_sandbox(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(redis_url=redis_url, data_dir=str(tmp_path), apps_engine="kubernetes", encryption_key="key")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert {"sandbox", "cluster"} <= (await rows_of(settings)).keys()  # a builder
    monkeypatch.setattr(doctor, "SERVICE_ACCOUNT", tmp_path)
    found = await rows_of(settings)
    assert "cluster" in found
    assert not {"sandbox", "control groups"} & found.keys()


@pytest.mark.parametrize(("good", "trusted", "state"), [(1, 1, "ok"), (1, 0, "fail"), (0, 1, "fail")])
async def test_tls(
    good: int,
    trusted: int,
    state: str,
    tls: tuple[ssl.SSLContext, str],
    bad_tls: tuple[ssl.SSLContext, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context, authority = tls if good else bad_tls
    connect = asyncio.open_connection
    monkeypatch.setattr(
        asyncio,
        "open_connection",
        lambda host, port, ssl: connect("127.0.0.1", port, ssl=ssl, server_hostname=host),
    )
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
        address = f"https://receiver.example.com:{server.sockets[0].getsockname()[1]}"
        settings = Settings(base_url=address, ca_file=authority if trusted else "")
        (row,) = [row async for row in doctor.check_address(settings)]
    assert row.state == state, row


async def test_a_check_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "CHECK_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = Settings(provider_url=f"http://127.0.0.1:{silent.getsockname()[1]}", provider_key="key")
        rows = await doctor._collect("provider", doctor.check_provider(settings))
    assert [(row.check, row.state) for row in rows] == [("provider", "fail")]


async def test_a_disk_that_does_not_say_how_large_it_is() -> None:
    rows = {row.check: row async for row in doctor.check_storage(Settings(data_dir="/proc/capsule"))}
    assert (rows["disk"].state, rows["disk"].detail) == ("warn", "the file system does not say how large it is")
    assert rows["disk"].action


@pytest.mark.parametrize(("output", "code"), [("--json", 1), ("--output=table", 1)])
def test_the_command(output: str, code: int, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "GATEWAY_REDIS_URL": f"redis://127.0.0.1:{free_port()}"}
    environment |= {"GATEWAY_DATA_DIR": str(tmp_path), "GATEWAY_PROVIDER_KEY": ""}
    command = [sys.executable, "-m", "capsule_gateway", "doctor", output]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (code, "")
    if output == "--json":
        rows = msgspec.json.decode(run.stdout, type=list[Row])
        assert ("redis", "fail") in [(row.check, row.state) for row in rows]
    else:
        assert "CHECK" in run.stdout
